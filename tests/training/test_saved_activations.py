"""Training with saved activations in float8 on a trained model: what it costs, and that where they
wait and how many processes there are change nothing."""

from typing import Any

import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.models import quantized
from tests.support.plans import PLANNED, make_plan
from tests.training.test_eight_bit_training import RESOURCES, documentation
from workflow.lib.distributed.world import process_group
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.training.best_adapter import HeldOut
from workflow.lib.training.loop import Trainer, make_optimizer

STEPS = 20
FEW = 2
MOST_LOSS = 0.003  # nats per token, either way: of the held-out loss after training
# Of gradients in the second step; in float8 matmuls weights differ by then, which these amplify.
LEAST_COSINE = {"matmuls too": 0.99}
STASHED = {"offload_activations": True, "offload_window_bytes": 2**16}
KEPT = {"activation_checkpointing": False}
# Name -> what is changed in plan, adapter and training; `LONG` are trained to the end.
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": KEPT,
    "float8": KEPT | {"saved_activations": "float8"},
    "float8 on the host": KEPT | STASHED | {"saved_activations": "float8"},
    "half on the host": KEPT | STASHED | {"saved_activations": "float8", "offload_activations": 1},
    "recomputed": {"activation_checkpointing": True},
    "recomputed, float8": {"saved_activations": "float8"} | STASHED,
    "not fused": KEPT | {"saved_activations": "float8", "fused_layers": False},
    "exact, matmuls": KEPT | {"matmul_dtype": "float8"},
    "matmuls too": KEPT | {"saved_activations": "float8", "matmul_dtype": "float8"},
    "exact, dora and dropout": KEPT | {"use_dora": True, "dropout": 0.1},
    "dora and dropout": KEPT | {"use_dora": True, "dropout": 0.1, "saved_activations": "float8"},
}

LONG = ("exact", "float8")


def trained(base, changes, world, *, steps):
    """Train; return the losses, the gradients of the second step, and the held-out loss."""
    torch.set_num_threads(1)
    plan, lora, train = (
        {key: changes[key] for key in names if key in changes}
        for names in (PLANNED, LoraSettings.model_fields, TrainConfig.model_fields)
    )
    train.pop("activation_checkpointing", None)  # the plan's
    fixed = {"epochs": None, "max_steps": STEPS, "global_batch_size": 2, "learning_rate": 1e-3}
    config = RunConfig(lora=LoraSettings(r=8, **lora), train=TrainConfig(**(fixed | train)))
    model = built_model(
        base, config, make_plan(**plan), world, matmul_dtype=config.train.matmul_dtype
    )
    optimizer, store = make_optimizer(model.training, config.train), documentation()
    params = trainable_parameters(model.training).values()
    gradients: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(torch.cat([full(p.grad).flatten() for p in params]))
    )
    rows = 2 // world.size
    trainer = Trainer(model.training, optimizer, store, config.train, rows, world)
    losses = [metrics.loss for metrics in trainer.steps(first_step=0, num_steps=steps)]
    heldout = HeldOut(store, every=1, num_steps=STEPS, at_most=None, seed=0, micro_batch_size=8)
    after = heldout.losses(model.training, world=world).whole if steps == STEPS else None
    return {"losses": losses, "gradients": gradients[1], "heldout": after}


def full(tensor):
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def train_all(base, steps):
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        return {
            name: trained(base, VARIANTS[name], world, steps=count) for name, count in steps.items()
        }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return quantized(RESOURCES / "base", tmp_path_factory.mktemp("trained") / "nf4")


@pytest.fixture(scope="module")
def single(base):
    steps = {name: STEPS if name in LONG else FEW for name in VARIANTS}
    return run_distributed(train_all, base, steps, world_size=1)[0]


def cosine(one, other):
    return float(torch.cosine_similarity(one["gradients"], other["gradients"], dim=0))


def test_training_costs_little_held_out_loss(single):
    exact, rounded = (single[name] for name in LONG)
    assert exact["losses"][0] == rounded["losses"][0], "forward is not rounded"
    assert exact["losses"][-1] != rounded["losses"][-1]
    assert abs(rounded["heldout"] - exact["heldout"]) <= MOST_LOSS


@pytest.mark.parametrize(
    ("rounded", "exact"),
    [
        ("float8", "exact"),
        ("not fused", "exact"),
        ("matmuls too", "exact, matmuls"),
        ("dora and dropout", "exact, dora and dropout"),
    ],
)
def test_gradients_point_where_exact_ones_do(single, rounded, exact):
    least = LEAST_COSINE.get(rounded, 0.999)
    assert least < cosine(single[rounded], single[exact]) < 0.999999


@pytest.mark.parametrize("where", ["float8 on the host", "half on the host"])
def test_where_activations_wait_changes_no_bit(single, where):
    assert single[where]["losses"] == single["float8"]["losses"][:FEW]
    assert torch.equal(single[where]["gradients"], single["float8"]["gradients"])


def test_recomputed_layers_are_as_exact_as_ever(single):
    rounded, exact = single["recomputed, float8"], single["recomputed"]
    assert torch.equal(rounded["gradients"], exact["gradients"])


def test_two_processes_round_what_one_does(base, single):
    """No scale is of several tokens, so rows beside each other do not matter; sums differ in order,
    which may move a number to the next step of float8."""
    steps = {"float8": FEW, "float8 on the host": FEW}
    alone = single["float8"]["losses"][:FEW]
    for result in run_distributed(train_all, base, steps, world_size=2):
        for name in steps:
            assert result[name]["losses"] == pytest.approx(alone, rel=1e-4)
            assert cosine(result[name], single["float8"]) > 0.9999
