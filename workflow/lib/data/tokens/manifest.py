"""The manifest of a tokens folder: every fact on the data that later stages and the report need.

`artifacts.manifest_record` describes its fields."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workflow.lib.checkpoints.tokenizer import num_usable_tokens, tokenizer_sha256
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.tokens.corpus import Corpus, Encoding
from workflow.lib.data.tokens.encoded_shards import ROW_COUNTS
from workflow.lib.data.tokens.splits import Split, documents_by_source
from workflow.lib.data.tokens.token_store import (
    ARRAYS,
    CHUNK_TOKENS,
    FORMAT_VERSION,
    OPTIONAL_ARRAYS,
    POSITIONS,
    REJECTS,
    TRUNCATED,
    WEIGHTS,
    Document,
)
from workflow.lib.data.tokens.work_folder import OVERLAP, Listing
from workflow.lib.kernels.attention.answer_rows import answer_rows, grouped
from workflow.lib.settings.objectives import PAIRED, Examples
from workflow.lib.system.files import file_sha256, provenance
from workflow.lib.system.redaction import redacted

Facts = dict[str, Any]  # a JSON object of the manifest
LONGEST_ROWS = 5
SAMPLE_TOKENS = 512  # tokens of a sample document that the manifest shows at most


def manifest(
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_facts: Facts,
    encodings: Mapping[str, Encoding],
    corpora: Mapping[str, Corpus],
    *,
    train: Split,
    heldout: Split,
    repeated: Mapping[str, int],
    licences: Mapping[str, str | None],
    packed_rows: int,
    listing: Listing,
    folder: Path,
) -> Facts:
    """Return the manifest of a folder with all other files. train: one epoch's, `packed_rows` rows
    in the folder. repeated: rows that repeat training, by field. licences: of `model` and `data`.
    listing: closed."""
    encoding = encodings["train"]
    seq_len = encoding.settings.seq_len
    splits = splits_facts(train, heldout, packed_rows=packed_rows, seq_len=seq_len)
    splits["train"] |= row_facts(folder, train.examples)
    if (folder / WEIGHTS[0]).exists():
        weights = np.load(folder / WEIGHTS[0], mmap_mode="r", allow_pickle=False)
        splits["train"]["weights"] = weight_facts(weights)
    optional = [name for name in OPTIONAL_ARRAYS if (folder / name).exists()]
    files = [*ARRAYS, *optional, REJECTS, TRUNCATED]
    return {
        **tokenizer_facts,
        "format_version": FORMAT_VERSION,
        "seq_len": seq_len,
        "format": ", ".join(dict.fromkeys(f for e in encodings.values() for f in e.formats)),
        "examples": train.examples,
        "sources": source_facts(corpora, {"train": train, "heldout": heldout}, encodings),
        "splits": splits,
        "dropped_by_reason": dict(sorted(listing.dropped_by_reason.items())),
        "train_heldout_overlap": listing.dropped_by_reason[OVERLAP],
        "template_kwargs": encoding.settings.template_kwargs,
        "template_date": encoding.encoder.written_date(),
        **repeated,
        "licences": licences,
        "samples": [segments(train[position], tokenizer) for position in sampled(train)],
        "sample_origins": [_sample_origin(train, position) for position in sampled(train)],
        **chat_facts(encoding.encoder, chat_template=encoding.chat_template),
        "files": {name: file_sha256(folder / name) for name in files},
        "provenance": provenance(),
    }


def tokenizer_facts(
    tokenizer: PreTrainedTokenizerBase, folder: Path, *, chat_template: str | None
) -> Facts:
    """Return vocabulary size, special ids and digests; eos pads the rows where the model knows no
    pad token."""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    vocab_size = num_usable_tokens(tokenizer, folder)
    if pad is not None and pad >= vocab_size:
        pad = None
    return {
        "vocab_size": vocab_size,
        "pad_token_id": eos if pad is None else pad,
        "pad_token_origin": "eos_token" if pad is None else "pad_token",
        "eos_token_id": eos,
        "bos_token_id": tokenizer.bos_token_id,
        "tokenizer_sha256": tokenizer_sha256(folder),
        "chat_template_sha256": None
        if chat_template is None
        else hashlib.sha256(chat_template.encode()).hexdigest(),
    }


def chat_facts(encoder: SampleEncoder, *, chat_template: str | None) -> Facts:
    """Return the facts by which an export writes conversations and is compared."""
    return {
        "chat_template": chat_template,
        "end_of_turn_token_ids": encoder.end_of_turn_ids(),
        "probes": encoder.encoded_probes(),
    }


def source_facts(
    corpora: Mapping[str, Corpus], splits: Mapping[str, Split], encodings: Mapping[str, Encoding]
) -> list[Facts]:
    """Return the manifest's entry of every data file, with its counts of rows, documents and
    tokens."""
    return [
        {
            "split": name,
            "source": corpus.sources[file.source].name,
            "weight": corpus.sources[file.source].weight,
            "file": file.file,
            "sha256": file.sha256,
            "rows": file.rows_read,
            "format": encodings[name].formats[file.source],
            "columns": file.columns,
            "not_read": dict(file.not_read.most_common()),
            "dropped_by_reason": dict(file.dropped_by_reason.most_common()),
            "blank_lines": file.blank_lines,
            **{name: file.counts[name] for name in ROW_COUNTS[1:]},
            "unrendered": dict(sorted(file.unrendered.items())),
            **counts,
        }
        for name, corpus in corpora.items()
        for file, counts in zip(corpus.files, _counts_by_file(splits[name]), strict=True)
    ]


def _counts_by_file(split: Split) -> list[Facts]:
    """Return documents, tokens and trained tokens of each file, repetitions by weight included."""
    counts = np.zeros((len(split.corpus.files), 3), dtype=np.int64)
    for file, chosen in split.by_file():
        lengths, trained = split.documents.lengths[chosen], split.documents.trained[chosen]
        counts[file] += (len(chosen), lengths.sum(dtype=np.int64), trained.sum(dtype=np.int64))
    total = max(1, int(counts[:, 1].sum()))
    return [
        {"documents": d, "tokens": t, "trained_tokens": trained, "token_share": t / total}
        for d, t, trained in counts.tolist()
    ]


def splits_facts(train: Split, heldout: Split, *, packed_rows: int, seq_len: int) -> Facts:
    """Return the facts on both splits. packed_rows: rows of the training split, `seq_len` tokens
    each."""
    facts = split_facts(train, seq_len=seq_len)
    fill = facts["tokens"] / (packed_rows * seq_len)
    return {
        "train": {**facts, "packed_rows": packed_rows, "fill": fill},
        "heldout": {
            **split_facts(heldout, seq_len=seq_len),
            "sources": [
                {"source": source.name, "documents": count}
                for source, count in zip(
                    heldout.corpus.sources, documents_by_source(heldout), strict=True
                )
            ],
        },
    }


def row_facts(folder: Path, examples: Examples) -> Facts:
    """Return the facts on the packed rows of a folder: documents' lengths, and rows of answers."""
    names = ("train.input_ids.npy", POSITIONS, "train.loss_mask.npy")
    arrays = [np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in names]
    facts: Facts = {"lengths": grouped(row_lengths(arrays[1]))}
    if examples == "texts":
        return facts
    return facts | {"answer_rows": asdict(answer_rows(*arrays, paired=examples in PAIRED))}


def row_lengths(positions: npt.NDArray[np.int32]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the lengths of documents and padding in rows of positions (rows, seq_len)."""
    step = max(1, CHUNK_TOKENS // positions.shape[1])
    for first in range(0, len(positions), step):
        block = positions[first : first + step].ravel()
        yield np.diff(np.flatnonzero(block == 0), append=len(block))


def weight_facts(weights: npt.NDArray[np.float32]) -> Facts:
    """Return the facts on the weights (rows, seq_len) of tokens; untrained ones have 0."""
    smallest, largest, total, count, reweighted = np.inf, 0.0, 0.0, 0, 0
    step = max(1, CHUNK_TOKENS // weights.shape[1])
    for first in range(0, len(weights), step):
        block = weights[first : first + step]
        block = block[block > 0].astype(np.float64)
        if len(block):
            smallest, largest = min(smallest, block.min()), max(largest, block.max())
        total, count = total + block.sum(), count + len(block)
        reweighted += int(np.count_nonzero(block != 1))
    return {
        "smallest": float(smallest),
        "largest": float(largest),
        "mean": float(total / count),
        "tokens": reweighted,
    }


def split_facts(split: Split, *, seq_len: int) -> Facts:
    """Return the facts on a split. Lengths are tokens of rows before any cut."""
    firsts = split.first_of_row
    lengths = split.documents.full_lengths[firsts].astype(np.int64)
    counts, longest = np.bincount(lengths), firsts[np.argsort(-lengths, kind="stable")]
    files = _counts_by_file(split)
    facts: Facts = {
        "rows_read": split.rows_read,
        "rows_kept": split.rows_read - split.rows_dropped,
        "rows_dropped": split.rows_dropped,
        "documents": len(split),
        "truncated": int(counts[seq_len + 1 :].sum()),
        "tokens": sum(file["tokens"] for file in files),
        "trained_tokens": sum(file["trained_tokens"] for file in files),
        "length_percentiles": percentiles(counts),
        "longest": [_origin(split, number) for number in longest[:LONGEST_ROWS].tolist()],
        "duplicates": len(firsts) - split.distinct_rows(),
    }
    if split.examples == "rated":
        facts["good_answers"] = split.good_answers()
    return facts


def percentiles(counts: npt.NDArray[np.int64]) -> Facts:
    """Return lengths in tokens: the smallest that is not below each share of rows."""
    upto = np.cumsum(counts)
    p50, p90, p99 = np.searchsorted(upto * 100, np.array([50, 90, 99]) * upto[-1]).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": len(counts) - 1}


def _origin(split: Split, number: int) -> Facts:
    file, row = split.origin(number)
    return {"file": file, "row": row, "tokens": int(split.documents.full_lengths[number])}


def sampled(train: Split) -> list[int]:
    """Return the places of the first, middle and last example's documents of each source."""
    positions: list[int] = []
    first = 0
    for count in documents_by_source(train):
        examples = count // train.unit
        numbers = {0, examples // 2, examples - 1} if count else set[int]()
        for example in sorted(numbers):
            begin = first + train.unit * example
            positions += range(begin, begin + train.unit)
        first += count
    return positions


def _sample_origin(train: Split, position: int) -> Facts:
    number = int(train.chosen[position])
    file = train.corpus.files[train.documents.file(number)]
    name, row = train.origin(number)
    origin = {"source": train.corpus.sources[file.source].name, "file": name, "row": row}
    if train.examples != "texts":
        is_good = train.documents.desirable[number]
        rated = ("good answer" if is_good else "bad answer", "answer of another row")
        names = ("chosen", "rejected") if train.examples == "pairs" else rated
        origin["answer"] = names[position % train.unit]
    return origin


def segments(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    ids, mask = (part[:SAMPLE_TOKENS] for part in document)
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
    return [
        (redacted(str(tokenizer.decode(ids[start:stop].tolist()))), bool(mask[start]))
        for start, stop in pairwise(edges)
    ]
