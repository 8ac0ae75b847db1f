"""Objectives' micro-batches in fixed layouts, captured and replayed; on a CPU a capture is the
function itself."""

import pytest

from tests.objectives.test_objective import build, configured, store_of
from tests.support.captures import Captures
from tests.support.distributed import run_in_group
from tests.support.rounding import assert_rounded
from tests.support.scored_rows import PROMPTED, prompted_rows
from tests.support.training_loops import restart_, values_of
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs
from workflow.lib.training.start_reference import StartReference

STEPS, ROWS = 5, 2
START, SHARED = "the start as reference", "shared prompts"
KINDS = [
    *("dpo", "orpo", "kto", "distill", "grpo by token", "grpo by answer"),
    *(f"dpo, {START}", f"kto, {START}", f"grpo by constant, {START}"),
    *(f"dpo, {SHARED}", f"kto, {START}, {SHARED}", f"grpo by answer, {SHARED}"),
]


def run(training, world, kind, graphed):
    """Train for some steps of several micro-batches; return what can be compared."""
    name, *extras = kind.split(", ")
    config, store, captures = configured(name, "frozen head"), store_of(name), Captures()
    of = config.train.objective, config.preferences, config.distill, config.grpo
    training.objective, training.shares_prompts = objective_of(*of), SHARED in extras
    training.reference = StartReference(training) if START in extras else None
    if name.startswith("grpo"):  # padding is of a micro-batch's first document
        store.loss_mask[(store.position_ids == 0).cumsum(axis=1) == 1] = False
    if training.shares_prompts:
        store = prompted_rows(store.examples)
        train = config.train.model_copy(update={"global_batch_size": len(PROMPTED)})
        config = config.model_copy(update={"train": train})
    graphs = MicroBatchGraphs(training, world, lambda: captures) if graphed else None
    optimizer = make_optimizer(training, config.train)
    trainer = Trainer.over(training, optimizer, store, config.train, ROWS, world, graphs)
    seen = []
    for metrics in trainer.steps(first_step=0, num_steps=STEPS):
        figures = [getattr(metrics, figure.name) for figure in training.objective.figures]
        seen.append((metrics.loss, metrics.grad_norm, figures))
    return seen, values_of(training), captures.replays


def both(world, base, head):
    training, found = build(base, configured("sft", head), world).training, {}
    initial = values_of(training)
    for kind in KINDS:
        for graphed in (False, True):
            restart_(training, initial)
            found.setdefault(kind, []).append(run(training, world, kind, graphed))
    return found


@pytest.fixture(scope="module", params=["frozen head", "trained head"])
def runs(request, base):
    return run_in_group(both, base, request.param, world_size=1)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_replays_of_an_objective_are_those_of_its_steps_without(runs, kind):
    """Padded tokens, documents, examples and keys change nothing but how matmuls sum."""
    plain, replayed = runs[kind]
    assert replayed[2] > STEPS
    assert_rounded(replayed[1], plain[1], share=1e-3)
    first = int(START in kind)  # then all rewards are what rounding leaves of zero
    for (loss, norm, figures), found in zip(plain[0][first:], replayed[0][first:], strict=True):
        assert found[:2] == pytest.approx((loss, norm), rel=1e-3)
        assert found[2] == pytest.approx(figures, rel=1e-3, abs=1e-4)
