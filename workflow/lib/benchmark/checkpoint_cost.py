"""What a checkpoint costs a training: blocks of steps with one checkpoint and blocks with none,
alternating in one run.

A block with a checkpoint ends when that is on disk, as if the next one were due at once. The order
within pairs alternates, and medians are taken, so that a change of the machine's load meets both.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from workflow.lib.artifacts.benchmark_record import CheckpointCost
from workflow.lib.distributed.world import World
from workflow.lib.training.checkpoint import saved_steps, step_dir


@dataclass
class CheckpointTrial:
    """Blocks of steps with and without a checkpoint, and the seconds that they took."""

    steps: Iterator[int]
    """Takes a step each time, and tells its number."""
    save: Callable[[int], None]
    """Starts a checkpoint after this step."""
    finish: Callable[[], None]
    """Waits until it is on the disk."""
    steps_of_block: int
    with_s: list[float] = field(default_factory=list)
    without_s: list[float] = field(default_factory=list)
    still_s: list[float] = field(default_factory=list)
    """Of each checkpoint, while training stands still."""

    def run(self, *, pairs: int) -> None:
        """Take `2 * pairs * steps_of_block` steps. Collective."""
        for pair in range(pairs):
            for with_one in (pair % 2 == 0, pair % 2 == 1):
                seconds = self.with_s if with_one else self.without_s
                seconds.append(self._block_s(with_one=with_one))

    def _block_s(self, *, with_one: bool) -> float:
        began = time.monotonic()
        for number in range(self.steps_of_block):
            step = next(self.steps)
            if with_one and number == 0:
                called = time.monotonic()
                self.save(step)
                self.still_s.append(time.monotonic() - called)
        self.finish()
        return time.monotonic() - began

    def cost(self, *, num_bytes: int) -> CheckpointCost:
        """Return the medians; num_bytes: of a checkpoint."""
        pairs = zip(self.with_s, self.without_s, strict=True)
        return CheckpointCost(
            step_s=statistics.median(self.without_s) / self.steps_of_block,
            cost_s=statistics.median(with_s - without_s for with_s, without_s in pairs),
            blocks_with_s=self.with_s,
            blocks_without_s=self.without_s,
            still_s=statistics.median(self.still_s),
            bytes=num_bytes,
        )


def remove_checkpoints(folder: Path, *, world: World) -> int:
    """Delete the checkpoints in `folder`; return the bytes of the newest. Collective."""
    newest = step_dir(folder, saved_steps(folder)[-1])
    num_bytes = sum(path.stat().st_size for path in newest.iterdir())
    dist.barrier(group=world.io_group)
    if world.is_main:
        shutil.rmtree(folder)
    return num_bytes
