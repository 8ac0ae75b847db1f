"""The load-balancing loss of routers by itself: by hand, and where it is not."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.mixtures import tiny_mixture
from tests.support.models import adapted, quantized, random_store
from workflow.lib.model.experts.router_balance import BalanceSettings, RouterBalance, router_balance
from workflow.lib.model.lora import routers_of
from workflow.lib.system.errors import UserError
from workflow.lib.training.batches import stored_batch

CPU = torch.device("cpu")
# Token 0 chooses expert 0 by 3 to 1, token 1 expert 1 likewise; token 2 is padding.
LOGITS = torch.tensor([[3.0, 1.0], [1.0, 3.0], [0.0, 8.0]]).log()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return quantized(tiny_mixture("qwen3_moe", folder / "original"), folder / "nf4")


def balance_of(logits, length):
    balance = RouterBalance(BalanceSettings(1.0, num_experts=2, top_k=1), layers=1)
    balance.begin_step_(divisor=1, tokens=length, device=CPU)
    with balance.counting(torch.tensor([length]), len(logits)):
        balance.count(logits)
    return balance


def test_even_choices_have_a_loss_of_the_choices_of_a_token():
    """2 (0.5 * 0.5 + 0.5 * 0.5) of one choice."""
    assert float(balance_of(LOGITS, 2).value()) == pytest.approx(1.0)


def test_micro_batches_of_a_step_are_added_up_and_the_next_step_begins_anew():
    balance = balance_of(LOGITS, 1)
    with balance.counting(torch.tensor([2]), len(LOGITS)):
        balance.count(LOGITS)
    # f (2/3, 1/3), p ((0.75 + 0.75 + 0.25) / 3, (0.25 + 0.25 + 0.75) / 3)
    assert float(balance.value()) == pytest.approx(2 * (2 / 3 * 1.75 / 3 + 1 / 3 * 1.25 / 3))
    balance.begin_step_(divisor=1, tokens=2, device=CPU)
    with balance.counting(torch.tensor([2]), len(LOGITS)):
        balance.count(LOGITS)
    assert float(balance.value()) == pytest.approx(1.0)


def test_padding_has_no_gradient():
    balance = balance_of(LOGITS[:, [0, 1]], 1)
    gradient = balance.gradient(LOGITS)
    assert not gradient[1:].any()
    # d/dl of 2 p_0 is 2 p_0 p_1
    torch.testing.assert_close(gradient[0], torch.tensor([0.375, -0.375]))


def test_evaluation_does_not_know_the_balance(base):
    """No step has begun, of which it would ask."""
    training = adapted(base, r=4, modules_to_save=["mlp.gate"]).eval()
    batch = stored_batch(random_store(rows=2, seq_len=23), range(2))  # type: ignore[arg-type]
    before = training(batch)
    training.balance_routers_(0.5)
    assert training.router_balance is not None
    assert torch.equal(training(batch), before)


def test_routers_that_are_frozen_are_balanced_if_it_is_asked_for(base):
    training = adapted(base, r=4)
    training.balance_routers_(None)
    assert training.router_balance is None
    training.balance_routers_(0.01)
    assert training.router_balance is not None


def load_balancing_loss_func(logits, experts, top_k, mask):
    """What a family might have: the mean of the logits' squares (arXiv 2202.08906)."""
    return torch.stack(logits).square().mean()


class OtherModel(nn.Module):
    """A model of a family whose function is the one above."""

    num_experts, num_experts_per_tok = 2, 1


def test_family_whose_loss_is_another_one_is_refused():
    other: Any = OtherModel()
    with pytest.raises(UserError, match="load-balancing loss of OtherModel is not supported"):
        router_balance(other, 0.1, {})


def test_layers_whose_router_is_not_known_are_refused(base):
    model: Any = adapted(base, r=4).peft_model.get_base_model()  # type: ignore[operator]
    first = dict([*routers_of(model).items()][:1])
    with pytest.raises(UserError, match="loss of Qwen3MoeForCausalLM is not supported"):
        router_balance(model, 0.1, first)
