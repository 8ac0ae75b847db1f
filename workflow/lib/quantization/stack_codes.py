"""A stack of experts in NF4, quantized by expert, stored as one linear (experts * out, in).

Scales are nested when all experts have theirs, because the mean is that of the whole stack. Only
the shape [experts, out, in] in `quant_state` tells a stack from a linear."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from bitsandbytes.functional import quantize_4bit

from workflow.lib.model.layers.expert_stacks import ExpertStack
from workflow.lib.quantization.nf4_codes import store_scales, stored_tensors
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import setting_error


def check_blocks(stacks: Mapping[str, ExpertStack], settings: QuantizeConfig) -> None:
    """Raise `UserError` if an expert would not begin at a block of weights that share a scale."""
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


class ExpertCodes(NamedTuple):
    """An expert in NF4: codes (out * in / 2, 1) uint8 (CPU), and fp32 scales by block (device)."""

    packed: torch.Tensor
    scales: torch.Tensor


def quantize_expert(weight: torch.Tensor, settings: QuantizeConfig) -> ExpertCodes:
    packed, state = quantize_4bit(
        weight.contiguous(),
        blocksize=settings.block_size,
        compress_statistics=False,
        quant_type="nf4",
    )
    return ExpertCodes(packed.cpu(), state.absmax)


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
