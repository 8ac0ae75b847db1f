"""Training on preferences: curves of rewards and log-probabilities, and a summary in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from workflow.lib.artifacts.training_record import Step
from workflow.lib.report.figures import Curve, Figure, drawn
from workflow.lib.report.run_results import Run
from workflow.lib.settings.objectives import needs_of

NUMBERS = "preferences-numbers"
# Of pairs and of rated answers: the kind that training should make likelier, and the other.
KINDS: dict[str, tuple[str, str]] = {
    "pairs": ("chosen", "rejected"),
    "rated": ("desirable", "undesirable"),
}


def _fields_by_kind(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{kind}" for kinds in KINDS.values() for kind in kinds)


CURVES = (
    Curve(
        "rewards",
        "Rewards",
        "As the objective defines them, mean over a step. Dashed: rejected or undesirable answers.",
        "reward",
        _fields_by_kind("reward"),
    ),
    Curve(
        "log_probs",
        "Log-probabilities",
        "Of whole answers, mean over a step. Dashed: rejected or undesirable answers.",
        "nats per answer",
        _fields_by_kind("log_probs"),
    ),
    Curve(
        "reward_accuracy",
        "Reward accuracy",
        "Share of the pairs of a step whose chosen answer has the higher reward.",
        "share",
        ("reward_accuracy",),
    ),
    Curve(
        "reward_margin",
        "Reward margin",
        "Reward of the chosen answer - of the rejected one, mean over the pairs of a step.",
        "reward",
        ("reward_margin",),
    ),
    Curve(
        "kl",
        "Reference point",
        "log p - log p_ref of prompts with answers of other rows, mean over a step.",
        "nats per answer",
        ("kl",),
    ),
)


def reward_runs(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if reward_fields(run) or run.measured.served.rewards]


def reward_fields(run: Run) -> list[str]:
    fields = [field for curve in CURVES for field in curve.fields]
    return [name for name in fields if any(getattr(s, name) is not None for s in run.steps)]


def reward_figures(runs: list[Run]) -> list[Figure]:
    return drawn(CURVES, runs, numbers=NUMBERS)


@dataclass(frozen=True)
class Fall:
    """Decrease in likelihood of chosen and rejected answers, if both decreased."""

    kinds: tuple[str, str]
    chosen: float
    rejected: float
    unit: str
    since: str


def both_fell(run: Run) -> Fall | None:
    """Return the decrease of both kinds of answers in training, or None. With a reference model it
    is in the rewards of the last tenth of the steps, which compare the same answers; without one in
    their log-probabilities against the first tenth's."""
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
    """Return the mean of a field; 0 if no step has it."""
    values = [value for step in steps if (value := getattr(step, field)) is not None]
    return fmean(values or [0.0])
