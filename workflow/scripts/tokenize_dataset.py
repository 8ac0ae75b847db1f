"""Turn a dataset into the tokens folder: token ids, loss masks and positions, packed, and a manifest of facts.

Every row is used or listed with a reason in `rejects.jsonl`; nothing is dropped or cut in silence. The
same files and settings give the same arrays, byte for byte. If unusable rows stop the run, their list is
kept beside the output, as `<output>.rejects.jsonl`.
"""

import argparse
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from workflow.lib import manifest
from workflow.lib.artifacts import provenance, put_in_place, write_json
from workflow.lib.chat import Encoded, SampleEncoder
from workflow.lib.config import DataConfig
from workflow.lib.corpus import Corpus, check_rejected_share, read_corpus
from workflow.lib.data_config import Format
from workflow.lib.dataset import column_names
from workflow.lib.errors import UserError
from workflow.lib.listing import OVERLAP, Listing
from workflow.lib.packing import one_per_row, pack
from workflow.lib.rows import PREVIEW_CHARS, Row, preview
from workflow.lib.samples import WITHOUT_TEMPLATE, choose_format, to_sample
from workflow.lib.sources import Source, resolve_splits
from workflow.lib.splits import (
    Split,
    check_not_empty,
    divide,
    weighted,
    whole_corpus,
    without_overlap,
)
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
    splits = resolve_splits(settings, root=args.dataset)
    formats = find_formats(splits)
    tokenizer = load_tokenizer(args.tokenizer)
    needs_template = not set(formats.values()) <= WITHOUT_TEMPLATE
    template = read_chat_template(tokenizer, settings.chat_template) if needs_template else None
    encoder = SampleEncoder(tokenizer, chat_template=template, loss_on=settings.loss_on)

    with finished_folder(args.output) as (folder, listing):
        corpora = read_files(splits, settings, formats, encoder, listing)
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
            "format": ", ".join(dict.fromkeys(formats.values())),
            "sources": manifest.source_facts(corpora),
            **manifest.split_facts(train, heldout, packing.num_rows, seq_len=settings.seq_len),
            **manifest.drop_facts(listing),
            "samples": manifest.samples(train, tokenizer),
            "files": manifest.file_facts(folder),
            "provenance": provenance(),
        }
        write_json(folder / MANIFEST, facts)
    log_facts(facts)


def find_formats(splits: dict[str, list[Source]]) -> dict[Source, Format]:
    """Return what a row of each source is."""
    formats = {}
    for split, sources in splits.items():
        for source in sources:
            setting = f"data.{split}"
            found = column_names(source.files, setting=setting)
            named = setting if len(sources) == 1 else f"{setting} ({source.name})"
            formats[source] = choose_format(
                found, format=source.format, columns=source.columns, setting=named
            )
    return formats


def read_files(
    splits: dict[str, list[Source]],
    settings: DataConfig,
    formats: dict[Source, Format],
    encoder: SampleEncoder,
    listing: Listing,
) -> dict[str, Corpus]:
    """Encode every row of every file."""

    def row_encoder(source: Source) -> Callable[[Row], Encoded]:
        columns, format = source.columns, formats[source]
        return lambda row: encoder.encode(to_sample(row.value, format=format, columns=columns))

    return {
        split: read_corpus(
            {source: row_encoder(source) for source in sources},
            setting=f"data.{split}",
            settings=settings,
            listing=listing,
        )
        for split, sources in splits.items()
    }


def make_splits(
    corpora: dict[str, Corpus],
    settings: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    listing: Listing,
) -> tuple[Split, Split]:
    """Return train, and held-out without what is also trained on."""
    if "heldout" in corpora:
        train, whole = (whole_corpus(name, corpus) for name, corpus in corpora.items())
    else:
        train, whole = divide(corpora["train"], share=settings.heldout_share, seed=settings.seed)
    heldout, places = without_overlap(whole, train)
    for place in places:
        text = str(tokenizer.decode(whole[place][0][:PREVIEW_CHARS].tolist()))
        file, row = whole.origin(place)
        listing.drop(file=file, row=row, reason=OVERLAP, preview=preview(text))
    return weighted(train, corpora["train"], seed=settings.seed), heldout


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
        put_in_place(partial, output)
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
    parser.add_argument(
        "--dataset", type=Path, default=Path(), help="folder in which the data's paths begin"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="tokens folder")
    run(main, parser)
