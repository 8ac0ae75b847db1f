"""Build question/answer pairs, a task and a raw corpus from CPython's documentation.

The task is of multiple choice.

    python workflow/resources/build_pydocs.py [--output workflow/resources] [--corpus corpus.jsonl]

It reads nothing but the running Python and needs no package beside it. The same Python version
gives the same bytes; the raw corpus is written only when asked for.
"""

import argparse
import gzip
import hashlib
import json
import platform
import ssl
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESOURCES = Path(__file__).resolve().parent
sys.path.insert(0, str(RESOURCES))

from pydocs_builder import choices, corpus, harvest, near_duplicates, pairs, splits, topics  # noqa: E402  # noqa: E402

LICENCE = (
    "Documentation of CPython, Copyright (c) Python Software Foundation, under the PSF License "
    "Version 2 (SPDX: PSF-2.0); the examples, recipes and other code in it also under the Zero "
    "Clause BSD License (SPDX: 0BSD). https://docs.python.org/3/license.html"
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=RESOURCES, help="folder that gets pydocs/ and tasks/"
    )
    parser.add_argument("--corpus", type=Path, help="also write the raw corpus to this JSONL file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    modules, missing_modules = harvest.import_modules()
    objects = harvest.harvest_objects(modules)
    sections = topics.read_sections()
    split = splits.split_pairs(pairs.all_pairs(objects, sections))
    items = choices.build_items(objects, split.heldout_sources)

    files = {
        "pydocs/train.jsonl.gz": [pair.as_row() for pair in split.train],
        "pydocs/heldout.jsonl.gz": [pair.as_row() for pair in split.heldout],
        "tasks/pydocs_mc.jsonl": [item.as_row() for item in items],
    }
    for name, rows in files.items():
        write_jsonl(args.output / name, rows)
    manifest = {
        "origin": "docstrings of the standard library, and pydoc_data.topics",
        "licence": LICENCE,
        "python_version": platform.python_version(),
        "system": platform.system(),
        "openssl": ssl.OPENSSL_VERSION,  # which signatures `hashlib` shows
        "modules": len(modules),
        "missing_modules": missing_modules,
        "objects": len(objects),
        "rows": {name: len(rows) for name, rows in files.items()},
        "heldout_objects": len(split.heldout_sources),
        "near_duplicates": {
            "measure": "Jaccard similarity of word 5-grams, of completions and of whole pairs",
            "threshold": near_duplicates.THRESHOLD,
            "heldout_pairs_moved_to_train": split.moved_pairs,
            "heldout_objects_moved_to_train": split.moved_sources,
        },
        "sha256": {name: sha256_of(args.output / name) for name in files},
    }
    write_text(args.output / "pydocs" / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    print(json.dumps(manifest["rows"]), f"{split.moved_pairs} near-duplicates moved to train")
    if args.corpus is not None:
        raw = corpus.build_corpus(objects, sections, modules, split)
        write_jsonl(args.corpus, ({"text": document} for document in raw.documents))
        print(
            f"{args.corpus}: {len(raw.documents)} documents, {args.corpus.stat().st_size} bytes, "
            f"{raw.removed_blocks} blocks removed that repeat a held-out answer"
        )


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON, one a line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with LF line ends under a temporary name, then rename.

    It is compressed if the name ends with `.gz`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode()
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    temporary.replace(path)


def content_of(path: Path) -> bytes:
    """Return what a file holds, unpacked: builds of zlib compress differently."""
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of what a file holds in hexadecimal."""
    return hashlib.sha256(content_of(path)).hexdigest()


if __name__ == "__main__":
    main()
