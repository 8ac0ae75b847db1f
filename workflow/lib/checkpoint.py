"""Checkpoints of a run in progress: adapter, optimizer and step by torch's distributed checkpoint (DCP).

A checkpoint is a folder `step-<8 digits>` below a folder that carries the fingerprint of the run's trajectory.
It is written under a temporary name and renamed when all processes have finished, so a folder with the final name
is whole. Only trainable tensors are in it; it can be read by another number of processes. Random numbers need no
state: they are functions of (seed, step, rank).
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from workflow.lib.artifacts import write_jsonl
from workflow.lib.errors import UserError
from workflow.lib.lora import trainable_parameters
from workflow.lib.parallel import World

STEP_PATTERN = re.compile(r"^step-(\d{8})$")
OPTIONS = StateDictOptions(ignore_frozen_params=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel frees it whatever kills the process. Call on the main process alone.

    Raises `UserError` if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"{folder} is in use: process {lock.read().strip() or 'unknown'} is training this run. "
                "Wait for it, or stop it, and repeat the command; it continues from the last checkpoint."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def saved_steps(folder: Path) -> list[int]:
    """Return the steps with a whole checkpoint, ascending."""
    matches = (STEP_PATTERN.match(p.name) for p in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in matches if match)


def step_dir(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return folder / f"step-{step:08d}"


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, and removes old ones. All processes call all methods.

    The background thread has a process group to itself: on a group that the main thread uses too (to agree on a stop,
    say), the collectives of both would meet in another order on another process.
    """

    def __init__(self, folder: Path, *, keep: int, world: World) -> None:
        self._folder, self._keep, self._world = folder, keep, world
        self._group = torch.distributed.new_group(backend="gloo")
        self._pending: tuple[int, Path, Future[Any]] | None = None

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """At the end of the block finish the write in progress, also if a `UserError` ends it (on all processes alike).

        Not after any other exception: processes that do not share it would be waited for. Collective.
        """
        try:
            yield
        except UserError:
            self.wait()
            raise
        self.wait()

    def save(self, training: nn.Module, optimizer: torch.optim.Optimizer, *, step: int) -> None:
        """Start to write the state after `step` steps; waits for the previous write. Collective."""
        self.wait()
        if step in saved_steps(self._folder):
            return
        partial = self._folder / f".step-{step:08d}.partial"
        if self._world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        torch.distributed.barrier(self._world.io_group)
        future = dcp.async_save(
            _state(training, optimizer, step), checkpoint_id=partial, process_group=self._group
        )
        assert isinstance(future, Future), "async_save without a stager returns a future"
        self._pending = (step, partial, future)

    def wait(self) -> None:
        """Finish the write in progress, if any, and remove checkpoints that are too old. Collective."""
        if self._pending is None:
            return
        step, partial, future = self._pending
        self._pending = None
        try:
            future.result()
        except (OSError, dcp.CheckpointException) as error:
            raise UserError(
                f"the checkpoint after step {step} cannot be written to {self._folder} ({cause(error)}). "
                "Mend that (free disk space?) and repeat the command; it continues from the one before."
            ) from None
        if self._world.is_main:
            partial.rename(step_dir(self._folder, step))
            for old in saved_steps(self._folder)[: -self._keep]:
                shutil.rmtree(step_dir(self._folder, old))
        torch.distributed.barrier(self._world.io_group)


def _state(training: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {
        "adapter": {name: param.detach() for name, param in trainable_parameters(training).items()},
        "optimizer": get_optimizer_state_dict(training, optimizer, options=OPTIONS),
        "step": torch.tensor(step),
    }


def resume_(
    folder: Path, training: nn.Module, optimizer: torch.optim.Optimizer, *, world: World
) -> int:
    """Load the newest checkpoint into `training` and `optimizer`; return its step, 0 if there is none. Collective."""
    steps = saved_steps(folder)
    if not steps:
        return 0
    state = _state(training, optimizer, 0)
    path = step_dir(folder, steps[-1])
    try:
        dcp.load(state, checkpoint_id=path, process_group=world.io_group)
    except (OSError, KeyError, RuntimeError, ValueError, dcp.CheckpointException) as error:
        raise UserError(
            f"checkpoint {path} cannot be read ({cause(error)}). Delete this folder to continue from the one before it."
        ) from None
    set_optimizer_state_dict(training, optimizer, state["optimizer"], options=OPTIONS)
    step = int(state["step"])
    assert step == steps[-1], f"{path} says step {step}"
    return step


def cause(error: BaseException) -> str:
    """Return what went wrong first inside DCP, which wraps it together with every process's traceback."""
    if isinstance(error, dcp.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return f"{type(error).__name__}: {error}"


def save_adapter(training: nn.Module, folder: Path, *, world: World) -> None:
    """Write the adapter alone as a sharded DCP folder. Collective."""
    state = {name: param.detach() for name, param in trainable_parameters(training).items()}
    dcp.save(state, checkpoint_id=folder, process_group=world.io_group)


def rewind_metrics(path: Path, *, step: int) -> list[dict[str, Any]]:
    """Drop the lines of a metrics file after `step` (and a line cut by a kill); return those that stay."""
    kept: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                break
            if row["step"] <= step:
                kept.append(row)
    write_jsonl(path, kept)
    return kept
