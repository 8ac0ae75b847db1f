"""Turn a dataset into the tokens folder: packed ids, masks and positions, and a manifest.

Every row is used or listed with a reason in `rejects.jsonl`; no row is silently dropped or cut. The
same files and settings give the same arrays, byte for byte, for any number of processes. Encoded
rows are kept in a work folder beside the output until all are done, so a killed run resumes. If
unusable rows stop the run, their list is kept beside the output, as `<output>.rejects.jsonl`."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from workflow.lib.checkpoints.tokenizer import (
    load_tokenizer,
    num_usable_tokens,
)
from workflow.lib.data.reading.hub_download import licence_of
from workflow.lib.data.reading.sources import resolve_splits
from workflow.lib.data.tokens import manifest
from workflow.lib.data.tokens.corpus import (
    Corpus,
    Encoding,
    check_rejected_share,
    encode_corpus,
    find_encodings,
    list_rows,
    open_corpora,
)
from workflow.lib.data.tokens.encoded_shards import SHARD_VERSION, Documents
from workflow.lib.data.tokens.heldout_drops import (
    check_heldout_left,
    drop_documents,
    group_reasons,
    near_reasons,
    overlap_reasons,
    treated,
)
from workflow.lib.data.tokens.manifest_log import log_facts
from workflow.lib.data.tokens.process_pool import available_processes
from workflow.lib.data.tokens.repetition.containment import find_contained
from workflow.lib.data.tokens.repetition.exchanges import pieces_of
from workflow.lib.data.tokens.splits import (
    Split,
    check_both_judgements,
    check_not_empty,
    divide,
    weighted,
    whole_corpus,
    with_neighbours,
)
from workflow.lib.data.tokens.token_store import MANIFEST
from workflow.lib.data.tokens.token_writer import (
    blocks,
    optional_arrays,
    packing_windows,
    write_heldout,
    write_train,
)
from workflow.lib.data.tokens.work_folder import (
    Listing,
    finished_folder,
    rejects_beside,
    work_folder,
)
from workflow.lib.settings.config import DataConfig
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.checksums import check_files, downloaded_files, without_weights
from workflow.lib.system.files import package_versions, short_hash, write_checked_json
from workflow.lib.system.input_files import Inputs
from workflow.scripts.command import run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = DataConfig.model_validate(args.config["data"])
    examples: Examples = args.config.get("examples", "texts")
    check_downloads(args)
    sources = resolve_splits(settings, root=args.dataset)
    tokenizer = load_tokenizer(args.tokenizer)
    usable_tokens = num_usable_tokens(tokenizer, args.tokenizer)
    encodings = find_encodings(tokenizer, usable_tokens, sources, settings, examples)
    tokenizer_facts = manifest.tokenizer_facts(
        tokenizer, args.tokenizer, chat_template=encodings["train"].chat_template
    )
    corpora = open_corpora(sources)
    inputs = inputs_of(args, settings, corpora)
    with (
        work_folder(args.output, key=work_key(corpora, encodings, tokenizer_facts)) as work,
        finished_folder(args.output) as (folder, listing),
    ):
        for split, corpus in corpora.items():
            encode_corpus(
                corpus, split=split, encoding=encodings[split], work=work, processes=args.processes
            )
        train, heldout, repeated = prepare_splits(
            corpora,
            settings,
            listing,
            tokenizer,
            examples=examples,
            work=work,
            output=args.output,
            processes=args.processes,
        )
        packed_rows = write_arrays(folder, train, heldout, settings, tokenizer_facts)
        listing.close()  # the manifest holds the checksums of its files
        facts = manifest.manifest(
            tokenizer,
            tokenizer_facts,
            encodings,
            corpora,
            train=train,
            heldout=heldout,
            repeated=repeated,
            licences=licences(args, corpora),
            packed_rows=packed_rows,
            listing=listing,
            folder=folder,
        )
        write_checked_json(folder / MANIFEST, facts)
        inputs.check()
    log_facts(
        facts,
        output=args.output,
        special_tokens=settings.special_tokens_in_text,
        leave_out=settings.leave_out,
    )


def check_downloads(args: argparse.Namespace) -> None:
    """Raise `UserError` if a downloaded dataset or tokenizer differs from the hub's checksums."""
    files = without_weights(downloaded_files(args.tokenizer))
    if args.dataset != Path():  # else the project's own folder
        files += downloaded_files(args.dataset)
    check_files(files, threads=args.processes)


def inputs_of(args: argparse.Namespace, settings: DataConfig, corpora: dict[str, Corpus]) -> Inputs:
    """Return the files of data, tokenizer and template; those of data have been hashed."""
    template = settings.chat_template
    read = [args.tokenizer, *([Path(template)] if template else [])]
    files = (file for corpus in corpora.values() for file in corpus.files)
    return Inputs(read, sha256={file.path: file.sha256 for file in files})


def licences(args: argparse.Namespace, corpora: dict[str, Corpus]) -> dict[str, str | None]:
    """Return the licences of the model, and of a downloaded dataset or local files."""
    files = [file.path for corpus in corpora.values() for file in corpus.files]
    data = files if args.dataset == Path() else [args.dataset]
    return {"model": licence_of([args.tokenizer]), "data": licence_of(data)}


def work_key(
    corpora: dict[str, Corpus], encodings: dict[str, Encoding], tokenizer_facts: dict[str, Any]
) -> str:
    """Return all that the encoded rows depend on, as one short hash."""
    files = {split: [file.sha256 for file in corpus.files] for split, corpus in corpora.items()}
    formats = {split: encoding.formats for split, encoding in encodings.items()}
    encoding = encodings["train"]
    settings = [encoding.settings.model_dump(mode="json"), encoding.examples]
    return short_hash(
        [SHARD_VERSION, files, formats, settings, tokenizer_facts, package_versions()]
    )


def prepare_splits(
    corpora: dict[str, Corpus],
    settings: DataConfig,
    listing: Listing,
    tokenizer: PreTrainedTokenizerBase,
    *,
    examples: Examples,
    work: Path,
    output: Path,
    processes: int,
) -> tuple[Split, Split, dict[str, int]]:
    """Return train by weight, held-out without trained documents, and the numbers of held-out rows
    that repeat training, by field of the manifest.

    Raises `UserError` if too many rows are unusable, or no document of a split is left."""
    rejects = rejects_beside(output)
    train, heldout = make_splits(corpora, settings, listing)
    if examples == "pairs":
        train, heldout = (replace(split, examples=examples) for split in (train, heldout))
    check_rejected_share(corpora.values(), largest=settings.max_rejected_share, rejects=rejects)
    check_not_empty(train, heldout, rejects=rejects)
    treat = partial(
        treated, listing=listing, tokenizer=tokenizer, treatment=settings.near_duplicates
    )
    heldout = drop_documents(heldout, overlap_reasons(heldout, train), listing, tokenizer)
    grouped = group_reasons(heldout, train)
    heldout = treat(heldout, grouped)
    check_heldout_left(heldout, listing, rejects=rejects)
    pieces = pieces_of(tokenizer)
    matches = find_contained(
        heldout,
        train,
        pieces=pieces,
        threshold=settings.near_duplicate_threshold,
        processes=processes,
    )
    heldout = treat(heldout, near_reasons(heldout, train, matches, tokenizer, pieces=pieces))
    check_heldout_left(heldout, listing, rejects=rejects)
    if examples == "rated":
        check_both_judgements(train)
        train, heldout = (
            with_neighbours(split, seq_len=settings.seq_len, work=work, train=train)
            for split in (train, heldout)
        )
    repeated = {
        "train_heldout_near_duplicates": len(matches),
        "train_heldout_shared_groups": len(grouped),
    }
    return weighted(train, seed=settings.seed), heldout, repeated


def make_splits(
    corpora: dict[str, Corpus], settings: DataConfig, listing: Listing
) -> tuple[Split, Split]:
    """Return train and held-out as read, and list dropped rows."""
    parts = [
        (corpus, Documents(corpus.shards), list_rows(corpus, listing))
        for corpus in corpora.values()
    ]
    if len(parts) == 1:
        return divide(*parts[0], share=settings.heldout_share, seed=settings.seed)
    return whole_corpus("train", *parts[0]), whole_corpus("heldout", *parts[1])


def write_arrays(
    folder: Path,
    train: Split,
    heldout: Split,
    settings: DataConfig,
    tokenizer_facts: dict[str, Any],
) -> int:
    """Write packed training rows and held-out documents; return the number of rows."""
    windows = packing_windows(
        train, seq_len=settings.seq_len, seed=settings.seed, packing=settings.packing
    )
    pad = tokenizer_facts["pad_token_id"]
    packed_rows = write_train(
        folder, windows, seq_len=settings.seq_len, pad_token_id=pad, optional=optional_arrays(train)
    )
    write_heldout(folder, blocks(heldout), optional=optional_arrays(heldout))
    return packed_rows


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="tokenizer output")
    parser.add_argument(
        "--dataset", type=Path, default=Path(), help="folder in which the data's paths begin"
    )
    parser.add_argument(
        "--processes", type=int, default=available_processes(), help="how many encode at once"
    )
    run(main, parser)
