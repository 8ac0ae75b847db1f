"""Scores that no model has computed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workflow.lib.artifacts.records import Split
from workflow.lib.data.tokens.token_store import ARRAYS, TokenStore
from workflow.lib.scores.store import SPLITS, Scores, ScoreWriter, trained_counts

FACTS: dict[str, Any] = {
    "model": "a-teacher",
    "model_files": {},
    "way": "whole",
    "device": "cpu",
    "compute_dtype": "float32",
}
SHARD_TOKENS = 128


def tokens_of(store: TokenStore) -> TokenStore:
    """Return the store with checksums in its manifest, as a folder's has them."""
    store.manifest["files"] = {name: name for name in ARRAYS}
    return store


def made_up(count: int, *, top_k: int = 0, seed: int = 0) -> Scores:
    draw = np.random.default_rng(seed)

    def below_zero(*shape: int) -> Any:
        return -draw.random(shape).astype(np.float32)

    if not top_k:
        return Scores(below_zero(count))
    ids = draw.integers(0, 40, size=(count, top_k), dtype=np.uint32)
    return Scores(below_zero(count), ids, below_zero(count, top_k), below_zero(count))


def scored(scores: Scores, value: float) -> Scores:
    return scores._replace(log_probs=np.full_like(scores.log_probs, value))


def written(
    folder: Path,
    tokens: TokenStore,
    *,
    top_k: int = 0,
    change: Callable[[Scores], Scores] = lambda scores: scores,
) -> dict[Split, Scores]:
    """Write made-up scores of these tokens to `folder`; return them whole."""
    every = {
        split: made_up(int(trained_counts(tokens, split).sum()), top_k=top_k, seed=number)
        for number, split in enumerate(SPLITS)
    }
    writing = ScoreWriter(folder, FACTS | {"top_k": top_k}, tokens, shard_tokens=SHARD_TOKENS)
    assert writing.prepare() == writing.parts
    starts = dict.fromkeys(SPLITS, 0)
    for part in writing.parts:
        start, starts[part.split] = starts[part.split], starts[part.split] + part.tokens
        writing.add(part, change(every[part.split].between(start, starts[part.split])))
    writing.finish()
    return every
