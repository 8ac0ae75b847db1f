"""A run that cannot go well stops at once, and says where it went wrong and what to change."""

import math
import re

import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.models import adapted
from tests.support.plans import make_plan
from tests.support.refusals import refusal
from tests.support.scored_rows import scored_rows
from tests.support.training_loops import BATCH, CLIP, STEPS, loop, settings, trainer
from workflow.lib.kernels.rows.dropout import dropped as dropped_of
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local
from workflow.lib.settings.schedule import step_rows
from workflow.lib.system.errors import UserError
from workflow.lib.training.loop import (
    STANDSTILL_STEPS,
    Standstill,
    Trainer,
    check_step,
    make_optimizer,
)


def runs(world, base, reshard_after_forward):
    """Be a process of all runs of this module over one group: their results by name and setting."""
    return {
        "filled": messages(base, world) if world.size == 1 else None,
        "forward": {each: poisoned(base, each, world) for each in reshard_after_forward},
        "backward": {
            each: poisoned_in_backward(base, each, world) for each in reshard_after_forward
        },
    }


@pytest.fixture(scope="module")
def found(base):
    variants = {1: (True,), 2: (True, False)}
    return {
        processes: run_in_group(runs, base, reshard, world_size=processes)
        for processes, reshard in variants.items()
    }


def messages(base, world):
    found = {}
    for name, fill in (("nan", math.nan), ("zero", 0.0)):
        try:
            next(loop(base, world, fill=fill))
        except UserError as error:
            found[name] = str(error)
    return found


def test_run_that_cannot_go_well_stops_at_its_first_such_step(found):
    (process,) = found[1]
    told = process["filled"]
    assert told["nan"].startswith(
        "step 1: loss = nan, gradient norm = nan: training has diverged (first in "
    )
    assert told["zero"].startswith("step 1: the gradient norm is exactly 0 (loss = ")
    assert "data.loss_on" in told["zero"]


def test_gradient_that_vanishes_after_an_update_blames_the_rate():
    with pytest.raises(
        UserError, match=r"the updates have broken the model\. Lower train\.learning_rate"
    ):
        check_step(5.7, 0.0, step=2)


def test_zero_gradient_is_healthy_where_the_objective_allows_it():
    check_step(0.0, 0.0, step=6, may_stand_still=True)


def test_user_is_told_once_that_gradients_stay_zero(caplog):
    standstill = Standstill()
    for step in range(3 * STANDSTILL_STEPS):
        standstill.note(1.0 if step in (5, 2 * STANDSTILL_STEPS) else 0.0, step=step)
    (told,) = caplog.messages
    assert told.startswith(f"the gradient has been exactly 0 in {STANDSTILL_STEPS} steps, up to ")


def weightless(world, base):
    """Take two steps of rows whose tokens all weigh 0, between others; return losses and norms."""
    store = scored_rows("texts", weights=True)
    order = [step_rows(num_rows=6, global_batch_size=1, seed=0, step=step)[0] for step in range(4)]
    store.weights[order[1:3]] = 0.0
    config = settings(global_batch_size=1, max_steps=4)
    training = adapted(base, r=4)
    optimizer = make_optimizer(training, config.train)
    made = Trainer.over(training, optimizer, store, config.train, 1, world)
    return [(m.loss, m.grad_norm) for m in made.steps(first_step=0, num_steps=4)]


def test_step_whose_tokens_all_weigh_0_goes_on(base):
    (steps,) = run_in_group(weightless, base, world_size=1)
    assert [loss > 0 and norm > 0 for loss, norm in steps] == [True, False, False, True]
    assert steps[1:3] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.inf), (2.0, math.nan)]
)
def test_divergence_says_what_to_change(loss, norm):
    assert refusal(check_step, loss, norm, step=6) == (
        f"step 7: loss = {loss}, gradient norm = {norm}: training has diverged. Lower "
        "train.learning_rate, "
        "raise train.warmup_share, or set train.max_grad_norm; the last checkpoint is kept."
    )


def poisoned(base, reshard_after_forward, world):
    """Be a process of a run whose adapter of one layer has become infinite."""
    config = settings()
    plan = make_plan(reshard_after_forward=reshard_after_forward)
    training = built_model(base, config, plan, world).training
    before = {n: local(p).clone() for n, p in trainable_parameters(training).items()}
    for name, param in trainable_parameters(training).items():
        if ".layers.1.mlp.up_proj.lora_B" in name:
            with torch.no_grad():
                local(param).fill_(math.inf)
                before[name] = local(param).clone()
    loop = trainer(training, config, world, micro_batch_size=1).steps(first_step=0, num_steps=STEPS)
    try:
        next(loop)
    except UserError as error:
        after = {n: local(p) for n, p in trainable_parameters(training).items()}
        assert all(torch.equal(after[n], before[n]) for n in before), "nothing was updated"
        return str(error)
    return "no error"


PROCESSES_AND_RESHARD = pytest.mark.parametrize(
    ("processes", "reshard_after_forward"), [(1, True), (2, True), (2, False)]
)


@PROCESSES_AND_RESHARD
def test_divergence_names_layer_rows_and_process(found, processes, reshard_after_forward):
    for process in found[processes]:
        message = process["forward"][reshard_after_forward]
        assert message.startswith("step 1: loss = nan")
        assert re.search(
            r"first in \S*layers\.1\.mlp\S*, forward, rows \[\d+\] of the tokens, process 0\)",
            message,
        ), message


def mask(module, x):
    """Return what the module's adapter drops of x (1, seq_len, features) in this pass."""
    draw = module.fused_draw()
    assert draw is not None
    return dropped_of(torch.ones_like(x[0]), draw) == 0


def poisoned_in_backward(base, reshard_after_forward, world):
    """Be a process of a run where one feature behind a feed-forward has NaN as its gradient."""

    def poison(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda grad: grad.index_fill(-1, torch.tensor(79), math.nan))

    dropped = []
    config = settings(dropout=0.3, max_grad_norm=CLIP)
    changes = {"reshard_after_forward": reshard_after_forward, "activation_checkpointing": False}
    training = built_model(base, config, make_plan(**changes), world).training
    (layer,) = (m for n, m in training.named_modules() if n.endswith("layers.1"))
    layer.mlp.register_forward_hook(poison)
    layer.self_attn.o_proj.register_forward_pre_hook(
        lambda module, inputs: dropped.append(mask(module, *inputs))
    )
    loop = trainer(training, config, world, micro_batch_size=1).steps(first_step=0, num_steps=STEPS)
    said = refusal(next, loop)
    passes = BATCH // world.size
    return {"message": said, "taken": dropped[:passes], "searched": dropped[passes:]}


@PROCESSES_AND_RESHARD
def test_divergence_in_backward_names_the_layer_where_it_began(
    found, processes, reshard_after_forward
):
    """Not the last layer, which clipping by NaN would spoil. One process alone has row 79 of B."""
    for process in found[processes]:
        result = process["backward"][reshard_after_forward]
        name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
        assert f"training has diverged (first in the gradient of {name})" in result["message"]


def test_search_for_the_origin_drops_what_the_step_dropped(found):
    (process,) = found[1]
    result = process["backward"][True]
    assert len(result["taken"]) == len(result["searched"]) == BATCH
    assert all(map(torch.equal, result["taken"], result["searched"]))
    assert not torch.equal(result["taken"][0], result["taken"][1])
