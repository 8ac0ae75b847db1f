"""Exchanges of documents: trained turns, each with the context before it."""

from pathlib import Path

import numpy as np

from tests.support.tiny import tiny_tokenizer
from tests.support.token_splits import Words, separate
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.repetition.exchanges import (
    NO_CONTEXT,
    TOKENS_AT_ONCE,
    exchanges,
    pieces_of,
    shingles,
    stretches,
)


def exchanges_of(*conversations):
    words = Words()
    documents = [words.conversation(*turns) for turns in conversations]
    ids = np.concatenate([ids for ids, _ in documents])
    mask = np.concatenate([mask for _, mask in documents])
    lengths = np.array([len(ids) for ids, _ in documents])
    return exchanges(ids, mask, lengths, pieces=words.pieces)


def test_every_trained_turn_is_an_exchange_of_its_document():
    of = exchanges_of((("a b", "c d e"), ("f", "g")), (("h", "i j"),))
    assert of.documents.tolist() == [0, 0, 1]
    assert of.starts.tolist() == [4, 10, 15]
    assert of.tokens.tolist() == [4, 2, 3]  # each with the end of its turn
    assert of.context_owners.tolist() == [0, 1, 2]


def test_context_of_another_document_is_none():
    words = Words()
    ids = words.conversation(("a b c", ""))[0]
    answer = words.conversation(("", "d e"))[0]
    mask = np.array([False] * len(ids) + [True] * len(answer))
    of = exchanges(
        np.concatenate([ids, answer]), mask, np.array([len(ids), len(answer)]), pieces=words.pieces
    )
    assert of.documents.tolist() == [1]
    assert of.contexts.tolist() == [int(NO_CONTEXT)]


def test_question_is_another_with_another_answer():
    first, second, third = exchanges_of(
        (("a b c", "yes"),), (("a b c", "no"),), (("a b c", "yes"),)
    ).questions.tolist()
    assert first == third != second


def test_stretches_hold_every_entry_once_and_few_tokens():
    tokens = np.random.default_rng(0).integers(0, TOKENS_AT_ONCE // 3, size=101)
    slices = stretches(tokens)
    assert np.concatenate([tokens[some] for some in slices]).tolist() == tokens.tolist()
    assert max(tokens[some].sum() for some in slices) <= 4 * TOKENS_AT_ONCE // 3
    assert stretches(tokens[:0]) == []


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
