"""What a checkpoint costs a training: blocks of steps with one checkpoint and blocks with none,
alternating in one run.

A block with a checkpoint ends when that is on disk, as if the next one were due at once. The order
within pairs alternates, and medians are taken, so that a change of the machine's load meets both.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from workflow.lib.distributed.world import World
from workflow.lib.training.checkpoint import CheckpointWriter, saved_steps, step_dir
from workflow.lib.training.optimizers import ShardwiseAdam


def measure_checkpoints(
    stepping: Iterator[int],
    training: nn.Module,
    optimizer: ShardwiseAdam,
    *,
    folder: Path,
    pairs: int,
    block: int,
    world: World,
    saving: Callable[[], None],
) -> dict[str, Any]:
    """Take `2 * pairs * block` steps; return what one checkpoint cost, as `cost`. Collective.

    stepping: takes a step each time, and tells its number. folder: to be made, on the disk in
    question; it is
    deleted in the end. saving: called before a checkpoint is waited for.
    """
    blocks: dict[bool, list[float]] = {True: [], False: []}
    still: list[float] = []
    writer = CheckpointWriter(folder, keep=2, identity="measured", world=world)
    for pair in range(pairs):
        for with_one in (pair % 2 == 0, pair % 2 == 1):
            began = time.monotonic()
            for number in range(block):
                step = next(stepping)
                if with_one and number == 0:
                    called = time.monotonic()
                    writer.save(training, optimizer, step=step)
                    still.append(time.monotonic() - called)
            saving()
            writer.wait()
            blocks[with_one].append(time.monotonic() - began)
    newest = step_dir(folder, saved_steps(folder)[-1])
    num_bytes = sum(path.stat().st_size for path in newest.iterdir())
    dist.barrier(group=world.io_group)
    if world.is_main:
        shutil.rmtree(folder)
    return cost(blocks[True], blocks[False], block=block) | {
        "still_s": statistics.median(still),
        "bytes": num_bytes,
    }


def cost(with_one: list[float], without: list[float], *, block: int) -> dict[str, Any]:
    """Return the median step and what a checkpoint adds to a block (median of the pairs), seconds,
    and the blocks.
    """
    added = (one - other for one, other in zip(with_one, without, strict=True))
    return {
        "step_s": statistics.median(without) / block,
        "cost_s": statistics.median(added),
        "blocks_with_s": with_one,
        "blocks_without_s": without,
    }
