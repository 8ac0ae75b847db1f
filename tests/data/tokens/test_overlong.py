"""Examples that do not fit into a row."""

import numpy as np
import pytest

from workflow.lib.data.encoding.sample_encoder import Encoded
from workflow.lib.data.tokens.overlong import (
    CUT,
    OverlongError,
    TooLongError,
    cut_to_length,
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
