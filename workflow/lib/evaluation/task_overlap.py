"""Overlap of a task's items with training rows: the share of an item's tokens in runs of more than
10 tokens of a training row (Llama 2, arXiv 2307.09288, A.6, without skipped tokens).

An item is every text of its document, also answers that a prompt does not show. Runs that two items
of a task share are its wording, and do not count."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

RUN = 11  # tokens
CHUNK_TOKENS = 2**20  # hashed at a time: 8 MiB
FACTORS = np.random.default_rng(0).integers(2**63, size=RUN, dtype=np.uint64) * 2 + 1
NONE = np.empty(0, np.uint64)
Array = npt.NDArray[Any]


def overlap_shares(
    tasks: Mapping[str, Any], rows: Array, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[float | None]]:
    """Return the shares of the items of each task (of the harness, by name); None for an item
    without a text of `RUN` tokens. rows: token ids of the training rows, (rows, tokens)."""
    items = {
        name: [_long_texts(document, tokenizer) for document in task.eval_docs]
        for name, task in tasks.items()
    }
    own = {name: _own_runs(of_task) for name, of_task in items.items()}
    asked = np.unique(np.concatenate([NONE, *own.values()]))
    known = np.zeros(len(asked), bool)
    step = max(1, CHUNK_TOKENS // rows.shape[1])
    for first in range(0, len(rows), step):
        known |= np.isin(asked, _runs(rows[first : first + step]))
    repeated = {name: np.intersect1d(runs, asked[known]) for name, runs in own.items()}
    return {
        name: [_share(item, repeated[name]) for item in of_task] for name, of_task in items.items()
    }


def _own_runs(items: list[list[Array]]) -> Any:
    """Return the runs of one item alone."""
    runs = [np.unique(np.concatenate([NONE, *map(_runs, item)])) for item in items]
    found, count = np.unique(np.concatenate([NONE, *runs]), return_counts=True)
    return found[count == 1]


def _share(item: list[Array], repeated: Array) -> float | None:
    inside = [np.convolve(np.isin(_runs(ids), repeated), np.ones(RUN)) > 0 for ids in item]
    return float(np.concatenate(inside).mean()) if inside else None


def _runs(ids: Array) -> Array:
    """Return a 64-bit hash of every run of `RUN` tokens of the last axis."""
    if ids.shape[-1] < RUN:
        return NONE
    padded = ids.astype(np.uint64) + np.uint64(1)
    return np.lib.stride_tricks.sliding_window_view(padded, RUN, axis=-1) @ FACTORS


def _long_texts(document: Any, tokenizer: PreTrainedTokenizerBase) -> list[Array]:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _texts(document)]
    return [np.array(some) for some in ids if len(some) >= RUN]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
