"""A run on a machine, the longest row that trains there, and the largest model.

Every answer is `decide` and `forecast` with one change: this module counts neither bytes nor
seconds."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from workflow.lib.artifacts.preflight_record import Forecast
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.peaks import Peaks, combined
from workflow.lib.planning.preflight.checks import check_tokens
from workflow.lib.planning.preflight.decision import Decision, decide
from workflow.lib.planning.preflight.forecast import forecast
from workflow.lib.planning.preflight.plan_search import Recorder
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError

LENGTH_STEP = 64  # tokens between the row lengths that are tried


def predicted(planned: PlannedRun, *, advise: bool = False) -> tuple[Decision, Forecast]:
    """Return the decision on a run and its forecast; advise: search for changes that would make it
    fit. Raises as `check_tokens` and `decide`."""
    check_tokens(planned.tokens, planned.settings, planned.shape)
    decision = decide(planned, advise=advise)
    return decision, forecast(decision, planned)


@dataclass
class _LengthLines:
    """A recorder of rows of any length, by lines between recordings at two lengths."""

    record: Recorder
    short: int
    long: int
    recorded: dict[str, Peaks] = field(default_factory=dict)

    def peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        """Return the peaks of plans, between (or beyond) their peaks at the two lengths."""
        ends = [replace(plan, seq_len=n) for plan in plans for n in (self.short, self.long)]
        new = {str(end): end for end in ends if str(end) not in self.recorded}
        self.recorded |= zip(new, self.record.peaks(list(new.values())), strict=True)
        return [self._between(plan) for plan in plans]

    def _between(self, plan: StepPlan) -> Peaks:
        long_share = (plan.seq_len - self.short) / max(1, self.long - self.short)
        ends = ((self.short, 1 - long_share), (self.long, long_share))
        return combined((self.recorded[str(replace(plan, seq_len=n))], share) for n, share in ends)

    def tape(self, plan: StepPlan) -> Tape:
        return self.record.tape(plan)


@dataclass(frozen=True)
class Longest:
    """The forecast of the longest row that trains, None without one; shortage: what a longer one
    lacks, None at the end of the model's context."""

    forecast: Forecast | None
    shortage: str | None


def longest(planned: PlannedRun) -> Longest:
    """Return the longest row that trains, within 1% or 64 tokens. Lines guide the search,
    recordings of the chosen plans decide; with `estimate` the lines of each length do."""
    most = planned.shape.max_position_embeddings
    lengths = range(LENGTH_STEP, most + 1, LENGTH_STEP) or range(most, most + 1)
    lines = _LengthLines(planned.record, lengths[len(lengths) // 8], lengths[-1])
    exact = planned.with_fewest_rows()
    recorded = replace(exact, record=lines)
    by_lines = replace(recorded, estimate=True)
    shortages = dict[int, str]()
    longest_forecast: Forecast | None = None

    def at(index: int, run: PlannedRun) -> Forecast | None:
        decision, forecast = predicted(run.with_rows_of(lengths[index]))
        if decision.fits:
            return forecast
        shortages[index] = decision.reason
        return None

    index = bisect_left(range(len(lengths)), True, key=lambda x: at(x, by_lines) is None) - 1
    # the last length that fits, and the first not to; an estimate tries none that lines refuse
    fits, fails = -1, index + 1 if planned.estimate and index >= 0 else len(lengths)
    index, stride = max(index, 0), max(1, index // 100)
    while fails - fits > max(1, fits // 100):
        if (held := at(index, exact if planned.estimate else recorded)) is not None:
            fits, longest_forecast = index, held
        else:
            fails = index
        below, above = max(0, fails - stride), min(len(lengths) - 1, fits + stride)
        index = below if fits < 0 else above if fails == len(lengths) else (fits + fails) // 2
        stride *= 2
    if longest_forecast is not None and not planned.estimate:
        # Time is not linear in the length.
        longest_forecast = at(fits, exact) or longest_forecast
    longer = min((index for index in shortages if index > fits), default=None)
    return Longest(longest_forecast, None if longer is None else shortages[longer])


@dataclass(frozen=True)
class Largest:
    """The largest model that fits, with its forecast, and why larger ones do not."""

    name: str | None
    decision: Decision | None
    forecast: Forecast | None
    larger: Mapping[str, str]


def largest(models: Mapping[str, ModelShape], run_with: Callable[[str], PlannedRun]) -> Largest:
    """Return the largest of some models that fits. A model that cannot be trained with these
    settings (its context is too short, it lacks a target) does not fit."""
    larger = dict[str, str]()
    for name in sorted(models, key=lambda name: -num_weights(models[name])):
        planned = run_with(name)
        try:
            reason = planned.too_large()
            decision, forecast = (None, None) if reason else predicted(planned)
        except UserError as error:
            decision, reason = None, str(error).splitlines()[0]
        if decision is not None and decision.fits:
            return Largest(name, decision, forecast, larger)
        larger[name] = reason or (decision.reason if decision else "")
    return Largest(None, None, None, larger)


def num_weights(shape: ModelShape) -> int:
    """Return the number of a model's weights."""
    return shape.quantized_weights + shape.plain_weights
