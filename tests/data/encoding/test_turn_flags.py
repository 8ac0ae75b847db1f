"""Keys that say whether a turn is trained, and its weight, are obeyed or refused with the cure."""

import math
from typing import Any

import pytest

from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.settings.data import DataColumns

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def trained(first, **columns):
    talk = [QUESTION, {**ANSWER, **first}, QUESTION, ANSWER]
    sample: Any = to_sample({"messages": talk, **columns}, format="messages", columns=DataColumns())
    assert sample.messages[3] == ANSWER
    return list(sample.trained)


@pytest.mark.parametrize(
    "keys",
    [
        {"train": False},
        {"loss": 0},
        {"training": False},
        {"trainable": 0.0},
        {"weight": 0},
        {"loss_weight": 0.0},
        {"masked": True},
        {"train": True, "weight": 0},
        {"train": {"loss": False}},
        {"metadata": {"turn": {"train": False}}},
        {"notes": [{"by": "x"}, {"train": False}]},
        {"loss": {"weight": 0, "why": "bad"}},
    ],
)
def test_turn_that_is_marked_is_not_trained(keys):
    assert trained(keys) == [False, False, False, True]


@pytest.mark.parametrize(
    "keys",
    [{"train": True}, {"loss": 1}, {"weight": 1.0}, {"train": None}, {"masked": False},
     {"metadata": {"train": True}}, {"trainer": "x"}, {"loss_reason": "text"}],
)  # fmt: skip
def test_turn_that_is_not_marked_is_trained(keys):
    assert trained(keys) == [False, True, False, True]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"train": "no"}, "unknown mask: message 2 has train = 'no', known are true and false"),
        ({"loss": []}, "unknown mask: message 2 has loss = []"),
        ({"weight": -1}, "unknown weight: message 2 has weight = -1, known are 0 and numbers from"),
        ({"loss_weight": math.nan}, "unknown weight: message 2 has loss_weight = nan"),
        ({"weight": math.inf}, "unknown weight: message 2 has weight = inf"),
        ({"weight": 1e-40}, "unknown weight: message 2 has weight = 1e-40"),
        ({"weight": 10**400}, "unknown weight: message 2 has weight = 1000"),
        ({"weight": "0.5"}, "unknown weight: message 2 has weight = '0.5'"),
        ({"train": 0.5}, "unknown weight: message 2 has train = 0.5, known are 0 and 1"),
        ({"mask": 1}, "unclear mask: message 2 has mask = 1, which means trained for some"),
        ({"train_on_turn": False}, "unknown mask: message 2 has train_on_turn = False"),
        ({"ignore": True}, "unknown mask: message 2 has ignore = True"),
        ({"lossScale": 0.0}, "unknown mask: message 2 has lossScale = 0.0"),
        ({"train_detail": [{"train": False}]}, "unknown mask: message 2 has train_detail = "),
        ({"metadata": {"weight": 0.3}}, "unknown weight: message 2 has weight = 0.3"),
    ],
)
def test_mask_that_cannot_be_read_is_refused_with_the_cure(keys, reason):
    with pytest.raises(RowError) as caught:
        trained(keys)
    assert str(caught.value).startswith(reason)
    assert "data.leave_out: [" in str(caught.value)


def test_question_that_is_marked_to_be_trained_is_refused():
    talk = [{**QUESTION, "train": True}, ANSWER]
    with pytest.raises(RowError, match="not an assistant's: message 1 is marked to be trained"):
        to_sample({"messages": talk}, format="messages", columns=DataColumns())


def test_question_of_weight_one_is_a_question():
    talk = [{**QUESTION, "weight": 1, "train": False}, ANSWER]
    sample: Any = to_sample({"messages": talk}, format="messages", columns=DataColumns())
    assert sample.trained == [False, True]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"train": False}, "not trained: column 'train' is False"),
        ({"weight": 0}, "not trained: column 'weight' is 0"),
        ({"metadata": {"train": False}}, "not trained: column 'train' is False"),
        ({"label": False}, "not trained: column 'label' is False"),
        ({"weight": -0.5}, "unknown weight: the row has weight = -0.5"),
        ({"weight": "high"}, "unknown weight: the row has weight = 'high'"),
        ({"mask": "User"}, "unclear mask: the row has mask = 'User'"),
        ({"loss_mask": [0, 1, 0, 1]}, "unknown mask: the row has loss_mask = [0, 1, 0, 1]"),
        ({"weights": [0, 1]}, "unknown mask: the row has weights = [0, 1]"),
        ({"sample_weight": 0.5}, "unknown mask: the row has sample_weight = 0.5"),
        ({"assistant_masks": [0, 1]}, "unknown mask: the row has assistant_masks = [0, 1]"),
        ({"train": "no"}, "unknown mask: the row has train = 'no'"),
    ],
)
def test_flag_of_a_row_is_obeyed_or_refused(columns, reason):
    with pytest.raises(RowError) as caught:
        trained({}, **columns)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    "columns",
    [{"label": True}, {"label": 0}, {"weight": 1}, {"loss": None}, {"weight_kg": 70.5},
     {"attention_mask": [1, 1]}, {"train_steps": 7}],
)  # fmt: skip
def test_row_that_no_flag_forbids_is_trained(columns):
    assert trained({}, **columns) == [False, True, False, True]


@pytest.mark.parametrize(
    ("turn", "row", "weights", "of_row"),
    [
        ({"weight": 0.5}, {}, [0, 0.5, 0, 1], 1),
        ({"loss_weight": 2, "train": True}, {}, [0, 2, 0, 1], 1),
        ({"loss": {"weight": 0.25}}, {}, [0, 0.25, 0, 1], 1),
        ({"weight": 3, "train": False}, {}, None, 1),
        ({"weight": 0.5}, {"weight": 4}, [0, 0.5, 0, 1], 4),
        ({}, {"weight": 2, "loss_weight": 0.25}, None, 0.5),
        ({}, {"importance": 0.5}, None, 0.5),
    ],
)
def test_weights_of_turns_and_rows_are_read(turn, row, weights, of_row):
    value = {"messages": [QUESTION, {**ANSWER, **turn}, QUESTION, ANSWER], **row}
    columns = DataColumns(weight="importance" if "importance" in row else "weight")
    sample: Any = to_sample(value, format="messages", columns=columns)
    if of_row != 1:
        assert sample.weight == of_row
        sample = sample.sample
    assert sample.weights == weights
