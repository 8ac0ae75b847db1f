"""The start of the training as the reference of preferences."""

import numpy as np
import pytest
import torch

from tests.objectives.test_objective import configured
from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.models import quantized, tiny_llama
from tests.support.plans import make_plan
from tests.support.scored_rows import PROMPTED, prompted_rows
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.start_reference import with_references

ROWS = len(PROMPTED)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A base of widths that float8 multiplies."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    return quantized(tiny_llama(folder / "o", num_key_value_heads=2, **sizes), folder / "nf4")


def steps_of(world, base, name, matmuls, heads=()):
    """Take three steps of a run on its start; return its metrics, and log p of the first row by the
    start before and after them."""
    config = configured(name, "frozen head")
    train = {"matmul_passes": "both", "global_batch_size": ROWS, "learning_rate": 0.01}
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "lora": config.lora.model_copy(update={"modules_to_save": heads}),
        }
    )
    plan = make_plan(num_steps=3, processes=world.size)
    model = built_model(base, config, plan, world, matmul_dtype=matmuls).training
    store = prompted_rows("rated" if name == "kto" else "pairs")
    rows = ROWS // world.size
    trainer = Trainer.over(
        model, make_optimizer(model, config.train), store, config.train, rows, world
    )
    batch = stored_batch(store, torch.arange(1).numpy())
    (before,) = model.reference.log_probs(model, [batch])
    metrics = list(trainer.steps(first_step=0, num_steps=3))
    weights = {n: p.detach().clone() for n, p in trainable_parameters(model).items()}
    (after,) = model.reference.log_probs(model, [batch])
    kept = all(torch.equal(weights[n], p) for n, p in trainable_parameters(model).items())
    return metrics, torch.equal(before, after), kept


@pytest.mark.parametrize("heads", [(), ("lm_head",)], ids=["adapters", "trained head"])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("matmuls", ["compute_dtype", "float8"])
def test_rewards_are_0_before_the_first_update(wide, processes, matmuls, heads):
    runs = run_in_group(steps_of, wide, "dpo", matmuls, heads, world_size=processes)
    for (first, *later), same, kept in runs:
        assert (first.reward_chosen, first.reward_rejected) == (0.0, 0.0)
        assert all(step.reward_margin != 0.0 for step in later)
        assert (same, kept) == (True, True)


def test_reference_point_of_kto_is_0_before_the_first_update(wide):
    (((first, *later), *_),) = run_in_group(steps_of, wide, "kto", "float8", world_size=1)
    assert first.kl == 0.0
    assert any(step.kl != 0.0 for step in later)


def test_scores_of_another_model_stay_beside_the_start():
    """KL of grpo may be to another model."""
    batch = stored_batch(prompted_rows("groups"), np.arange(2))
    start = torch.zeros_like(batch.targets, dtype=torch.float32)
    (found,) = with_references([batch], [start])
    assert found.reference is start
    assert found.scored is batch.reference
    assert batch.reference.abs().min() > 0
