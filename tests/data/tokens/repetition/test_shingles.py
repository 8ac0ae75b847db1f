"""Shingles: what counts as alike, checked against sets counted by hand."""

from pathlib import Path

import numpy as np

from tests.support.tiny import tiny_tokenizer
from tests.support.token_splits import separate
from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.data.tokens.repetition.shingles import pieces_of, shingles

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
    assert not first & third


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
