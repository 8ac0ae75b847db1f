"""Exchanges of documents: trained turns, each with the context before it."""

import numpy as np

from tests.support.token_splits import Words
from workflow.lib.data.tokens.repetition.exchanges import (
    NO_CONTEXT,
    TOKENS_AT_ONCE,
    exchanges,
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
