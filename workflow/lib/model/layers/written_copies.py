"""Copies in 8 bits that a kernel writes beside the tensor that it makes, for matmuls that take it.

Rounded by itself, the tensor would be read once more. What makes a tensor cannot know what takes
it, so a `Maker` learns that when matmuls take its first one. They take a copy once: it lives no
longer than their operand would."""

from dataclasses import dataclass
from typing import Protocol

import torch

from workflow.lib.kernels.eight_bits.rounding import Format, Rounded, unfilled
from workflow.lib.kernels.rows.norm import normed

COPY = "workflow_copy"  # attribute of a tensor


class Takers(Protocol):
    """Matmuls of a model, which multiply in 8 bits at some times and not at others."""

    forward: Format | None  # what they round to now


class Maker:
    """What makes tensors (a norm), as the matmuls see it that take them."""

    def __init__(self) -> None:
        self.takers: Takers | None = None
        """None: no matmul has taken a tensor yet."""

    def new_copy(self, like: torch.Tensor) -> Rounded | None:
        """Return a copy to fill for a tensor (..., width); None: not wanted, or no kernel."""
        form = None if self.takers is None else self.takers.forward
        if form is None or not normed.works_on(like.device, like.dtype):
            return None
        width = like.shape[-1]
        return unfilled((like.numel() // width, width), form, like.device)


@dataclass
class _Note:
    maker: Maker
    copy: Rounded | None
    version: int  # of the tensor that was copied


def note(tensor: torch.Tensor, maker: Maker, copy: Rounded | None) -> None:
    """Note on a tensor, and on none of its views, who made it and the copy that was written."""
    setattr(tensor, COPY, _Note(maker, copy, tensor._version))


def taken_copy(tensor: torch.Tensor, takers: Takers) -> Rounded | None:
    """Return the copy for these matmuls, which take it; None if it is absent or outdated."""
    noted: _Note | None = getattr(tensor, COPY, None)
    if noted is None:
        return None
    noted.maker.takers = takers
    copy, noted.copy = noted.copy, None
    if copy is None or copy.form != takers.forward or noted.version != tensor._version:
        return None
    return copy
