"""Routers trained whole with their family's load-balancing loss: a step against stock Transformers
and PEFT.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
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
    train_in_process,
)

UNBALANCED = {"glm4_moe", "deepseek_v3"}  # families without such a loss
# fp32 on both sides, sums in another order
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


@pytest.fixture(scope="module", params=[*MIXTURES, *MORE_MIXTURES])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its config.json has the coefficient."""
    folder = tmp_path_factory.mktemp(family)
    changes = {} if family in UNBALANCED else {"router_aux_loss_coef": COEFFICIENT}
    return quantized(tiny_mixture(family, folder / "original", **changes), folder / "nf4")


def stock_step(base: Path, family: str, initial: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The loss that Transformers computes of labels, and its gradients."""
    model, params = stock(base, family, initial)
    model.train()
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


def test_step_is_that_of_stock_peft_with_output_router_logits(family: str, base: Path) -> None:
    settings = config(family, train={"max_grad_norm": None})
    (ours,) = run_distributed(
        train_in_process, base, settings, single_documents(), 1, {}, world_size=1
    )
    theirs = stock_step(base, family, ours["initial"])
    total = ours["losses"][0] + COEFFICIENT * (ours["balance"][0] or 0.0)
    assert total == pytest.approx(theirs["loss"], rel=2e-5)
    assert ours["balance"][0] == (theirs["balance"] and pytest.approx(theirs["balance"], rel=1e-4))
    trained = [name for name in ours["initial"] if f".{router(family)}." in name]
    assert trained
    torch.testing.assert_close(ours["gradients"][0], theirs["gradients"], **TOLERANCE)
    assert all(ours["gradients"][0][name].any() for name in trained)
