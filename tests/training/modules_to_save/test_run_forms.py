"""Head and embedding trained whole: resumed, in replicas, in 16 bits, and evaluated in slices."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.gathering import all_full
from tests.support.models import random_store
from tests.support.trained_modules import (
    CPU,
    ROWS,
    SEQ_LEN,
    TRAIN,
    WEIGHT_TOLERANCE,
    build,
    export,
    take,
    train_kinds,
)
from workflow.lib.distributed.world import process_group
from workflow.lib.export.sharded_models import load_sharded_adapter
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.training.checkpoint import CheckpointWriter, resume_
from workflow.lib.training.loop import make_optimizer
from workflow.lib.training.startup_checks import startup_checks


@pytest.fixture(scope="module")
def alone(folder):
    target = folder / "alone"
    (result,) = run_distributed(train_kinds, folder / "nf4", target, 8, ["both"], world_size=1)
    return target / "both", result["both"]


def evaluate_sharded(base, exported):
    with process_group("cpu", timeout_s=TIMEOUT_S) as world, torch.no_grad():
        tuned = load_sharded_adapter(
            base, exported, world=world, compute_dtype=torch.float32, attention="sdpa"
        )
        ids = torch.arange(3, 20)[None]
        inner = tuned.get_base_model()
        on = inner(input_ids=ids).logits
        with tuned.disable_adapter():
            return on, inner(input_ids=ids).logits


def test_sharded_evaluation_takes_the_trained_modules(folder, alone):
    """As the stock reload, with the adapter on and off."""
    exported = export(alone[0])
    base = load_base(folder / "nf4", device=CPU, compute_dtype=torch.float32, attention="sdpa")
    plain = base(input_ids=torch.arange(3, 20)[None]).logits.detach()
    tuned = load_adapter(base, exported)(input_ids=torch.arange(3, 20)[None]).logits.detach()
    assert float((plain - tuned).abs().max()) > 1.0
    for on, off in run_distributed(evaluate_sharded, folder / "nf4", exported, world_size=2):
        torch.testing.assert_close(on, tuned, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(off, plain, rtol=1e-4, atol=1e-4)


OPTIMIZERS = ("adamw", "adamw_8bit")
RESUMED_STEPS = 3  # the third loss is the first that a resumed moment has a part in


def steps_from(base, folder, world, *, kind, save_after=None):
    """Continue the checkpoint in `folder`, if there is one, to the last step; save in the midst."""
    model = build(base, "both", world)
    train = TRAIN.model_copy(update={"optimizer": kind})
    optimizer = make_optimizer(model.training, train)
    found = resume_(folder, model.training, optimizer, identity="x", world=world)
    first, taken = found.step, []
    if save_after is not None:
        taken = take(model, optimizer, world, num_steps=RESUMED_STEPS, count=save_after)
        writer = CheckpointWriter(folder, keep=9, identity="x", world=world)
        with writer.finishing():
            writer.save(model.training, optimizer, step=save_after)
        first = save_after
    taken += take(model, optimizer, world, first=first, num_steps=RESUMED_STEPS)
    weights = all_full(trainable_parameters(model.training))
    return {"step": found.step, "losses": [m.loss for m in taken], "weights": weights}


def whole_and_interrupted(base, folder):
    """Return by optimizer the steps of a run that saves after the first one, and those of another
    that is resumed from there."""
    found = {}
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        for kind in OPTIMIZERS:
            whole = steps_from(base, folder / kind, world, kind=kind, save_after=1)
            found[kind] = (whole, steps_from(base, folder / kind, world, kind=kind))
    return found


def only_resumed(base, folder):
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        return {kind: steps_from(base, folder / kind, world, kind=kind) for kind in OPTIMIZERS}


@pytest.fixture(scope="module")
def runs(folder):
    """By optimizer: a run of three processes, and its resumed steps of three and of two."""
    base, saved = folder / "nf4", folder / "resumed"
    of_three = run_distributed(whole_and_interrupted, base, saved, world_size=3)[0]
    of_two = run_distributed(only_resumed, base, saved, world_size=2)[0]
    return {kind: (*of_three[kind], of_two[kind]) for kind in OPTIMIZERS}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumed_run_is_the_uninterrupted_one(runs, kind):
    """Bit by bit with as many processes as before; with another number as close as that number
    itself, or as moments of 8 bits are to themselves when they are quantized anew."""
    whole, again, other = runs[kind]
    assert (whole["step"], again["step"], other["step"]) == (0, 1, 1)
    assert len(again["losses"]) == RESUMED_STEPS - 1
    assert again["losses"] == whole["losses"][1:]
    for name, tensor in whole["weights"].items():
        assert torch.equal(tensor, again["weights"][name])
        if kind == "adamw":
            torch.testing.assert_close(tensor, other["weights"][name], **WEIGHT_TOLERANCE)
    torch.testing.assert_close(
        other["losses"], again["losses"], rtol=1e-5 if kind == "adamw" else 1e-2, atol=0
    )


def replicas(base):
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        model = build(base, "both", replace(world, mesh=mesh))
        optimizer = make_optimizer(model.training, TRAIN)
        take(model, optimizer, world)
        return all_full(trainable_parameters(model.training))


def test_replicas_train_the_same_modules(folder, alone):
    expected = alone[1]["weights"]
    found = run_distributed(replicas, folder / "nf4", world_size=4)
    torch.testing.assert_close(found[0], expected, **WEIGHT_TOLERANCE)
    for weights in found:
        assert all(torch.equal(found[0][name], t) for name, t in weights.items())


SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def in_sixteen_bits(base):
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        return {dtype: train_in(dtype, base, world) for dtype in SIXTEEN_BITS}


def train_in(dtype, base, world):
    model = build(base, "both", world, compute_dtype=dtype)
    checks = startup_checks(model, random_store(rows=ROWS, seq_len=SEQ_LEN), base, world)
    optimizer = make_optimizer(model.training, TRAIN)
    metrics = take(model, optimizer, world)
    params = trainable_parameters(model.training)
    return {
        "checks": [check.passed for check in checks], "losses": [m.loss for m in metrics],
        "types": {p.dtype for p in params.values()}, "norms": [m.grad_norm for m in metrics],
    }  # fmt: skip


@pytest.fixture(scope="module")
def rounded(folder):
    return run_distributed(in_sixteen_bits, folder / "nf4", world_size=2)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_masters_of_sixteen_bit_runs_are_fp32(rounded, alone, dtype):
    """And losses and the first norm those of fp32 to the types' rounding (8 and 11 bits of
    mantissa)."""
    expected = alone[1]
    for process in rounded:
        found = process[dtype]
        assert found["checks"]
        assert all(found["checks"])
        assert found["types"] == {torch.float32}
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0.02, atol=0)
        torch.testing.assert_close(found["norms"][0], expected["norms"][0], rtol=0.05, atol=0)
