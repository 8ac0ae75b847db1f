"""Stacks of experts as bitsandbytes packs them, on the CPU."""

import torch
from bitsandbytes.functional import quantize_4bit

from workflow.lib.model.layers.frozen_stack import FrozenStack
from workflow.lib.model.layers.weight_storage import NF4Spec


def packed_stack(weights: torch.Tensor, *, double_quant: bool = True) -> FrozenStack:
    """Return weights (experts, out, in) as a stack whose bytes are those of bitsandbytes."""
    experts, out_features, in_features = weights.shape
    shape = (experts * out_features, in_features)
    options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": double_quant}
    data, state = quantize_4bit(weights.reshape(shape), **options)
    parts = {"weight": data, "absmax": state.absmax, "quant_map": state.code}
    offset = torch.zeros(())
    if double_quant:
        nested, offset = state.state2, state.offset
        parts |= {"nested_absmax": nested.absmax, "nested_quant_map": nested.code}
    spec = NF4Spec(shape, 64, double_quant, float(offset), experts)
    stack = FrozenStack(spec, compute_dtype=torch.float32).to_empty(device="cpu")
    stack.nested_offset.copy_(offset)
    for name, part in parts.items():
        stored = part.flatten().view(torch.uint8)
        getattr(stack, name).data.view(torch.uint8)[: len(stored)].copy_(stored)
    return stack
