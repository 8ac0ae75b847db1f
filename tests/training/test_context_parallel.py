"""Runs whose rows are shared by several processes: losses, gradients, masks and resumed steps are
those of one process with whole rows."""

import numpy as np
import pytest
import torch.distributed as dist

from tests.objectives.dense import DENSE, TokenTable
from tests.objectives.test_objective import SETTINGS, build, configured, one_step, store_of
from tests.support.built_models import built_model
from tests.support.checkpointing import IDENTITY, SAVED, Run
from tests.support.distributed import run_in_group
from tests.support.family_runs import LENGTHS, LOSS, family_store, make_bases, randomize_
from tests.support.gathering import all_full
from tests.support.models import base_fixture
from tests.support.plans import make_plan
from tests.support.rounding import assert_rounded
from tests.support.scored_rows import ROWS
from tests.support.training_loops import STEPS, settings, trainer
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.training.batches import cut_rows, stored_batch
from workflow.lib.training.best_adapter import HeldOut
from workflow.lib.training.checkpoint import CheckpointWriter, TrainingClock
from workflow.lib.training.startup_checks import startup_checks

# Nine heads over 2 processes: 5 and 4. Rows of 31 tokens get 1, 2 and 1 more over 2, 3 and 4.
nine_heads = base_fixture(
    num_attention_heads=9, num_key_value_heads=3, hidden_size=144, num_hidden_layers=2
)
SHARED = {"2 processes": (2, 2), "3": (3, 3), "4": (4, 4), "2 pairs": (4, 2)}
"""Processes, and how many of them share a row."""
every_division = pytest.mark.parametrize("division", SHARED)
VARIANTS = {
    "1 row": ({}, 1),
    "3 rows, dropout": ({"dropout": 0.3}, 3),
    "fused, dropout, tiled, clipped": (
        {"dropout": 0.3, "fused_layers": True, "max_grad_norm": 0.05}, 1,
    ),
}  # fmt: skip


def in_division(function, *args, division):
    size, shared = SHARED[division]
    return run_in_group(function, *args, world_size=size, context_parallel=shared)


def train_variants(world, base):
    found = {}
    for name, (changes, rows) in VARIANTS.items():
        config = settings(**changes)
        plan = make_plan(tile_tokens=5 * ("tiled" in name), processes=world.size)
        training = built_model(base, config, plan, world, attention="flex").training
        made = trainer(training, config, world, micro_batch_size=rows)
        gradients = first_gradients(made.optimizer, trainable_parameters(training))
        metrics = list(made.steps(first_step=0, num_steps=STEPS))
        found[name] = {
            "losses": [step.loss for step in metrics],
            "norms": [step.grad_norm for step in metrics],
            "gradients": {key: x for key, x in gradients.items() if x.any()},
        }
    return found


def first_gradients(optimizer, params):
    """Return a dictionary that the first update fills with its gradients."""
    gradients = {}

    def keep(*_):
        if not gradients:
            gradients.update(all_full({name: p.grad for name, p in params.items()}))

    optimizer.register_step_pre_hook(keep)
    return gradients


@pytest.fixture(scope="module")
def whole_rows(nine_heads):
    (found,) = run_in_group(train_variants, nine_heads, world_size=1)
    return found


@every_division
def test_run_is_the_same_for_any_division_of_rows(nine_heads, whole_rows, division):
    """Masks of dropout, accumulation and clipping included. AdamW divides gradients by their own
    size, so weights show rounding of any size, and losses of later steps do not."""
    for found in in_division(train_variants, nine_heads, division=division):
        for name, expected in whole_rows.items():
            assert found[name]["losses"] == pytest.approx(expected["losses"], rel=LOSS)
            assert found[name]["norms"] == pytest.approx(expected["norms"], rel=1e-4)
            assert_rounded(found[name]["gradients"], expected["gradients"])


# What attention may have: windows, soft caps, sinks, keys and values of other layers and of two
# widths; experts with a balanced router.
FAMILIES = ("mistral", "gemma2", "gpt_oss", "gemma4_text", "deepseek_v3", "glm4_moe", "qwen3_moe")


def family_steps(world, folder):
    """Return by family the start-up checks, losses and gradients of packed and unpacked rows."""
    found = {}
    for family in FAMILIES:
        base = folder / family / "nf4"
        config = RunConfig(
            lora=LoraSettings(r=3),
            train=TrainConfig(router_aux_loss_coef=0.1 if family == "qwen3_moe" else None),
        )
        model = built_model(base, config, make_plan(), world, attention="flex")
        randomize_(model.training)
        checks = startup_checks(model, family_store("packed"), Checkpoint(base), world)
        steps = {rows: family_step(model.training, family_store(rows), world) for rows in LENGTHS}
        found[family] = [check.name for check in checks], steps
    return found


def family_step(training, store, world):
    training.train()
    batch = cut_rows(stored_batch(store, np.arange(4)), world.context)
    if training.router_balance is not None:
        training.router_balance.begin_step_(divisor=1.0, tokens=64, device=world.device)
    loss = training(batch)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    params = trainable_parameters(training)
    gradients = all_full({n: p.grad for n, p in params.items() if p.grad is not None})
    training.zero_grad()
    return float(total), {name: x for name, x in gradients.items() if x.any()}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("families"), FAMILIES)


@pytest.fixture(scope="module")
def alone(families):
    (found,) = run_in_group(family_steps, families, world_size=1)
    return found


@pytest.mark.parametrize("division", ["2 processes", "3"])
def test_every_kind_of_attention_is_that_of_whole_rows(families, alone, division):
    """Of three heads. Packed rows and whole ones of one document."""
    found, *_ = in_division(family_steps, families, division=division)
    for family, (checks, steps) in found.items():
        assert "rows that processes share have the hidden states of whole rows" in checks
        for rows, (loss, gradients) in steps.items():
            whole_loss, whole_gradients = alone[family][1][rows]
            assert loss == pytest.approx(whole_loss, rel=LOSS), family
            assert_rounded(gradients, whole_gradients)


def dense(model, store, name):
    """Return the loss and the figures of a step in float64 from the family's logits, and the
    gradients."""
    batch = stored_batch(store, np.arange(len(ROWS)))
    logits = model.training.family_logits(batch.input_ids, batch.position_ids).double()
    loss, figures = DENSE[name](TokenTable(store, logits), SETTINGS[name])
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in trainable_parameters(model.training).items()}
    model.training.zero_grad()
    return float(loss), {key: float(number) for key, number in figures.items()}, gradients


def objective_steps(world, base, head):
    model = build(base, configured("sft", head), world, attention="flex")
    found = {}
    for name in SETTINGS:
        config, store = configured(name, head), store_of(name)
        sections = config.train.objective, config.preferences, config.distill, config.grpo
        model.training.objective = objective_of(*sections)
        if world.context is None:
            found[name] = dense(model, store, name)
            continue
        step = one_step(model, config, world, 3, store=store)
        heldout = HeldOut(store, every=1, num_steps=1, at_most=None, seed=0, micro_batch_size=2)
        found[name] = *step, heldout.losses(model.training, world=world).whole
    return found


@pytest.mark.parametrize("head", ["frozen head", "trained head"])
def test_objectives_are_those_of_a_dense_reference(base, head):
    """Two documents of an example may be in different slices, as a document's tokens are."""
    (expected,) = run_in_group(objective_steps, base, head, world_size=1)
    for division in ("2 processes", "3", "2 pairs"):
        found = in_division(objective_steps, base, head, division=division)[-1]
        for name, (loss, figures, gradients) in expected.items():
            assert found[name][0] == pytest.approx(loss, rel=LOSS), name
            assert found[name][1] == pytest.approx(figures, rel=1e-4, abs=1e-5), name
            assert_rounded(found[name][2], gradients)
            texts = figures["entropy"] if name.startswith("grpo") else loss
            assert found[name][3] == pytest.approx(texts, rel=LOSS), name


def save(world, base, folder):
    """Train to the end, saving in the midst; return the losses."""
    run = Run(base, world)
    writer = CheckpointWriter(folder, keep=2, identity=IDENTITY, world=world)
    losses = run.losses(first=0)
    first = [next(losses) for _ in range(SAVED)]
    writer.save(run.training, run.optimizer, step=SAVED, clock=TrainingClock())
    writer.wait()
    return [*first, *losses]


def resume(world, base, folder):
    run = Run(base, world)
    return run.train(first=run.resume(folder).step)


@pytest.mark.parametrize("saved_by", ["2 processes", "2 pairs"])
def test_resumed_run_may_divide_rows_otherwise(base, tmp_path, saved_by):
    losses, *_ = in_division(save, base, tmp_path / "run", division=saved_by)
    resumed = [
        *run_in_group(resume, base, tmp_path / "run", world_size=1),
        *in_division(resume, base, tmp_path / "run", division="3"),
    ]
    assert len(losses[SAVED:]) > 1
    for later in resumed:
        assert later == pytest.approx(losses[SAVED:], rel=LOSS)
