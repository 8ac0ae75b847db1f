"""Checkpoints of a run in progress: adapter, optimizer, step and metrics, in the background.

A folder `step-<8 digits or more>` below that of the trajectory's fingerprint is written under a
temporary name, fsynced, and renamed when all processes have finished. If its checksums show damage,
the one before is taken. Any number of processes can read it. Random numbers need no state: they are
functions of (seed, step, rank)."""

import logging
import math
import queue
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from workflow.lib.artifacts.checkpoint_folder import METRICS, saved_steps, set_aside, step_dir
from workflow.lib.artifacts.trained_content import NO_INPUTS, InputDigests
from workflow.lib.distributed.sharded_files import (
    DamagedError,
    Piece,
    WriteError,
    check_files,
    piece_of,
    read_index,
    read_into_,
    write_sharded,
)
from workflow.lib.distributed.world import World, any_of_all
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.loss.loss_scale import loss_scale_of
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import sync
from workflow.lib.training.optimizers import ShardwiseOptimizer

logger = logging.getLogger("workflow")

LEFTOVER_PATTERN = re.compile(r"^\.step-\d{8,}\.(partial|damaged)$")


class TrainingClock(NamedTuple):
    """Seconds of a run's steps, over all starts: by the wall clock, and times the processes."""

    elapsed_s: float = 0.0
    process_s: float = 0.0

    def at(self, elapsed_s: float, *, processes: int) -> "TrainingClock":
        more_s = elapsed_s - self.elapsed_s
        return TrainingClock(elapsed_s, self.process_s + more_s * processes)


BEGINNING = TrainingClock()


@dataclass(frozen=True)
class Cadence:
    """When to write a checkpoint: by steps, by minutes, after steps with exported adapters, and
    after step 1 as a test."""

    every_steps: int
    every_minutes: float | None
    exported: Collection[int] = ()
    began_s: float = field(default_factory=time.monotonic)

    def due(self, *, step: int, last_saved_s: float | None) -> bool:
        """Tell whether a checkpoint is due after `step` (1-based); clocks differ by process."""
        since = time.monotonic() - (self.began_s if last_saved_s is None else last_saved_s)
        late = self.every_minutes is not None and since >= 60 * self.every_minutes
        return step == 1 or step % self.every_steps == 0 or step in self.exported or late


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, and removes old ones except `exported`.
    Collective. The thread has its own process group: in a shared one the order of collectives could
    differ."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        identity: str,
        world: World,
        newest: int = 0,
        exported: Collection[int] = (),
        inputs: InputDigests = NO_INPUTS,
    ) -> None:
        self._folder, self._keep, self._world = folder, keep, world
        self._facts = {"identity": identity, "inputs": inputs.deciding | inputs.measuring}
        self._exported = exported
        self._group = dist.new_group(backend="gloo")
        self._newest = newest
        self._orders: queue.SimpleQueue[tuple[dict[str, Piece], int, TrainingClock]]
        self._orders = queue.SimpleQueue()
        self._writing, self._written = False, threading.Event()
        self._failure: WriteError | None = None
        self.last_saved_s: float | None = None
        """Start of the last write, on the monotonic clock."""
        # Started while there is memory: if a new thread gets too little, Python waits for ever. A
        # daemon: a failing process must not wait at its end for a lost one.
        threading.Thread(target=self._serve, daemon=True).start()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """At the end of the block finish the write in progress, also after a `UserError` (raised on
        all processes). Not after any other exception, which the others may not share: they would be
        waited for. Collective."""
        try:
            yield
        except UserError:
            self.wait()
            raise
        self.wait()

    def save(
        self,
        training: nn.Module,
        optimizer: ShardwiseOptimizer,
        *,
        step: int,
        clock: TrainingClock = BEGINNING,
    ) -> None:
        """Start to write the state after `step` steps; wait for the previous write. Collective."""
        self.wait()
        if step == self._newest:
            return
        # The host waits for this copy: the next step changes the tensors while the thread writes.
        live = _pieces(training, optimizer)
        pieces = {name: piece.staged() for name, piece in live.items()}
        self._newest, self.last_saved_s = step, time.monotonic()
        self._orders.put((pieces, step, clock))
        self._writing = True

    def wait(self) -> None:
        """Finish the write in progress. Collective. Raises `UserError` if it failed anywhere."""
        if not self._writing:
            return
        self._written.wait()
        self._written.clear()
        self._writing = False
        if self._failure is not None:
            steps = saved_steps(self._folder)
            remains = f"that of step {steps[-1]} is kept" if steps else "there is none before it"
            raise UserError(
                f"the checkpoint after step {self._newest} cannot be written to {self._folder} "
                f"({self._failure}); {remains}. Mend that (free disk space?) and repeat the "
                "command; it continues from the last checkpoint."
            )

    def _serve(self) -> None:
        while True:
            self._write(*self._orders.get())  # without a name here the copy is freed at once
            self._written.set()

    def _write(self, pieces: dict[str, Piece], step: int, clock: TrainingClock) -> None:
        """Write, publish and prune; run by the background thread of every process."""
        partial = self._folder / f".step-{step:08d}.partial"
        try:
            self._on_main(lambda: self._prepare(partial))
            metrics = partial / METRICS
            write_sharded(
                partial,
                pieces,
                group=self._group,
                facts=self._facts | {"step": step, "clock": clock._asdict()},
                companions=[metrics] if self._world.is_main and metrics.exists() else [],
            )
            self._on_main(lambda: self._publish(partial, step))
        except WriteError as error:
            self._failure = error
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
        except Exception as error:  # of a dead peer: this process is about to be stopped, too
            self._failure = WriteError(f"{type(error).__name__}: {error}")

    def _on_main(self, action: Any) -> None:
        """Call `action` on the main process; raise its error on all processes. Collective."""
        failure: list[str | None] = [None]
        if self._world.is_main:
            try:
                action()
            except OSError as error:
                failure = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(failure, group=self._group, group_src=0)
        if failure[0] is not None:
            raise WriteError(failure[0])

    def _prepare(self, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        metrics = self._folder / METRICS
        if metrics.exists():  # so that lines up to this step are as safe as the state
            shutil.copyfile(metrics, partial / METRICS)

    def _publish(self, partial: Path, step: int) -> None:
        final = step_dir(self._folder, step)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        try:
            sync(self._folder)
            self._prune()
        except OSError as error:
            logger.warning(
                "checkpoint %s is saved; what is older stays (%s: %s)",
                final,
                type(error).__name__,
                error,
            )

    def _prune(self) -> None:
        for path in self._folder.iterdir():
            if LEFTOVER_PATTERN.match(path.name):
                shutil.rmtree(path, ignore_errors=True)
        # later ones are of a longer run with the same steps
        own = [step for step in saved_steps(self._folder) if step <= self._newest]
        for old in {*own[: -self._keep]}.difference(self._exported):
            discard(step_dir(self._folder, old))


def discard(path: Path) -> None:
    """Remove a folder, its name first: a half must not look complete. A failure is only logged, as
    the run is sound; the rest is removed later."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        path.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        logger.warning("%s cannot be removed (%s: %s)", path, type(error).__name__, error)


def _pieces(training: nn.Module, optimizer: ShardwiseOptimizer) -> dict[str, Piece]:
    """Return this process's part of the weights and of the optimizer's tensors; the optimizer's
    rates and betas are settings."""
    weights, rank = trainable_parameters(training), dist.get_rank()
    named = {f"adapter/{n}": param.detach() for n, param in weights.items()}
    named["optimizer/step"] = optimizer.count
    if (scale := loss_scale_of(training)) is not None:
        named["loss_scale"] = scale.values
    return {name: piece_of(tensor, rank=rank) for name, tensor in named.items()} | {
        f"optimizer/{n}/{key}": piece
        for n in weights
        for key, piece in optimizer.pieces(n, rank=rank).items()
    }


@dataclass(frozen=True)
class Resumed:
    """Where a run resumes: after `step` steps, and the skipped checkpoints."""

    step: int
    skipped: list[dict[str, Any]]  # of `SkippedCheckpoint`
    metrics: Path | None  # the checkpoint's own copy of metrics.jsonl
    clock: TrainingClock = BEGINNING
    measured_otherwise: bool = False  # held-out losses up to `step` are of other data


def resume_(
    folder: Path,
    training: nn.Module,
    optimizer: ShardwiseOptimizer,
    *,
    identity: str,
    world: World,
    num_steps: float = math.inf,
    inputs: InputDigests = NO_INPUTS,
) -> Resumed:
    """Load the newest complete checkpoint of at most `num_steps` into `training` and `optimizer`.
    Collective. A damaged one is set aside and the one before taken; all are set aside if they are
    of other inputs. Raises `UserError` for a checkpoint of another run."""
    skipped: list[dict[str, Any]] = []
    steps = _steps_on_main(folder, world)
    if world.is_main and (later := [step for step in steps if step > num_steps]):
        logger.warning("checkpoints of steps %s, after this run's last, are not used", later)
    for step in (x for x in reversed(steps) if x <= num_steps):
        path = step_dir(folder, step)
        problem = _problem(path, world=world)
        if problem is None:
            earlier = read_index(path).get("inputs", {})
            if changed := any_of_all(", ".join(inputs.changed(earlier)) or None, world=world):
                if world.is_main:
                    logger.warning(
                        "training begins anew, because its inputs are others now (%s); the "
                        "checkpoints so far are in %s",
                        *(changed, set_aside(folder)),
                    )
                return Resumed(0, skipped, None)
            clock = _load_(path, training, optimizer, identity=identity, step=step)
            metrics = path / METRICS if (path / METRICS).exists() else None
            return Resumed(step, skipped, metrics, clock, inputs.measured_otherwise(earlier))
        skipped.append({"step": step, "reason": problem})
        if world.is_main:
            _set_aside(path)
            logger.warning(
                "checkpoint %s is damaged (%s); the one before it is taken", path, problem
            )
    if skipped and world.is_main:
        logger.warning("no whole checkpoint is left in %s: training begins anew", folder)
    return Resumed(0, skipped, None)


def _steps_on_main(folder: Path, world: World) -> list[int]:
    """Return on all processes the saved steps that the main process sees. Collective."""
    steps: list[Any] = [saved_steps(folder) if world.is_main else None]
    dist.broadcast_object_list(steps, src=0, group=world.io_group)
    result: list[int] = steps[0]
    return result


def _problem(path: Path, *, world: World) -> str | None:
    """Return the fault of a checkpoint's files; each process checks a share. Collective."""
    problem: str | None = None
    try:
        check_files(path, read_index(path), share=slice(world.rank, None, world.size))
    except DamagedError as error:
        problem = str(error)
    return any_of_all(problem, world=world)


def _set_aside(path: Path) -> None:
    """Keep a damaged checkpoint under another name until the next one is written."""
    aside = path.with_name(f".{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _load_(
    path: Path, training: nn.Module, optimizer: ShardwiseOptimizer, *, identity: str, step: int
) -> TrainingClock:
    """Load a checkpoint; return its clock."""
    index = read_index(path)
    if (index["identity"], index["step"]) != (identity, step):
        raise UserError(
            f"checkpoint {path} is that of step {index['step']} of {index['identity']}, this run "
            f"is {identity}: its settings, data or base differ. Move the folder away to continue "
            "from the one before it."
        )
    try:
        pieces = _pieces(training, optimizer)  # the live tensors, not copies
        moments = _cut_otherwise(index, pieces)
        read_into_(path, index, pieces | {n: piece_of(t, rank=0) for n, t in moments.items()})
        if moments:
            for name in trainable_parameters(training):
                start = f"optimizer/{name}/"
                named = {n.removeprefix(start): moments[n] for n in moments if n.startswith(start)}
                optimizer.requantize_(name, named)
        return TrainingClock(**index["clock"])
    except (OSError, DamagedError) as error:
        raise UserError(
            f"checkpoint {path} does not fit this run ({error}). Delete this folder to continue "
            "from the one before it."
        ) from None


def _cut_otherwise(index: dict[str, Any], pieces: dict[str, Piece]) -> dict[str, torch.Tensor]:
    """Return empty tensors for whole 8-bit moments, if their cuts differ from this run's; else
    none."""
    scales = [n for n in pieces.keys() & index["tensors"].keys() if n.endswith("_absmax")]
    if all(tuple(index["tensors"][n]["shape"]) == pieces[n].shape for n in scales):
        return {}
    names = {whole for n in scales for whole in (n, n.removesuffix("_absmax"))}
    entries = {n: index["tensors"][n] for n in names if n in index["tensors"]}
    return {
        n: torch.empty(e["shape"], dtype=getattr(torch, e["dtype"])) for n, e in entries.items()
    }


def save_adapter(training: nn.Module, folder: Path, *, world: World) -> None:
    """Write the adapter alone into an existing folder, as shards. Collective."""
    pieces = {
        name: piece_of(param.detach(), rank=world.rank).staged()
        for name, param in trainable_parameters(training).items()
    }
    try:
        write_sharded(folder, pieces, group=world.io_group, facts={})
    except WriteError as error:
        raise UserError(
            f"the adapter cannot be written to {folder} ({error}). Mend that (free disk space?) "
            "and repeat the command; it continues from the last checkpoint."
        ) from None


def load_adapter_(training: nn.Module, folder: Path) -> None:
    """Read the files of `save_adapter` into `training`; each process reads its part. Raises
    `UserError` if the files are damaged or of another adapter."""
    pieces = {
        name: piece_of(param.detach(), rank=dist.get_rank())
        for name, param in trainable_parameters(training).items()
    }
    try:
        index = read_index(folder)
        check_files(folder, index)
        read_into_(folder, index, pieces)
    except (OSError, DamagedError) as error:
        raise UserError(
            f"the adapter in {folder} cannot be read ({error}). Set train.select to last, or train "
            "anew."
        ) from None
