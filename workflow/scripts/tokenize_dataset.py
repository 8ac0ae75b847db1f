"""Turn a dataset into the tokens folder: token ids, loss masks and positions, packed, and a
manifest of facts.

Every row is used or listed with a reason in `rejects.jsonl`; nothing is dropped or cut in silence.
The same files and settings give the same arrays, byte for byte, whatever the number of processes.
What is encoded is kept in a work folder beside the output until all is done, so a killed run goes
on where it was. If unusable rows stop the run, their list is kept beside the output, as
`<output>.rejects.jsonl`.
"""

import argparse
import json
import logging
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from workflow.lib.data.encoding.row_formats import WITHOUT_TEMPLATE, choose_format
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.encoding.tokenizer import load_tokenizer, read_chat_template
from workflow.lib.data.reading.data_file import column_names
from workflow.lib.data.reading.row import PREVIEW_CHARS, preview
from workflow.lib.data.reading.sources import Source, resolve_splits
from workflow.lib.data.tokens import manifest
from workflow.lib.data.tokens.corpus import (
    Corpus,
    Encoding,
    check_rejected_share,
    encode_corpus,
    list_rows,
    open_corpora,
)
from workflow.lib.data.tokens.documents import collect_documents
from workflow.lib.data.tokens.dropped_rows import NEAR_DUPLICATE, OVERLAP, Listing
from workflow.lib.data.tokens.encoded_shards import SHARD_VERSION
from workflow.lib.data.tokens.manifest_fields import Manifest, SplitFacts, TokenizerFacts
from workflow.lib.data.tokens.near_duplicates import (
    NearDuplicates,
    find_near_duplicates,
    make_measure,
    write_keys,
)
from workflow.lib.data.tokens.packing_windows import blocks, packing_windows
from workflow.lib.data.tokens.process_pool import available_processes
from workflow.lib.data.tokens.shingles import piece_table
from workflow.lib.data.tokens.splits import (
    Split,
    check_not_empty,
    divide,
    overlap,
    weighted,
    whole_corpus,
)
from workflow.lib.data.tokens.token_store import FORMAT_VERSION, MANIFEST, REJECTS
from workflow.lib.data.tokens.token_writer import write_heldout, write_train
from workflow.lib.data.tokens.work_folder import finished_folder, rejects_beside, work_folder
from workflow.lib.planning.preflight.decision import CHECKS_HELP, check_models
from workflow.lib.settings.config import DataConfig
from workflow.lib.settings.data import Format
from workflow.lib.system.checksums import check_files, downloaded_files, without_weights
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import package_versions, provenance, short_hash, write_checked_json
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")

SHOWN_PAIRS = 3  # near-duplicates that an error message quotes


def main(args: argparse.Namespace) -> None:
    settings = DataConfig.model_validate(args.config["data"])
    check_models(args.checks, folder=args.tokenizer)
    check_downloads(args)
    sources = resolve_splits(settings, root=args.dataset)
    tokenizer = load_tokenizer(args.tokenizer)
    encodings = find_encodings(tokenizer, sources, settings)
    template = encodings["train"].chat_template
    tokenizer_facts = manifest.tokenizer_facts(tokenizer, args.tokenizer, chat_template=template)
    corpora = open_corpora(sources)
    rejects = rejects_beside(args.output)

    with (
        work_folder(args.output, key=work_key(corpora, encodings, tokenizer_facts)) as work,
        finished_folder(args.output) as (folder, listing),
    ):
        for split, corpus in corpora.items():
            encode_corpus(
                corpus, split=split, encoding=encodings[split], work=work, processes=args.processes
            )
        whole = make_splits(corpora, settings, listing, work=work)
        check_rejected_share(corpora.values(), largest=settings.max_rejected_share, rejects=rejects)
        check_not_empty(*whole, rejects=rejects)
        train, heldout = whole[0], drop_overlap(*whole, listing, tokenizer)
        near = near_duplicates(train, heldout, settings, tokenizer, processes=args.processes)
        heldout = drop_near_duplicates(heldout, train, near, settings, listing, tokenizer)
        check_not_empty(train, heldout, rejects=rejects)
        train = weighted(train, seed=settings.seed)
        listing.close()

        windows = packing_windows(
            train, seq_len=settings.seq_len, seed=settings.seed, packing=settings.packing
        )
        packed_rows = write_train(
            folder,
            windows,
            seq_len=settings.seq_len,
            pad_token_id=tokenizer_facts["pad_token_id"],
        )
        write_heldout(folder, blocks(heldout))
        facts: Manifest = {
            **tokenizer_facts,
            "format_version": FORMAT_VERSION,
            "seq_len": settings.seq_len,
            "format": ", ".join(dict.fromkeys(f for e in encodings.values() for f in e.formats)),
            "sources": manifest.source_facts(corpora, {"train": train, "heldout": heldout}),
            "splits": manifest.splits_facts(
                train, heldout, near, packed_rows=packed_rows, seq_len=settings.seq_len
            ),
            **manifest.drop_facts(listing),
            "train_heldout_near_duplicates": len(near.pairs),
            "samples": manifest.samples(train, tokenizer),
            **manifest.chat_facts(encodings["train"].encoder, chat_template=template),
            "files": manifest.file_facts(folder),
            "provenance": provenance(),
        }
        write_checked_json(folder / MANIFEST, facts)
    log_facts(facts, output=args.output)


def check_downloads(args: argparse.Namespace) -> None:
    """Raise `UserError` if a downloaded dataset or tokenizer is not what the hub announced."""
    files = without_weights(downloaded_files(args.tokenizer))
    if args.dataset != Path():  # else the project's own folder
        files += downloaded_files(args.dataset)
    check_files(files, threads=args.processes)


def find_encodings(
    tokenizer: PreTrainedTokenizerBase,
    splits: dict[str, list[Source]],
    settings: DataConfig,
) -> dict[str, Encoding]:
    """Return how the rows of each split become tokens, once the template is known to serve."""
    formats = {split: find_formats(split, sources) for split, sources in splits.items()}
    chats = any(format not in WITHOUT_TEMPLATE for some in formats.values() for format in some)
    template = read_chat_template(tokenizer, settings.chat_template) if chats else None
    encoder = SampleEncoder(tokenizer, chat_template=template, loss_on=settings.loss_on)
    return {
        split: Encoding(
            encoder=encoder,
            chat_template=template,
            formats=formats[split],
            columns=tuple(source.columns for source in sources),
            settings=settings,
        )
        for split, sources in splits.items()
    }


def find_formats(split: str, sources: list[Source]) -> tuple[Format, ...]:
    """Return what a row of each source is."""
    formats = []
    for source in sources:
        setting = f"data.{split}"
        names = column_names(source.files, setting=setting)
        named = setting if len(sources) == 1 else f"{setting} ({source.name})"
        formats.append(
            choose_format(names, format=source.format, columns=source.columns, setting=named)
        )
    return tuple(formats)


def work_key(
    corpora: dict[str, Corpus], encodings: dict[str, Encoding], tokenizer_facts: TokenizerFacts
) -> str:
    """Return what the encoded rows depend on, as one short hash."""
    files = {split: [file.sha256 for file in corpus.files] for split, corpus in corpora.items()}
    formats = {split: encoding.formats for split, encoding in encodings.items()}
    settings = encodings["train"].settings.model_dump(mode="json")
    return short_hash(
        [SHARD_VERSION, files, formats, settings, tokenizer_facts, package_versions()]
    )


def make_splits(
    corpora: dict[str, Corpus], settings: DataConfig, listing: Listing, *, work: Path
) -> tuple[Split, Split]:
    """Return train and held-out as they were read, and list what was dropped."""
    parts = [
        (
            corpus,
            collect_documents(corpus.shards, folder=work, name=split),
            list_rows(corpus, listing),
        )
        for split, corpus in corpora.items()
    ]
    if len(parts) == 1:
        return divide(*parts[0], share=settings.heldout_share, seed=settings.seed)
    return whole_corpus("train", *parts[0]), whole_corpus("heldout", *parts[1])


def drop_overlap(
    train: Split, heldout: Split, listing: Listing, tokenizer: PreTrainedTokenizerBase
) -> Split:
    """Return held-out without the rows that are also trained on."""
    reasons = ((int(number), OVERLAP) for number in overlap(heldout, train))
    return drop_documents(heldout, reasons, listing, tokenizer)


def near_duplicates(
    train: Split,
    heldout: Split,
    settings: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    processes: int,
) -> NearDuplicates:
    """Compare the documents of both splits with each other."""
    measure = make_measure(
        train, table=piece_table(tokenizer), threshold=settings.near_duplicate_threshold
    )
    write_keys([train, heldout], measure, processes=processes)
    return find_near_duplicates(train, heldout, measure)


def drop_near_duplicates(
    heldout: Split,
    train: Split,
    near: NearDuplicates,
    settings: DataConfig,
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
) -> Split:
    """Return held-out as `data.near_duplicates` says. Raises `UserError` if they are refused."""
    if not near.pairs or settings.near_duplicates == "keep":
        return heldout
    reasons = near_reasons(near, train)
    if settings.near_duplicates == "refuse":
        shown = [
            f"row {heldout.origin(number)[1]}: {reason}"
            for number, reason in islice(reasons, SHOWN_PAIRS)
        ]
        raise setting_error(
            "data.near_duplicates",
            "refuse",
            f"{len(near.pairs)} held-out rows nearly repeat training rows:\n  "
            + "\n  ".join(shown),
            "Take them out of the held-out data, set remove, or raise "
            "data.near_duplicate_threshold",
        )
    return drop_documents(heldout, reasons, listing, tokenizer)


def near_reasons(near: NearDuplicates, train: Split) -> Iterator[tuple[int, str]]:
    """Yield each held-out document that resembles a training one, and which."""
    for number, other, measured in near.pairs:
        file, row = train.origin(other)
        yield number, f"{NEAR_DUPLICATE}: {measured:.2f} like row {row} of {file}"


def drop_documents(
    split: Split,
    reasons: Iterable[tuple[int, str]],
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
) -> Split:
    """Return the split without the rows of these documents, ascending, with their reasons; each row
    is listed once.
    """
    lost, last = array("Q"), None
    for number, reason in reasons:
        ordinal = int(split.documents.ordinals[number])
        if ordinal != last:
            file, row = split.origin(number)
            text = str(tokenizer.decode(split.documents[number][0][:PREVIEW_CHARS].tolist()))
            listing.drop(
                {"row": row, "reason": reason, "preview": preview(text)},
                file=file,
            )
            lost.append(ordinal)
        last = ordinal
    return split.without_rows(np.array(lost, dtype=np.uint64))


def log_facts(facts: Manifest, *, output: Path) -> None:
    """Log what became of the rows, and what a reader should not miss."""
    splits: dict[str, SplitFacts] = {
        "train": facts["splits"]["train"],
        "heldout": facts["splits"]["heldout"],
    }
    for name, split in splits.items():
        logger.info(
            "%s: %d rows read, %d kept, %d dropped, %d longer than %d tokens; %d tokens, %.1f%% "
            "trained",
            name,
            split["rows_read"],
            split["rows_kept"],
            split["rows_dropped"],
            split["truncated"],
            facts["seq_len"],
            split["tokens"],
            100 * split["trained_tokens"] / split["tokens"],
        )
        logger.info(
            "%s: %d rows equal an earlier one, %d nearly do",
            name, split["duplicates"], split["near_duplicates"],
        )  # fmt: skip
    train = facts["splits"]["train"]
    logger.info(
        "packed %d documents into %d rows of %d tokens: %.2f%% full",
        train["documents"], train["packed_rows"], facts["seq_len"], 100 * train["fill"],
    )  # fmt: skip
    for reason, count in facts["dropped_by_reason"].items():
        logger.info("dropped %d: %s", count, reason)
    if facts["dropped_by_reason"]:
        logger.info("dropped rows, with line and reason: %s", output / REJECTS)
    for source in facts["sources"]:
        if source["blank_lines"]:
            logger.info(
                "%s: %d blank lines are no rows, but count as lines",
                source["file"], source["blank_lines"],
            )  # fmt: skip
    special = sum(source["special_token_texts"] for source in facts["sources"])
    if special:
        logger.info("%d rows spell a special token; it was encoded as ordinary text", special)
    by_turns = sum(source["rows_by_turns"] for source in facts["sources"])
    if by_turns:
        logger.info(
            "%d rows became several examples: the template shows turns otherwise once others "
            "follow",
            by_turns,
        )
    if facts["pad_token_origin"] == "eos_token":
        logger.info("no pad token: rows are filled with eos, which is never trained there")


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument(
        "--dataset", type=Path, default=Path(), help="folder in which the data's paths begin"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--checks", type=json.loads, default={}, help=CHECKS_HELP)
    parser.add_argument("--output", type=Path, required=True, help="tokens folder")
    parser.add_argument(
        "--processes", type=int, default=available_processes(), help="how many encode at once"
    )
    run(main, parser)
