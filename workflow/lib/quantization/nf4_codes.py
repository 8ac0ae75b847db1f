"""NF4 in bitsandbytes' layout, from codes and scales that were chosen elsewhere.

A weight decodes as w = code_table[code] * scale[block]; blocks run over the flattened weight. With
double quantization the scales decode as scale = nested_table[s] * nested_scale + offset, so a scale
is known only after nesting, and codes are chosen for decoded scales.

A stack of experts is stored as one linear (experts * out, in); only the shape in `quant_state`
distinguishes them. Its scales are nested after all experts' scales: the mean is the stack's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from bitsandbytes.functional import (
    QuantState,
    dequantize_blockwise,
    get_4bit_type,
    quantize_4bit,
    quantize_blockwise,
)

from workflow.lib.checkpoints.decoder_layers import ExpertStack
from workflow.lib.kernels.nf4.decode import NESTED_BLOCK_SIZE
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import setting_error


@dataclass(frozen=True)
class Scales:
    """The scales of a weight, one for each block: stored and decoded."""

    decoded: torch.Tensor  # fp32, shape (blocks,)
    stored: torch.Tensor  # uint8 with double quantization, else fp32; shape (blocks,)
    nested: QuantState | None
    """Decoding of `stored` without `offset`; None without double quantization."""
    offset: torch.Tensor | None  # fp32, shape (): the mean of the scales


def store_scales(scales: torch.Tensor, *, double_quant: bool) -> Scales:
    """Return the scales (blocks,) fp32 in the storage of bitsandbytes' `quantize_4bit`."""
    if not double_quant:
        return Scales(decoded=scales, stored=scales, nested=None, offset=None)
    offset = scales.mean()
    stored, nested = quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK_SIZE)
    decoded = dequantize_blockwise(stored, nested) + offset
    return Scales(decoded=decoded, stored=stored, nested=nested, offset=offset)


def code_table(device: torch.device) -> torch.Tensor:
    """Return the values (16,) fp32 of the NF4 codes, rising."""
    table: torch.Tensor = get_4bit_type("nf4", device=device)
    return table.float()


def nearest_codes(weight: torch.Tensor, scale: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Return the codes (int64) whose values times `scale` are nearest to `weight`. edges: (15,)
    fp32, midpoints of the table. A scale of 0 decodes to 0."""
    ratio = torch.where(scale == 0, 0.0, weight / scale)
    return torch.bucketize(ratio, edges)


def code_edges(table: torch.Tensor) -> torch.Tensor:
    """Return the midpoints (15,) fp32 between the values of neighbouring codes."""
    return (table[1:] + table[:-1]) / 2


def stored_tensors(
    packed: torch.Tensor,
    scales: Scales,
    settings: QuantizeConfig,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return checkpoint tensors of a weight by suffix, CPU. dtype: before quantization."""
    state = QuantState(
        absmax=scales.stored,
        shape=torch.Size(shape),
        dtype=dtype,
        blocksize=settings.block_size,
        code=code_table(scales.stored.device),
        quant_type="nf4",
        offset=scales.offset,
        state2=scales.nested,
    )
    parts = {"weight": packed}
    parts |= {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
    return {name: part.cpu().contiguous() for name, part in parts.items()}


def packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes a byte, the first in the high half, shape (bytes, 1)."""
    if codes.numel() % 2:
        codes = torch.cat([codes, codes.new_zeros(1)])
    return (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)


def check_blocks(stacks: Mapping[str, ExpertStack], settings: QuantizeConfig) -> None:
    """Raise `UserError` if an expert would not begin at a block of a scale."""
    for path, stack in stacks.items():
        _, out_features, in_features = stack.shape
        weights = out_features * in_features
        if weights % settings.block_size:
            raise setting_error(
                "quantize.block_size",
                settings.block_size,
                f"each of the experts in {path} has {out_features} x {in_features} weights, which "
                "must be whole blocks",
                "Set a smaller block_size, or choose another model.source",
            )


ExpertCodes = tuple[torch.Tensor, torch.Tensor]
"""An expert in NF4: codes (out * in / 2, 1) uint8 (CPU), and fp32 scales by block (device)."""


def quantize_expert(weight: torch.Tensor, settings: QuantizeConfig) -> ExpertCodes:
    """Return the packed codes (CPU) of an expert's weight (out, in), and its blocks' absmax, as
    bitsandbytes quantizes it."""
    packed, state = quantize_4bit(
        weight.contiguous(),
        blocksize=settings.block_size,
        compress_statistics=False,
        quant_type="nf4",
    )
    return packed.cpu(), state.absmax


def stack_tensors(
    experts: Sequence[ExpertCodes],
    settings: QuantizeConfig,
    *,
    shape: torch.Size,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return a stack's checkpoint tensors by suffix, CPU; shape (out, in), dtype: an expert's."""
    packed, scales = zip(*experts, strict=True)
    return stored_tensors(
        torch.cat(packed),
        store_scales(torch.cat(scales), double_quant=settings.double_quant),
        settings,
        shape=(len(experts), *shape),
        dtype=dtype,
    )


def quantize_stack(
    experts: Iterable[torch.Tensor],
    settings: QuantizeConfig,
    *,
    device: torch.device,
    transposed: bool,
) -> dict[str, torch.Tensor]:
    """Quantize the experts (out, in), or (in, out) if `transposed`, one by one on `device`; return
    as `stack_tensors`. out * in: whole blocks."""
    quantized = []
    for expert in experts:
        weight = (expert.T if transposed else expert).to(device)
        quantized.append(quantize_expert(weight, settings))
    return stack_tensors(quantized, settings, shape=weight.shape, dtype=weight.dtype)
