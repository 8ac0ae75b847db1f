"""The search for the fastest plan that fits: every micro-batch size with every open value of the
memory options (`step_plan.memory_options`).

Bytes are predicted by lines between recordings (`recorded_peaks`), seconds by `machine_speed`.
Saving memory costs time, but allows larger micro-batches, so all of some hundred plans are tried;
offloading only if it would be faster than plans that fit.

The search's choice is recorded from the engine and replayed (`confirmed`). Each recording corrects
the lines of the search, which continues until it chooses a recorded plan, or none that is worth a
recording."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.memory.recorded_peaks import RecordedPeaks
from workflow.lib.planning.memory.replay import Replay, replay
from workflow.lib.planning.preflight.budget import Budget, host_bytes
from workflow.lib.planning.preflight.checks import check_batch
from workflow.lib.planning.preflight.planning_inputs import circumstances, wanted
from workflow.lib.planning.timing.machine_speed import Speed
from workflow.lib.settings.config import RunConfig
from workflow.lib.step_plan.memory_options import (
    TABLE,
    MemoryOption,
    Value,
    demands,
    takes_host_memory,
)
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError
from workflow.lib.system.units import GIB

# Larger micro-batches bring a CPU nothing: its matmuls are full at a few hundred rows.
LARGEST_CPU_MICRO_BATCH = 8
# Two plans of different kinds must differ by more than the error of predicted times
# (docs/predictions.md), two of a kind by less.
UNSURE, NEGLIGIBLE = 0.10, 0.03
# Of a step's time, by options that spend memory: less is not worth a fuller GPU.
LEAST_WON, MOST_WON = 0.01, 0.25
VERDICTS_OF_CHOSEN = ("chosen", "needs least, does not fit")


@dataclass(frozen=True)
class Candidate:
    """A plan, its memory, and the predicted seconds of a step."""

    plan: StepPlan
    peaks: Peaks  # by lines between recordings, or by its own recording (`replayed`)
    lacking_bytes: int  # bytes that a process lacks; 0 or less if it fits
    step_s: float
    host_bytes: int = 0  # host memory of a node's processes together
    lacking_host_bytes: int = 0
    """Host bytes that are lacking; 0 or less if there are enough, or it is unknown."""
    replayed: Replay | None = None
    """Of its own recording, if any, which then gives `lacking_bytes`."""

    @property
    def peak_bytes(self) -> int:
        """The peak of allocated bytes."""
        return self.peaks.allocated_bytes

    @property
    def micro_batch_size(self) -> int:
        """Rows per process and forward pass."""
        return self.plan.micro_batch_size

    @property
    def fits(self) -> bool:
        """Whether the peak fits with slack and margin, and the host holds its part."""
        return self.lacking_bytes <= 0 and self.lacking_host_bytes <= 0


@dataclass(frozen=True)
class Choices:
    """The open settings of a plan."""

    sizes: Sequence[int]  # rows of a micro-batch
    values: Mapping[str, Sequence[Value]]  # values to try of memory options, by field
    fewest: Sequence[MemoryOption] = ()
    """Options of which the fewest layers are tried that let a plan fit."""
    spending: Sequence[MemoryOption] = ()
    """Options of which the most layers are tried with which a plan fits."""

    def plans(self, plan: StepPlan, *, rows: int) -> Iterator[StepPlan]:
        """Yield all combinations for `rows` rows per process and step."""
        needless = [option.needless for option in TABLE if option.field in self.values]
        for size, values in product(self.sizes, product(*self.values.values())):
            options = dict(zip(self.values, values, strict=True))
            counts = {"micro_batch_size": size, "accumulation_steps": rows // size}
            tried = plan.changed(counts | options)
            if not any(does_the_same(tried) for does_the_same in needless):
                yield tried

    def takes_host_memory(self, plan: StepPlan) -> bool:
        """Whether an open option takes page-locked host memory in this plan."""
        chosen = (option for option in TABLE if option.field in self.values)
        return any(option.on_host and option.of(plan) for option in chosen)


def open_choices(run: RunConfig, shape: ModelShape, machine: Machine) -> Choices:
    """Return the open settings on a machine; raises `UserError` as `check_batch`."""
    _, sizes = check_batch(run, machine)
    where = circumstances(run, shape, machine)
    values = {option.field: option.open_values(wanted(run, option), where) for option in TABLE}
    counted = [x for x in TABLE if wanted(run, x) == "auto" and where.cuda]
    return Choices(
        sizes,
        {field: tried for field, tried in values.items() if tried},
        [option for option in counted if option.fewest],
        # spare memory is for bits first
        [option for option in counted if option.spends and not run.quantize.measures],
    )


class PeaksOf(Protocol):
    """Predicts peaks."""

    def of(self, plan: StepPlan) -> Peaks:
        """Return a plan's predicted peaks."""


@dataclass(frozen=True)
class Question:
    """The inputs of a candidate's prediction."""

    shape: ModelShape
    machine: Machine
    speed: Speed
    limits: Budget
    rows: int  # of a process and step
    trained_share: float
    peaks: PeaksOf

    def holds(self, plan: StepPlan) -> bool:
        """Whether a plan's predicted peak fits."""
        return self.limits.holds(self.peaks.of(plan).allocated_bytes)


def candidates(question: Question, plan: StepPlan, choices: Choices) -> list[Candidate]:
    """Predict every choice; a plan that does not fit, with the fewest offloaded layers."""
    options, unasked = list[Candidate](), list[StepPlan]()
    for tried in choices.plans(plan, rows=question.rows):
        if choices.takes_host_memory(tried):
            unasked.append(tried)
        else:
            options += _with_fewest_layers(question, tried, choices, unasked=False)
    options += _spending(question, options, choices)
    on_device = (x for x in options if x.fits and not takes_host_memory(x.plan))
    fastest_s = min((option.step_s for option in on_device), default=math.inf)
    for tried in unasked:
        # Copies to the host make nothing faster, and the recording without them is known.
        without = tried.changed({x.field: x.off for x in TABLE if x.on_host and x.of(tried)})
        if seconds(question, without, question.peaks.of(without)) * (1 + UNSURE) <= fastest_s:
            options += _with_fewest_layers(question, tried, choices, unasked=True)
    if question.machine.imagined_host is None or any(option.fits for option in options):
        return options
    return [_in_all_of_the_host(option, question.limits) for option in options]


def _spending(
    question: Question, options: Sequence[Candidate], choices: Choices
) -> Iterator[Candidate]:
    """Yield plans with as many layers of the options that spend memory as fit, if they are faster
    than all plans that fit."""
    fitting = [candidate for candidate in options if candidate.fits]
    fastest_s = min((candidate.step_s for candidate in fitting), default=math.inf)
    for candidate, option in product(fitting, choices.spending):
        plan = candidate.plan
        room = -candidate.lacking_bytes * question.shape.num_layers
        if (
            option.needless(plan)
            or candidate.step_s > fastest_s * (1 + MOST_WON)
            or room < question.shape.total(_weights)
        ):
            continue
        most = plan.changed({option.field: _most_layers(question, plan, option)})
        faster = predicted_candidate(question, most, unasked=False)
        if faster.step_s * (1 + LEAST_WON) <= fastest_s:
            yield faster


def _weights(layer: DecoderLayer) -> int:
    """The frozen weights of a layer, and the bytes of its smallest decoded form."""
    return sum(linear.num_weights for linear in layer.linears)


def _most_layers(question: Question, plan: StepPlan, option: MemoryOption) -> int:
    """Return the most layers of an option with which `plan`, which fits, still does."""

    def exceeds(count: int) -> bool:
        return not question.holds(plan.changed({option.field: count}))

    return bisect_left(range(1, question.shape.num_layers + 1), True, key=exceeds)


def _with_fewest_layers(
    question: Question, plan: StepPlan, choices: Choices, *, unasked: bool
) -> Iterator[Candidate]:
    """Yield a plan, and if it does not fit, the plan with the fewest offloaded layers that does."""
    candidate = predicted_candidate(question, plan, unasked=unasked)
    yield candidate
    for option in choices.fewest:
        if candidate.lacking_bytes > 0:
            fewest = plan.changed({option.field: _fewest_layers(question, plan, option)})
            candidate = predicted_candidate(question, fewest, unasked=True)
            yield candidate


def _fewest_layers(question: Question, plan: StepPlan, option: MemoryOption) -> int:
    """Return the fewest layers with which an option lets `plan` fit, by bisection; all if fewer do
    not. Most plans that do not fit need all, so one fewer is tried first."""

    def holds(count: int) -> bool:
        return question.holds(plan.changed({option.field: count}))

    most = question.shape.num_layers - 1
    if not holds(most):
        return question.shape.num_layers
    return 1 + bisect_left(range(1, most), True, key=holds)


def predicted_candidate(question: Question, plan: StepPlan, *, unasked: bool) -> Candidate:
    """Return a plan with its predicted peak and time. unasked: its use of host memory is the
    search's choice, not a setting."""
    peaks = question.peaks.of(plan)
    needed = question.limits.needed_bytes(peaks.allocated_bytes)
    host = host_bytes(question.shape, plan, question.machine, peaks)
    allowed = _allowed_host_bytes(question.machine, question.limits, unasked=unasked)
    return Candidate(
        plan=plan,
        peaks=peaks,
        lacking_bytes=needed - question.limits.capacity_bytes,
        step_s=seconds(question, plan, peaks),
        host_bytes=host,
        lacking_host_bytes=0 if allowed is None else host - allowed,
    )


def seconds(question: Question, plan: StepPlan, peaks: Peaks) -> float:
    """Return the predicted seconds of a step; peaks: of the plan, with its work."""
    micro_batches = question.rows // plan.micro_batch_size
    parts = question.speed.parts(
        peaks.work,
        plan,
        num_layers=question.shape.num_layers,
        trained_share=question.trained_share,
        micro_batches=micro_batches,
    )
    return sum(parts.values()) * micro_batches


def _in_all_of_the_host(option: Candidate, limits: Budget) -> Candidate:
    """Return a plan judged by all host memory, for an imagined machine whose half is too little."""
    if limits.host_capacity_bytes is None:
        return option
    return replace(option, lacking_host_bytes=option.host_bytes - limits.host_capacity_bytes)


def _allowed_host_bytes(machine: Machine, limits: Budget, *, unasked: bool) -> int | None:
    """Host memory that a plan may take, or None for any. Page-locked memory without a setting
    leaves half of the host's free; an unknown host has twice the GPUs' memory."""
    if not unasked or machine.gpu_bytes is None:
        return limits.host_capacity_bytes
    if limits.host_capacity_bytes is None:
        return machine.gpu_bytes * machine.processes_per_node
    return limits.host_capacity_bytes // 2


def choose(options: list[Candidate], *, device: str) -> Candidate:
    """Return the fastest candidate that fits, or a less demanding one that is at most 10% slower.

    Less demanding: activations and weights stay on the GPU; then, gathered weights are freed. Of
    equally fast ones, most rows win, then the smallest peak; of offloading ones within 3%, the
    least host memory. If none fits, the one that lacks least. On the CPU micro-batches have at most
    8 rows, if there are such candidates: larger ones gain nothing."""
    small = [c for c in options if c.micro_batch_size <= LARGEST_CPU_MICRO_BATCH]
    allowed = small if device == "cpu" and small else options
    fitting = [candidate for candidate in allowed if candidate.fits]
    if not fitting:
        return min(options, key=lambda c: (c.lacking_host_bytes > 0, c.peak_bytes))
    fastest_s = min(candidate.step_s for candidate in fitting)
    near = [c for c in fitting if c.step_s <= fastest_s * (1 + UNSURE)]
    least = min(demands(candidate.plan) for candidate in near)
    return _fastest([candidate for candidate in near if demands(candidate.plan) == least])


def is_worth_recording(candidate: Candidate, recorded: Candidate) -> bool:
    """Whether a candidate is less demanding than a known one that fits, or faster by 3% or more."""
    less = demands(candidate.plan) < demands(recorded.plan)
    return less or candidate.step_s < recorded.step_s / (1 + NEGLIGIBLE)


def _fastest(alike: list[Candidate]) -> Candidate:
    """Of equally demanding plans: the fastest, most rows, least offloaded activations."""
    first = min(alike, key=lambda c: (float(f"{c.step_s:.6g}"), -c.micro_batch_size, c.peak_bytes))
    if not takes_host_memory(first.plan):
        return first
    near = [c for c in alike if c.step_s <= first.step_s * (1 + NEGLIGIBLE)]
    return min(near, key=lambda c: (c.host_bytes, c.step_s))


def explain(candidate: Candidate, chosen: Candidate) -> str:
    """Return a short reason why a candidate was chosen or not."""
    if candidate == chosen:
        return VERDICTS_OF_CHOSEN[0 if candidate.fits else 1]
    if candidate.lacking_bytes > 0:
        method = ", replayed" if candidate.replayed else ""
        return f"{candidate.lacking_bytes / GIB:.2f} GiB too much{method}"
    if not candidate.fits:
        return f"{candidate.lacking_host_bytes / GIB:.2f} GiB of host memory too much"
    percent = 100 * (candidate.step_s / chosen.step_s - 1)
    return f"{percent:.1f}% slower" if percent >= 0 else f"only {-percent:.1f}% faster"


class NotRecordedError(UserError):
    """A model calls operations that cannot run on tensors without values."""


class Recorder(Protocol):
    """Runs plans on tensors without values; raises `NotRecordedError` if it cannot."""

    def peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        """Return the peaks of a process of each plan."""

    def tape(self, plan: StepPlan) -> Tape:
        """Return all events of a GPU's allocator in a process of a plan."""


def confirmed(
    search: Callable[[], list[Candidate]],
    lines: RecordedPeaks,
    *,
    device: str,
    limits: Budget,
    record: Recorder,
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate whose replay fits, and all candidates, corrected by replays;
    search: finds them, by `lines`. If none fits, the one that needs least, replayed too."""
    replayed = list[Candidate]()
    while True:
        options = _with_replays(search(), replayed)
        chosen = choose(options, device=device)
        if chosen.replayed is not None:
            return chosen, options
        if fitting := [candidate for candidate in replayed if candidate.fits]:
            best = choose(fitting, device=device)
            if not is_worth_recording(chosen, best):
                return best, options
        replayed.append(recorded(chosen, limits=limits, record=record))
        lines.correct(chosen.plan, replayed[-1].peaks)


def _with_replays(options: list[Candidate], replayed: list[Candidate]) -> list[Candidate]:
    """Return the options, with replayed ones in their places, new ones after them."""
    plans = [candidate.plan for candidate in options]
    checked = list(options)
    for candidate in replayed:
        if candidate.plan in plans:
            checked[plans.index(candidate.plan)] = candidate
        else:
            checked.append(candidate)
    return checked


def recorded(candidate: Candidate, *, limits: Budget, record: Recorder) -> Candidate:
    """Return a candidate with its recorded peak and lack; CPUs are not replayed."""
    if candidate.plan.device == "cpu":
        (peaks,) = record.peaks([candidate.plan])
        reserved = peaks.allocated_bytes + limits.slack_bytes(peaks.allocated_bytes)
        replayed, lacking = Replay(peaks, reserved, 0), reserved - limits.capacity_bytes
    else:
        allowed = limits.capacity_bytes - limits.outside_allocator_bytes - limits.margin_bytes
        replayed = replay(record.tape(candidate.plan), limit_bytes=allowed)
        lacking = replayed.lacking_bytes or replayed.reserved_bytes - allowed
    return replace(candidate, peaks=replayed.peaks, replayed=replayed, lacking_bytes=lacking)
