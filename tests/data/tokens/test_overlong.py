"""Examples that do not fit into a row."""

from itertools import pairwise

import numpy as np
import pytest

from tests.support.encoding import PLAIN_TEMPLATE, conversation
from tests.support.tiny import tiny_tokenizer
from workflow.lib.data.encoding.row_formats import Weighted
from workflow.lib.data.encoding.sample_encoder import Encoded, SampleEncoder
from workflow.lib.data.tokens.overlong import (
    CUT,
    OverlongError,
    TooLongError,
    cut_to_length,
    divide_chat,
    tokens_needed,
)


def answer(prompt, length, *, first=100):
    ids = np.concatenate([np.arange(prompt), first + np.arange(length)]).astype(np.uint32)
    return Encoded(ids, np.arange(len(ids)) >= prompt, held_special_text=False)


@pytest.mark.parametrize(
    ("chosen", "rejected", "kept"),
    [
        (5, 6, (8, 9)),
        (5, 9, (8, 9)),
        (8, 8, (8, 8)),
        (3, 30, (6, 11)),
        (30, 3, (11, 6)),
        (30, 30, (8, 8)),
    ],
)
def test_longer_answer_of_a_pair_is_cut_first_until_both_fit(chosen, rejected, kept):
    examples = [answer(3, chosen), answer(3, rejected, first=200)]
    fits = tokens_needed(examples, "pairs") <= 17
    pieces = CUT["pairs"](examples, seq_len=17, overlong="truncate")
    lengths = tuple(len(piece.ids) for piece in pieces)
    assert lengths == ((3 + chosen, 3 + rejected) if fits else kept)
    assert sum(lengths) <= 17
    assert all(piece.mask.tolist()[:4] == [False] * 3 + [True] for piece in pieces)


@pytest.mark.parametrize(
    ("kind", "examples", "overlong", "reason"),
    [
        ("pairs", [answer(3, 9), answer(3, 9)], "drop", "12 and 12 tokens, and one row"),
        (
            "pairs",
            [answer(9, 9), answer(9, 8, first=200)],
            "truncate",
            "9 tokens come before the first; chosen and rejected share a row of data.seq_len = 17 "
            "tokens, so each keeps 8; data.seq_len: 35 holds it",
        ),
        ("pairs", [answer(3, 9), answer(3, 8)], "truncate", "and begin alike for 8; .* 23 holds"),
        ("rated", [answer(3, 6)], "drop", "9 tokens, and a rated answer may take half a row"),
        (
            "rated",
            [answer(8, 1)],
            "truncate",
            "two answers share .* each keeps 8; data.seq_len: 18",
        ),
    ],
)
def test_example_of_which_nothing_is_left_to_compare_is_dropped(kind, examples, overlong, reason):
    with pytest.raises(OverlongError if overlong == "drop" else TooLongError, match=reason):
        CUT[kind](examples, seq_len=17, overlong=overlong)


def test_rated_answer_leaves_half_a_row_to_its_neighbour():
    (piece,) = CUT["rated"]([answer(3, 30)], seq_len=17, overlong="truncate")
    assert len(piece.ids) == 8
    assert tokens_needed([answer(3, 30)], "rated") == 66


def test_text_is_split_anywhere_and_what_has_a_prompt_is_not():
    pieces = cut_to_length(answer(1, 39), seq_len=17, overlong="split")
    assert [len(piece.ids) for piece in pieces] == [17, 17, 6]
    with pytest.raises(TooLongError, match=r"40 tokens, .* would have no prompt; data.seq_len: 40"):
        cut_to_length(answer(2, 38), seq_len=17, overlong="split")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


SYSTEM = {"role": "system", "content": "Be brief."}


def chat(count, *, longest=9):
    turns = []
    for number in range(count):
        answer = f"Answer {number}." + " so" * (number % longest)
        turns += [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": answer},
        ]
    return [SYSTEM, *turns]


def divided(tokenizer, messages, *, seq_len=150, loss_on="completions", weight=None, **more):
    encoder = SampleEncoder(tokenizer, chat_template=PLAIN_TEMPLATE, loss_on=loss_on)
    sample = conversation(messages, **more)
    sample = sample if weight is None else Weighted(sample, weight)
    return divide_chat(encoder, sample, seq_len=seq_len, last_turn=loss_on == "last_turn")


def shown(tokenizer, document):
    return tokenizer.decode(document.ids.tolist())


def test_every_turn_is_trained_once_behind_the_system_text_and_its_question(tokenizer):
    documents = divided(tokenizer, chat(30))
    texts = [shown(tokenizer, document) for document in documents]
    assert len(texts) > 2
    assert all(len(document.ids) <= 150 for document in documents)
    assert all(text.count("Be brief.") == 1 for text in texts)
    for number in range(30):
        (host,) = [text for text in texts if f"Answer {number}." in text]
        assert f"Question {number}?" in host


def test_parts_are_as_long_as_fits(tokenizer):
    documents = divided(tokenizer, chat(30))
    whole = divided(tokenizer, chat(30), seq_len=10_000)
    assert len(whole) == 1
    lengths = [len(document.ids) for document in documents]
    assert all(a + b > 150 for a, b in pairwise(lengths))


def test_turns_between_two_questions_stay_together(tokenizer):
    messages = [m for n, turn in enumerate(chat(9)) for m in ((turn, turn) if n % 2 else (turn,))]
    parts = divided(tokenizer, messages, seq_len=90)
    assert len(parts) > 2
    assert all(shown(tokenizer, part).count("<|user|>") % 2 == 0 for part in parts)


def test_question_whose_answers_do_not_fit_is_refused_with_the_length_that_does(tokenizer):
    messages = chat(3)
    messages[4]["content"] = "long " * 200
    with pytest.raises(TooLongError, match=r"message 4 and its answers have (\d+) .*seq_len: \1 "):
        divided(tokenizer, messages)


def test_only_the_last_turn_is_trained_where_settings_say_so(tokenizer):
    documents = divided(tokenizer, chat(30), loss_on="last_turn")
    assert len(documents) == 1
    assert "Answer 29." in shown(tokenizer, documents[0])


def test_untrained_turns_make_no_document_and_weights_stay(tokenizer):
    weights = [0.0, *([0.0, 0.0] * 15), *([0.0, 0.5] * 15)]
    messages = chat(30)
    documents = divided(tokenizer, messages, weights=weights, weight=2.0)
    assert all(document.weights.max() == 1.0 for document in documents if document.mask.any())
