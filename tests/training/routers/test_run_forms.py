"""A run with trained routers and their load-balancing loss, whatever divides it: processes,
micro-batches, recomputation, graphs."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.support.captures import Captures
from tests.support.distributed import run_in_group
from tests.support.mixtures import tiny_mixture
from tests.support.models import base_fixture, random_store
from tests.support.router_runs import (
    BATCH,
    COEFFICIENT,
    ROWS,
    SEQ_LEN,
    config,
    first_rows,
    real_tokens,
    router,
    stock,
    train,
    train_in_process,
)
from workflow.lib.training.batches import attention_costs
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs

FAMILY, EXPERTS, TOP_K = "qwen3_moe", 11, 2
TRAIN = {"router_aux_loss_coef": COEFFICIENT, "max_grad_norm": None}
# fp32 on both sides, sums in another order
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}
WEIGHT_TOLERANCE = {"rtol": 0.0, "atol": 2e-4}


base = base_fixture(partial(tiny_mixture, FAMILY))


def run(base, *, processes, **plan):
    settings = config(FAMILY, train=TRAIN, target_modules="all-linear")
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    plan = {"processes": processes, **plan}
    return run_in_group(train_in_process, base, settings, store, 2, plan, world_size=processes)


def run_alone(world, base):
    """Runs of one process, by what they do otherwise than the run that is to be had again."""
    store, captures = random_store(rows=ROWS, seq_len=SEQ_LEN), Captures()
    settings = config(FAMILY, train=TRAIN, target_modules="all-linear")
    no_balance = config(
        FAMILY, train=TRAIN | {"router_aux_loss_coef": 0.0}, target_modules="all-linear"
    )

    def graphs(training, world):
        return MicroBatchGraphs(training, world, lambda: captures)

    found = {
        "nothing": train(base, settings, store, world, micro_batches=2),
        "recomputed": train(
            base, settings, store, world,
            micro_batches=2, plan={"activation_checkpointing": True},
        ),
        "graphed": train(base, settings, store, world, micro_batches=2, graphs=graphs),
        "no balance": train(base, no_balance, store, world, micro_batches=2),
    }  # fmt: skip
    found["graphed"]["replays"] = captures.replays
    return found


@pytest.fixture(scope="module")
def of_one(base):
    return dict(run_in_group(run_alone, base, world_size=1)[0])


@pytest.fixture(scope="module")
def alone(of_one):
    return of_one["nothing"]


@pytest.mark.parametrize(
    ("processes", "plan"),
    [(3, {"activation_checkpointing": 2}), (2, {"replicas": 2, "activation_checkpointing": True})],
    ids=str,
)
def test_any_number_of_processes_makes_the_same_run(base, alone, processes, plan):
    """Their micro-batches together have the same rows."""
    for process in run(base, processes=processes, **plan):
        assert process["losses"] == pytest.approx(alone["losses"], rel=2e-5)
        assert process["balance"] == pytest.approx(alone["balance"], rel=2e-5)
        assert process["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        torch.testing.assert_close(process["gradients"][0], alone["gradients"][0], **TOLERANCE)
        torch.testing.assert_close(process["weights"], alone["weights"], **WEIGHT_TOLERANCE)


def test_recomputed_layers_are_counted_once(of_one):
    alone, recomputed = of_one["nothing"], of_one["recomputed"]
    assert recomputed["balance"] == pytest.approx(alone["balance"], rel=1e-6)
    torch.testing.assert_close(recomputed["gradients"], alone["gradients"], **TOLERANCE)


def test_graphs_replay_the_run_that_is_made_without(of_one):
    alone, graphed = of_one["nothing"], of_one["graphed"]
    assert graphed["replays"] > 0
    assert graphed["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert graphed["balance"] == pytest.approx(alone["balance"], rel=1e-5)
    torch.testing.assert_close(graphed["weights"], alone["weights"], **WEIGHT_TOLERANCE)


def test_reported_loss_is_without_the_balance(of_one):
    alone, plain = of_one["nothing"], of_one["no balance"]
    assert plain["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-6)
    assert plain["balance"] == [None, None]
    name = next(name for name in plain["initial"] if router(FAMILY) in name)
    moved = (plain["gradients"][0][name] - alone["gradients"][0][name]).abs().max()
    assert moved > 100 * TOLERANCE["atol"]


def packed_logits(model, store, rows):
    ids, places = (
        torch.from_numpy(array[rows].astype("int64"))
        for array in (store.input_ids, store.position_ids)
    )
    found = model(input_ids=ids, position_ids=places, use_cache=False, output_router_logits=True)
    return found.logits, list(found.router_logits)


def test_gradient_takes_the_choices_of_all_micro_batches_until_then(base, alone):
    """By hand: sum over micro-batches m of E f(1..m) p(m) / (tokens of the step x layers)."""
    model, params = stock(base, FAMILY, stock_initial(alone["initial"]))
    store, rows = random_store(rows=ROWS, seq_len=SEQ_LEN), first_rows()
    rows = rows[np.argsort(-attention_costs(store.position_ids[rows]), kind="stable")]
    real = real_tokens(store, rows)
    assert 0 < real.sum() < real.numel()
    targets = int(store.loss_mask[rows].sum())
    total = torch.zeros(())
    chosen, tokens, means = torch.zeros(EXPERTS), 0, 0.0
    for part in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        logits, layers = packed_logits(model, store, rows[part])
        mask, ids = store.loss_mask[rows[part]], store.input_ids[rows[part]].astype("int64")
        trained = torch.from_numpy(mask[:, 1:])
        goals = torch.from_numpy(ids[:, 1:])[trained]
        nats = torch.nn.functional.cross_entropy(logits[:, :-1][trained], goals, reduction="sum")
        total = total + nats / targets
        there = real[part].flatten().bool()
        chances = [layer.softmax(-1)[there] for layer in layers]
        tokens += int(there.sum())
        for chance in chances:
            chosen += torch.bincount(chance.topk(TOP_K).indices.flatten(), minlength=EXPERTS)
        share = sum(chance.sum(0) for chance in chances) / (int(real.sum()) * len(layers))
        total = total + COEFFICIENT * EXPERTS * (chosen / (tokens * len(layers))) @ share
        means = means + share.detach()
    total.backward()
    ours = alone["gradients"][0]
    for name, param in params.items():
        torch.testing.assert_close(ours[name], param.grad, **TOLERANCE)
    whole = float(EXPERTS * (chosen / (tokens * len(layers))) @ means)
    assert alone["balance"][0] == pytest.approx(whole, rel=1e-5)


def stock_initial(initial):
    """Without adapters of experts and other linears, whose B is zero in the first step."""
    kept = ("q_proj.", "o_proj.", f"{router(FAMILY)}.")
    return {name: x for name, x in initial.items() if any(part in name for part in kept)}
