"""The factor on the loss in float16: it changes nothing but what float16 can hold, and no step is
lost."""

import math
from typing import Any

import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.gathering import all_full
from tests.support.models import random_store
from tests.support.plans import make_plan
from tests.support.training_loops import STEPS, settings
from workflow.lib.distributed.world import process_group
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.loss.loss_scale import INITIAL, SMALLEST, STEPS_UNTIL_DOUBLED, LossScale
from workflow.lib.training.checkpoint import CheckpointWriter, resume_
from workflow.lib.training.loop import Trainer, make_optimizer

IDENTITY = "0123456789ab-cdef01234567"
FAR_TOO_LARGE = 2.0**130  # matmuls of fp32 gradients overflow until it has been halved some times


def trained(base, world, *, factor, dtype, folder=None):
    """Train with a loss scale that starts at `factor`, or with what the type brings along; save and
    resume in `folder`."""
    config = settings(dropout=0.2, max_grad_norm=0.5)
    build = {"dtype": dtype}
    training = built_model(base, config, make_plan(), world, **build).training
    if factor is not None:
        training.loss_scale = LossScale()
        training.loss_scale.values[0] = factor
    optimizer = make_optimizer(training, config.train)
    params = trainable_parameters(training)
    gradients: dict[str, torch.Tensor] = {}

    def keep_first(*_):
        if not gradients:
            gradients.update(all_full({name: p.grad for name, p in params.items()}))

    optimizer.register_step_pre_hook(keep_first)
    metrics = list(
        Trainer.over(
            training,
            optimizer,
            random_store(rows=13, seq_len=31),
            config.train,
            micro_batch_size=2,
            world=world,
        ).steps(first_step=0, num_steps=STEPS)
    )
    outcome: dict[str, Any] = {
        "losses": [m.loss for m in metrics],
        "repeats": [m.repeats for m in metrics],
        "gradients": gradients,
        "weights": all_full(params),
    }
    if folder is not None:
        writer = CheckpointWriter(folder, keep=1, identity=IDENTITY, world=world)
        writer.save(training, optimizer, step=STEPS)
        writer.wait()
        assert training.loss_scale is not None
        outcome["saved"] = training.loss_scale.values.clone()
        training.loss_scale.values.zero_()
        resume_(folder, training, optimizer, identity=IDENTITY, world=world)
        outcome["resumed"] = training.loss_scale.values
    return outcome


def survey(base, folder):
    fp32 = torch.float32
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        return {
            "plain": trained(base, world, factor=None, dtype=fp32),
            "scaled": trained(base, world, factor=INITIAL, dtype=fp32, folder=folder),
            "overflowing": trained(base, world, factor=FAR_TOO_LARGE, dtype=fp32),
            "float16": trained(base, world, factor=None, dtype=torch.float16),
        }


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_distributed(survey, base, folder, world_size=2)[0]


@pytest.mark.parametrize("case", ["scaled", "overflowing"])
def test_loss_scale_changes_no_loss_no_gradient_and_no_weight(runs, case):
    """It is a power of two, and a repeated step drops out what it dropped out before."""
    assert runs[case]["losses"] == runs["plain"]["losses"]
    for key in ("gradients", "weights"):
        torch.testing.assert_close(runs[case][key], runs["plain"][key], rtol=0, atol=0)


def test_steps_that_overflow_are_made_once_more_and_counted(runs):
    assert runs["plain"]["repeats"] == [None] * STEPS
    assert runs["scaled"]["repeats"] == [0] * STEPS
    first, *later = runs["overflowing"]["repeats"]
    assert first > 0
    assert later[-1] - first < 5, "the factor is kept from step to step"


def test_float16_trains_with_a_scaled_loss_close_to_float32(runs):
    """11 bits of mantissa, through two layers."""
    half, exact = runs["float16"], runs["plain"]
    assert half["repeats"] != [None] * STEPS
    torch.testing.assert_close(half["losses"], exact["losses"], rtol=2e-3, atol=0)
    for name, gradient in exact["gradients"].items():
        atol = 2e-2 * float(gradient.abs().max())
        torch.testing.assert_close(half["gradients"][name], gradient, rtol=0, atol=atol)


def test_checkpoint_holds_the_loss_scale(runs):
    assert runs["scaled"]["saved"].tolist() == [INITIAL, STEPS, 0]
    assert torch.equal(runs["scaled"]["resumed"], runs["scaled"]["saved"])


def test_factor_doubles_after_many_steps_without_overflow():
    scale = LossScale()
    for _ in range(STEPS_UNTIL_DOUBLED - 1):
        assert not scale.must_repeat(1.0)
    assert scale.factor == INITIAL
    scale.must_repeat(1.0)
    assert scale.factor == 2 * INITIAL


def test_gradients_that_overflow_without_a_factor_are_not_tried_for_ever():
    scale = LossScale()
    tries = 0
    while scale.must_repeat(math.inf):
        tries += 1
    assert scale.factor == SMALLEST
    assert tries == math.log2(INITIAL)
