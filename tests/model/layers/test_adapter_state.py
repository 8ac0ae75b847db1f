"""What is made once of adapters that do not change; nothing of it outlives their change."""

import pytest
import torch

from tests.support.models import adapted
from workflow.lib.model.layers import lora_linear
from workflow.lib.model.layers.adapter_dropout import AdapterState
from workflow.lib.model.lora import trainable_parameters


@pytest.fixture
def norms_made(monkeypatch):
    made: list[object] = []
    direction_norms = lora_linear.direction_norms

    def counted(layer, *, dtype):
        made.append(layer)
        return direction_norms(layer, dtype=dtype)

    monkeypatch.setattr(lora_linear, "direction_norms", counted)
    return made


def test_row_norms_are_made_once_while_adapters_are_unchanged(tiny_base, norms_made):
    training = adapted(tiny_base, r=3, use_dora=True)
    ids, places = torch.arange(13)[None], torch.arange(13)

    def logits():
        return training.logits(ids, places[None], places).detach()

    with training.adapters.unchanged():
        first = logits()
        assert torch.equal(logits(), first)
        assert len(norms_made) == len(set(norms_made)) == 21
    with torch.no_grad():
        for name, param in trainable_parameters(training).items():
            if ".lora_B." in name:
                param.add_(0.1)
    expected = logits()
    with training.adapters.unchanged():
        assert torch.equal(logits(), expected)
    assert not torch.allclose(first, expected)
    assert len(norms_made) == 3 * 21


def test_gathered_adapters_leave_no_casts_and_nothing_is_kept_between_steps():
    state = AdapterState()
    assert state.casts() is None
    with state.unchanged():
        assert state.casts() == {}
    state.sharded = True
    with state.unchanged():
        assert state.casts() is None
        state.norms("linear", lambda: torch.zeros(1))
        assert state.norms("linear", lambda: torch.ones(1)) == 0
    assert state.norms("linear", lambda: torch.ones(1)) == 1


def test_failed_step_leaves_nothing_either():
    state = AdapterState()

    def fail():
        with state.unchanged():
            state.norms("linear", lambda: torch.zeros(1))
            raise ValueError("a step that fails")

    with pytest.raises(ValueError, match="a step that fails"):
        fail()
    assert state.norms("linear", lambda: torch.ones(1)) == 1


def test_documents_that_are_computed_as_rows_have_keys_of_their_own():
    """Of two rows of 5 tokens; the keys do not depend on which rows are computed together."""
    state = AdapterState()
    state.row_keys = torch.tensor([100, 900])
    with state.rows_as(torch.tensor([0, 3, 5, 9]), tokens=10):
        assert state.row_keys.tolist() == [100, 103, 900, 904]
    assert state.row_keys.tolist() == [100, 900]
    state.row_keys = state.row_keys[1:]
    with state.rows_as(torch.tensor([4]), tokens=5):
        assert state.row_keys.tolist() == [904]
