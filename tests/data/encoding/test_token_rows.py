"""Rows of ready token ids."""

import pytest

from tests.support.rows import sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.token_rows import TokenRow


@pytest.mark.parametrize(
    "targets",
    [{"labels": [-100, 2, 3]}, {"loss_mask": [0, 1, 1]}, {"loss_mask": [False, True, True]}],
)
def test_labels_and_masks_mean_the_same(targets):
    row = TokenRow([1, 2, 3], [False, True, True])
    assert sample({"input_ids": [1, 2, 3], **targets}, "tokens") == row


def test_padding_of_ready_tokens_is_left_out():
    value = {
        "input_ids": [0, 1, 2, 0],
        "labels": [-100, 1, 2, -100],
        "attention_mask": [0, 1, 1, 0],
    }
    assert sample(value, "tokens") == TokenRow([1, 2], [True, True])


def test_tokens_without_targets_say_nothing_of_training():
    assert sample({"input_ids": [1, 2]}, "tokens") == TokenRow([1, 2], None)


def test_documents_that_were_packed_into_a_row_are_refused():
    value = {"input_ids": [7, 1, 2, 3], "labels": [7, 1, 2, 3], "position_ids": [0, 1, 0, 1]}
    with pytest.raises(RowError, match=r"position_ids begin anew at place 2; .*position_ids\]"):
        sample(value, "tokens")
    padded = {"attention_mask": [0, 1, 1, 1], "position_ids": [1, 0, 1, 2]}
    assert sample({**value, **padded}, "tokens") == TokenRow([1, 2, 3], [True] * 3)
