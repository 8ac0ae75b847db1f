"""From the sharded adapter to files that anyone can load: PEFT's adapter, and optionally a merged model.

Everything runs in one process outside training. The merged model is streamed: one tensor and one output
shard in memory at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from safetensors.torch import save_file

from workflow.lib.artifacts import atomic_path, write_json
from workflow.lib.config import ExportConfig
from workflow.lib.errors import UserError
from workflow.lib.nf4 import CHECKPOINT_SUFFIX, CODE_SUFFIX, STATE_SUFFIX
from workflow.lib.quantize import ShardWriter, copy_companions, read_model_config
from workflow.lib.shards import DamagedError, read_whole
from workflow.lib.targets import adapter_scale
from workflow.lib.weights import CheckpointReader

PREFIX = "base_model.model."


def read_sharded_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder of shards whole, on the CPU, by PEFT's name. Needs no process group.

    Raises `UserError` if the folder is damaged, or the adapter has no effect (every B is zero) or is not finite.
    """
    try:
        tensors = read_whole(folder)
    except (OSError, DamagedError) as error:
        raise UserError(
            f"the sharded adapter in {folder} cannot be read ({error}). Train again: delete that folder and repeat "
            "the command; it continues from the last checkpoint."
        ) from None
    check_adapter(tensors)
    return tensors


def check_adapter(tensors: dict[str, torch.Tensor]) -> None:
    """Raise `UserError` if an adapter is empty, not finite, or zero."""
    if not tensors:
        raise UserError("the sharded adapter has no tensors. Train again.")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(
                f"adapter tensor {name} is not finite. Lower train.learning_rate and train again."
            )
    if not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name):
        raise UserError(
            "every B of the adapter is zero: it changes nothing. Train longer (train.max_steps)."
        )


def save_adapter(tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", config)


def dequantized_weight(reader: CheckpointReader, path: str) -> torch.Tensor:
    """Return the weight (out, in) of one linear of an NF4 checkpoint, fp32."""
    suffixes = [*CHECKPOINT_SUFFIX.values(), *CODE_SUFFIX.values(), STATE_SUFFIX]
    parts = {
        suffix.removeprefix("weight."): reader.tensor(f"{path}.{suffix}")
        for suffix in suffixes
        if f"{path}.{suffix}" in reader
    }
    packed = parts.pop("weight")
    state = QuantState.from_dict(parts, device=torch.device("cpu"))
    state.dtype = torch.float32
    weight: torch.Tensor = dequantize_4bit(packed, state)
    return weight


def merged_tensors(
    adapter: dict[str, torch.Tensor],
    adapter_config: dict[str, Any],
    *,
    original: CheckpointReader,
    nf4: CheckpointReader,
    onto: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and bf16 tensor of the merged model: `merged_weight` where there is an adapter, a module's own where it was trained whole.

    onto: `dequantized` (the weights that were trained on) or `original`. The sum is in fp32, rounded once.
    Raises `UserError` if an adapter belongs to no tensor of the model.
    """
    pending = {name.removesuffix(".lora_A.weight") for name in adapter if ".lora_A." in name}
    whole = {name for name in adapter if ".lora_" not in name}
    for name in original.names():
        if f"{PREFIX}{name}" in whole:
            whole.discard(f"{PREFIX}{name}")
            yield name, adapter[f"{PREFIX}{name}"].to(torch.bfloat16)
            continue
        path = name.removesuffix(".weight")
        key = f"{PREFIX}{path}"
        quantized = f"{path}.{STATE_SUFFIX}" in nf4
        weight = (
            dequantized_weight(nf4, path)
            if quantized and onto == "dequantized"
            else original.tensor(name)
        )
        if key in pending and path != name:
            pending.discard(key)
            scale = adapter_scale(adapter_config, path)
            weight = merged_weight(weight.float(), adapter, key, scale=scale)
        yield name, weight.to(torch.bfloat16) if weight.is_floating_point() else weight
    if pending | whole:
        raise UserError(
            f"the adapter has tensors for {min(pending | whole)}, which the model has not. Check model.source."
        )


def merged_weight(
    weight: torch.Tensor, adapter: dict[str, torch.Tensor], key: str, *, scale: float
) -> torch.Tensor:
    """Return W + s B A (out, in) fp32 for the linear that PEFT calls `key`; with DoRA its rows are given their trained length."""
    a_weight, b_weight = (adapter[f"{key}.lora_{part}.weight"].float() for part in "AB")
    total = weight + scale * (b_weight @ a_weight)
    magnitude = adapter.get(f"{key}.lora_magnitude_vector")
    if magnitude is None:
        return total
    factor: torch.Tensor = magnitude / torch.linalg.vector_norm(total, dim=1)
    return total * factor[:, None]


def write_merged(
    tensors: Iterator[tuple[str, torch.Tensor]],
    source: Path,
    folder: Path,
    *,
    settings: ExportConfig,
) -> int:
    """Write the merged model with the original's config and tokenizer; return its bytes."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, shard_bytes=int(settings.shard_gib * 2**30))
    for name, tensor in tensors:
        writer.add({name: tensor.contiguous()})
    writer.close()
    copy_companions(source, folder)
    write_json(folder / "config.json", read_model_config(source) | {"dtype": "bfloat16"})
    return writer.total_bytes
