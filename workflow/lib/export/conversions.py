"""Other formats of the merged model, whose folders Transformers opens (`forms.CONVERTED`).

`w4a16`: 4 bits as vLLM serves them, compressed-tensors' scheme W4A16 in its format `pack-quantized`
(https://github.com/neuralmagic/compressed-tensors). A group of inputs of a linear has a scale:
weight = scale * code, codes from -8 to 7. Of the scales `FACTORS` * max |weight| / 7.5 the one with
the least squared error is taken. A scale has 5 significant bits: so scale * code is exact in
bfloat16, and all readers have the same weights in every compute dtype."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.files.model_files import CONFIG
from workflow.lib.checkpoints.files.quantization_settings import QUANTIZATION
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.model.adaptable_linears import adaptable_linears
from workflow.lib.quantization.nf4_checkpoint import ShardWriter, copy_companions
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checksums, write_json

SCHEME, FORMAT = "W4A16", "pack-quantized"
GROUPS = (128, 64, 32)  # inputs with one scale, of vLLM's kernels
ROWS = 32  # outputs of these kernels are a multiple; other linears (a single gate) stay in 16 bits
LOWEST, HIGHEST = -8, 7  # codes
FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
SCALE_BITS = 5
WEIGHT = ".weight"


def check_w4a16(checkpoint: Checkpoint) -> None:
    """Raise `UserError` for a model whose linears and experts do not lie in its files one by one,
    or have inputs that no group divides."""
    with checkpoint.decoded() as reader:
        group_size(reader, packed_linears(checkpoint, reader)[0])


def write_w4a16(merged: Checkpoint, writer: ShardWriter, device: torch.device) -> dict[str, Any]:
    """Write the weights of a merged model that passes `check_w4a16`; return its
    `quantization_config`."""
    from compressed_tensors.compressors import BaseCompressor  # takes seconds
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme: Any = preset_name_to_scheme(SCHEME, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(FORMAT)
    with merged.stored() as reader:
        linears, others = packed_linears(merged, reader)
        scheme.weights.group_size = group_size(reader, linears)
        for name in reader.names():
            tensor, path = reader.tensor(name), name.removesuffix(WEIGHT)
            if path in linears:
                scales = group_scales(tensor.to(device).float(), scheme.weights.group_size)
                packed = {"weight": tensor.to(device), "weight_scale": scales.to(tensor.dtype)}
                parts = compressor.compress(packed, scheme)
                writer.add({f"{path}.{part}": value.cpu() for part, value in parts.items()})
            else:
                writer.add({name: tensor})
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=FORMAT,
        quantization_status="compressed",
        ignore=others,
    )
    settings: dict[str, Any] = quantization.model_dump(mode="json")
    return settings


def packed_linears(checkpoint: Checkpoint, reader: CheckpointReader) -> tuple[set[str], list[str]]:
    """Return the linears and experts to pack, by their names in files; and the other modules with
    matrices, by these names and the model's own."""
    model, stacks = checkpoint.model, checkpoint.stacks
    shapes = adaptable_linears(model)
    wanted = {f"{path}{WEIGHT}" for path, (rows, _) in shapes.items() if rows % ROWS == 0}
    wanted |= stacks.keys()
    linears: set[str] = set()
    others: set[str] = set()
    packed: set[str] = set()
    for stored in reader.names():
        if len(reader.shape(stored)) < 2:
            continue
        name, pattern = checkpoint.names.named(stored)
        is_alone = stored.endswith(WEIGHT) and len(reader.shape(stored)) == 2
        if name in wanted and is_alone and (pattern is None or name in stacks):
            linears.add(stored.removesuffix(WEIGHT))
            packed.add(name)
        else:
            others |= {stored.removesuffix(WEIGHT), name.removesuffix(WEIGHT)}
    if missing := sorted(wanted - packed):
        raise UserError(
            f"export.w4a16: {missing[0]} does not lie in the model's files by itself, and {SCHEME} "
            "packs each linear alone. Leave out export.w4a16; export.gguf has 4 bits too."
        )
    head = model.get_output_embeddings()
    return linears, sorted(others | {p for p, module in model.named_modules() if module is head})


def group_size(reader: CheckpointReader, linears: set[str]) -> int:
    """Return the largest group that divides the inputs of every linear."""
    inputs = {path: reader.shape(f"{path}{WEIGHT}")[1] for path in sorted(linears)}
    sizes = [size for size in GROUPS if all(count % size == 0 for count in inputs.values())]
    if not sizes:
        path, count = next((p, n) for p, n in inputs.items() if n % GROUPS[-1])
        raise UserError(
            f"export.w4a16: {path} has {count} inputs, which no group of {GROUPS} divides. Leave "
            "out export.w4a16; export.gguf has 4 bits too."
        )
    return sizes[0]


def group_scales(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return the scales (out, in / group) of a weight (out, in), fp32, with the least squared error
    of each group."""
    groups = weight.unflatten(1, (-1, group))
    largest = groups.abs().amax(-1) / -(LOWEST + 0.5)
    candidates = (_rounded(largest * factor) for factor in FACTORS)
    best: torch.Tensor = largest
    least = torch.full_like(largest, torch.inf)
    for scales in candidates:
        codes = (groups / scales[..., None]).round().clamp(LOWEST, HIGHEST)
        error = (codes * scales[..., None] - groups).square().sum(-1)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best


def _rounded(scales: torch.Tensor) -> torch.Tensor:
    """Round to `SCALE_BITS` significant bits; 0, of weights that are all 0, becomes 1."""
    mantissa, exponent = torch.frexp(scales.masked_fill(scales == 0, 1.0))
    rounded: torch.Tensor = torch.ldexp((mantissa * 2**SCALE_BITS).round(), exponent - SCALE_BITS)
    return rounded


class Conversion(NamedTuple):
    """Functions of a format.

    write: packs the weights of the model in a folder on a device, and returns the format's
    `quantization_config`. check: raises `UserError` if the merged model of a base cannot have this
    format."""

    write: Callable[[Checkpoint, ShardWriter, torch.device], dict[str, Any]]
    check: Callable[[Checkpoint], None]


CONVERSIONS: Mapping[str, Conversion] = {"w4a16": Conversion(write_w4a16, check_w4a16)}


def convert(
    form: str, merged: Checkpoint, folder: Path, *, shard_bytes: int, device: torch.device
) -> None:
    """Write a merged model in another format to an empty folder."""
    writer = ShardWriter(folder, shard_bytes=shard_bytes)
    quantization = CONVERSIONS[form].write(merged, writer, device)
    writer.close()
    copy_companions(merged.folder, folder)
    write_json(folder / CONFIG, merged.config | {QUANTIZATION: quantization})
    write_checksums(folder)
