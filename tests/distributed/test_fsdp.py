"""Sharding over three processes, which no size of the model is divisible by: nothing lost, doubled
or altered."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.models import adapted, quantized, random_store, tiny_llama
from tests.support.plans import make_plan
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.weight_checks import local_bytes, mismatched_tensors
from workflow.lib.model.architecture.layer_choice import recomputed_layers
from workflow.lib.model.layers.frozen_linear import frozen_linears
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local, local_range
from workflow.lib.model.recomputation import checkpoint_activations_
from workflow.lib.settings.config import LoraSettings, RunConfig
from workflow.lib.system.errors import UserError
from workflow.lib.training.startup_checks import startup_checks

PROCESSES = 3
CONFIG = RunConfig(lora=LoraSettings(r=4))
LAYER = "model.layers.1.mlp.down_proj"
ALTERED = {
    f"{LAYER}.weight": "packed weights",
    f"{LAYER}.absmax": "scales",
    f"{LAYER}.nested_absmax": "scales of scales",
    "model.layers.2.input_layernorm.weight": "a norm",
    "model.embed_tokens.weight": "the embedding",
    "lm_head.weight": "the head",
    "model.norm.weight": "the root unit",
}


def survey(world, base, altered_base):
    model = built_model(base, CONFIG, make_plan(), world)
    params = dict(model.training.named_parameters())
    report = {
        "ranges": {name: (*local_range(p), p.shape[0]) for name, p in params.items()},
        "local_rows": {name: len(local(p)) for name, p in params.items()},
        "bytes": held_bytes(model, world),
        "spare_bytes": spare_bytes(model, world),
        "bytes_read": model.bytes_read,
        "units": len(model.units),
        "whole": whole(model, params),
    }
    report["checks"] = startup_checks(
        model, random_store(rows=2, seq_len=11), Checkpoint(base), world
    )
    report["held_after_checks"] = held_bytes(model, world)
    with CheckpointReader(base) as reader:
        report["found"] = {name: alter(model, name, reader, world) for name in ALTERED}
        report["afterwards"] = mismatches(model, reader, world)
    with CheckpointReader(altered_base) as reader:
        report["on_disk"] = mismatches(model, reader, world)
    try:
        startup_checks(model, random_store(rows=2, seq_len=11), Checkpoint(altered_base), world)
    except UserError as error:
        report["message"] = str(error)
    return report


def held_bytes(model, world):
    """Return the bytes that this process holds, and those of the whole model, with the slices of
    packed weights."""
    sliced = model.packed_layers.device_bytes
    held, total = local_bytes(model.training)
    return held + sliced, total + sliced * world.size


def spare_bytes(model, world):
    """Return by how much the slices of all processes are more than the packed tensors, each rounded
    up to 512 bytes."""
    linears = dict(frozen_linears(model.training))
    sizes = [size for linear in linears.values() for size in linear.spec.sizes.values()]
    return model.packed_layers.device_bytes * world.size - sum(-(-x // 512) * 512 for x in sizes)


def whole(model, params):
    """Return the values of all parameters, gathered."""
    found = {n: p.full_tensor().detach() for n, p in params.items() if isinstance(p, DTensor)}
    for number in model.packed_layers.slices:
        with model.packed_layers.gathered(number):
            rest = {name: p for name, p in params.items() if name not in found and p.numel()}
            found |= {name: p.detach().clone() for name, p in rest.items()}
    return found


def mismatches(model, reader, world):
    units = mismatched_tensors(model.training, model.units, reader, world)
    return units + model.packed_layers.mismatched(reader)


def alter(model, name, reader, world):
    """Flip a bit of the first byte that the last process with a part of `name` holds; return what
    is found."""
    held = last_part(model, name, world)
    if held is not None:
        held[0] ^= 1
    found = mismatches(model, reader, world)
    if held is not None:
        held[0] ^= 1
    return found


def last_part(model, name, world):
    """Return the bytes of `name` that the last process with a part of it holds; None on others."""
    plain = model.training.peft_model.get_base_model()
    names = {n.replace(".base_layer", ""): p for n, p in plain.named_parameters()}
    param = names[name]
    if isinstance(param, DTensor):
        holder = (param.shape[0] - 1) // -(-param.shape[0] // world.size)
        held = local(param).detach().reshape(-1).view(torch.uint8)
        return held if world.rank == holder else None
    return last_part_of_slices(model, param, world)


def last_part_of_slices(model, param, world):
    """The same of a packed parameter: its layer's slices lie one behind the other in the buffer."""
    packed = model.packed_layers
    for number, mine in packed.slices.items():
        with packed.gathered(number):
            start, stop = param.storage_offset() * 4, (param.storage_offset() + param.numel()) * 4
        if stop > start:
            holder = (stop - 1) // len(mine)
            first = max(start - holder * len(mine), 0)
            return mine[first:] if world.rank == holder else None
    raise AssertionError("no layer has it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    quantized(tiny_llama(folder / "original"), folder / "nf4")
    shutil.copytree(folder / "nf4", folder / "altered")
    for file in (folder / "altered").glob("*.safetensors"):
        tensors = load_file(file)
        if f"{LAYER}.weight" in tensors:
            tensors[f"{LAYER}.weight"][-1] ^= 1
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def reports(folder):
    return run_in_group(survey, folder / "nf4", folder / "altered", world_size=PROCESSES)


def test_slices_of_all_processes_cover_every_tensor_once(reports):
    for name, (_, _, rows) in reports[0]["ranges"].items():
        ranges = [report["ranges"][name] for report in reports]
        edges = [0, *(stop for _, stop, _ in ranges)]
        assert [start for start, _, _ in ranges] == edges[:-1], name
        assert edges[-1] == rows, name


def test_slices_are_those_that_fsdp_holds(reports):
    for report in reports:
        for name, (start, stop, _) in report["ranges"].items():
            assert report["local_rows"][name] == stop - start, name


def test_gathered_model_is_the_unsharded_one_bit_for_bit(folder, reports):
    """The initial adapter too: it is the same for any number of processes."""
    single = adapted(folder / "nf4", r=4)
    expected = dict(single.named_parameters())
    assert reports[0]["whole"].keys() == expected.keys()
    for report in reports:
        for name, param in expected.items():
            bits = (tensor.detach().view(torch.uint8) for tensor in (report["whole"][name], param))
            assert torch.equal(*bits), name
    assert any(p.any() for n, p in trainable_parameters(single).items() if ".lora_A." in n)


def test_every_process_holds_a_third_before_and_after_the_checks(reports):
    for key in ("bytes", "held_after_checks"):
        totals = {report[key][1] for report in reports}
        assert len(totals) == 1
        assert sum(report[key][0] for report in reports) == totals.pop()
        assert all(held < 0.36 * total for held, total in (report[key] for report in reports))


def test_checkpoint_is_read_once_by_all_together(folder, reports):
    stored = 0
    for file in (folder / "nf4").glob("*.safetensors"):
        parts = load_file(file).items()
        stored += sum(t.nbytes for n, t in parts if "quant_map" not in n and "quant_state" not in n)
    assert sum(report["bytes_read"] for report in reports) == stored


def test_intact_model_passes_the_checks(reports):
    for report in reports:
        assert [check.passed for check in report["checks"]] == [True] * 6
        assert report["afterwards"] == []


@pytest.mark.parametrize("name", ALTERED, ids=lambda name: ALTERED[name])
def test_one_bit_of_one_process_is_found_by_all(reports, name):
    assert [report["found"][name] for report in reports] == [[name]] * PROCESSES


def test_one_bit_of_the_checkpoint_is_found_by_all(reports):
    assert [report["on_disk"] for report in reports] == [[f"{LAYER}.weight"]] * PROCESSES


def keep_gathered(world, base):
    """Run a forward without backward where layers stay gathered, first as FSDP leaves it."""
    plan = make_plan(reshard_after_forward=False)
    training = built_model(base, CONFIG, plan, world).training
    before, held = trainable_parameters(training), local_bytes(training)
    ids = torch.arange(11)[None]
    with torch.no_grad():
        training.logits(ids, ids, ids[0])
    try:
        found = trainable_parameters(training)
    except AssertionError as error:
        found = str(error)
    with forward_only(training):
        training.logits(ids, ids, ids[0])
    after = trainable_parameters(training)
    same = before.keys() == after.keys() and all(after[n] is before[n] for n in before)
    return {"gathered": found, "same": same, "freed": local_bytes(training) == held}


def test_parameters_are_listed_as_shards_or_not_at_all(folder):
    """Gathered ones are other objects, which an optimizer does not know and nothing updates."""
    for result in run_in_group(keep_gathered, folder / "nf4", world_size=2):
        assert "layers.0.self_attn.q_proj.lora_A.weight is gathered" in result["gathered"]
        assert result["same"]
        assert result["freed"]


@pytest.mark.parametrize(
    ("level", "chosen"), [(1, [0, 1, 2]), (2, [0, 2]), (3, [0]), (7, [0]), (0.4, [0, 2])]
)
def test_layers_of_a_level_are_recomputed(folder, level, chosen):
    model = Checkpoint(folder / "original").build(torch.float32)
    checkpoint_activations_(model, recomputed_layers(level, 3))
    layers = decoder_layers(model)
    assert [n for n, layer in enumerate(layers) if layer.gradient_checkpointing] == chosen


def test_model_without_known_layers_is_refused(folder):
    model = Checkpoint(folder / "original").build(torch.float32)
    assert len(decoder_layers(model)) == 3
    model._no_split_modules = None
    with pytest.raises(
        UserError, match=r"LlamaForCausalLM names no decoder layer class .*model\.source\."
    ):
        decoder_layers(model)
