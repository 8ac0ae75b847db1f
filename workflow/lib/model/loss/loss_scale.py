"""A factor on the loss so that gradients in float16 neither vanish nor overflow (arXiv 1710.03740,
section 3.2).

A step whose gradients overflow is repeated with half the factor. So no step or row is lost, and
training does not depend on the factor. All processes see the same gradient norm and decide alike.
The factor is a power of two: without overflow or underflow it changes no bit."""

import math

import torch
from torch import nn

from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local

INITIAL = 2.0**16  # as torch.amp.GradScaler has it, and so the next one
STEPS_UNTIL_DOUBLED = 2000
SMALLEST = 1.0  # a smaller factor would not help against an overflow
LARGEST = 2.0**24


class LossScale:
    """`values` (3,) float64 on the CPU: the factor, steps since it changed, repeated steps."""

    def __init__(self) -> None:
        self.values = torch.tensor([INITIAL, 0.0, 0.0], dtype=torch.float64)

    @property
    def factor(self) -> float:
        return float(self.values[0])

    @property
    def repeats(self) -> int:
        """Number of steps that this run has repeated."""
        return int(self.values[2])

    def unscale_(self, training: nn.Module) -> None:
        params = trainable_parameters(training).values()
        gradients = [local(param.grad) for param in params if param.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.factor)

    def must_repeat(self, norm: float) -> bool:
        """Learn from a step's gradient norm: True if it overflowed and half the factor may help."""
        if math.isfinite(norm):
            self.values[1] += 1
            if self.values[1] >= STEPS_UNTIL_DOUBLED and self.factor < LARGEST:
                self.values[0] *= 2
                self.values[1] = 0
            return False
        if self.factor <= SMALLEST:
            return False
        self.values[0] /= 2
        self.values[1] = 0
        self.values[2] += 1
        return True


def loss_scale_of(training: nn.Module) -> LossScale | None:
    """Return the loss scale of a model that trains in float16, None of any other."""
    scale = getattr(training, "loss_scale", None)
    assert scale is None or isinstance(scale, LossScale)
    return scale
