"""Shingles and their keys: what counts as alike, checked against sets counted by hand."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny import tiny_tokenizer
from tests.support.token_splits import separate
from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.data.tokens.repetition.shingles import (
    BINS,
    band_keys,
    band_rows,
    pieces_of,
    resemblance,
    shingles,
    widespread,
)

WORDS = separate(1000)


def shingle_sets(documents):
    lengths = np.array([len(document) for document in documents])
    hashes, owners, _ = shingles(np.concatenate(documents).astype(np.uint32), lengths, pieces=WORDS)
    return [frozenset(hashes[owners == number].tolist()) for number in range(len(documents))]


def test_shingles_are_runs_of_six_within_a_document():
    first, second, third = shingle_sets(
        [list(range(1, 11)), list(range(3, 11)), list(range(20, 26))]
    )
    assert (len(first), len(second), len(third)) == (5, 3, 1)
    assert second < first
    arrays = [np.array(sorted(hashes), dtype=np.uint64) for hashes in (first, second, third)]
    assert resemblance(arrays[0], arrays[1]) == 3 / 5
    assert resemblance(arrays[0], arrays[2]) == 0.0


def test_short_document_is_one_shingle_of_its_own():
    short, longer, same = shingle_sets([[1, 2, 3], [1, 2, 3, 4], [1, 2, 3]])
    assert len(short) == len(longer) == 1
    assert short != longer
    assert short == same


def words(tokenizer, text):
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.uint32)
    return pieces_of(tokenizer).words(ids, np.zeros(len(ids), dtype=np.int64))[0].tolist()


def test_words_ignore_case_and_signs_and_special_tokens(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    assert words(tokenizer, "a B,c!") == words(tokenizer, "<|user|>A b - C")
    assert words(tokenizer, "a B,c!") != words(tokenizer, "a B,d!")
    assert words(tokenizer, "日") != words(tokenizer, "月")  # parts of characters


def test_words_are_the_same_however_capitals_cut_them_into_tokens():
    tokenizer = load_tokenizer(Path("workflow/resources/base"))
    text = "The photosynthesis of fishermen is described below."
    assert len(tokenizer.encode(text)) != len(tokenizer.encode(text.upper()))
    assert words(tokenizer, text) == words(tokenizer, text.upper())
    assert len(words(tokenizer, text)) == 7


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_nearly_all_pairs_at_the_threshold_share_a_key(threshold):
    draw = np.random.default_rng(0)
    rows, pairs, size = band_rows(threshold), 400, 120
    shared = round(2 * size * threshold / (1 + threshold))
    sets = []
    for _ in range(pairs):
        values = draw.integers(0, 2**64, size=2 * size - shared, dtype=np.uint64)
        sets += [values[:size], values[size - shared :]]
    owners = np.repeat(np.arange(2 * pairs), size)
    keys = band_keys(np.concatenate(sets), owners, documents=2 * pairs, rows=rows)
    assert keys.shape == (BINS // rows, 2 * pairs)
    share_a_key = (keys[:, ::2] == keys[:, 1::2]).any(axis=0)
    assert share_a_key.mean() >= 0.95
    strangers = (keys[:, :-2:2] == keys[:, 3::2]).any(axis=0)
    assert strangers.mean() < 0.01


def test_short_documents_that_share_little_rarely_share_a_key():
    draw = np.random.default_rng(0)
    pairs, size, shared = 400, 24, 4  # most bins are empty and borrow
    sets = []
    for _ in range(pairs):
        values = draw.integers(0, 2**64, size=2 * size - shared, dtype=np.uint64)
        sets += [values[:size], values[size - shared :]]
    owners = np.repeat(np.arange(2 * pairs), size)
    keys = band_keys(np.concatenate(sets), owners, documents=2 * pairs, rows=3)
    assert (keys[:, ::2] == keys[:, 1::2]).any(axis=0).mean() < 0.1


def test_what_many_documents_say_is_widespread():
    hashes = np.array([7] * 10 + [8, 8, 9], dtype=np.uint64)
    owners = np.array([*range(10), 0, 1, 2])
    assert widespread(hashes, owners, share=0.5).tolist() == [7]
