"""GPU memory that calibrating a layer takes: too little is told before anything is computed.

Its largest moment is a linear's: the matrices over its inputs, its weight a few times, the layer
itself. Hidden states wait on the host.
"""

from collections.abc import Iterable

import torch
from torch import nn

from workflow.lib.quantization.calibration import quantized_linears
from workflow.lib.quantization.calibration_rows import BATCH_TOKENS
from workflow.lib.system.errors import setting_error
from workflow.lib.system.units import GIB

# fp32 matrices of (in, in) at a time: correlation, inverse, and its factor.
MATRICES = 3
# fp32 copies of a weight at a time: what is rounded, what is left, decoded by both methods, scales,
# and what indexing takes.
WEIGHT_COPIES = 7


def layer_bytes(layer: nn.Module) -> int:
    """Bytes on the GPU while a decoder layer is calibrated.

    One H200, torch 2.11, 2026-11-23: 3% and 4% above what was allocated (docs/results.md).
    """
    linears = quantized_linears(layer).values()
    widest = max(linear.in_features for linear in linears)
    largest = max(linear.weight.numel() for linear in linears)
    weights = sum(p.numel() * p.element_size() for p in layer.parameters())
    inputs = 4 * BATCH_TOKENS * widest
    # the layer, the original weights, and codes of a byte
    return 4 * (MATRICES * widest**2 + WEIGHT_COPIES * largest) + 5 * weights // 2 + 3 * inputs


def check_gpu_memory(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Raise `UserError` if a layer cannot be calibrated in the free memory of a GPU."""
    if device.type != "cuda":
        return
    needed, free = max(map(layer_bytes, layers)), torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise setting_error(
            "quantize.method",
            "calibrated",
            f"calibrating a layer of this model takes about {needed / GIB:.1f} GiB of a GPU, and "
            f"{free / GIB:.1f} GiB are free",
            "Set it to absmax, or calibrate on a GPU with more memory: the base can be copied",
        )
