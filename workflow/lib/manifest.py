"""The manifest of a tokens folder: every fact on the data that later stages and the report need."""

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from workflow.lib.artifacts import file_sha256
from workflow.lib.corpus import Corpus
from workflow.lib.listing import OVERLAP, Listing
from workflow.lib.splits import Split
from workflow.lib.tokenizer import tokenizer_sha256
from workflow.lib.tokens import ARRAYS, FORMAT_VERSION, REJECTS, TRUNCATED, Document

SAMPLE_TOKENS = 512  # tokens of a sample document that the manifest shows at most


def tokenizer_facts(
    tokenizer: PreTrainedTokenizerBase, folder: Path, *, chat_template: str | None
) -> dict[str, Any]:
    """Return vocabulary size, special ids and digests; rows are filled with pad, or with eos where there is no pad."""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": eos if pad is None else pad,
        "pad_token_origin": "eos_token" if pad is None else "pad_token",
        "eos_token_id": eos,
        "bos_token_id": tokenizer.bos_token_id,
        "tokenizer_sha256": tokenizer_sha256(folder),
        "chat_template_sha256": None
        if chat_template is None
        else hashlib.sha256(chat_template.encode()).hexdigest(),
    }


def source_facts(corpora: dict[str, Corpus]) -> list[dict[str, Any]]:
    """Return split, source, weight, name, digest and rows of each data file."""
    return [
        {
            "split": split,
            "source": corpus.sources[file.source].name,
            "weight": corpus.sources[file.source].weight,
            "file": file.file,
            "sha256": file_sha256(file.path),
            "rows": file.rows_read,
            "special_token_texts": file.special_texts,
        }
        for split, corpus in corpora.items()
        for file in corpus.files
    ]


def split_facts(train: Split, heldout: Split, packed_rows: int, *, seq_len: int) -> dict[str, Any]:
    """Return the facts on both splits; `fill` is the share of a training row's places that documents take."""
    facts = train.facts()
    fill = facts["tokens"] / (packed_rows * seq_len)
    return {
        "format_version": FORMAT_VERSION,
        "seq_len": seq_len,
        "splits": {
            "train": {**facts, "packed_rows": packed_rows, "fill": fill},
            "heldout": heldout.facts(),
        },
    }


def drop_facts(listing: Listing) -> dict[str, Any]:
    """Return how many rows were dropped for each reason, and how many held-out ones were training rows."""
    reasons = dict(sorted(listing.dropped_by_reason.items()))
    return {"dropped_by_reason": reasons, "train_heldout_overlap": reasons.get(OVERLAP, 0)}


def file_facts(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of the folder but the manifest."""
    names = [*ARRAYS, REJECTS, TRUNCATED]
    return {name: file_sha256(folder / name) for name in names}


def samples(train: Split, tokenizer: PreTrainedTokenizerBase) -> list[list[tuple[str, bool]]]:
    """Return the first, middle and last training document as segments of text, each trained or not."""
    places = sorted({0, len(train) // 2, len(train) - 1})
    return [_segments(train[place], tokenizer) for place in places]


def _segments(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    ids, mask = (part[:SAMPLE_TOKENS] for part in document)
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
    return [
        (str(tokenizer.decode(ids[start:stop].tolist())), bool(mask[start]))
        for start, stop in pairwise(edges)
    ]
