"""Weights of an NF4 checkpoint, as bitsandbytes' own types."""

import torch
from bitsandbytes.functional import QuantState

from workflow.lib.model.layers.nf4_linear import (
    CHECKPOINT_SUFFIX,
    CODE_SUFFIX,
    STATE_SUFFIX,
    decoded,
)
from workflow.lib.model.safetensors_reader import CheckpointReader


def stored_weight(reader: CheckpointReader, path: str) -> tuple[torch.Tensor, QuantState]:
    """Return codes (bytes, 1) and state of a linear or stack, on the CPU; it decodes to fp32."""
    suffixes = [*CHECKPOINT_SUFFIX.values(), *CODE_SUFFIX.values(), STATE_SUFFIX]
    parts = {
        suffix.removeprefix("weight."): reader.tensor(f"{path}.{suffix}")
        for suffix in suffixes
        if f"{path}.{suffix}" in reader
    }
    packed = parts.pop("weight")
    state = QuantState.from_dict(parts, device=torch.device("cpu"))
    state.dtype = torch.float32
    return packed, state


def dequantized_weight(reader: CheckpointReader, path: str) -> torch.Tensor:
    return decoded(*stored_weight(reader, path))
