"""Routers trained whole with their family's load-balancing loss: a step against stock Transformers
and PEFT."""

import pytest
import torch

from tests.support.distributed import run_in_group
from tests.support.mixtures import MIXTURES, MORE_MIXTURES, tiny_mixture
from tests.support.models import quantized
from tests.support.router_runs import (
    COEFFICIENT,
    config,
    first_rows,
    real_tokens,
    router,
    single_documents,
    stock,
    train,
)

UNBALANCED = {"glm4_moe", "deepseek_v3"}  # families without such a loss
# fp32 on both sides, sums in another order
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


FAMILIES = (*MIXTURES, *MORE_MIXTURES)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """By family; each config.json has the coefficient."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        changes = {} if family in UNBALANCED else {"router_aux_loss_coef": COEFFICIENT}
        original = tiny_mixture(family, folder / "original", **changes)
        found[family] = quantized(original, folder / "nf4")
    return found


def train_families(world, bases):
    return {
        family: train(
            base, config(family, train={"max_grad_norm": None}), single_documents(), world
        )
        for family, base in bases.items()
    }


@pytest.fixture(scope="module")
def trained(bases):
    (runs,) = run_in_group(train_families, bases, world_size=1)
    return dict(runs)


def stock_step(base, family, initial):
    model, params = stock(base, family, initial)
    model.train()
    if (
        family not in UNBALANCED
        and "router_logits" not in model.get_base_model()._can_record_outputs
    ):
        pytest.skip("this version of Transformers fails to compute the family's balance")
    store, rows = single_documents(), first_rows()
    ids = torch.from_numpy(store.input_ids[rows].astype("int64"))
    labels = ids.masked_fill(~torch.from_numpy(store.loss_mask[rows]), -100)
    options = {} if family in UNBALANCED else {"output_router_logits": True}
    found = model(
        ids, attention_mask=real_tokens(store, rows), labels=labels, use_cache=False, **options
    )
    found.loss.backward()
    balance = None if family in UNBALANCED else float(found.aux_loss.detach())
    return {
        "loss": float(found.loss.detach()),
        "balance": balance,
        "gradients": {name: param.grad for name, param in params.items()},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_step_is_that_of_stock_peft_with_output_router_logits(family, bases, trained):
    ours = trained[family]
    theirs = stock_step(bases[family], family, ours["initial"])
    total = ours["losses"][0] + COEFFICIENT * (ours["balance"][0] or 0.0)
    assert total == pytest.approx(theirs["loss"], rel=2e-5)
    assert ours["balance"][0] == (theirs["balance"] and pytest.approx(theirs["balance"], rel=1e-4))
    routers = [name for name in ours["initial"] if f".{router(family)}." in name]
    assert routers
    torch.testing.assert_close(ours["gradients"][0], theirs["gradients"], **TOLERANCE)
    assert all(ours["gradients"][0][name].any() for name in routers)
