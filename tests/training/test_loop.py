"""The loop: the same run for any number of processes and any split into micro-batches; packing,
clipping, resuming."""

import itertools

import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.gathering import all_full
from tests.support.models import adapted, random_store
from tests.support.plans import PLANNED, make_plan
from tests.support.training_loops import (
    BATCH,
    CLIP,
    LEARNING_RATE,
    ROWS,
    SEQ_LEN,
    STEPS,
    restart_,
    settings,
    trainer,
    values_of,
)
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.schedule import step_rows
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.optimizers import learning_rate

MICRO_BATCH = 3  # rows of one process
SHARDED_MICRO_BATCH = 2  # of three processes the whole share of a step
LOOP_ALONE = ("micro_batch_size", "max_grad_norm")  # what changes the loop and not its model
STASHED = {"offload_activations": True, "offload_window_bytes": 4096}
# Name of a variant -> what is changed in plan, adapter and training settings.
# fmt: off
SINGLE = {
    "6 rows at once": {"micro_batch_size": 6},
    "3 rows at a time": {},
    "2 rows at a time": {"micro_batch_size": 2},
    "1 row at a time": {"micro_batch_size": 1},
    "4 rows at a time": {"micro_batch_size": 4},
    "activations kept": {"activation_checkpointing": False},
    "dropout": {"dropout": 0.3},
    "dropout, activations kept": {"dropout": 0.3, "activation_checkpointing": False},
    "every second layer's activations kept": {"activation_checkpointing": 2},
    "weights of a layer kept decoded": {"keep_decoded": 1},
    "weights kept decoded, activations too": {
        "keep_decoded": 2, "activation_checkpointing": False,
    },
    "clipped": {"max_grad_norm": CLIP},
    "fused": {"fused_layers": True},
    "fused, activations offloaded": {
        "fused_layers": True,
        **STASHED,
        "activation_checkpointing": False,
    },
    "fused, dropout": {"fused_layers": True, "dropout": 0.3},
    "fused, dropout, 4 rows at a time": {
        "fused_layers": True, "dropout": 0.3, "micro_batch_size": 4,
    },
    "fused, tiled": {"fused_layers": True, "tile_tokens": 7},
    "fused, tiled, activations kept": {
        "fused_layers": True, "tile_tokens": 7, "activation_checkpointing": False,
    },
    "fused, dropout, tiled": {"fused_layers": True, "dropout": 0.3, "tile_tokens": 7},
    "fused, dora, tiled": {"fused_layers": True, "use_dora": True, "tile_tokens": 7},
    "fused, dropout, activations offloaded": {
        "fused_layers": True, "dropout": 0.3, **STASHED, "activation_checkpointing": False,
    },
    "dora": {"use_dora": True},
    "fused, dora": {"fused_layers": True, "use_dora": True},
    "fused, dora, activations kept": {
        "fused_layers": True, "use_dora": True, "activation_checkpointing": False,
    },
    "inputs offloaded": STASHED,
    "activations offloaded": {**STASHED, "activation_checkpointing": False},
    "one layer's activations offloaded": {
        **STASHED,
        "offload_activations": 1,
        "activation_checkpointing": False,
    },
}
# fmt: on
SHARDED = {
    "1 row at a time": {"micro_batch_size": 1},
    "2 rows at a time": {},
    "weights kept after forward": {"micro_batch_size": 1, "reshard_after_forward": False},
    "weights of a layer kept decoded": {"micro_batch_size": 1, "keep_decoded": 1},
    "clipped": {"max_grad_norm": CLIP},
    "fused, dropout": {"fused_layers": True, "dropout": 0.3},
    "fused, dora": {"fused_layers": True, "use_dora": True},
    "fused, dropout, tiled": {"fused_layers": True, "dropout": 0.3, "tile_tokens": 7},
    "fused, tiled": {"fused_layers": True, "tile_tokens": 7, "reshard_after_forward": False},
    "fused, every second layer's activations offloaded": {
        "fused_layers": True,
        **STASHED,
        "offload_activations": 1,
        "activation_checkpointing": 2,
    },
}  # fmt: skip
# fp32, sums in another order (per process and per micro-batch); losses are of order 5. AdamW
# divides gradients by their own magnitude, so a rounding error of a gradient near zero moves its
# weight by a share of the learning rate.
LOSS_TOLERANCE = {"rtol": 1e-5, "atol": 0.0}
WEIGHT_TOLERANCE = {"rtol": 0.0, "atol": LEARNING_RATE * 2e-2}


def train_variants(world, base, variants, micro_batch):
    """Train every variant in this group; return losses, norms, the first step's gradients as
    applied, final weights. Variants whose models are the same share one."""
    models = {}
    found = {}
    for name, changes in variants.items():
        planned = {k: v for k, v in changes.items() if k in PLANNED}
        plan = make_plan(**({"micro_batch_size": micro_batch} | planned))
        config = settings(**{k: v for k, v in changes.items() if k not in PLANNED})
        of_model = str(sorted((k, v) for k, v in changes.items() if k not in LOOP_ALONE))
        if of_model not in models:
            built = built_model(base, config, plan, world).training
            models[of_model] = (built, values_of(built))
        training, initial = models[of_model]
        restart_(training, initial)
        found[name] = train_one(training, config, plan, world)
    return found


def train_one(training, config, plan, world):
    made = trainer(training, config, world, micro_batch_size=plan.micro_batch_size)
    params = trainable_parameters(training)
    gradients = {}

    def keep_first(*_):
        if not gradients:
            gradients.update(all_full({name: p.grad for name, p in params.items()}))

    made.optimizer.register_step_pre_hook(keep_first)
    metrics = list(made.steps(first_step=0, num_steps=STEPS, elapsed_s=100.0))
    offload = training.activation_offload
    return {
        "metrics": metrics,
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "gradients": gradients,
        "weights": all_full(params),
        "host_bytes": offload.host_bytes if offload else 0,
    }


@pytest.fixture(scope="module")
def single(base):
    (result,) = run_in_group(train_variants, base, SINGLE, MICRO_BATCH, world_size=1)
    return result


@pytest.fixture(scope="module")
def sharded(base):
    return run_in_group(train_variants, base, SHARDED, SHARDED_MICRO_BATCH, world_size=3)


def assert_same_run(one, other):
    torch.testing.assert_close(one["losses"], other["losses"], **LOSS_TOLERANCE)
    torch.testing.assert_close(one["norms"], other["norms"], rtol=1e-4, atol=0)
    torch.testing.assert_close(one["weights"], other["weights"], **WEIGHT_TOLERANCE)


def assert_identical(one, other):
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])


def test_training_moves_the_weights_far_beyond_the_tolerance(single):
    losses, weights = (single["6 rows at once"][key] for key in ("losses", "weights"))
    assert all(
        t.abs().max() > 100 * WEIGHT_TOLERANCE["atol"]
        for n, t in weights.items()
        if ".lora_B." in n
    )
    assert len({round(loss, 3) for loss in losses}) == STEPS


@pytest.mark.parametrize(
    "variant", ["1 row at a time", "2 rows at a time", "3 rows at a time", "4 rows at a time"]
)
def test_run_is_the_same_for_any_micro_batch(single, variant):
    """Also if the last micro-batch is smaller: 6 rows in 4 and 2."""
    assert_same_run(single[variant], single["6 rows at once"])


@pytest.mark.parametrize("variant", SHARDED)
def test_run_is_the_same_for_any_number_of_processes(single, sharded, variant):
    """Those that train something else by the run of one process that does so, too."""
    others = ("clipped", "fused, dropout", "fused, dora", "fused, dropout, tiled")
    reference = single[variant if variant in others else "6 rows at once"]
    for result in sharded:
        assert_same_run(result[variant], reference)


def test_all_processes_report_the_same_loss_and_norm(sharded):
    for variant in SHARDED:
        for key in ("losses", "norms"):
            assert all(result[variant][key] == sharded[0][variant][key] for result in sharded)


@pytest.mark.parametrize("variant", ["activations kept", "every second layer's activations kept"])
def test_recomputed_activations_change_no_bit(single, variant):
    assert_identical(single[variant], single["3 rows at a time"])


@pytest.mark.parametrize(
    "variant", ["inputs offloaded", "activations offloaded", "one layer's activations offloaded"]
)
def test_offloaded_activations_change_no_bit(single, variant):
    assert_identical(single[variant], single["3 rows at a time"])
    inputs, everything = (
        single[name]["host_bytes"] for name in ("inputs offloaded", "activations offloaded")
    )
    assert everything > 5 * inputs > 0
    assert 0 < single["one layer's activations offloaded"]["host_bytes"] <= everything / 2


def test_fused_layers_train_the_same_run(single):
    for variant in ("fused", "fused, activations offloaded"):
        assert_same_run(single[variant], single["3 rows at a time"])
    assert_identical(single["fused, activations offloaded"], single["fused"])


def test_fused_layers_keep_less_for_backward(single):
    """At least the activation and the matmul, fp32 of width 176, of the feed-forwards of both
    layers."""
    stock, fused = (
        single[name]["host_bytes"]
        for name in ("activations offloaded", "fused, activations offloaded")
    )
    assert stock - fused >= 2 * 2 * MICRO_BATCH * SEQ_LEN * 176 * 4


def test_fused_layers_with_dropout_train_the_same_run(single):
    assert_same_run(single["fused, dropout"], single["dropout"])


def test_recomputed_activations_meet_the_same_dropout(single):
    assert_identical(single["dropout, activations kept"], single["dropout"])
    assert_identical(single["fused, dropout, activations offloaded"], single["fused, dropout"])
    assert single["dropout"]["losses"] != single["3 rows at a time"]["losses"]


def test_micro_batches_of_another_size_meet_the_same_dropout(single):
    assert_same_run(single["fused, dropout, 4 rows at a time"], single["fused, dropout"])


def test_fused_layers_with_dora_train_the_same_run(single):
    assert_same_run(single["fused, dora"], single["dora"])
    assert_identical(single["fused, dora, activations kept"], single["fused, dora"])


def test_tiles_of_tokens_train_the_same_run(single):
    """Tiles of 7 tokens, which begin within rows; with dropout the same masks."""
    assert_same_run(single["fused, tiled"], single["fused"])
    assert_same_run(single["fused, dropout, tiled"], single["fused, dropout"])
    assert_same_run(single["fused, dora, tiled"], single["fused, dora"])
    assert_identical(single["fused, tiled, activations kept"], single["fused, tiled"])


def test_weights_kept_after_forward_change_no_bit(sharded):
    assert_identical(sharded[0]["weights kept after forward"], sharded[0]["1 row at a time"])


def test_weights_that_stay_decoded_change_no_bit(single, sharded):
    for variant in ("weights of a layer kept decoded", "weights kept decoded, activations too"):
        assert_identical(single[variant], single["3 rows at a time"])
    (decoded, plain) = ("weights of a layer kept decoded", "1 row at a time")
    assert_identical(sharded[0][decoded], sharded[0][plain])


@pytest.mark.parametrize("processes", ["one", "several"])
def test_clipping_is_torchs_over_the_gathered_gradients(single, sharded, processes):
    result, unclipped = (
        (single, "3 rows at a time") if processes == "one" else (sharded[0], "2 rows at a time")
    )
    params = {n: torch.nn.Parameter(g.clone()) for n, g in result[unclipped]["gradients"].items()}
    for param in params.values():
        param.grad = param.detach().clone()
    norm = torch.nn.utils.clip_grad_norm_(params.values(), CLIP)
    assert float(norm) > 2 * CLIP, "the bound is active"
    assert result["clipped"]["norms"][0] == pytest.approx(float(norm), rel=1e-6)
    expected = {name: p.grad for name, p in params.items()}
    torch.testing.assert_close(result["clipped"]["gradients"], expected, rtol=1e-5, atol=1e-9)


def test_metrics_count_steps_tokens_and_time(single):
    metrics = single["6 rows at once"]["metrics"]
    train = settings().train
    assert [m.step for m in metrics] == [1, 2, 3]
    assert [m.learning_rate for m in metrics] == [
        learning_rate(train, step=step, num_steps=STEPS) for step in range(STEPS)
    ]
    assert {m.tokens for m in metrics} == {BATCH * SEQ_LEN}
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    assert sum(m.trained_tokens for m in metrics[:2]) < store.loss_mask.sum(), "12 of 13 rows"
    assert metrics[0].elapsed_s > 100.0
    assert all(a.elapsed_s < b.elapsed_s for a, b in itertools.pairwise(metrics))
    seconds = metrics[1].elapsed_s - metrics[0].elapsed_s
    assert metrics[1].tokens_per_s == pytest.approx(BATCH * SEQ_LEN / seconds)
    assert all(m.peak_bytes > 10 * 2**20 for m in metrics), (
        "resident memory of a Python process with torch"
    )
    assert set(metrics[0].as_json()) == {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "trained_tokens",
        "tokens",
        "tokens_per_s",
        "peak_bytes",
        "elapsed_s",
    }


def test_first_loss_is_the_mean_over_trained_tokens_of_all_rows(base, single):
    """Not the mean of the rows' means: they have different numbers of trained tokens."""
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    rows = step_rows(num_rows=ROWS, global_batch_size=BATCH, seed=0, step=0)
    assert len(set(store.trained_tokens_per_row[rows].tolist())) > 1
    training = adapted(base, r=4, alpha=8)
    with torch.no_grad():
        total = sum(float(training(stored_batch(store, [row]))) for row in rows)
    mean = total / int(store.loss_mask[rows].sum())
    assert single["6 rows at once"]["losses"][0] == pytest.approx(mean, rel=1e-5)
