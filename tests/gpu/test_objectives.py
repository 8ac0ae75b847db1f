"""Objectives on GPUs: a step in bf16 by FlashAttention on NF4 weights, against a dense reference in
fp32 with logits in float64."""

import pytest
import torch

from tests.objectives.test_objective import build, configured, dense, one_step, store_of
from tests.support.distributed import run_in_group
from tests.support.scored_rows import PROMPTED, ROWS, prompted_rows

pytestmark = pytest.mark.gpu

OBJECTIVES = ("dpo", "kto", "distill")
# Of what stock code in bf16 is off: ours rounds elsewhere, but no more.
MORE_THAN_STOCK = 2.0
HEAD = "frozen head"


def with_stored_scores(config):
    """Return a run's settings with the store's reference, in place of the module's own start."""
    preferences = config.preferences.model_copy(update={"reference": "original"})
    return config.model_copy(update={"preferences": preferences})


def steps(world, base):
    """Return loss, figures and gradients of a step of each objective: ours, and of one process also
    those of dense references in fp32 and bf16."""
    found = {}
    for name in OBJECTIVES:
        config, bf16 = with_stored_scores(configured(name, HEAD)), torch.bfloat16
        model = build(base, config, world, dtype=bf16, attention="varlen")
        rows = len(ROWS) // world.size
        found[name] = one_step(model, config, world, rows, store=store_of(name))
        for dtype in (torch.float32, bf16) if world.size == 1 else ():
            model = build(base, config, world, dtype=dtype)
            found[f"{name}, {dtype}"] = dense(model, name)
    return found


def off(step, exact):
    """Return how far loss and gradients are from exact ones, as shares of these."""
    (loss, _, gradients), (true_loss, _, true_gradients) = step, exact
    assert gradients.keys() == true_gradients.keys()
    ours, true = (
        torch.cat([g[name].cpu().float().flatten() for name in true_gradients])
        for g in (gradients, true_gradients)
    )
    return abs(loss - true_loss) / abs(true_loss), float((ours - true).norm() / true.norm())


def check(step, found, name):
    exact, stock = (found[f"{name}, {dtype}"] for dtype in (torch.float32, torch.bfloat16))
    (loss, gradients), (stock_loss, stock_gradients) = off(step, exact), off(stock, exact)
    print(f"{name}: loss off by {loss:.2g} ({stock_loss:.2g}), gradients {gradients:.2g} "
          f"({stock_gradients:.2g})")  # fmt: skip
    assert 0 < gradients < MORE_THAN_STOCK * stock_gradients
    assert loss < MORE_THAN_STOCK * max(stock_loss, torch.finfo(torch.bfloat16).eps)


@pytest.fixture(scope="module")
def alone(base, one_gpu):
    (found,) = run_in_group(steps, base, world_size=one_gpu, device="cuda")
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_in_bf16_is_as_near_to_fp32_as_stock_code(alone, name):
    check(alone[name], alone, name)


def test_objectives_over_two_gpus_are_those_of_one(base, alone, two_gpus):
    found = run_in_group(steps, base, world_size=two_gpus, device="cuda")[0]
    for name in OBJECTIVES:
        check(found[name], alone, name)


def prompted_steps(world, base, objective, examples):
    """Return a step in bf16 with shared prompts and with prompts apart, and in fp32."""
    found = {}
    config, store = configured(objective, HEAD), prompted_rows(examples)
    train = config.train.model_copy(update={"global_batch_size": len(PROMPTED)})
    # rounding may move a token over the edge of a clip, where its gradient is another
    unclipped = config.grpo.model_copy(update={"clip_low": 0.999, "clip_high": 100.0})
    config = config.model_copy(update={"train": train, "grpo": unclipped})
    for name, dtype, by in (
        ("shared", torch.bfloat16, "varlen"),
        ("apart", torch.bfloat16, "varlen"),
        ("exact", torch.float32, "sdpa"),
    ):
        model = build(base, config, world, dtype=dtype, attention=by)
        model.training.shares_prompts = name == "shared"
        found[name] = one_step(model, config, world, len(PROMPTED), store=store)
    return found


@pytest.mark.parametrize(
    ("objective", "examples"), [("dpo", "pairs"), ("grpo by answer", "groups")]
)
def test_shared_prompts_by_flash_attention_are_as_near_to_fp32_as_prompts_apart(
    base, one_gpu, objective, examples
):
    (found,) = run_in_group(
        prompted_steps, base, objective, examples, world_size=one_gpu, device="cuda"
    )
    (loss, gradients), (_, gradients_apart) = (
        off(found[name], found["exact"]) for name in ("shared", "apart")
    )
    print(f"loss off by {loss:.2g}, gradients {gradients:.2g} ({gradients_apart:.2g})")
    assert 0 < gradients < MORE_THAN_STOCK * gradients_apart
    assert loss < 2 * torch.finfo(torch.bfloat16).eps
