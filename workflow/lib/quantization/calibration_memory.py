"""GPU memory that calibrating a layer takes: too little is told before anything is computed.

Its largest moment is a linear's or an expert's: the matrices over its inputs, its weight a few
times, the layer itself. Hidden states wait on the host, and so do the original experts.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from workflow.lib.model.layers.expert_stacks import experts_modules
from workflow.lib.quantization.calibrated_experts import LoadedStack, loaded_stacks
from workflow.lib.quantization.calibration_rows import BATCH_TOKENS
from workflow.lib.system.errors import setting_error
from workflow.lib.system.units import GIB

# fp32 matrices of (in, in) at a time: correlation, inverse, and its factor.
MATRICES = 3
# fp32 copies of a weight at a time: what is rounded, what is left, decoded by both methods, scales,
# and what indexing takes.
WEIGHT_COPIES = 7
# Experts of a token: the most of the families that we know (Qwen3-Next).
TOP_K = 10
# Bytes of a score of eager attention in 16 bits: capped or with a sink, and the softmax of it.
SCORE_BYTES = 8
# fp32 copies of a stack's scales at a time, of a block of 64 weights each.
SCALE_COPIES, BLOCK_SIZE = 5, 64


def layer_bytes(layer: nn.Module, *, scores: int = 0) -> int:
    """Bytes on the GPU while a decoder layer is calibrated.

    scores: those that eager attention makes at once. On one H200 (torch 2.11, 2026-11-25) this was
    15 to 29% above what was allocated for dense layers and a mixture, and 54% above where eager
    attention takes most (docs/results.md).
    """
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    stacks = [x for _, experts in experts_modules(layer) for x in loaded_stacks(experts).values()]
    shapes = [(x.out_features, x.in_features) for x in linears] + [x.shape[1:] for x in stacks]
    widest = max(in_features for _, in_features in shapes)
    largest = max(out_features * in_features for out_features, in_features in shapes)
    weights = sum(p.nbytes for p in layer.parameters())
    in_stacks = sum(stack.weights.nbytes for stack in stacks)
    matrices = 4 * (MATRICES * widest**2 + WEIGHT_COPIES * largest)
    inputs = 3 * 4 * BATCH_TOKENS * widest
    # the layer, and of its linears the original weights and codes of a byte
    layer_and_codes = weights + 3 * (weights - in_stacks) // 2
    # attention has ended before the matrices are made
    return layer_and_codes + max(matrices, SCORE_BYTES * scores) + inputs + _stack_bytes(stacks)


def _stack_bytes(stacks: Sequence[LoadedStack]) -> int:
    """Bytes that experts take besides: rows of a batch sorted by expert, in and out of both
    products, and the scales of the larger stack."""
    if not stacks:
        return 0
    widths = sum(sum(stack.shape[1:]) for stack in stacks)
    rows = TOP_K * BATCH_TOKENS * widths * stacks[0].weights.element_size()
    return rows + 4 * SCALE_COPIES * max(x.weights.numel() for x in stacks) // BLOCK_SIZE


def check_gpu_memory(layers: Iterable[nn.Module], device: torch.device, *, scores: int = 0) -> None:
    """Raise `UserError` if a layer cannot be calibrated in the free memory of a GPU. scores: as in
    `layer_bytes`."""
    if device.type != "cuda":
        return
    needed = max(layer_bytes(layer, scores=scores) for layer in layers)
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise setting_error(
            "quantize.method",
            "calibrated",
            f"calibrating a layer of this model takes about {needed / GIB:.1f} GiB of a GPU, and "
            f"{free / GIB:.1f} GiB are free",
            "Set it to absmax, or calibrate on a GPU with more memory: the base can be copied",
        )
