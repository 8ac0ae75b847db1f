"""Mixtures of experts on their way out: a stock model with 4-bit stacks, the adapter in PEFT's
files, and the merged model in the layout that the family publishes, each against plain weights."""

import pytest
import torch
from bitsandbytes.nn import Params4bit
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.families import FamilyCase
from tests.support.mixtures import MIXTURES, tiny_mixture
from tests.support.models import decoded_by_hand, quantized, stock_base
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.converted_reader import ModuleNames
from workflow.lib.checkpoints.decoder_layers import expert_stacks
from workflow.lib.checkpoints.files.model_files import ADAPTER_WEIGHTS
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.export.adapter_files import merged_tensors, save_adapter
from workflow.lib.export.packed_stacks import (
    PREFIX,
    NF4Tensor,
    adapted_paths,
    exported_config,
    without_stacks,
)
from workflow.lib.model.adaptable_linears import adaptable_linears
from workflow.lib.model.architecture.adapter_targets import adapter_scale
from workflow.lib.system.files import read_json

IDS = torch.arange(3, 40)[None]
FAMILIES = sorted(MIXTURES)
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 6,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "rank_pattern": {r"layers\.1\.mlp\.experts\.down_proj": 3, "gate_proj": 2},
    "alpha_pattern": {"up_proj": 9},
    "inference_mode": True,
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A mixture, and its NF4 base."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_mixture(request.param, folder / "model")
    quantized(folder / "model", folder / "nf4")
    return folder


def meta(folder):
    return Checkpoint(folder / "model").build(torch.float32)


def stock(folder):
    return stock_base(folder, attention="eager")


@torch.no_grad()
def logits(model):
    found: torch.Tensor = model(IDS).logits
    return found


def trained_adapter(model):
    draw = torch.Generator().manual_seed(3)
    shapes = {path: (1, *size) for path, size in adaptable_linears(model).items()}
    shapes |= {path: stack.shape for path, stack in expert_stacks(model).items()}
    adapter = {}
    for path, (experts, out_features, in_features) in shapes.items():
        rank = 3 if path.endswith("layers.1.mlp.experts.down_proj") else 4
        rank = experts * (2 if path.endswith(".gate_proj") else rank)
        for name, shape in {"A": (rank, in_features), "B": (out_features, rank)}.items():
            values = 0.2 * torch.randn(shape, generator=draw)
            adapter[f"{PREFIX}{path}.lora_{name}.weight"] = values
    return adapter


def changes(model):
    """s B A of every parameter, in the family's own orientation, one expert after the other."""
    adapter, found = trained_adapter(model), {}
    for path in adaptable_linears(model):
        a, b = (adapter[f"{PREFIX}{path}.lora_{part}.weight"] for part in "AB")
        found[f"{path}.weight"] = adapter_scale(CONFIG, path) * b @ a
    for path, stack in expert_stacks(model).items():
        a, b = (adapter[f"{PREFIX}{path}.lora_{part}.weight"] for part in "AB")
        experts, rank = stack.shape[0], len(a) // stack.shape[0]
        deltas = []
        for expert in range(experts):
            columns = [column * experts + expert for column in range(rank)]
            deltas.append(b[:, columns] @ a[expert * rank : (expert + 1) * rank])
        delta = adapter_scale(CONFIG, path) * torch.stack(deltas)
        found[path] = delta.mT if stack.transposed else delta
    return found


def decoded_weights(folder, model):
    """What NF4 encodes of every parameter, in the family's own orientation."""
    found = {}
    with Checkpoint(folder / "nf4").decoded() as reader:
        for path in adaptable_linears(model):
            found[f"{path}.weight"] = decoded_by_hand(*reader.nf4_weight(f"{path}.weight"))
        for path, stack in expert_stacks(model).items():
            decoded = decoded_by_hand(*reader.nf4_weight(f"{path}.weight"))
            found[path] = decoded.mT if stack.transposed else decoded
    return found


def plain(folder, *, onto, adapted):
    """A stock model of ordinary weights: the reference."""
    model = stock(folder / "model")
    with torch.no_grad():
        weights = decoded_weights(folder, meta(folder)) if onto == "dequantized" else {}
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)
        for name, change in changes(meta(folder)).items() if adapted else ():
            model.get_parameter(name).add_(change)
    return model


def exported(folder, target, **changed):
    original, adapter = Checkpoint(folder / "model"), trained_adapter(meta(folder))
    names = original.names.peft(adapted_paths(adapter))
    save_adapter(
        {names.exported(name): tensor for name, tensor in adapter.items()},
        exported_config(CONFIG | changed, original.names, adapter),
        target,
    )
    return target


def test_stacks_of_a_stock_model_are_those_of_the_checkpoint_bit_for_bit(folder):
    model = stock(folder / "nf4")
    for name, weight in decoded_weights(folder, meta(folder)).items():
        if name in expert_stacks(meta(folder)):
            param = model.get_parameter(name)
            assert param.shape == weight.shape
            assert torch.equal(param.clone(), weight)
            for expert in range(len(weight)):
                assert torch.equal(param[expert], weight[expert])


def test_stacks_of_a_stock_model_stay_in_4_bits(folder):
    model = stock(folder / "nf4")
    logits(model)
    for path, stack in expert_stacks(meta(folder)).items():
        param = model.get_parameter(path)
        held = [param.packed, param.state.absmax, param.state.state2.absmax]  # type: ignore[attr-defined]
        weights = torch.Size(stack.shape).numel()
        assert sum(tensor.nbytes for tensor in held) < 0.54 * weights
        assert isinstance(param, NF4Tensor)
    others = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert any(isinstance(weight, Params4bit) for weight in others)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_stock_model_with_4_bit_stacks_computes_what_decoded_weights_do(folder, experts):
    model, reference = stock(folder / "nf4"), plain(folder, onto="dequantized", adapted=False)
    model.set_experts_implementation(experts)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-4, atol=1e-4)


def test_exported_configuration_names_the_parameters(folder, tmp_path):
    config = read_json(exported(folder, tmp_path, lora_dropout=0.1) / "adapter_config.json")
    parameters = config["target_parameters"]
    stacks = [*expert_stacks(meta(folder))]
    assert parameters[: len(stacks)] == stacks
    # what PEFT would take for the experts
    taken = [path for path in parameters[len(stacks) :] if path.endswith("_proj.weight")]
    dense = [path for path in adaptable_linears(meta(folder)) if ".mlp." in path]
    assert sorted(path.removesuffix(".weight") for path in taken) == sorted(dense)
    assert "o_proj" in config["target_modules"]
    assert config["lora_dropout"] == 0.0


def test_mixture_whose_layers_are_all_dense_names_parameters_too():
    """PEFT would take `gate_proj` for the experts that this model has not."""
    dense = FamilyCase("", {"mlp_only_layers": [0, 1]}, "qwen3_moe")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(dense.config("qwen3_moe"))
    paths = [*adaptable_linears(model)]
    trained = {"target_modules": paths, "rank_pattern": {}, "alpha_pattern": {}}
    adapter = [f"{PREFIX}{path}.lora_A.weight" for path in paths]
    found = exported_config(trained, ModuleNames(model), adapter)
    feed_forward = {f"{path}.weight" for path in paths if ".mlp." in path}
    assert len(feed_forward) == 6
    assert {*found["target_parameters"]} == feed_forward
    assert found["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_names_of_the_training_come_back_from_the_exported_files(folder, tmp_path):
    target, model = exported(folder, tmp_path), meta(folder)
    names = Adapter(target).names
    stored = load_file(target / ADAPTER_WEIGHTS)
    assert {names.trained(name) for name in stored} == trained_adapter(model).keys()
    assert any(".experts.base_layer.lora_A" in name for name in stored)


def test_adapter_on_one_stack_of_a_layer_has_the_outermost_wrapper(folder):
    names = Checkpoint(folder / "model").names
    *_, path = (path for path in names.stacks if path.endswith("gate_up_proj"))
    name = f"{PREFIX}{path}.lora_A.weight"
    assert names.peft({path}).exported(name) == (
        f"{PREFIX}{path.removesuffix('.gate_up_proj')}.lora_A.weight"
    )


def test_wrapped_model_is_stock_pefts_own(folder, tmp_path):
    """Stock calls alone, as a user would make them, on the model as published."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    tuned = PeftModel.from_pretrained(model, str(exported(folder, tmp_path)))
    with safe_open(tmp_path / ADAPTER_WEIGHTS, framework="pt") as file:
        stored = {name.replace(".weight", ".default.weight") for name in file.keys()}  # noqa: SIM118
    assert {name for name, _ in tuned.named_parameters() if ".lora_" in name} == stored
    expected = logits(plain(folder, onto="original", adapted=True))
    torch.testing.assert_close(logits(tuned), expected, rtol=1e-4, atol=2e-4)


def test_merged_model_keeps_the_digits_of_the_bias_that_chooses_experts(tmp_path):
    source = tiny_mixture("glm4_moe", tmp_path / "model", dtype=torch.bfloat16)
    stored = load_file(source / "model.safetensors")
    (name,) = (name for name in stored if name.endswith("e_score_correction_bias"))
    stored[name] = torch.linspace(0.1, 0.10001, 5)
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    quantized(source, tmp_path / "nf4")
    stacks = expert_stacks(meta(tmp_path))
    adapter = without_stacks(trained_adapter(meta(tmp_path)), stacks)
    with CheckpointReader(source) as original, Checkpoint(tmp_path / "nf4").decoded() as nf4:
        how = {"original": original, "nf4": nf4, "onto": "original", "stacks": stacks}
        merged = dict(merged_tensors(adapter, CONFIG, **how))
    assert torch.equal(merged.pop(name), stored[name])
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
