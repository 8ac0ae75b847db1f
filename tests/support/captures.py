"""What stands for a GPU's captures on a CPU, where a capture is the function itself."""

from collections.abc import Callable
from typing import Any

import torch

from workflow.lib.distributed.world import World
from workflow.lib.training.cuda_capture import Replay

Function = Callable[[], torch.Tensor]
NOTHING: Any = None
ALONE = World(0, 1, torch.device("cpu"), NOTHING, NOTHING)  # without a process group


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
