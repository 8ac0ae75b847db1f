"""Successive halving: runs of a sweep train to a rung, and held-out losses decide which continue.

A run at a rung is an ordinary, unnamed run of that many steps: its own training, export and
evaluation. If more steps continue a run (`TrainConfig.begins_longer_runs`), its rungs share its
checkpoints. `decide_rung` writes a `Rung`. The idea: Jamieson and Talwalkar, arXiv 1502.07943; here
intervals decide which runs end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workflow.lib.artifacts import layout
from workflow.lib.artifacts.records import Interval, Provenance, Record
from workflow.lib.settings.config import ExportConfig, RunConfig, SweepConfig
from workflow.lib.system.errors import setting_error


def rung_name(name: str, steps: int) -> str:
    return f"{name}@{steps}"


def run_of(name: str) -> str:
    """Return the name of a rung's run; of other runs their own."""
    return name.partition("@")[0]


def with_rungs(runs: Mapping[str, RunConfig], sweep: SweepConfig) -> dict[str, RunConfig]:
    """Return the runs, and after them each at every rung but the last. Raises `UserError` for runs
    that a rung cannot compare."""
    if not sweep.rungs:
        return dict(runs)
    for bound, change in _faults(runs, sweep.rungs[-1]):
        raise setting_error("sweep.rungs", list(sweep.rungs), bound, change)
    rungs = {
        rung_name(name, steps): _at(run, steps).as_rung_of(name)
        for steps in sweep.rungs[:-1]
        for name, run in runs.items()
    }
    return {**runs, **rungs}


def _faults(runs: Mapping[str, RunConfig], last: int) -> Iterator[tuple[str, str]]:
    first, *others = runs
    if not others:
        yield f"the only run is {first}, so it cannot be compared", "Add runs, or remove rungs"
    for name, run in runs.items():
        if (steps := run.train.max_steps) != last:
            found = f"max_steps = {steps}, epochs = {run.train.epochs}"
            change = f"Set train.max_steps to {last} and train.epochs to null, or change the rung"
            yield f"run {name} has another end than the last rung ({found})", change
        if not run.evaluate.heldout:
            change = "Set evaluate.heldout to true"
            yield f"run {name} measures no held-out loss (evaluate.heldout = false)", change
        if layout.tokens_key(run) != layout.tokens_key(runs[first]):
            yield (
                f"runs {first} and {name} have different tokens, so their losses are of different "
                "documents",
                "Give all runs the same data, model.source and kind of objective, or remove rungs",
            )
        if (start := run.train.start_from) in runs:
            change = "Train that run by a config of its own, and name its adapter's folder"
            yield f"run {name} starts from run {start}, which may end early", change


def _at(run: RunConfig, steps: int) -> RunConfig:
    """Return a run of another's first steps; only its held-out loss is measured."""
    only_loss = {"subjects": ("base", "tuned"), "served": "tuned", "samples": 0, "require": {}}
    off = {"tasks": (), "tasks_dir": None}
    kept = tuple(step for step in run.export.steps if step <= steps)  # of checkpoints
    update = {
        "train": run.train.model_copy(update={"max_steps": steps}),
        "evaluate": run.evaluate.model_copy(update=only_loss | off),
        "export": ExportConfig(base_id=run.export.base_id, steps=kept),
    }
    return run.model_copy(update=update)


class Decision(Record):
    """Whether a run continues after a rung."""

    run: str  # name of the run
    loss: float  # held-out loss, nats per trained token
    behind: float  # its paired difference to the run with the lowest loss; 0 for that one
    behind_ci95: Interval | None  # its 95% interval over documents; null for a single document
    goes_on: bool  # whether it trains further
    reason: Literal["lowest loss", "not surely worse", "surely worse", "beyond keep"]
    """The reason. Surely worse: the interval is above 0."""


class RungRun(Decision):
    """A run at a rung."""

    device_hours: float  # hours of all steps of this training, summed over the processes
    continued: bool  # whether it continued from the rung before, and the next one continues it


class Rung(Record):
    """`results/sweep/rung-<steps>.json`: the runs that continue."""

    steps: int  # optimizer steps of the rung
    keep: float  # `sweep.keep`
    documents: int  # held-out documents that were compared
    runs: list[RungRun]  # lowest loss first
    provenance: Provenance  # origin of the file

    @property
    def going_on(self) -> list[str]:
        return [found.run for found in self.runs if found.goes_on]


@dataclass(frozen=True)
class Saved:
    """Savings of rungs against training every run to the end; negative if they cost more."""

    steps: int
    of_steps: int
    device_hours: float
    """From the hours a step of each run at its last rung."""


def saved_by(rungs: Sequence[Rung], last: int) -> Saved:
    """Return the savings of rungs; rungs: all but the last, ascending; last: its steps."""
    saved, hours = 0, 0.0
    ends = {found.run: (rung, found) for rung in rungs for found in rung.runs}
    for name, (end, found) in ends.items():
        before = [
            r.steps for r in rungs if r.steps <= end.steps and name in {x.run for x in r.runs}
        ]
        taken = [*before, *([last] if found.goes_on else [])]
        steps = last - (taken[-1] if found.continued else sum(taken))
        saved += steps
        hours += steps * found.device_hours / end.steps
    return Saved(steps=saved, of_steps=last * len(ends), device_hours=hours)
