"""Settings of quantization count where weights are packed, and nowhere else."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import tiny_llama
from tests.support.packed_checkpoints import fp8_checkpoint
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.quantization_settings import QUANTIZATION, without_quantization
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.system.errors import UserError

LEFT_BEHIND: dict[str, Any] = {
    "null": None,
    "empty": {},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def say(folder, settings, *, within=None):
    config = json.loads((folder / "config.json").read_text())
    config |= {QUANTIZATION: settings} if within is None else {within: {QUANTIZATION: settings}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("settings", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_what_is_said_over_16_bit_weights_counts_as_absent_everywhere(tmp_path, caplog, settings):
    folder = tiny_llama(tmp_path, num_hidden_layers=1)
    plain = describe_checkpoint(Checkpoint.open(folder))
    stock = {"device": torch.device("cpu"), "compute_dtype": torch.float32, "attention": "sdpa"}
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    logits = load_base(Checkpoint(folder), **stock)(ids).logits
    say(folder, settings)
    found = describe_checkpoint(Checkpoint.open(folder))
    assert (found.kinds, found.source_dtype) == (plain.kinds, plain.source_dtype)
    told = [x.message for x in caplog.records if "speaks of quantization" in x.message]
    assert len(told) == bool(settings)
    assert QUANTIZATION not in Checkpoint(folder).plain_config
    assert torch.equal(load_base(Checkpoint(folder), **stock)(ids).logits, logits)


def test_scales_without_anything_packed_are_refused_by_name(tmp_path):
    folder = tiny_llama(tmp_path, num_hidden_layers=1)
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    tensors = load_file(folder / "model.safetensors") | {scale: torch.ones(1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    say(folder, {"quant_method": "compressed-tensors"})
    with pytest.raises(UserError, match=rf"'compressed-tensors'\), and {scale} is a scale, but no"):
        describe_checkpoint(Checkpoint.open(folder))


def test_format_that_is_not_decoded_is_refused_where_weights_are_packed(tmp_path):
    save_file({"a._qdata": torch.ones(2)}, tmp_path / "model.safetensors")
    config = {QUANTIZATION: {"quant_method": "hqq"}}
    with pytest.raises(UserError, match=r"quantized already \(.*'hqq'; "):
        without_quantization(config, tmp_path / "config.json")


@pytest.mark.parametrize("newer", [True, False], ids=["said twice", "by MLX's name alone"])
def test_weights_that_mlx_has_quantized_are_refused_by_its_name(tmp_path, newer):
    folder = tiny_llama(tmp_path, num_hidden_layers=1)
    path, linear = folder / "model.safetensors", "model.layers.0.mlp.up_proj"
    codes = torch.zeros(176, 80 // 8, dtype=torch.int32).view(torch.uint32)
    parts = {"weight": codes, "scales": torch.ones(176, 1), "biases": torch.ones(176, 1)}
    tensors = load_file(path) | {f"{linear}.{name}": part for name, part in parts.items()}
    save_file(tensors, path, metadata={"format": "mlx"})
    settings = {"group_size": 64, "bits": 4}
    config = json.loads((folder / "config.json").read_text()) | {"quantization": settings}
    config |= {QUANTIZATION: settings} if newer else {}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"quantized already \(by MLX: quantization = .*'bits': 4"):
        describe_checkpoint(Checkpoint.open(folder))


def test_config_json_alone_is_believed(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(UserError, match=r"quantized already \(.*'quanto'; "):
        without_quantization({QUANTIZATION: {"quant_method": "quanto"}}, path)
    packed = {"text_config": {QUANTIZATION: {"quant_method": "fp8"}, "x": 1}}
    assert without_quantization(packed, path) == {"text_config": {"x": 1}}


@pytest.mark.parametrize("within", [None, "text_config"])
@pytest.mark.parametrize("said", ["fp8", "", [], 0, False, {"quant_method": ["fp8"]}], ids=str)
def test_settings_of_another_type_are_refused(tmp_path, said, within):
    folder = say(tiny_llama(tmp_path, num_hidden_layers=1), said, within=within)
    message = (
        r"quantization_config( = .*|\.quant_method = \['fp8'\]): it must be an? \w+ or null\. Give"
    )
    with pytest.raises(UserError, match=message):
        describe_checkpoint(Checkpoint.open(folder))


def test_packed_weights_of_which_config_json_says_nothing_are_refused(tmp_path):
    """Transformers would load their codes as if they were weights."""
    folder = say(fp8_checkpoint(tmp_path, block_size=(16, 16)), None)
    with pytest.raises(UserError, match=r"packed.*config\.json says nothing of it"):
        describe_checkpoint(Checkpoint.open(folder))
