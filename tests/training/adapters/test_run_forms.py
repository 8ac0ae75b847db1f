"""Head and embedding trained whole, and rows of added tokens: resumed, in replicas, in 16 bits,
evaluated in slices, and continued from an adapter."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from tests.support.adapter_kinds import (
    ADDED,
    ROWS,
    SEQ_LEN,
    TRAIN,
    WEIGHT_TOLERANCE,
    base_of,
    build,
    config,
    export,
    take,
    train_kinds,
)
from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.gathering import all_full
from tests.support.models import random_store, stock_base
from tests.support.plans import make_plan
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.model_files import ADAPTER_WEIGHTS
from workflow.lib.export.sharded_models import load_sharded_adapter
from workflow.lib.export.stock_models import load_adapter
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_json
from workflow.lib.training.checkpoint import CheckpointWriter, resume_
from workflow.lib.training.loop import make_optimizer
from workflow.lib.training.startup_checks import startup_checks

KINDS = ("both", "rows, tied", "rows, untied")
IDS = torch.arange(ADDED.start - 9, ADDED.stop + 5)[None]

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """The folder of each kind's run by one process, and what it found."""
    target = tmp_path_factory.mktemp("alone")
    (found,) = run_in_group(train_kinds, folder, target, 8, KINDS, world_size=1)
    return {kind: (target / kind, found[kind]) for kind in KINDS}


def evaluate_sharded(world, base, exported):
    with torch.no_grad():
        tuned = load_sharded_adapter(
            Checkpoint(base),
            Adapter(exported),
            world=world,
            compute_dtype=torch.float32,
            attention="sdpa",
        )
        inner = tuned.get_base_model()
        first = inner(input_ids=IDS).logits
        with tuned.disable_adapter():
            off = inner(input_ids=IDS).logits
        return first, off, inner(input_ids=IDS).logits


@every_kind
def test_sharded_evaluation_takes_what_is_trained_beside_adapters(folder, alone, kind):
    """As the stock reload, with the adapter on, off, and on again."""
    exported = export(alone[kind][0])
    path = base_of(folder, kind)
    base = stock_base(path)
    plain = base(input_ids=IDS).logits.detach()
    tuned = load_adapter(base, Adapter(exported))(input_ids=IDS).logits.detach()
    assert float((plain - tuned).abs().max()) > (1.0 if kind == "both" else 0.1)
    for on, off, again in run_in_group(evaluate_sharded, path, exported, world_size=2):
        torch.testing.assert_close(on, tuned, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(off, plain, rtol=1e-4, atol=1e-4)
        assert torch.equal(again, on)


RESUMED = [*((kind, "adamw") for kind in KINDS), ("both", "adamw_8bit")]
RESUMED_STEPS = 3  # the third loss is the first that a resumed moment has a part in


def steps_from(folder, target, world, *, resumed, save_after=None):
    """Continue the checkpoint in `target`, if there is one, to the last step; save in the midst."""
    kind, optimizer_kind = resumed
    model = build(folder, kind, world)
    train = TRAIN.model_copy(update={"optimizer": optimizer_kind})
    optimizer = make_optimizer(model.training, train)
    target = target / "-".join(resumed)
    found = resume_(target, model.training, optimizer, identity="x", world=world)
    first, taken = found.step, []
    if save_after is not None:
        taken = take(model, optimizer, world, num_steps=RESUMED_STEPS, count=save_after)
        writer = CheckpointWriter(target, keep=9, identity="x", world=world)
        with writer.finishing():
            writer.save(model.training, optimizer, step=save_after)
        first = save_after
    taken += take(model, optimizer, world, first=first, num_steps=RESUMED_STEPS)
    weights = all_full(trainable_parameters(model.training))
    return {"step": found.step, "losses": [m.loss for m in taken], "weights": weights}


def all_steps(world, folder, target, ways):
    """Return, for each of `RESUMED`, its steps in each way: whether it saves after the first."""
    return {
        resumed: [
            steps_from(folder, target, world, resumed=resumed, save_after=way) for way in ways
        ]
        for resumed in RESUMED
    }


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """A run of three processes that saves, and its resumed steps of three and of two."""
    saved = tmp_path_factory.mktemp("resumed")
    of_three = run_in_group(all_steps, folder, saved, (1, None), world_size=3)[0]
    of_two = run_in_group(all_steps, folder, saved, (None,), world_size=2)[0]
    return {resumed: (*of_three[resumed], *of_two[resumed]) for resumed in RESUMED}


@pytest.mark.parametrize("resumed", RESUMED, ids=", ".join)
def test_resumed_run_is_the_uninterrupted_one(runs, resumed):
    """Bit by bit with as many processes as before; with another number as close as that number
    itself, or as moments of 8 bits are to themselves when they are quantized anew."""
    whole, again, other = runs[resumed]
    assert (whole["step"], again["step"], other["step"]) == (0, 1, 1)
    assert len(again["losses"]) == RESUMED_STEPS - 1
    assert again["losses"] == whole["losses"][1:]
    exact = resumed[1] == "adamw"
    for name, tensor in whole["weights"].items():
        assert torch.equal(tensor, again["weights"][name])
        if exact:
            torch.testing.assert_close(tensor, other["weights"][name], **WEIGHT_TOLERANCE)
    rtol = 1e-5 if exact else 1e-2
    torch.testing.assert_close(other["losses"], again["losses"], rtol=rtol, atol=0)


def replicas(world, folder):
    found = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for kind in KINDS:
        model = build(folder, kind, replace(world, mesh=mesh))
        take(model, make_optimizer(model.training, TRAIN), world)
        found[kind] = all_full(trainable_parameters(model.training))
    return found


def test_replicas_train_the_same(folder, alone):
    found = run_in_group(replicas, folder, world_size=4)
    for kind in KINDS:
        first = found[0][kind]
        torch.testing.assert_close(first, alone[kind][1]["weights"], **WEIGHT_TOLERANCE)
        for process in found:
            assert all(torch.equal(first[name], t) for name, t in process[kind].items())


SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def in_sixteen_bits(world, folder):
    return {dtype: train_in(dtype, folder, world) for dtype in SIXTEEN_BITS}


def train_in(dtype, folder, world):
    model = build(folder, "both", world, compute_dtype=dtype)
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    checks = startup_checks(model, store, Checkpoint(base_of(folder, "both")), world)
    optimizer = make_optimizer(model.training, TRAIN)
    metrics = take(model, optimizer, world)
    params = trainable_parameters(model.training)
    return {
        "checks": [check.passed for check in checks], "losses": [m.loss for m in metrics],
        "types": {p.dtype for p in params.values()}, "norms": [m.grad_norm for m in metrics],
    }  # fmt: skip


@pytest.fixture(scope="module")
def rounded(folder):
    return run_in_group(in_sixteen_bits, folder, world_size=2)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_masters_of_sixteen_bit_runs_are_fp32(rounded, alone, dtype):
    """And losses and the first norm those of fp32 to the types' rounding (8 and 11 bits of
    mantissa)."""
    expected = alone["both"][1]
    for process in rounded:
        found = process[dtype]
        assert found["checks"]
        assert all(found["checks"])
        assert found["types"] == {torch.float32}
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0.02, atol=0)
        torch.testing.assert_close(found["norms"][0], expected["norms"][0], rtol=0.05, atol=0)


def started(world, base, run, adapters):
    """Build runs that start from these adapters, in 16 bits; return the values, or the refusal."""
    found, plan = [], make_plan()
    for adapter in adapters:
        try:
            model = built_model(base, run, plan, world, dtype=torch.bfloat16, start=adapter)
        except UserError as error:
            found.append(str(error))
            continue
        checks = startup_checks(
            model, random_store(rows=ROWS, seq_len=SEQ_LEN), Checkpoint(base), world
        )
        assert all(check.passed for check in checks)
        found.append(all_full(trainable_parameters(model.training)))
    return found


@pytest.mark.parametrize("kind", KINDS[1:])
def test_run_starts_from_the_rows_of_an_adapter(folder, alone, tmp_path, kind):
    """Exactly; those of other tokens are refused, of as many, too."""
    exported, other = export(alone[kind][0]), tmp_path / "other"
    shutil.copytree(exported, other)
    indices, told = "trainable_token_indices", read_json(other / "adapter_config.json")
    shifted = {path: [n + 1 for n in rows] for path, rows in told[indices].items()}
    write_json(other / "adapter_config.json", told | {indices: shifted})
    arguments = (base_of(folder, kind), config(kind, start_from="them"), [exported, other])
    values, refusal = run_in_group(started, *arguments, world_size=2)[0]
    stored = load_file(exported / ADAPTER_WEIGHTS)
    assert values.keys() == stored.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in stored.items())
    assert refusal.startswith(f"train.start_from = 'them': its {indices} are {shifted}")
    assert "Set model.add_tokens to what it was trained with" in refusal
