"""The start of a Triton kernel.

Triton comes with PyTorch's CUDA and ROCm builds; it needs a C compiler and a folder for its cache.
Kernels compute in fp32 and round once."""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from workflow.lib.system.device_types import RECORDED


@torch.library.custom_op("workflow::launched", mutates_args=())
def launched(tensors: Sequence[torch.Tensor], kernel: str, flop: float) -> None:
    """Do nothing: a recorded device runs this in a kernel's place."""


LAUNCHED = torch.ops.workflow.launched.default

INSTALLED = importlib.util.find_spec("triton") is not None
WARPS = 4
MOST_PROGRAMS = 65_535  # along the second and third axis of a grid (CUDA)


def launch(
    kernel: str,
    grid: tuple[int, ...],
    out: torch.Tensor,
    *arguments: Any,
    flop: float = 0.0,
    **options: Any,
) -> None:
    """Start a kernel, `module.function` of `triton_code`, that writes to `out` and perhaps to other
    arguments. All are allocated before: kernels allocate nothing. A recorded device computes
    nothing. flop: of its matmuls; 0 for a kernel whose memory traffic decides its time."""
    assert all(count <= MOST_PROGRAMS for count in grid[1:]), f"{kernel}: a GPU refuses {grid}"
    if out.device.type == RECORDED:
        tensors = [x for x in (out, *arguments) if isinstance(x, torch.Tensor)]
        LAUNCHED(tensors, kernel, flop)
    elif all(grid):
        _function(kernel)[grid](out, *arguments, **options)


@functools.cache
def _function(kernel: str) -> Any:
    module, name = kernel.split(".")
    return getattr(importlib.import_module(f"workflow.lib.kernels.triton_code.{module}"), name)


def power_of_two(number: int) -> int:
    """Return the next power of two, the only sizes that Triton's ranges have."""
    return 1 << (number - 1).bit_length()
