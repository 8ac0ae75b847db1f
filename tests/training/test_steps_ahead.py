"""The first micro-batch of a step that is launched before the step before it is known changes
nothing but when things happen."""

import math

import pytest
import torch

from tests.support.captures import Captures
from tests.support.distributed import run_in_group
from tests.support.models import adapted
from tests.support.refusals import refusal
from tests.support.training_loops import CLIP, STEPS, settings, trainer
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.training.loop import Trainer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs

MICRO_BATCHES = 3  # of a step: 6 rows, 2 at a time
GRADIENT = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


class InTurn(Trainer):
    """Begins a step when the one before it is done."""

    def _prefetch(self, *unused):
        return None


def made(training, world, *, kind, graphs=True):
    config, captures = settings(max_grad_norm=CLIP), Captures()
    replays = MicroBatchGraphs(training, world, lambda: captures) if graphs else None
    return trainer(training, config, world, micro_batch_size=2, graphs=replays, kind=kind)


def values(training):
    params = trainable_parameters(training)
    return {name: param.detach().clone() for name, param in params.items()}


def followed(world, base, kind, release_after):
    training, passes, seen = adapted(base, r=4), [0], []
    training.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    trainer = made(training, world, kind=kind)
    for metrics in trainer.steps(first_step=0, num_steps=STEPS):
        if metrics.step == release_after:  # as a held-out loss does
            trainer.release_graphs()
        found = {"loss": metrics.loss, "norm": metrics.grad_norm, "weights": values(training)}
        seen.append(found | {"passes": passes[0]})
    return seen


def both(base, release_after):
    kinds = (Trainer, InTurn)
    return [run_in_group(followed, base, kind, release_after, world_size=1)[0] for kind in kinds]


@pytest.mark.parametrize("release_after", [None, 2])
def test_steps_begun_ahead_are_those_taken_in_turn(base, release_after):
    """Bit by bit, whenever a step's weights are looked at; and whatever is done with the memory of
    graphs between steps."""
    ahead, in_turn = both(base, release_after)
    assert [x["passes"] for x in in_turn] == [n * MICRO_BATCHES for n in range(1, STEPS + 1)]
    assert [x["passes"] for x in ahead] == [
        n * MICRO_BATCHES + (n < STEPS) for n in range(1, STEPS + 1)
    ]
    for one, other in zip(ahead, in_turn, strict=True):
        assert (one["loss"], one["norm"]) == (other["loss"], other["norm"])
        assert all(torch.equal(one["weights"][n], other["weights"][n]) for n in one["weights"])


def diverged(world, base, place, graphs):
    """Train with a layer that gives NaN for the rows of the second step alone; return the
    message."""
    training, rows = adapted(base, r=4), list[torch.Tensor]()
    training.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].input_ids.clone()))

    def poison(module, inputs, output):
        of_second_step = rows[MICRO_BATCHES : 2 * MICRO_BATCHES]
        if not any(torch.equal(rows[-1], ids) for ids in of_second_step):
            return None
        if place == "forward":
            return output * math.nan
        if output.requires_grad:
            output.register_hook(lambda grad: grad.index_fill(-1, torch.tensor(79), math.nan))
        return None

    (layer,) = (m for name, m in training.named_modules() if name.endswith("layers.1"))
    layer.mlp.register_forward_hook(poison)
    steps = made(training, world, kind=Trainer, graphs=graphs).steps(first_step=0, num_steps=STEPS)
    next(steps)
    before = values(training)
    said = refusal(next, steps)
    assert all(torch.equal(before[name], value) for name, value in values(training).items())
    return said


@pytest.mark.parametrize(
    ("place", "origin"), [("forward", r"layers.1.mlp, forward"), ("backward", GRADIENT)]
)
def test_bad_step_is_named_and_left_though_the_next_one_has_begun(base, place, origin):
    """The gradients of the next step's first micro-batch lie there by then."""
    (with_graphs,), (without,) = (
        run_in_group(diverged, base, place, graphs, world_size=1) for graphs in (True, False)
    )
    assert with_graphs.startswith("step 2: loss = ")
    assert origin in with_graphs
    assert with_graphs.partition("norm")[2] == without.partition("norm")[2]


def left(world, base):
    """Leave a run after its first step, and begin it anew at the second."""
    training = adapted(base, r=4)
    trainer = made(training, world, kind=Trainer)
    first = next(trainer.steps(first_step=0, num_steps=STEPS))
    later = list(trainer.steps(first_step=1, num_steps=STEPS))
    return [metrics.grad_norm for metrics in (first, *later)]


def test_what_a_step_that_was_left_has_added_to_gradients_is_gone(base):
    ((norms,), (whole,)) = (
        run_in_group(left, base, world_size=1),
        run_in_group(followed, base, Trainer, None, world_size=1),
    )
    assert norms == pytest.approx([step["norm"] for step in whole], rel=1e-5)
