"""Training on preferences: curves of rewards and log-probabilities, and what they say in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from workflow.lib.artifacts.training_record import Step
from workflow.lib.report.figures import Figure, line_of, over_steps
from workflow.lib.report.run_results import Run
from workflow.lib.settings.objectives import needs_of

NUMBERS = "preferences-numbers"
# Of pairs and of rated answers: the kind that training should make likelier, and the other.
KINDS: dict[str, tuple[str, str]] = {
    "pairs": ("chosen", "rejected"),
    "rated": ("desirable", "undesirable"),
}
DASHED = {"rejected", "undesirable"}


@dataclass(frozen=True)
class Drawn:
    """A figure of fields of a step."""

    title: str
    caption: str
    axis: str
    fields: tuple[str, ...]


def _of_kinds(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{kind}" for kinds in KINDS.values() for kind in kinds)


FIGURES = {
    "rewards": Drawn(
        "Rewards",
        "As the objective defines them, mean over a step. Dashed: rejected or undesirable answers.",
        "reward",
        _of_kinds("reward"),
    ),
    "log_probs": Drawn(
        "Log-probabilities",
        "Of whole answers, mean over a step. Dashed: rejected or undesirable answers.",
        "nats per answer",
        _of_kinds("log_probs"),
    ),
    "reward_accuracy": Drawn(
        "Reward accuracy",
        "Share of the pairs of a step whose chosen answer has the higher reward.",
        "share",
        ("reward_accuracy",),
    ),
    "reward_margin": Drawn(
        "Reward margin",
        "Reward of the chosen answer - of the rejected one, mean over the pairs of a step.",
        "reward",
        ("reward_margin",),
    ),
    "kl": Drawn(
        "Reference point",
        "log p - log p_ref of prompts with answers of other rows, mean over a step.",
        "nats per answer",
        ("kl",),
    ),
}


def reward_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that train preferences."""
    return [run for run in runs if reward_fields(run) or run.measured.served.rewards]


def reward_fields(run: Run) -> list[str]:
    """Return the fields of its steps that are about preferences."""
    known = [field for drawn in FIGURES.values() for field in drawn.fields]
    return [name for name in known if any(getattr(s, name) is not None for s in run.steps)]


def reward_figures(runs: list[Run]) -> list[Figure]:
    """Return the curves over the steps, all runs in each; none where no run tells any."""
    figures = []
    for key, drawn in FIGURES.items():
        if traces := [trace for n, run in enumerate(runs) for trace in _traces(drawn, run, n)]:
            layout = over_steps(runs, axis=drawn.axis) | {"showlegend": len(traces) > 1}
            figures.append(Figure(key, drawn.title, drawn.caption, NUMBERS, traces, layout))
    return figures


def _traces(drawn: Drawn, run: Run, index: int) -> list[dict[str, Any]]:
    """Return a line of each field that the run has, in the run's colour."""
    traces = []
    for field in drawn.fields:
        told = [(step, value) for step in run.steps if (value := getattr(step, field)) is not None]
        if not told:
            continue
        steps, values = map(list, zip(*told, strict=True))
        trace = line_of(run, index, values, ".4g", steps=steps)
        if len(drawn.fields) > 1:
            kind = field.rpartition("_")[2]
            dash = {"width": 1.8, "dash": "dash" if kind in DASHED else "solid"}
            trace |= {"name": f"{trace['name']}, {kind}", "line": dash}
        traces.append(trace)
    return traces


@dataclass(frozen=True)
class Fall:
    """By how much chosen and rejected answers became less likely, where both did."""

    kinds: tuple[str, str]
    chosen: float
    rejected: float
    unit: str
    since: str


def both_fell(run: Run) -> Fall | None:
    """Return what training took from both kinds of answers, or None. With a reference model the
    rewards of the last tenth of the steps say it, which compare the same answers; without one their
    log-probabilities beside those of the first tenth."""
    needs = needs_of(run.summary.settings.train.get("objective", "sft"))
    if needs.examples not in KINDS or len(run.steps) < 2:
        return None
    kinds, tenth = KINDS[needs.examples], max(1, len(run.steps) // 10)
    if needs.scores_of:
        chosen, rejected = (_mean(run.steps[-tenth:], f"reward_{kind}") for kind in kinds)
        fall = Fall(kinds, chosen, rejected, "reward", "against the reference")
    else:
        chosen, rejected = (
            _mean(run.steps[-tenth:], field) - _mean(run.steps[:tenth], field)
            for field in (f"log_probs_{kind}" for kind in kinds)
        )
        fall = Fall(kinds, chosen, rejected, "nats per answer", "since the first steps")
    return fall if max(chosen, rejected) < 0 else None


def _mean(steps: list[Step], field: str) -> float:
    """Return the mean of a field; 0 where no step has it."""
    values = [value for step in steps if (value := getattr(step, field)) is not None]
    return fmean(values or [0.0])
