"""Rows of added tokens are trained, in tied and untied models: against stock PEFT's
`trainable_token_indices`, over processes, to the export."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.gathering import all_full
from tests.support.models import quantized, random_store, tiny_llama
from tests.support.plans import make_plan
from tests.support.stock_training import stock
from tests.support.trained_modules import (
    CPU,
    ROWS,
    ROWS_ALONE,
    SEQ_LEN,
    TRAIN,
    WEIGHT_TOLERANCE,
    build,
    config,
    export,
    take,
    train_kinds,
)
from workflow.lib.distributed.world import process_group
from workflow.lib.export.adapter_files import merged_tensors, read_sharded_adapter
from workflow.lib.export.parity import compare_logits
from workflow.lib.export.sharded_models import load_sharded_adapter
from workflow.lib.export.stock_models import ADAPTER_WEIGHTS, load_adapter, load_base
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.model.trained_modules import ROWS_TENSOR, TRAINED_ROWS
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_json
from workflow.lib.training.checkpoint import CheckpointWriter, resume_
from workflow.lib.training.loop import make_optimizer
from workflow.lib.training.startup_checks import startup_checks

# Slices of three processes begin at 0, 71 and 142: two of them have some of these rows.
ADDED = range(138, 145)
EMBEDDING = f"base_model.model.model.embed_tokens.{ROWS_TENSOR}"
INDICES = "trainable_token_indices"
HEAD = f"base_model.model.lm_head.{ROWS_TENSOR}"
# fp32 on both sides, sums in another order. AdamW divides gradients by their own magnitude, so
# adam_eps is far above their rounding errors.
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    """A folder of the test module, with a Llama of one layer in `original`, quantized in `nf4`."""
    folder = tmp_path_factory.mktemp("rows")
    tiny_llama(folder / "original", tied=request.param, num_hidden_layers=1, pad_token_id=5)
    path = folder / "original" / "config.json"
    write_json(path, read_json(path) | {TRAINED_ROWS: [ADDED.start, ADDED.stop]})
    quantized(folder / "original", folder / "nf4")
    return folder


@pytest.fixture(scope="module")
def names(folder):
    tied = read_json(folder / "original" / "config.json")["tie_word_embeddings"]
    return {EMBEDDING} if tied else {EMBEDDING, HEAD}


@pytest.fixture(scope="module", params=[1, 3], ids=lambda p: f"{p} processes")
def trained(request, folder):
    target = folder / f"of-{request.param}"
    results = run_distributed(
        train_kinds, folder / "nf4", target, 8, [ROWS_ALONE], world_size=request.param
    )
    return target / ROWS_ALONE, [result[ROWS_ALONE] for result in results]


def test_run_is_that_of_stock_peft(folder, trained, names):
    """Losses, norms, clipped gradients, and values after all steps; on every process."""
    initial = trained[1][0]["initial"]
    theirs = stock(folder / "nf4", config(ROWS_ALONE), initial, rows=ROWS, seq_len=SEQ_LEN)
    for ours in trained[1]:
        torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=2e-5, atol=0)
        torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=1e-4, atol=0)
        for one, other in zip(ours["gradients"], theirs["gradients"], strict=True):
            torch.testing.assert_close(one, other, **GRADIENT_TOLERANCE)
        torch.testing.assert_close(ours["weights"], theirs["weights"], **WEIGHT_TOLERANCE)
    assert {name for name in initial if ".lora_" not in name} == names
    for name in names:
        moved = (theirs["weights"][name] - initial[name]).abs().amax(dim=1)
        assert float(moved.median()) > 20 * WEIGHT_TOLERANCE["atol"]


def test_start_up_checks_hold_and_count_the_rows(trained):
    for process in trained[1]:
        assert process["checks"] == [True] * 6
        assert process["counted"][0] == sum(t.numel() for t in process["initial"].values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stock_peft_reloads_the_export_as_it_was_trained(folder, trained, dtype):
    exported = export(trained[0])
    base = load_base(folder / "nf4", device=CPU, compute_dtype=dtype, attention="sdpa")
    model = load_adapter(base, exported)
    model.tie_weights()  # as lm-eval does
    parity = compare_logits(
        model, trained[0] / "parity.safetensors",
        exported=exported / ADAPTER_WEIGHTS, compute_dtype=dtype, device=CPU,
    )  # fmt: skip
    assert parity.identical_values
    if dtype == torch.float32:
        assert parity.passed


def test_merged_model_has_the_trained_rows(folder, trained, names):
    exported = export(trained[0])
    adapter = read_sharded_adapter(trained[0] / "adapter")
    settings = read_json(trained[0] / "adapter_config.json")
    original = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=torch.float32)
    theirs = load_adapter(original, exported).merge_and_unload().state_dict()
    with CheckpointReader(folder / "original") as source, CheckpointReader(folder / "nf4") as nf4:
        ours = dict(merged_tensors(adapter, settings, original=source, nf4=nf4, onto="original"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name].bfloat16(), rtol=2**-7, atol=1e-6)
    for name in names:
        table = name.removeprefix("base_model.model.").removesuffix(ROWS_TENSOR)
        rows = ours[f"{table}weight"][ADDED.start : ADDED.stop]
        assert torch.equal(rows, adapter[name].bfloat16())


def evaluate_sharded(base, exported):
    with process_group("cpu", timeout_s=TIMEOUT_S) as world, torch.no_grad():
        tuned = load_sharded_adapter(
            base, exported, world=world, compute_dtype=torch.float32, attention="sdpa"
        )
        ids = torch.arange(ADDED.start - 9, ADDED.stop + 5)[None]
        inner = tuned.get_base_model()
        first = inner(input_ids=ids).logits
        with tuned.disable_adapter():
            off = inner(input_ids=ids).logits
        return first, off, inner(input_ids=ids).logits


def test_sharded_evaluation_takes_the_trained_rows(folder, trained):
    """As the stock reload, with the adapter on, off, and on again."""
    exported, ids = export(trained[0]), torch.arange(ADDED.start - 9, ADDED.stop + 5)[None]
    base = load_base(folder / "nf4", device=CPU, compute_dtype=torch.float32, attention="sdpa")
    plain = base(input_ids=ids).logits.detach()
    tuned = load_adapter(base, exported)(input_ids=ids).logits.detach()
    assert float((plain - tuned).abs().max()) > 0.1
    for on, off, again in run_distributed(evaluate_sharded, folder / "nf4", exported, world_size=2):
        torch.testing.assert_close(on, tuned, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(off, plain, rtol=1e-4, atol=1e-4)
        assert torch.equal(again, on)


RESUMED_STEPS = 3  # the third loss is the first that a resumed moment has a part in


def steps_from(base, folder, world, *, save_after=None):
    """Continue the checkpoint in `folder`, if there is one, to the last step; save in the midst."""
    model = build(base, ROWS_ALONE, world)
    optimizer = make_optimizer(model.training, TRAIN)
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
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        return steps_from(base, folder, world, save_after=1), steps_from(base, folder, world)


def test_resumed_run_is_the_uninterrupted_one_bit_by_bit(folder):
    whole, again = run_distributed(
        whole_and_interrupted, folder / "nf4", folder / "resumed", world_size=2
    )[0]
    assert (whole["step"], again["step"]) == (0, 1)
    assert again["losses"] == whole["losses"][1:]
    assert all(torch.equal(t, again["weights"][name]) for name, t in whole["weights"].items())


def replicas(base):
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        model = build(base, ROWS_ALONE, replace(world, mesh=mesh))
        take(model, make_optimizer(model.training, TRAIN), world)
        return all_full(trainable_parameters(model.training))


def test_replicas_train_the_same_rows(folder, trained):
    found = run_distributed(replicas, folder / "nf4", world_size=4)
    torch.testing.assert_close(found[0], trained[1][0]["weights"], **WEIGHT_TOLERANCE)
    for weights in found:
        assert all(torch.equal(found[0][name], t) for name, t in weights.items())


def started(base, adapters):
    """Build runs that start from these adapters, in 16 bits; return the values, or the refusal."""
    run = config(ROWS_ALONE, start_from="them")
    found = []
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        for adapter in adapters:
            try:
                model = built_model(
                    base, run, make_plan(), world, dtype=torch.bfloat16, start=adapter
                )
            except UserError as error:
                found.append(str(error))
                continue
            checks = startup_checks(model, random_store(rows=ROWS, seq_len=SEQ_LEN), base, world)
            assert all(check.passed for check in checks)
            found.append(all_full(trainable_parameters(model.training)))
    return found


def test_run_starts_from_the_rows_of_an_adapter(folder, trained, tmp_path):
    """Exactly; those of other tokens are refused, of as many, too."""
    exported, other = export(trained[0]), tmp_path / "other"
    shutil.copytree(exported, other)
    told = read_json(other / "adapter_config.json")
    shifted = {path: [n + 1 for n in rows] for path, rows in told[INDICES].items()}
    write_json(other / "adapter_config.json", told | {INDICES: shifted})
    found = run_distributed(started, folder / "nf4", [exported, other], world_size=2)
    values, refusal = found[0]
    stored = load_file(exported / ADAPTER_WEIGHTS)
    assert values.keys() == stored.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in stored.items())
    assert refusal.startswith(f"train.start_from = 'them': its {INDICES} are {shifted}")
    assert "Set model.add_tokens to what it was trained with" in refusal
