"""A process of a stage that works alone or beside others: each has its device and its pulse."""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from workflow.lib.distributed.heartbeat import JOIN_S, Pulse
from workflow.lib.distributed.world import World, process_group
from workflow.lib.model.backends import choose_device
from workflow.lib.system.environment import is_worker

logger = logging.getLogger("workflow")

TIMEOUT_S = 24 * 3600.0  # a process may wait this long for the share of another, if that moves


@dataclass(frozen=True)
class Process:
    """This process. `world`: those that share the work, or None; `sharded`: the weights too."""

    device: torch.device
    world: World | None
    pulse: Pulse
    sharded: bool

    @property
    def is_main(self) -> bool:
        """Whether it is the one that writes and tells."""
        return self.world is None or self.world.is_main

    @property
    def shards(self) -> World | None:
        """The processes that share the weights."""
        return self.world if self.sharded else None


def join(stack: ExitStack, *, sharded: bool) -> Process:
    """Return this process, which has joined the others until `stack` closes."""
    pulse = stack.enter_context(
        Pulse(rank=int(os.environ.get("RANK", 0)), start_s=JOIN_S, step_s=JOIN_S)
    )
    device = choose_device()
    if not is_worker():
        return Process(device, None, pulse, sharded)
    world = stack.enter_context(process_group(device.type, timeout_s=TIMEOUT_S))
    if not world.is_main:
        logger.setLevel(logging.CRITICAL)  # what the settings break is told once
    return Process(world.device, world, pulse, sharded)
