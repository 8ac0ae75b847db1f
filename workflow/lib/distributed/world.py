"""The processes of a run: how a torchrun worker joins the others, and ends with its launcher."""

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workflow.lib.kernels.op import DECISION, Decision
from workflow.lib.model.loss.vocabulary_slices import vocabulary_slices
from workflow.lib.system.environment import LAUNCHER_VARIABLE, die_with_parent

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class World:
    """The processes of the training, from one of them."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # of `process_mesh`
    io_group: dist.ProcessGroup
    """gloo, for decisions and checkpoints beside the training's collectives, without a GPU."""
    context: dist.ProcessGroup | None = None
    """The neighbours that share this process's rows; None: it has rows of its own."""
    moved: Callable[[], None] = lambda: None
    """Called by long work after each of its parts: `Pulse.moved`, where there is a heartbeat."""

    def axis(self, name: Literal["replica", "shard"]) -> DeviceMesh:
        """Return the processes along one axis of the mesh, including this one."""
        return self.mesh[name]

    @property
    def shard_size(self) -> int:
        """Processes that share one copy of the model."""
        return self.axis("shard").size()

    @property
    def row_groups(self) -> int:
        """Groups of processes with rows of their own."""
        return self.size // (1 if self.context is None else self.context.size())

    @property
    def row_group(self) -> int:
        """Number of this process's group among them."""
        return self.rank * self.row_groups // self.size

    def slice_tokens(self, seq_len: int) -> int:
        """Return a process's tokens of a row of `seq_len`."""
        return -(-seq_len * self.row_groups // self.size)

    def gathered(self, value: ValueT) -> list[ValueT]:
        """Return the value of every process, over the CPU. Collective."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.io_group)
        return values

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that only one may write."""
        return self.rank == 0


@contextmanager
def process_group(
    device_type: str,
    *,
    timeout_s: float,
    shard_size: int | None = None,
    context_parallel: int = 1,
    moved: Callable[[], None] = lambda: None,
) -> Iterator[World]:
    """Join the process group of torchrun's environment and leave it at the end; not after an error
    (NCCL would wait), when the process has to end. device_type: `cuda` (NCCL) or `cpu` (gloo);
    shard_size: neighbours that share a copy, None: all; context_parallel: those that share rows;
    moved: of `World`. The process dies with its launcher. Collective."""
    die_with_launcher()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(
        backend, timeout=timeout, device_id=device if device_type == "cuda" else None
    )
    mesh = process_mesh(device_type, size=size, shard_size=shard_size or size)
    try:
        group = dist.new_group(backend="gloo", timeout=timeout)
        context = context_group(device_type, size=size, context_parallel=context_parallel)
        yield World(rank, size, device, mesh, group, context, moved)
    except SystemExit:  # a requested stop, on all processes
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def process_mesh(device_type: str, *, size: int, shard_size: int) -> DeviceMesh:
    """Return all processes by the axis `shard`, along which each group of `shard_size` neighbours
    shards a copy of the model, and before it `replica` if there are several groups."""
    assert size % shard_size == 0, f"{size} processes cannot form groups of {shard_size}"
    if shard_size == size:
        return init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
    sizes = (size // shard_size, shard_size)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replica", "shard"))


def context_group(
    device_type: str, *, size: int, context_parallel: int
) -> dist.ProcessGroup | None:
    """Return the neighbours along the axis `context`, which share each row, of all processes; None
    for one. Collective."""
    if context_parallel == 1:
        return None
    sizes = (size // context_parallel, context_parallel)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("rows", "context"))
    return mesh.get_group("context")


def vocabulary_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of all processes with the axis along which they share the vocabulary:
    `shard`, or its own `vocabulary` if fewer are enough (`vocabulary_slices`)."""
    shards = mesh["shard"].size()
    slices = vocabulary_slices(shards)
    if slices == shards:
        return mesh, mesh["shard"]
    sizes = (dist.get_world_size() // slices, slices)
    names = ("replica", "vocabulary")
    mesh = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=names)
    return mesh, mesh["vocabulary"]


def die_with_launcher() -> None:
    """Let the kernel kill this process when its launcher dies (torchrun's workers have their own
    sessions)."""
    die_with_parent(int(os.environ.get(LAUNCHER_VARIABLE, os.getppid())))


def largest_of_all(counts: Sequence[int], *, world: World) -> list[int]:
    """Return the largest of each count, or flag, of any process, on the CPU. Collective."""
    if world.size == 1:
        return list(counts)
    largest = torch.tensor([int(count) for count in counts])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=world.io_group)
    numbers: list[int] = largest.tolist()
    return numbers


def any_of_all(value: ValueT | None, *, world: World) -> ValueT | None:
    """Return the first process's `value` that is not None; None if there is none. Collective."""
    return next((one for one in world.gathered(value) if one is not None), None)


def decide_kernels(world: World, decision: Decision = DECISION) -> None:
    """Turn off on all processes the kernels that one cannot use. Collective."""
    if world.size > 1:
        faults_by_process = world.gathered(decision.faults)
        decision.adopt(
            {key: fault for faults in faults_by_process for key, fault in faults.items()}
        )
