"""Objectives against dense references in float64, by formulas stated here once more: losses and
gradients of a step for frozen and trained heads, any number of processes and any accumulation.
"""

import numpy as np
import pytest
import torch

from tests.objectives.dense import DENSE, TokenTable, assert_gradients
from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.plans import make_plan
from tests.support.scored_rows import ROWS, scored_rows
from tests.support.stock_training import whole
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.objectives.objective import NEXT_TOKEN
from workflow.lib.settings.config import load_config
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.best_adapter import HeldOut
from workflow.lib.training.loop import Trainer, make_optimizer

HEADS = {"frozen head": (), "trained head": ("lm_head",)}
# One setting of each that has all its terms; forms of losses are tested without a model.
SETTINGS = {
    "sft": {},
    "dpo": {"preferences": {"beta": 0.3, "sft_weight": 0.7, "label_smoothing": 0.1}},
    "orpo": {"preferences": {"beta": 0.4}},
    "kto": {"preferences": {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8}},
    "distill": {"distill": {"temperature": 1.5, "sft_weight": 0.6}},
    **{
        f"grpo by {normalize}": {
            "grpo": {
                "normalize": normalize,
                "clip_low": 0.3,
                "clip_high": 0.4,
                "importance_cap": 1.1,
                "constant": 11,
                "kl": 0.2,
            },
            "rewards": {"functions": {"exact": {"function": "last_number"}}},
        }
        for normalize in ("token", "answer", "constant")
    },
}


def configured(name, head):
    train = {
        "objective": name.partition(" ")[0],
        "epochs": None,
        "max_steps": 1,
        "global_batch_size": len(ROWS),
        "max_grad_norm": None,
    }
    document = {"train": train, "lora": {"r": 4, "modules_to_save": HEADS[head]}}
    return load_config({**document, **SETTINGS[name], "runs": {"a": {}}})[1]["a"]


def store_of(name):
    if name in ("sft", "distill"):
        return scored_rows("texts", top_k=5, weights=True)
    if name.startswith("grpo"):
        return scored_rows("groups")
    return scored_rows("rated" if name == "kto" else "pairs")


def dense(model, name):
    """Return loss and gradients of the family's own forward, with all logits in float64."""
    store, params = store_of(name), trainable_parameters(model.training)
    device = next(iter(params.values())).device
    batch = stored_batch(store, np.arange(len(ROWS))).to(device)
    logits = model.training.family_logits(batch.input_ids, batch.position_ids).cpu().double()
    loss, figures = DENSE[name](TokenTable(store, logits), SETTINGS[name])
    loss.backward()
    return (
        float(loss.detach()),
        {key: float(number) for key, number in figures.items()},
        {key: param.grad for key, param in params.items()},
    )


def one_step(model, config, world, rows, *, store):
    training, gradients = model.training, {}
    params = trainable_parameters(training)
    # no weight changes: further steps begin alike
    train = config.train.model_copy(update={"learning_rate": 1e-30})
    optimizer = make_optimizer(training, train)

    def keep(*_):
        gradients.update(whole({key: param.grad for key, param in params.items()}, world))

    optimizer.register_step_pre_hook(keep)
    trainer = Trainer.over(training, optimizer, store, train, rows, world)
    (metrics,) = trainer.steps(first_step=0, num_steps=1)
    figures = {figure.name: getattr(metrics, figure.name) for figure in training.objective.figures}
    return metrics.loss, figures, gradients


def build(base, config, world, **options):
    plan = make_plan(device=world.device.type, processes=world.size)
    model = built_model(base, config, plan, world, **options)
    for key, param in trainable_parameters(model.training).items():
        if ".lora_B." in key:  # else those of lora_A have no gradient
            torch.nn.init.constant_(param, 0.03)
    return model


def survey(world, base):
    found = {}
    share = len(ROWS) // world.size
    for head in HEADS:
        model = build(base, configured("sft", head), world)
        for name in SETTINGS:
            config, store = configured(name, head), store_of(name)
            of = config.train.objective, config.preferences, config.distill, config.grpo
            model.training.objective = objective_of(*of)
            for rows in {share, 1}:
                step = one_step(model, config, world, rows, store=store)
                found[f"{head}, {name}, {rows}"] = step
            heldout = HeldOut(store, every=1, num_steps=1, at_most=None, seed=0, micro_batch_size=2)
            found[f"held out, {head}, {name}"] = heldout.losses(model.training, world=world).whole
            if world.size == 1:
                found[f"{head}, {name}, dense"] = dense(model, name)
                model.training.zero_grad()
    return found


@pytest.fixture(scope="module")
def alone(base):
    (found,) = run_in_group(survey, base, world_size=1)
    return found


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n} processes")
def found(request, base, alone):
    if request.param == 1:
        return alone
    return run_in_group(survey, base, world_size=request.param)[-1]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("head", HEADS)
def test_step_has_the_loss_the_figures_and_the_gradients_of_a_dense_reference(
    found, alone, head, name
):
    loss, figures, expected = alone[f"{head}, {name}, dense"]
    forms = [key for key in found if key.startswith(f"{head}, {name}, ") and "dense" not in key]
    assert len(forms) == 2
    for form in forms:
        assert found[form][0] == pytest.approx(loss, rel=1e-5)
        assert found[form][1] == pytest.approx(figures, rel=1e-4, abs=1e-5)
        assert_gradients(found[form][2], expected)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("head", HEADS)
def test_held_out_loss_is_that_of_one_step_over_all_documents(found, alone, head, name):
    loss, figures, _ = alone[f"{head}, {name}, dense"]
    if name.startswith("grpo"):  # whose held-out documents are texts
        loss = figures["entropy"]
    assert found[f"held out, {head}, {name}"] == pytest.approx(loss, rel=1e-5)


def losses_with_dropout(world, base, name):
    losses = []
    for dropout in (0.0, 0.4):
        config = configured(name, "frozen head")
        lora = config.lora.model_copy(update={"dropout": dropout})
        config = config.model_copy(update={"lora": lora})
        losses.append(one_step(build(base, config, world), config, world, 1, store=store_of(name)))
    return [loss for loss, *_ in losses]


@pytest.mark.parametrize(("name", "drops"), [("sft", True), ("dpo", False), ("kto", False)])
def test_preferences_train_without_dropout(base, name, drops):
    (losses,) = run_in_group(losses_with_dropout, base, name, world_size=1)
    assert (losses[0] != losses[1]) is drops


def test_weights_that_are_all_equal_change_nothing():
    """A gradient three times as large is divided by a sum of weights three times as large."""
    plain = scored_rows("texts")
    tripled = scored_rows("texts")
    tripled.optional["weights"] = 3.0 * tripled.loss_mask
    rows = np.arange(2)
    (divisor,), (alone,) = (NEXT_TOKEN.step_sizes(store, rows) for store in (tripled, plain))
    assert divisor == 3 * alone
    weights = stored_batch(tripled, rows).weights
    assert weights.tolist() == [3.0] * int(alone)
