"""Several processes that share one evaluation, or the hashing of files: every n-th item each.

Answers are gathered in the order of the items, so results do not depend on the number of processes.
Every forward of a sharded model is collective: in `in_step` a process that has finished its share
runs forwards of a single token, without use, until all have finished."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from workflow.lib.distributed.heartbeat import JOIN_S, Pulse
from workflow.lib.distributed.world import World, largest_of_all, process_group
from workflow.lib.model.backends import choose_device
from workflow.lib.system.checksums import RecordedFile, findings, largest_first, refuse_damaged
from workflow.lib.system.environment import is_worker
from workflow.lib.system.errors import UserError, setting_error

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Largest share of a GPU's memory for the weights of a copy; the rest is for activations.
WEIGHTS_SHARE = 0.6
# The same for a slice: there are no other GPUs, and batches shrink to the rest.
SLICE_SHARE = 0.9
HOST_SHARE = 0.6  # of free memory, for all copies in float32


@dataclass(frozen=True)
class Division:
    """The number of evaluating processes, and whether they share one copy of the weights."""

    processes: int
    sharded: bool


def divide(
    processes: int | str,
    *,
    shard: bool | Literal["auto"],
    folders: Sequence[Path],
    gpu_bytes: Sequence[int],
) -> Division:
    """Return the division of an evaluation by `processes` and `shard`. `auto`: a process a GPU,
    sharded only if models do not fit on one; one on the CPU. folders: safetensors; gpu_bytes: of
    each GPU. Raises `UserError` for more processes than GPUs, copies that do not fit, or a single
    process to shard over."""
    largest = max(sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in folders)
    fits = all(largest <= WEIGHTS_SHARE * total for total in gpu_bytes)
    alone = processes == 1 or len(gpu_bytes) == 1
    sharded = shard is True or (shard == "auto" and not fits and not alone)
    most = len(gpu_bytes) if fits or sharded else 1
    count = max(1, most) if processes == "auto" else int(processes)
    if gpu_bytes and count > most:
        raise setting_error(
            "evaluate.processes",
            processes,
            f"{largest / 2**30:.1f} GiB of weights leave room for {most} process(es) on "
            f"{len(gpu_bytes)} GPU(s)",
            "Lower it, or set auto",
        )
    if sharded:
        _check_shards(largest, count=count, gpu_bytes=gpu_bytes)
    return Division(count, sharded)


def fits(folder: Path, division: Division, *, gpu_bytes: Sequence[int], host_bytes: int) -> bool:
    """Tell whether processes of `division` can load a 16-bit safetensors model (CPU: float32)."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not gpu_bytes:
        copies = 1 if division.sharded else division.processes
        return 2 * size * copies <= HOST_SHARE * host_bytes
    if division.sharded:
        return size / division.processes <= SLICE_SHARE * min(gpu_bytes)
    return size <= WEIGHTS_SHARE * min(gpu_bytes)


def _check_shards(largest: int, *, count: int, gpu_bytes: Sequence[int]) -> None:
    if count == 1:
        raise setting_error(
            "evaluate.shard",
            True,
            "one process has nobody to share the weights with",
            "Set evaluate.processes to 2 or more, or shard to auto",
        )
    if gpu_bytes and largest / count > SLICE_SHARE * min(gpu_bytes):
        raise setting_error(
            "evaluate.processes",
            count,
            f"a slice of {largest / count / 2**30:.1f} GiB leaves a GPU of "
            f"{min(gpu_bytes) / 2**30:.1f} GiB too little",
            "Use more GPUs, or measure no model in 16 bits (evaluate.subjects, export.merged)",
        )


def shared_out(
    items: Sequence[ItemT],
    compute: Callable[[list[ItemT]], Sequence[ResultT]],
    *,
    world: World | None,
    model: nn.Module | None = None,
) -> list[ResultT]:
    """Return `compute(items)`, one result an item; each process computes its share (perhaps empty).
    Collective; None: alone. model: the model in `compute`, if it may be sharded."""
    if world is None or world.size == 1:
        return list(compute(list(items)))
    with in_step(model, world=world):
        own_part = list(compute(list(items[world.rank :: world.size])))
    parts = world.gathered(own_part)
    results: list[Any] = [None] * len(items)
    for rank, part in enumerate(parts):
        results[rank :: world.size] = part
    return results


def is_sharded(model: nn.Module | None) -> bool:
    return isinstance(model, FSDPModule)


@contextmanager
def in_step(model: nn.Module | None, *, world: World | None) -> Iterator[None]:
    """Let processes run different numbers of forwards of a sharded model in the block, and leave it
    together. Collective; no effect on other models."""
    if model is None or world is None or not is_sharded(model):
        yield
        return

    def announce(*_: object) -> None:  # whether a process still runs forwards
        largest_of_all([True], world=world)

    # before FSDP's hook, which gathers weights: all must know by then that they take part
    hook = model.register_forward_pre_hook(announce, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    one_token = torch.zeros((1, 1), dtype=torch.long, device=world.device)
    while any(largest_of_all([False], world=world)):
        with torch.no_grad():
            model(input_ids=one_token, use_cache=False)


def agreed(value: ItemT, *, world: World | None) -> ItemT:
    """Return the main process's `value` on every process. Collective; None = alone."""
    if world is None or world.size == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0, group=world.io_group)
    result: ItemT = values[0]
    return result


def check_recorded(files: Iterable[RecordedFile], *, world: World | None = None) -> None:
    """Hash files, each on one process, by its torch threads; raise `UserError` on all if one is
    damaged. Collective (None: alone)."""
    ordered = agreed(largest_first(files), world=world)
    look = partial(findings, threads=torch.get_num_threads(), on_progress=progress_of(world))
    refuse_damaged(ordered, shared_out(ordered, look, world=world))


def progress_of(world: World | None) -> Callable[[], None]:
    """Return what work calls when it progresses; a process alone has nobody who waits for it."""
    return (lambda: None) if world is None else world.moved


@contextmanager
def main_first(world: World | None) -> Iterator[None]:
    """Let the main process run the block first: the others find its files, or raise `UserError` if
    it fails. Collective; None: alone."""
    if world is not None and not world.is_main:
        if not agreed(True, world=world):
            raise UserError("The main process failed; its message tells why.")
        yield
        return
    try:
        yield
    except BaseException:
        agreed(False, world=world)
        raise
    agreed(True, world=world)


logger = logging.getLogger("workflow")

TIMEOUT_S = 24 * 3600.0  # bound of the wait for another process's share, if that progresses


@dataclass(frozen=True)
class Process:
    """This process. `world`: those that share the work, or None; `sharded`: the weights too."""

    device: torch.device
    world: World | None
    pulse: Pulse
    sharded: bool

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and logs."""
        return self.world is None or self.world.is_main

    @property
    def shards(self) -> World | None:
        """The processes that share the weights, if any."""
        return self.world if self.sharded else None


def join(stack: ExitStack, *, sharded: bool) -> Process:
    """Join the other processes until `stack` closes; return this one."""
    pulse = stack.enter_context(
        Pulse(rank=int(os.environ.get("RANK", 0)), start_s=JOIN_S, step_s=JOIN_S)
    )
    device = choose_device()
    if not is_worker():
        return Process(device, None, pulse, sharded)
    world = stack.enter_context(process_group(device.type, timeout_s=TIMEOUT_S, moved=pulse.moved))
    if not world.is_main:
        logger.setLevel(logging.CRITICAL)  # the main process alone reports errors of settings
    return Process(world.device, world, pulse, sharded)
