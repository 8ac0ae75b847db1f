"""The record of a run: a line per step while it trains, a summary at its end.

Beside the checkpoints, in no rule's outputs: `metrics.jsonl` (rewound to the checkpoint on
resuming, so without gaps or doubles) and `history.jsonl` (a line per start, or return to an earlier
checkpoint; never rewound).

`TimeWatch` compares measured with predicted time, of steps alone, which never wait for data.
Held-out losses and checkpoints come between steps."""

import logging
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workflow.lib.artifacts.checkpoint_folder import (
    HISTORY,
    METRICS,
    damaged_line,
    rewind_metrics,
    whole_rows,
)
from workflow.lib.artifacts.trained_content import NO_INPUTS, InputDigests
from workflow.lib.artifacts.training_record import Check, Step
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import World, largest_of_all
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.settings.config import RunConfig, TrainConfig
from workflow.lib.settings.objectives import needs_of
from workflow.lib.settings.schedule import step_rows
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.checksums import checked_line, write_lines
from workflow.lib.system.hardware import drawn_j
from workflow.lib.system.number_formats import duration
from workflow.lib.training.build import TrainingModel
from workflow.lib.training.checkpoint import Resumed
from workflow.lib.training.loop import peak_bytes

LOSSES = ("first_loss", "final_loss")  # of a summary
HELDOUT_LOSSES = ("heldout_loss", "heldout_losses")  # of a row
STEPS_SEEN = 10  # the first of a start, with compilation and capture
FAR_OFF = 0.10  # of the predicted time: a larger error is logged
STEPS, DATA, HELDOUT, CHECKPOINTS = (
    "steps", "waiting for data", "held-out losses", "checkpoints"
)  # fmt: skip


@dataclass
class TimeWatch:
    """Seconds of one start of a run. predicted_s: of a step, None if the speed is unknown; every:
    steps between events between steps, as far as they are set."""

    predicted_s: float | None
    num_steps: int
    every: Mapping[str, int | None]
    steps_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note the block's seconds as a part's."""
        began = time.monotonic()
        yield
        self.parts_s.setdefault(name, []).append(time.monotonic() - began)

    def waited(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the same batches, and note the wait for each."""
        while True:
            with self.part(DATA):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @property
    def step_s(self) -> float:
        """Median seconds of a step, without the first one."""
        return statistics.median(self.steps_s[1:] or self.steps_s)

    @property
    def coming_s(self) -> float:
        """Seconds of a coming step: as predicted until a second is measured; the first compiles."""
        return self.predicted_s if self.predicted_s and len(self.steps_s) < 2 else self.step_s

    def after_step(self, seconds: float, *, step: int) -> str | None:
        """Note a step's seconds; after ten steps return once the error of the forecast, or None for
        at most 10%. step: counts from 1, over all starts."""
        self.steps_s.append(seconds)
        if len(self.steps_s) != STEPS_SEEN or self.predicted_s is None:
            return None
        waited_s = sum(self.parts_s.get(DATA, ())) / STEPS_SEEN
        more_s = {STEPS: self.step_s - waited_s - self.predicted_s, DATA: waited_s}
        for name, steps in self.every.items():
            if steps is not None and name in self.parts_s:
                more_s[name] = statistics.mean(self.parts_s[name]) / steps
        each_s = self.predicted_s + sum(more_s.values())
        off = each_s / self.predicted_s - 1
        if abs(off) <= FAR_OFF:
            return None
        worst = max(more_s, key=lambda name: abs(more_s[name]))
        left_s = (self.num_steps - step) * each_s
        return (
            f"the forecast of time was off: {STEPS_SEEN} steps show {each_s:.3g} s a step, "
            f"{self.predicted_s:.3g} s were predicted ({off:+.0%}); most of it is {worst} "
            f"({more_s[worst]:+.2g} s a step). Corrected: {duration(left_s)} left"
        )

    def document(self) -> dict[str, Any]:
        """Return its part of `summary.json`."""
        parts = {name: sum(seconds) for name, seconds in self.parts_s.items()}
        steps_s = sum(self.steps_s) - parts.get(DATA, 0.0)
        measured_s = self.step_s if self.steps_s else None
        return {
            "predicted_step_s": self.predicted_s,
            "measured_step_s": measured_s,
            "parts_s": {STEPS: steps_s} | parts,
        }


logger = logging.getLogger("workflow")

DAMAGED_LINES = "%s is damaged from line %d on: the lines before it, or the checkpoint's, are kept"
LINE_S = 60.0  # between lines of the log, which replaces a terminal's bar


class Journal:
    """Appends to `metrics.jsonl` on the main process; keeps the same history in memory on all."""

    def __init__(
        self, folder: Path, *, resumed: Resumed, log_every: int, num_steps: int, world: World
    ) -> None:
        self._path, self._num_steps = folder / METRICS, num_steps
        self._log_every, self._world = log_every, world
        self._last_line_s = 0.0
        self.rows: list[dict[str, Any]] = []
        self.resumed_from: list[int] = []
        self.skipped: list[dict[str, Any]] = []  # of `SkippedCheckpoint`
        self.returns: list[list[int]] = []  # as in `Summary`; on the main process
        if world.is_main:
            for path in (self._path, folder / HISTORY):
                if (line := damaged_line(path)) is not None:
                    logger.warning(DAMAGED_LINES, path, line)
            self.rows = rewind_metrics(
                self._path,
                step=resumed.step,
                source=resumed.metrics,
                without=HELDOUT_LOSSES if resumed.measured_otherwise else (),
            )
            starts = _note_start(folder / HISTORY, resumed)
            self.resumed_from = [row["first_step"] for row in starts if row.get("first_step")]
            self.skipped = [skipped for row in starts for skipped in row.get("skipped", ())]
            self.returns = [[r["from_step"], r["to_step"]] for r in starts if "to_step" in r]
        # Every process decides its next step by them, and all must decide alike.
        shared: list[Any] = [self.rows, self.resumed_from, self.skipped]
        dist.broadcast_object_list(shared, src=0, group=world.io_group)
        self.rows, self.resumed_from, self.skipped = shared
        self.step = resumed.step  # steps taken so far, over all invocations
        self.heldout = [row["heldout_loss"] for row in self.rows if "heldout_loss" in row]
        self.clock = self.begun = resumed.clock
        self.first_step = resumed.step
        self._drawn_j = drawn_j() if world.is_main and not resumed.step else None
        self.graphs_off: str | None = None
        """Why micro-batches of this start were no CUDA graphs any more."""

    def add(self, metrics: Step, *, coming_s: float) -> bool:
        """Record a step: to disk every `log_every` steps, at the first and with a held-out loss; to
        the log every `LINE_S`. Return whether it was written to disk. coming_s: seconds of each
        step that is left."""
        self.step = metrics.step
        self.clock = self.clock.at(metrics.elapsed_s, processes=self._world.size)
        measured = metrics.heldout_loss is not None
        self._log(metrics, left_s=(self._num_steps - metrics.step) * coming_s)
        if metrics.step % self._log_every and metrics.step != 1 and not measured:
            return False
        self.rows.append(metrics.as_json())
        if metrics.heldout_loss is not None:
            self.heldout.append(metrics.heldout_loss)
        if not self._world.is_main:
            return True
        with self._path.open("a", encoding="utf-8") as file:
            file.write(checked_line(metrics.as_json()))
        return True

    def _log(self, metrics: Step, *, left_s: float) -> None:
        if not self._world.is_main or time.monotonic() - self._last_line_s < LINE_S:
            return
        self._last_line_s = time.monotonic()
        if metrics.heldout_loss is None and self.heldout:
            metrics = metrics.model_copy(update={"heldout_loss": self.heldout[-1]})
        logger.log(
            logging.DEBUG if sys.stderr.isatty() else logging.INFO,
            "step %d of %d: %s, about %s left",
            *(metrics.step, self._num_steps, self.line(metrics), duration(left_s)),
        )

    def line(self, metrics: Step) -> str:
        heldout, balance = metrics.heldout_loss, metrics.router_aux_loss
        return (
            f"loss {metrics.loss:.3f}, {'' if balance is None else f'balance {balance:.3f}, '}"
            f"{'' if heldout is None else f'held-out {heldout:.3f}, '}|g| "
            f"{metrics.grad_norm:.2f}, "
            f"{metrics.tokens_per_s:,.0f} tokens/s, {metrics.peak_bytes / 2**30:.2f} GiB"
        )

    def amount(self) -> str:
        """Describe how much this start trained, and what earlier ones did."""
        if self.step == self.first_step:
            return f"nothing was left to train: all {self.step} steps were in the checkpoints"
        before = f" after {self.first_step} of earlier starts" if self.first_step else ""
        seconds = self.clock.elapsed_s - self.begun.elapsed_s
        return f"trained {self.step - self.first_step} steps in {seconds:.0f} s{before}"

    def energy_j(self) -> float | None:
        """Return the GPUs' energy since the first start, joules; None if unknown."""
        now = drawn_j()
        return None if now is None or self._drawn_j is None else now - self._drawn_j

    def peak_over_processes(self) -> int:
        """Return the largest peak memory of a process, bytes. Collective."""
        return largest_of_all([peak_bytes(self._world.device)], world=self._world)[0]

    def copy_to(self, path: Path) -> None:
        write_lines(path, self.rows)


def trained_tokens(store: TokenStore, train: TrainConfig, *, num_steps: int) -> int:
    """Return the trained tokens of all steps over all processes."""
    rows_of_steps = (
        step_rows(
            num_rows=store.num_rows,
            global_batch_size=train.global_batch_size,
            seed=train.seed,
            step=step,
        )
        for step in range(num_steps)
    )
    return sum(int(store.trained_tokens_per_row[rows].sum()) for rows in rows_of_steps)


def _note_start(path: Path, resumed: Resumed) -> list[dict[str, Any]]:
    """Append this start to the history; return its whole rows, with this one."""
    note = {"first_step": resumed.step, "skipped": resumed.skipped, "unix_s": round(time.time())}
    starts = [*whole_rows(path), note]
    write_lines(path, starts)
    return starts


@dataclass(frozen=True)
class TrainingRun:
    """A run on this process: its name, its plan, and its open inputs."""

    name: str
    identity: str  # of settings, data and base, without the run's name
    config: RunConfig
    plan: StepPlan
    world: World
    store: TokenStore
    model: TrainingModel
    inputs: InputDigests = NO_INPUTS


def summarize(
    run: TrainingRun,
    journal: Journal,
    watch: TimeWatch,
    *,
    predicted_bytes: int,
    peak_bytes: int,
    checks: list[Check],
    selected_step: int,
    parity_sha256: str,
) -> dict[str, Any]:
    """Return `summary.json` without its provenance. On the main process alone. predicted_bytes,
    peak_bytes: a process's peak as planned and as measured."""
    return {
        "run": run.name,
        "fingerprint": run.identity,
        **_device(run.world),
        "num_steps": journal.step,
        **({"planned_steps": run.plan.num_steps} if journal.step < run.plan.num_steps else {}),
        "logged_steps": len(journal.rows),
        "parity_sha256": parity_sha256,
        "resumed_from_steps": journal.resumed_from,
        "skipped_checkpoints": journal.skipped,
        **({"returns": journal.returns} if journal.returns else {}),
        **_sizes(run),
        **_losses(journal),
        **_amounts(run, num_steps=journal.step, elapsed_s=journal.clock.elapsed_s),
        "process_s": journal.clock.process_s,
        "energy_j": journal.energy_j(),
        "peak_bytes": {
            "predicted": predicted_bytes,
            "measured": peak_bytes,
            "kind": "cuda_allocated" if run.world.device.type == "cuda" else "host_rss",
        },
        "times": watch.document(),
        **({"graphs_off": journal.graphs_off} if journal.graphs_off else {}),
        "selected_step": selected_step,
        "checks": [check.model_dump() for check in (*checks, _check_gradient_norms(journal))],
    }


def _device(world: World) -> dict[str, str | int]:
    cuda = world.device.type == "cuda"
    return {
        "device": world.device.type,
        "device_name": torch.cuda.get_device_name(world.device) if cuda else "CPU",
        "processes": world.size,
    }


def _sizes(run: TrainingRun) -> dict[str, Any]:
    trainable, total = run.model.num_parameters()
    read = needs_of(run.config.train.objective).settings
    sections = {"model", "lora", "train"} | {setting.partition(".")[0] for setting in read}
    return {
        "settings": run.config.model_dump(mode="json", include=sections),
        "global_batch_size": run.config.train.global_batch_size,
        "micro_batch_size": run.plan.micro_batch_size,
        "accumulation_steps": run.plan.accumulation_steps,
        "seq_len": run.store.seq_len,
        "trainable_parameters": trainable,
        "trainable_by_module": run.model.trainable_by_module(),
        "total_parameters": total,
        "bytes_read_by_main_process": run.model.bytes_read,
    }


def _losses(journal: Journal) -> dict[str, float]:
    """Return the first loss, and the mean of the last tenth; also of the routers' balance."""
    losses: dict[str, float] = {}
    for name in ("loss", "router_aux_loss"):
        if values := [row[name] for row in journal.rows if name in row]:
            tail = values[-max(1, len(values) // 10) :]
            losses |= {f"first_{name}": values[0], f"final_{name}": sum(tail) / len(tail)}
    return losses


def _amounts(run: TrainingRun, *, num_steps: int, elapsed_s: float) -> dict[str, float]:
    train = run.config.train
    tokens = num_steps * train.global_batch_size * run.store.seq_len
    return {
        "tokens": tokens,
        "trained_tokens": trained_tokens(run.store, train, num_steps=num_steps),
        "elapsed_s": elapsed_s,
        "tokens_per_s": tokens / elapsed_s,
    }


def _check_gradient_norms(journal: Journal) -> Check:
    norms = [row["grad_norm"] for row in journal.rows]
    return Check(
        name="steps have gradients",
        passed=max(norms) > 0,
        detail=f"norms from {min(norms):.3g} to {max(norms):.3g}; "
        f"0 in {norms.count(0.0)} of {len(norms)} logged steps",
    )
