"""Tiny checkpoints in the packed formats that are published, written without the library."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.mixtures import tiny_mixture


def fp8_checkpoint(
    folder: Path, *, block_size: tuple[int, int], family: str = "qwen3_moe", **changes: Any
) -> Path:
    """Save a tiny mixture in FP8 as it is published: all projections of decoder layers in E4M3,
    with a scale for each block.
    """
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


def _save(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, object]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": quantization, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
