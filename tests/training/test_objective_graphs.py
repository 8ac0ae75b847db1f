"""Objectives' micro-batches in fixed layouts, captured and replayed; on a CPU a capture is the
function itself."""

import pytest
import torch

from tests.objectives.test_objective import build, configured, store_of
from tests.support.captures import Captures
from tests.support.distributed import run_in_group
from tests.support.training_loops import values_of
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs
from workflow.lib.training.start_reference import StartReference

STEPS, ROWS = 3, 2
KINDS = {
    "sft": "sft",
    "dpo": "dpo",
    "dpo of the start": "dpo",
    "orpo": "orpo",
    "kto": "kto",
    "kto of the start": "kto",
    "distill": "distill",
    "grpo by token": "grpo by token",
    "grpo by answer": "grpo by answer",
    "grpo of the start": "grpo by constant",
}


def run(world, base, kind, head, graphed):
    """Train for some steps of several micro-batches; return what can be compared."""
    config, store, captures = configured(KINDS[kind], head), store_of(KINDS[kind]), Captures()
    training = build(base, config, world).training
    if kind.endswith("of the start"):
        training.reference = StartReference(training)
    graphs = MicroBatchGraphs(training, world, lambda: captures) if graphed else None
    optimizer = make_optimizer(training, config.train)
    trainer = Trainer.over(training, optimizer, store, config.train, ROWS, world, graphs)
    seen = []
    for metrics in trainer.steps(first_step=0, num_steps=STEPS):
        figures = [getattr(metrics, figure.name) for figure in training.objective.figures]
        seen.append((metrics.loss, metrics.grad_norm, figures))
    return seen, values_of(training), captures.replays


def both(world, base, kind, head):
    return [run(world, base, kind, head, graphed) for graphed in (False, True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["frozen head", "trained head"])
def test_replays_of_an_objective_are_bit_equal_to_its_steps_without(base, kind, head):
    """Padded tokens, documents and examples change no bit of loss, figures and weights."""
    ((plain, replayed),) = run_in_group(both, base, kind, head, world_size=1)
    assert replayed[2] > STEPS
    assert all(torch.equal(plain[1][name], x) for name, x in replayed[1].items())
    assert plain[0] == replayed[0]
