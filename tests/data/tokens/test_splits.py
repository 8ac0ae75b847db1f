"""How often an epoch takes each document of weighted sources."""

import numpy as np
import pytest

from tests.support.token_splits import Words, split_of
from workflow.lib.data.tokens.splits import drawn, next_others, times_taken, with_neighbours

DOCUMENTS = 7


def times(weight, *, source=1, seed=0):
    return times_taken(DOCUMENTS, weight=weight, source=source, seed=seed).tolist()


@pytest.mark.parametrize(
    ("weight", "total"), [(2.0, 14), (0.5, 4), (2.3, 16), (0.01, 1), (100.0, 700)]
)
def test_weight_is_the_share_of_a_sources_documents_that_an_epoch_takes(weight, total):
    counts = times(weight)
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1


def test_seed_and_source_decide_which_documents_are_taken():
    assert len({tuple(times(0.5, seed=seed)) for seed in range(5)}) > 1
    assert len({tuple(times(0.5, source=source)) for source in range(5)}) > 1
    assert times(0.5) == times(0.5)


def test_draw_is_the_beginning_of_numpys_permutation_in_half_its_memory():
    order = np.random.Generator(np.random.PCG64([3, 1])).permutation(10_007)
    numbers = drawn(500, total=10_007, seed=[3, 1])
    assert numbers.tolist() == order[:500].tolist()
    assert numbers.dtype == np.uint32


@pytest.mark.parametrize(
    ("rows", "prompts", "answers", "others"),
    [
        ("0123", "wxyz", "abcd", [1, 2, 3, 0]),  # the next, and around the end
        ("0123", "wxyz", "aabb", [2, 2, 0, 0]),  # never an equal one
        ("001122", "uvwxyz", "abcdef", [2, 2, 4, 4, 0, 0]),  # never one of the same row
        ("0011", "wxyz", "abab", [3, 2, 1, 0]),
        ("00112", "vwxyz", "abaab", [4, 2, 4, 4, 0]),
        ("012345", "xxyyzz", "abcdef", [2, 2, 4, 4, 0, 0]),  # never one of the same prompt
        ("01234", "xxyyx", "abbca", [2, 3, 4, 4, 2]),
        ("0123", "wxyz", "aaaa", [-1] * 4),
        ("0123", "xxxx", "abcd", [-1] * 4),
        ("00", "xy", "ab", [-1, -1]),
        ("001", "xyz", "aba", [-1, 2, 1]),
    ],
)
def test_neighbour_is_the_next_answer_of_another_row_and_prompt_that_differs(
    rows, prompts, answers, others
):
    ordinals, *digests = (
        np.array([ord(x) for x in column], dtype=np.uint64) for column in (rows, prompts, answers)
    )
    assert next_others(ordinals, *digests).tolist() == others


def test_neighbours_answer_is_cut_to_the_room_that_is_left_in_a_row(tmp_path):
    words = Words()
    split = split_of(
        tmp_path,
        "train",
        [words.conversation(("a b", "c")), words.conversation(("d", "e f g h i j k"))],
    )
    paired = with_neighbours(split, seq_len=12, work=tmp_path, train=split)
    documents = [(ids.tolist(), mask.astype(int).tolist()) for ids, mask in paired]
    # 0 begins and ends every turn; words are numbered from 1
    assert documents[:2] == [
        ([0, 1, 2, 0, 3, 0], [0, 0, 0, 0, 1, 1]),
        ([0, 1, 2, 0, 5, 6], [0, 0, 0, 0, 1, 1]),
    ]


def test_held_out_answers_of_one_prompt_have_neighbours_of_the_training_rows(tmp_path):
    words = Words()
    train = [words.conversation(("a", "b")), words.conversation(("c", "d"))]
    heldout = [words.conversation(("a", "e")), words.conversation(("a", "f"))]
    splits = [split_of(tmp_path, name, x) for name, x in (("train", train), ("heldout", heldout))]
    paired = with_neighbours(splits[1], seq_len=12, work=tmp_path, train=splits[0])
    answers = [ids[mask].tolist() for ids, mask in paired]
    (d,) = {tuple(answer) for answer in answers[1::2]}
    ids, mask = train[1]
    assert d == tuple(ids[mask])
