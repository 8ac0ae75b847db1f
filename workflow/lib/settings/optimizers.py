"""The optimizers of `train.optimizer`: what each keeps of a trained tensor, and what it reads.

Settings, checkpoints, planning and the builders in `training.optimizers` follow this table. Another
optimizer is a row here, a builder there, and a line of test data."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

BLOCK_SIZE = 256  # bitsandbytes/optim/optimizer.py, Optimizer2State.init_state


@dataclass(frozen=True)
class State:
    """A tensor of the shape of what is trained, cut over processes as that is."""

    name: str
    """In checkpoints; scales have `_absmax` behind it."""
    element_bytes: int = 4
    in_blocks: bool = False
    """Whether every 256 neighbouring elements of a shard share a scale in fp32."""

    def sizes(self, elements: int) -> list[int]:
        """Bytes of the tensors that a process keeps for a shard."""
        scales = [4 * math.ceil(elements / BLOCK_SIZE)] if self.in_blocks else []
        return [elements * self.element_bytes, *scales]


@dataclass(frozen=True)
class OptimizerKind:
    """One row: the states of the adapter's matrices, and of all else that is trained."""

    matrices: tuple[State, ...]
    others: tuple[State, ...]
    device_decides: bool = False
    """Whether the device leaves out the update of an unhealthy step by itself. Otherwise the host
    waits for every step's loss before the update."""

    def sizes(self, elements: int, *, matrix: bool = True) -> list[int]:
        """Bytes of all tensors that a process keeps for a shard of so many elements."""
        states = self.matrices if matrix else self.others
        return [size for state in states for size in state.sizes(elements)]


ADAM = (State("exp_avg"), State("exp_avg_sq"))
ADAM_8BIT = (
    State("exp_avg", element_bytes=1, in_blocks=True),
    State("exp_avg_sq", element_bytes=1, in_blocks=True),
)
OPTIMIZERS = {
    "adamw": OptimizerKind(ADAM, ADAM, device_decides=True),
    "adamw_8bit": OptimizerKind(ADAM_8BIT, ADAM_8BIT),
    "muon": OptimizerKind((State("momentum"),), ADAM),
}
# The one that keeps least.
SMALLEST = min(OPTIMIZERS, key=lambda name: sum(OPTIMIZERS[name].sizes(BLOCK_SIZE)))

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[*OPTIMIZERS]
