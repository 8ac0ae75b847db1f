"""What stands for a GPU's captures on a CPU, where a capture is the function itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workflow.lib.distributed.world import World
from workflow.lib.training.cuda_capture import Replay

Function = Callable[[], torch.Tensor]
NOTHING: Any = None
ALONE = World(0, 1, torch.device("cpu"), NOTHING, NOTHING)  # without a process group


class BreaksOff:
    """Captures that run until a decoder layer is reached, forward or backward, and fail there.

    Of what a GPU captures nothing is computed, so gradients are then what they were."""

    def __init__(self, training: nn.Module, layer: nn.Module, *, backward: bool) -> None:
        self.count, self.replays = 0, 0
        self._training, self._layer, self._backward = training, layer, backward

    def __call__(self, function: Function) -> Replay:
        self.count += 1

        def fail(*ignored: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        if self._backward:
            hook = self._layer.register_full_backward_pre_hook(fail)
        else:
            hook = self._layer.register_forward_pre_hook(fail)
        gradients = [p.grad for p in self._training.parameters() if p.grad is not None]
        before = [gradient.clone() for gradient in gradients]
        try:
            function()
        finally:
            hook.remove()
            for gradient, values in zip(gradients, before, strict=True):
                gradient.copy_(values)
        raise AssertionError("the layer was not reached")


class Captures:
    """Captures, counted."""

    def __init__(self, *, fails: bool = False) -> None:
        self.count, self.replays, self._fails = 0, 0, fails

    def __call__(self, function: Function) -> Replay:
        self.count += 1
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        def replay() -> torch.Tensor:
            self.replays += 1
            return function()

        return replay
