"""Objectives' micro-batches in fixed layouts, captured and replayed; on a CPU a capture is the
function itself."""

import pytest

from tests.objectives.dense import assert_gradients
from tests.objectives.test_objective import build, configured, one_step, store_of
from tests.support.captures import ALONE, Captures
from tests.support.distributed import run_in_group
from tests.support.models import adapted
from tests.support.rounding import assert_rounded
from tests.support.scored_rows import PROMPTED, prompted_rows
from tests.support.training_loops import restart_, settings, values_of
from workflow.benchmark.random_pairs import pair_rows, random_pairs
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs
from workflow.lib.training.start_reference import StartReference
from workflow.lib.training.startup_checks import check_shared_prompts

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


# Examples, and the tokens that are left of the first row.
OBJECTIVES = {"dpo": ("pairs", 38), "kto": ("rated", 38), "grpo by answer": ("groups", 29)}


def survey(world, base):
    found = {}
    for name, (examples, _) in OBJECTIVES.items():
        config, store = configured(name, "frozen head"), prompted_rows(examples)
        train = config.train.model_copy(update={"global_batch_size": len(PROMPTED)})
        config = config.model_copy(update={"train": train})
        model = build(base, config, world)
        of = config.train.objective, config.preferences, config.distill, config.grpo
        model.training.objective = objective_of(*of)
        for shares in (False, True):
            model.training.shares_prompts = shares
            checks = check_shared_prompts(model.training.eval(), store, world)
            found[name, shares, "checks"] = [check.detail for check in checks]
            for rows in {1, len(PROMPTED) // world.size}:
                step = one_step(model, config, world, rows, store=store)
                found.setdefault((name, shares), []).append(step)
    return found


def test_rows_with_shared_prompts_have_few_lengths(base):
    """Each is a shape with CUDA graphs of its own: at most 16, in blocks of 64 tokens."""
    training, config = adapted(base, r=4), settings()
    training.shares_prompts = True
    store = pair_rows(random_pairs(300, seq_len=2048, vocab_size=97), seq_len=2048)
    optimizer = make_optimizer(training, config.train)
    batches = Trainer.over(training, optimizer, store, config.train, 1, ALONE).batches
    lengths = {group.row_tokens for step in range(40) for group in batches.rows(step).groups}
    assert len(lengths) > 4
    assert {length % 128 for length in lengths} == {0}


def of_several_lengths(world, base):
    """Return the losses of some steps without graphs and with them, the rows' lengths, and how many
    micro-batches were replayed."""
    config, found, captures = configured("orpo", "frozen head"), [], Captures()
    store = pair_rows(random_pairs(24, seq_len=1024, vocab_size=97), seq_len=1024)
    train = config.train.model_copy(update={"global_batch_size": store.num_rows})
    training = build(base, config, world).training
    training.shares_prompts, initial = True, values_of(training)
    for graphs in (None, MicroBatchGraphs(training, world, lambda: captures)):
        restart_(training, initial)
        optimizer = make_optimizer(training, train)
        trainer = Trainer.over(training, optimizer, store, train, 1, world, graphs)
        found.append([step.loss for step in trainer.steps(first_step=0, num_steps=3)])
    lengths = [group.row_tokens for group in trainer.batches.rows(0).groups]
    return *found, lengths, captures.replays


def test_rows_of_several_lengths_are_replayed(base):
    """As those of pairs are, of which the last row of a step may be short."""
    plain, replayed, lengths, replays = run_in_group(of_several_lengths, base, world_size=1)[0]
    assert min(lengths) <= 512 < max(lengths)
    assert replayed == pytest.approx(plain, rel=1e-4)
    assert replays > 0


# With two processes the embedding's rows are exchanged, equally many.
@pytest.mark.parametrize("processes", [1, 2])
def test_step_with_shared_prompts_is_that_of_whole_documents(base, processes):
    found = run_in_group(survey, base, world_size=processes)[-1]
    for name in OBJECTIVES:
        assert found[name, False, "checks"] == []
        (detail,) = found[name, True, "checks"]
        assert detail.endswith(f"{OBJECTIVES[name][1]} of 53 tokens are left")
    for name in OBJECTIVES:
        (loss, figures, gradients), *_ = found[name, False]
        for step in found[name, True]:
            assert step[0] == pytest.approx(loss, rel=1e-5)
            assert step[1] == pytest.approx(figures, rel=1e-4, abs=1e-5)
            assert_gradients(step[2], gradients)
