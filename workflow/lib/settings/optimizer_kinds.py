"""The optimizers of `train.optimizer`: both are AdamW, with different storage of moments.

Settings, checkpoints, planning and `training.optimizers` follow this table."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

BLOCK_SIZE = 256  # bitsandbytes/optim/optimizer.py, Optimizer2State.init_state
MOMENTS = ("exp_avg", "exp_avg_sq")  # names in checkpoints; their scales end in `_absmax`


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer's storage of moments, and the place of its update decisions."""

    element_bytes: int
    in_blocks: bool
    """Whether every 256 neighbouring elements of a shard share a scale in fp32."""
    device_decides: bool
    """Whether the device leaves out the update of an unhealthy step by itself. Otherwise the host
    waits for every step's loss before the update."""

    def moment_bytes(self, elements: int) -> int:
        """Bytes of both moments and their scales for a shard of so many elements."""
        scales = 4 * math.ceil(elements / BLOCK_SIZE) if self.in_blocks else 0
        return len(MOMENTS) * (elements * self.element_bytes + scales)


OPTIMIZERS = {
    "adamw": OptimizerKind(element_bytes=4, in_blocks=False, device_decides=True),
    "adamw_8bit": OptimizerKind(element_bytes=1, in_blocks=True, device_decides=False),
}
# The one with the least memory.
SMALLEST = min(OPTIMIZERS, key=lambda name: OPTIMIZERS[name].moment_bytes(BLOCK_SIZE))

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[*OPTIMIZERS]
