"""Near-duplicates of splits on disk: the same are found however few keys are in memory at a
time.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.lib.data.encoding.sample_encoder import Encoded
from workflow.lib.data.reading.row import Row
from workflow.lib.data.tokens.corpus import Corpus
from workflow.lib.data.tokens.documents import collect_documents
from workflow.lib.data.tokens.encoded_shards import Shard, encode_rows, read_facts
from workflow.lib.data.tokens.near_duplicates import (
    TOKENS_AT_ONCE,
    Measure,
    find_near_duplicates,
    stable_order,
    stretches,
    write_keys,
)
from workflow.lib.data.tokens.splits import Split, whole_corpus

VOCABULARY = 5000
PER_SHARD = 7


def split_of(folder: Path, name: str, documents: list[npt.NDArray[np.uint32]]) -> Split:
    """Write documents to shards of seven."""

    def encode(row: Row) -> list[Encoded]:
        ids = documents[row.number]
        return [Encoded(ids, np.arange(len(ids)) > 0, False)]

    shards: list[Shard] = []
    for first in range(0, len(documents), PER_SHARD):
        rows = [Row(n, {}) for n in range(first, min(first + PER_SHARD, len(documents)))]
        stem = folder / f"{name}-{first}"
        encode_rows(
            rows, begin=lambda row: partial(encode, row), seq_len=1000, overlong="drop", stem=stem
        )
        facts = read_facts(stem)
        shards.append(Shard(stem, 0, first, facts.rows_read, facts.documents, facts.tokens))
    corpus = Corpus(sources=[], files=[], shards=shards, rows_read=len(documents))
    collected = collect_documents(shards, folder=folder, name=name)
    return whole_corpus(name, corpus, collected, np.empty(0, dtype=np.int64))


def test_same_near_duplicates_are_found_however_few_keys_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    originals = [draw.integers(1, VOCABULARY, size=90, dtype=np.uint32) for _ in range(40)]
    changed = [np.concatenate([ids[:60], ids[62:]]) for ids in originals]
    train = split_of(tmp_path, "train", [*originals, *changed[:15]])
    heldout = split_of(tmp_path, "heldout", [*changed[20:31], originals[0][::-1].copy()])
    table = np.arange(VOCABULARY, dtype=np.uint32)
    measure = Measure(table, np.empty(0, dtype=np.uint64), threshold=0.5)
    write_keys([train, heldout], measure, processes=1)
    at_once = find_near_duplicates(train, heldout, measure)
    assert (at_once.train, at_once.heldout) == (15, 0)
    assert [pair[:2] for pair in at_once.pairs] == [(n, n + 20) for n in range(11)]
    assert find_near_duplicates(train, heldout, measure, keys_at_once=4) == at_once
    monkeypatch.setattr("workflow.lib.data.tokens.near_duplicates.BLOCK", 5)
    assert find_near_duplicates(train, heldout, measure, keys_at_once=4) == at_once


def test_splits_of_one_corpus_are_compared_by_the_same_keys(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    originals = [draw.integers(1, VOCABULARY, size=90, dtype=np.uint32) for _ in range(30)]
    whole = split_of(tmp_path, "all", [*originals, *(ids[:80] for ids in originals[:9])])
    heldout = replace(whole, name="heldout", chosen=np.array([2, 5, 11, 33, 36], dtype=np.uint32))
    train = replace(whole, name="train", chosen=np.setdiff1d(whole.chosen, heldout.chosen))
    measure = Measure(
        np.arange(VOCABULARY, dtype=np.uint32), np.empty(0, dtype=np.uint64), threshold=0.5
    )
    write_keys([train, heldout], measure, processes=1)
    near = find_near_duplicates(train, heldout, measure)
    assert [pair[:2] for pair in near.pairs] == [(2, 32), (5, 35), (33, 3), (36, 6)]
    assert (near.train, near.heldout) == (5, 0)


def test_stretches_hold_every_entry_once_and_few_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, TOKENS_AT_ONCE // 3, size=101)
    slices = stretches(tokens)
    assert np.concatenate([tokens[some] for some in slices]).tolist() == tokens.tolist()
    assert max(tokens[some].sum() for some in slices) <= 4 * TOKENS_AT_ONCE // 3
    assert stretches(tokens[:0]) == []


@given(st.lists(st.integers(0, 2**40 - 1) | st.integers(0, 3), max_size=300))
def test_equal_keys_keep_their_order(keys: list[int]) -> None:
    array = np.array(keys, dtype=np.uint64)
    assert stable_order(array).tolist() == np.argsort(array, kind="stable").tolist()
