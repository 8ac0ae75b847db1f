"""Turn a dataset into the tokens folder: token ids, loss masks and positions, packed, and a manifest of facts.

Every row is used or listed with a reason in `rejects.jsonl`; nothing is dropped or cut in silence. The
same files and settings give the same arrays, byte for byte. If unusable rows stop the run, their list is
kept beside the output, as `<output>.rejects.jsonl`.
"""

import argparse
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from workflow.lib import manifest
from workflow.lib.artifacts import provenance, write_json
from workflow.lib.chat import Encoded, SampleEncoder
from workflow.lib.config import DataConfig
from workflow.lib.corpus import Corpus, check_rejected_share, read_corpus
from workflow.lib.dataset import PREVIEW_CHARS, Row, column_names, preview
from workflow.lib.errors import UserError, setting_error
from workflow.lib.listing import OVERLAP, Listing
from workflow.lib.packing import one_per_row, pack
from workflow.lib.samples import Format, choose_format, to_sample
from workflow.lib.splits import Split, check_not_empty, divide, whole_file, without_overlap
from workflow.lib.tokenizer import load_tokenizer, read_chat_template
from workflow.lib.tokens import (
    MANIFEST,
    REJECTS,
    TRUNCATED,
    write_heldout,
    write_train,
)
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    settings = DataConfig.model_validate(args.config["data"])
    paths = data_paths(args, settings)
    format = find_format(paths, settings)
    tokenizer = load_tokenizer(args.tokenizer)
    template = None if format == "text" else read_chat_template(tokenizer, settings.chat_template)
    encoder = SampleEncoder(tokenizer, chat_template=template, train_all=settings.loss_on == "all")

    with finished_folder(args.output) as (folder, listing):
        corpora = read_files(paths, settings, format, encoder, listing)
        check_rejected_share(
            corpora.values(),
            largest=settings.max_rejected_share,
            rejects=rejects_beside(args.output),
        )
        train, heldout = make_splits(corpora, settings, tokenizer, listing)
        check_not_empty(train, heldout, rejects=rejects_beside(args.output))
        place = pack if settings.packing else one_per_row
        packing = place(train.lengths, seq_len=settings.seq_len, seed=settings.seed)
        listing.close()

        facts = manifest.tokenizer_facts(tokenizer, args.tokenizer, chat_template=template)
        pad = facts["pad_token_id"]
        write_train(folder, train, packing=packing, seq_len=settings.seq_len, pad_token_id=pad)
        write_heldout(folder, heldout)
        facts |= {
            "format": format,
            "sources": manifest.source_facts(corpora, paths),
            **manifest.split_facts(train, heldout, packing.num_rows, seq_len=settings.seq_len),
            **manifest.drop_facts(listing),
            "samples": manifest.samples(train, tokenizer),
            "files": manifest.file_facts(folder),
            "provenance": provenance(),
        }
        write_json(folder / MANIFEST, facts)
    log_facts(facts)


def data_paths(args: argparse.Namespace, settings: DataConfig) -> dict[str, Path]:
    """Return the files by split, after checking that the command line and the settings name the same ones."""
    if (args.heldout is None) != (settings.heldout is None):
        bound = f"data.heldout = {settings.heldout!r}, and both or neither must name a file"
        raise setting_error("--heldout", args.heldout and str(args.heldout), bound, "Change one")
    return {"train": args.train} | ({"heldout": args.heldout} if args.heldout else {})


def find_format(paths: dict[str, Path], settings: DataConfig) -> Format:
    """Return the format that the first file has and the others share; files without any object have no say."""
    columns = {name: column_names(path, setting=f"data.{name}") for name, path in paths.items()}
    speaking = {name: found for name, found in columns.items() if found} or columns
    for name, found in speaking.items():
        format = choose_format(found, settings, file_setting=f"data.{name}")
        settings = settings.model_copy(update={"format": format})
    return format


def read_files(
    paths: dict[str, Path],
    settings: DataConfig,
    format: Format,
    encoder: SampleEncoder,
    listing: Listing,
) -> dict[str, Corpus]:
    """Encode every row of every file."""

    def encode(row: Row) -> Encoded:
        return encoder.encode(to_sample(row.value, format=format, columns=settings.columns))

    return {
        name: read_corpus(
            path,
            file=getattr(settings, name),
            setting=f"data.{name}",
            settings=settings,
            encode=encode,
            listing=listing,
        )
        for name, path in paths.items()
    }


def make_splits(
    corpora: dict[str, Corpus],
    settings: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    listing: Listing,
) -> tuple[Split, Split]:
    """Return train, and held-out without what is also trained on."""
    if "heldout" in corpora:
        train, whole = (whole_file(name, corpus) for name, corpus in corpora.items())
    else:
        train, whole = divide(corpora["train"], share=settings.heldout_share, seed=settings.seed)
    heldout, places = without_overlap(whole, train)
    for place in places:
        text = str(tokenizer.decode(whole[place][0][:PREVIEW_CHARS].tolist()))
        listing.drop(
            file=whole.file,
            row=int(whole.rows[place]),
            reason=OVERLAP,
            preview=preview(text),
        )
    return train, heldout


@contextmanager
def finished_folder(output: Path) -> Iterator[tuple[Path, Listing]]:
    """Yield a new folder, and the listing in it, that replaces `output` once complete.

    On failure nothing is left but the list of dropped rows, if there is any, beside `output`.
    """
    partial = output.with_name(f".{output.name}.partial")
    _remove(partial)
    rejects_beside(output).unlink(missing_ok=True)  # of an earlier attempt
    partial.mkdir(parents=True)
    try:
        with Listing(rejects=partial / REJECTS, truncated=partial / TRUNCATED) as listing:
            yield partial, listing
    except UserError:
        if (partial / REJECTS).stat().st_size:
            shutil.copyfile(partial / REJECTS, rejects_beside(output))
        raise
    else:
        _remove(output)
        partial.rename(output)
    finally:
        _remove(partial)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def rejects_beside(output: Path) -> Path:
    """Return where the list of dropped rows is kept if they stop the run."""
    return output.with_name(f"{output.name}.{REJECTS}")


def log_facts(facts: dict[str, Any]) -> None:
    """Log what became of the rows, and what a reader should not miss."""
    for name, split in facts["splits"].items():
        logger.info(
            "%s: %d rows read, %d kept, %d dropped, %d cut to %d tokens; %d tokens, %.1f%% trained",
            name, split["rows_read"], split["rows_kept"], split["rows_dropped"], split["truncated"],
            facts["seq_len"], split["tokens"], 100 * split["trained_tokens"] / split["tokens"],
        )  # fmt: skip
    train = facts["splits"]["train"]
    logger.info(
        "packed %d documents into %d rows of %d tokens: %.2f%% full",
        train["documents"], train["packed_rows"], facts["seq_len"], 100 * train["fill"],
    )  # fmt: skip
    for reason, count in facts["dropped_by_reason"].items():
        logger.info("dropped %d: %s", count, reason)
    special = sum(source["special_token_texts"] for source in facts["sources"])
    if special:
        logger.info("%d rows spell a special token; it was encoded as ordinary text", special)
    if facts["pad_token_origin"] == "eos_token":
        logger.info("no pad token: rows are filled with eos, which is never trained there")


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--train", type=Path, required=True, help="training file")
    parser.add_argument("--heldout", type=Path, help="held-out file; default: split off the other")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="tokens folder")
    run(main, parser)
