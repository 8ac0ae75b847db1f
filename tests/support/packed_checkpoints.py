"""Tiny checkpoints in the packed formats that are published, written without the library."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.support.mixtures import tiny_mixture
from tests.support.models import tiny_llama


def fp8_checkpoint(
    folder: Path, *, block_size: tuple[int, int], family: str = "qwen3_moe", **changes: Any
) -> Path:
    """Save a tiny mixture in FP8 as it is published: all projections of decoder layers in E4M3,
    with a scale for each block."""
    tensors = load_file(tiny_mixture(family, folder, **changes) / "model.safetensors")
    packed = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = tensor.to(torch.bfloat16)
            continue
        rows, columns = (-(-size // b) for size, b in zip(tensor.shape, block_size, strict=True))
        scales = torch.empty(rows, columns)
        codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                part = (
                    slice(row * block_size[0], (row + 1) * block_size[0]),
                    slice(column * block_size[1], (column + 1) * block_size[1]),
                )
                scales[row, column] = tensor[part].abs().max() / 448  # E4M3's largest value
                codes[part] = (tensor[part] / scales[row, column]).to(torch.float8_e4m3fn)
        packed |= {name: codes, f"{name}_scale_inv": scales}
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [*block_size],
        "modules_to_not_convert": ["lm_head"],
    }
    return _save(folder, packed, quantization)


def mxfp4_checkpoint(folder: Path) -> Path:
    """Save a tiny gpt-oss as it is published: experts in MXFP4, all else in bf16."""
    tensors = load_file(tiny_mixture("gpt_oss", folder) / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    packed = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor.to(torch.bfloat16)
            continue
        experts, in_features, out_features = tensor.shape
        size = (experts, out_features, in_features // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(121, 126, size, generator=draw, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return _save(folder, packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def integer_checkpoint(
    folder: Path, method: str, *, bits: int = 4, said: dict[str, Any] | None = None
) -> Path:
    """Save a tiny llama in random codes of GPTQ (with inputs in no order) or AWQ, groups of 16
    inputs, packed code by code; said: what its config.json has besides."""
    tensors = load_file(tiny_llama(folder) / "model.safetensors")
    draw = torch.Generator().manual_seed(7)
    packed = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = tensor.to(torch.bfloat16)
            continue
        out, inputs = tensor.shape
        groups, linear = inputs // 16, name.removesuffix(".weight")
        codes = torch.randint(0, 2**bits, (inputs, out), generator=draw)
        zeros = torch.randint(0, 2**bits, (groups, out), generator=draw)
        scales = torch.rand(groups, out, generator=draw) / 50
        packed[f"{linear}.scales"] = scales.half()
        if method == "gptq":
            index = torch.arange(inputs)[torch.randperm(inputs, generator=draw)] // 16
            packed[f"{linear}.g_idx"] = index.int()
            packed[f"{linear}.qweight"] = _packed(codes.T, bits).T.contiguous()
            packed[f"{linear}.qzeros"] = _packed(zeros, bits)
        else:
            columns = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # in the order of AWQ's kernels
            order = (torch.arange(out // 8)[:, None] * 8 + columns).flatten()
            packed[f"{linear}.qweight"] = _packed(codes[:, order], bits)
            packed[f"{linear}.qzeros"] = _packed(zeros[:, order], bits)
    settings = {"quant_method": method, "bits": bits, "group_size": 16}
    return _save(folder, packed, settings | (said or {}))


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes (rows, columns) as int32 (rows, columns * bits / 32), the first lowest."""
    rows = []
    for row in codes.tolist():
        words = [row[at : at + 32 // bits] for at in range(0, len(row), 32 // bits)]
        rows.append([sum(code << (bits * i) for i, code in enumerate(word)) for word in words])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def compressed_checkpoint(folder: Path, scheme: str) -> Path:
    """Save a tiny llama as compressed-tensors itself does, by one of its schemes (`W4A16`, ...)."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    tiny_llama(folder, **sizes, num_attention_heads=8, num_key_value_heads=8)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = QuantizationConfig(config_groups={scheme: ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _fit_scales_(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder


def _fit_scales_(linear: Any) -> None:
    weight, (rows, columns) = linear.weight, linear.weight_scale.shape
    parts = weight.view(rows, len(weight) // rows, columns, weight.shape[1] // columns)
    least, most = parts.amin((1, 3)), parts.amax((1, 3))
    whole = None
    if hasattr(linear, "weight_global_scale"):
        whole = generate_gparam(least.min(), most.max())
        linear.weight_global_scale.data.copy_(whole)
    args = linear.quantization_scheme.weights
    scale, zero = calculate_qparams(least, most, args, global_scale=whole)
    linear.weight_scale.data = scale
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data = zero


def _save(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": quantization, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
