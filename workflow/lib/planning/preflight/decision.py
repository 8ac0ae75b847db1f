"""The decision of preflight: a run's plan, whether it fits, and if not, what would."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workflow.lib.artifacts.preflight_record import BitCurve
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.peaks import Peaks, combined
from workflow.lib.planning.memory.recorded_peaks import RecordedPeaks
from workflow.lib.planning.model_sizes import layer_bytes, packed_bytes, trainable_parameters
from workflow.lib.planning.preflight.bit_choice import (
    BitOrder,
    as_fast,
    choose_bits,
    with_all,
)
from workflow.lib.planning.preflight.budget import Budget, budget, host_bytes
from workflow.lib.planning.preflight.checks import check_batch
from workflow.lib.planning.preflight.plan_search import (
    Candidate,
    Choices,
    NotRecordedError,
    Question,
    Recorder,
    candidates,
    choose,
    confirmed,
    open_choices,
)
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.preflight.planning_inputs import (
    circumstances,
    divisors,
    plan_from_settings,
)
from workflow.lib.planning.timing.machine_speed import Speed, speed_of
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.settings.optimizer_kinds import OPTIMIZERS, SMALLEST
from workflow.lib.settings.train import ALL_LINEARS
from workflow.lib.step_plan.memory_options import (
    TABLE,
    Circumstances,
    MemoryOption,
    Value,
    in_words,
)
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.number_formats import size
from workflow.lib.system.units import GIB

MOST_GPUS = 64
SHORTEST_ROW = 128  # tokens; shorter rows are no remedy worth naming
SMALLEST_RANK = 4
# From the nearest to the farthest: first changes without effect on the result of training, then
# changes of rounding alone.
NEAREST = (
    "train.micro_batch_size",
    *(option.setting for option in TABLE if not option.rounds),
    "hardware.shard_size",
    "hardware.gpus",
    "hardware.cpu_processes",
    *(option.setting for option in TABLE if option.rounds),
    "train.optimizer",
    "quantize.double_quant",
    "quantize.keep",
    "quantize.method",
    "lora.dropout",
    "lora.r",
    "data.seq_len",
    "lora.use_dora",
    "lora.modules_to_save",
)


Option = tuple[str, StepPlan]


@dataclass(frozen=True)
class Remedy:
    """One change, the peak and the capacity that a process then has, and whether it fits."""

    change: str
    peak_bytes: int
    fits: bool

    def __str__(self) -> str:
        return f"{self.change} (peak {self.peak_bytes / GIB:.2f} GiB)"


def remedies(planned: PlannedRun, plan: StepPlan, *, before: Peaks, most: int) -> list[Remedy]:
    """Return up to `most` single changes that fit, the nearest first, of each kind the smallest; if
    there is none, those that save most of the plan's peak (`before`). Lines between recordings find
    the smallest, and each is recorded."""
    kinds = sorted(filter(None, _options(planned, plan)), key=_remedy_order)
    record = planned.record.peaks

    def judged(option: Option, peaks: Peaks) -> Remedy:
        change, changed = option
        machine = replace(planned.machine, processes=changed.processes)
        limits = budget(planned.settings.hardware, machine)
        host = host_bytes(planned.shape, changed, machine, peaks)
        room = limits.host_capacity_bytes is None or host <= limits.host_capacity_bytes
        return Remedy(change, peaks.allocated_bytes, limits.holds(peaks.allocated_bytes) and room)

    def smallest(options: Sequence[Option], last: Peaks) -> Remedy:
        size, least = _size(plan), _size(options[-1][1])
        for option in options[:-1]:
            share = (size - _size(option[1])) / (size - least)
            line = combined([(last, share), (before, 1 - share)])
            if judged(option, line).fits and (tried := judged(option, *record([option[1]]))).fits:
                return tried
        return judged(options[-1], last)

    fitting, helpful = list[Remedy](), list[Remedy]()
    for first in range(0, len(kinds), most):
        attempts = kinds[first : first + most]
        largest = record([options[-1][1] for options in attempts])
        for options, peaks in zip(attempts, largest, strict=True):
            helpful.append(judged(options[-1], peaks))
            if helpful[-1].fits and len(fitting) < most:
                fitting.append(smallest(options, peaks))
        if len(fitting) == most:
            break
    helpful = [remedy for remedy in helpful if remedy.peak_bytes < before.allocated_bytes]
    return fitting or sorted(helpful, key=lambda remedy: remedy.peak_bytes)[:most]


def _size(plan: StepPlan) -> float:
    """The number with which peaks grow, almost linearly, among plans with one difference."""
    rows = plan.micro_batch_size + plan.slice_tokens
    return rows + plan.rank + 1 / plan.processes - plan.offload_layers


def _remedy_order(options: Sequence[Option]) -> int:
    """The rank of a kind of change among all, the nearest first."""
    setting = options[0][0].split(" = ")[0]
    assert setting in NEAREST, f"{setting} has no place among the remedies"
    return NEAREST.index(setting)


def _options(planned: PlannedRun, plan: StepPlan) -> Iterator[list[Option]]:
    """Yield the changes of one setting at a time, from the smallest to the largest."""
    machine, batch_size = planned.machine, planned.settings.train.global_batch_size
    rows = batch_size // plan.row_groups
    smaller = [d for d in reversed(divisors(rows)) if d < plan.micro_batch_size]
    yield [
        (
            f"train.micro_batch_size = {d}",
            replace(plan, micro_batch_size=d, accumulation_steps=rows // d),
        )
        for d in smaller
    ]
    yield from ([option] for option in _switches(plan))
    where = circumstances(planned.settings, planned.shape, machine)
    yield from (_option_remedies(option, plan, where) for option in TABLE)
    lengths = _halves(plan.seq_len, SHORTEST_ROW)
    yield [
        (f"data.seq_len = {n} (tokenizes again)", replace(plan, seq_len=n, answer_rows=None))
        for n in lengths
    ]
    processes = "hardware.gpus" if machine.device == "cuda" else "hardware.cpu_processes"
    yield [
        (f"{processes} = {p // machine.nodes}", replace(plan, processes=p))
        for p in _process_counts(machine, batch_size * plan.context_parallel)
        if p % (plan.replicas * plan.context_parallel) == 0
    ]
    yield [(f"lora.r = {r}", replace(plan, rank=r)) for r in _halves(plan.rank, SMALLEST_RANK)]


def _option_remedies(option: MemoryOption, plan: StepPlan, where: Circumstances) -> list[Option]:
    """Return the changes to higher values of a memory option, as far as they are allowed."""
    values: Iterable[Value] = ()
    if option.fewest:
        eighths = {math.ceil(where.num_layers * part / 8) for part in range(1, 9)}
        values = sorted(count for count in eighths if count > option.of(plan))
    elif option.most is not None and option.of(plan) != option.most:
        values = [option.most]
    return [
        (f"{option.setting} = {json.dumps(value)}", plan.changed({option.field: value}))
        for value in values
        if option.obstacle(plan, value, where) is None
    ]


def _switches(plan: StepPlan) -> Iterator[Option]:
    if plan.trained_tables:
        frozen = replace(plan, trains_head=False, trains_embedding=False)
        yield "lora.modules_to_save = []", frozen
    if plan.optimizer != SMALLEST:
        yield f"train.optimizer = {SMALLEST}", replace(plan, optimizer=SMALLEST)
    if plan.kept:
        change = "method = absmax" if plan.kept == ALL_LINEARS else "keep = []"
        yield f"quantize.{change}", replace(plan, kept=())
    if not plan.double_quant:
        yield "quantize.double_quant = true", replace(plan, double_quant=True)
    if plan.dropout:
        yield "lora.dropout = 0", replace(plan, dropout=0.0)
    if plan.dora:
        yield "lora.use_dora = false", replace(plan, dora=False)
    if plan.replicas > 1:
        yield "hardware.shard_size = auto", replace(plan, replicas=1)


def _halves(value: int, least: int) -> list[int]:
    halves = []
    while value // 2 >= least:
        value //= 2
        halves.append(value)
    return halves


def _process_counts(machine: Machine, global_batch_size: int) -> list[int]:
    """More GPUs, or fewer CPU processes, each of which has its own libraries and activations."""
    valid = [p for p in divisors(global_batch_size) if p % machine.nodes == 0]
    if machine.device == "cuda":
        return [p for p in valid if machine.processes < p <= MOST_GPUS]
    return [p for p in reversed(valid) if p < machine.processes]


def disk_bytes(
    shape: ModelShape,
    plan: StepPlan,
    tokens: TokenCounts,
    *,
    keep_checkpoints: int,
    keep_best: bool,
) -> dict[str, int]:
    """Return the bytes of every artifact of a run. Checkpoints (fp32 adapter, whole modules,
    optimizer's moments): one more than `keep_checkpoints`, as the new one comes before the oldest
    goes. Adapters: two, and with `keep_best` one for every checkpoint, and the newest."""
    stored = shape.source_bytes
    base = sum(layer_bytes(shape, plan, kept_bytes=stored))
    base += packed_bytes(shape.other_linears, plan, kept_bytes=stored)
    trained = trainable_parameters(shape, plan)
    adapter, moments = 4 * trained, OPTIMIZERS[plan.optimizer].moment_bytes(trained)
    packed_tokens = tokens.packed_rows * tokens.seq_len
    return {
        "tokens": packed_tokens * (4 + 1 + 4) + tokens.heldout_tokens * (4 + 1),
        "base": base + shape.source_bytes * shape.plain_weights,
        "checkpoints": (adapter + moments) * (keep_checkpoints + 1),
        "adapter": (2 + (keep_checkpoints + 1 if keep_best else 0)) * adapter,
    }


MOST_REMEDIES = 3  # in a message on a run that does not fit
RECOMPUTATION = "activation_checkpointing"
NOTHING_KNOWN = Peaks({"unknown": {}})

logger = logging.getLogger("workflow")


@dataclass(frozen=True)
class Decision:
    """The chosen candidate, all candidates, their comparison; `reason`: of the verdict."""

    fits: bool
    reason: str
    chosen: Candidate
    candidates: list[Candidate]
    rows: int
    speed: Speed
    limits: Budget
    disk_bytes: dict[str, int]
    disk_free_bytes: int | None
    bits: BitCurve | None = None


def decide(planned: PlannedRun, *, advise: bool = True) -> Decision:
    """Choose the plan and return whether the run fits memory and disk: of `context_parallel: auto`
    the smallest number with which it fits memory. advise: also name changes that would fit. Raises
    `UserError` if a setting cannot work here, or is open for a model that cannot be recorded."""
    decisions = _divided(planned)
    best = min(decisions, key=_shortage)
    reason, chosen = best.reason, best.chosen
    if advise and chosen.lacking_bytes > 0:
        run = planned.with_rows_over(chosen.plan.context_parallel)
        reason += f". {_advice(run, chosen)}"
    options = [candidate for decision in decisions for candidate in decision.candidates]
    return replace(best, reason=reason, candidates=options)


def _divided(planned: PlannedRun) -> list[Decision]:
    """Return the decisions that were tried, of `auto` at most as far as one fits."""
    if planned.settings.hardware.context_parallel != "auto":
        return [_searched(planned)]
    tried, wider = [_searched(planned.with_rows_over(1))], [*planned.wider()]
    if tried[0].chosen.fits or not wider:
        return tried
    widest = _searched(wider.pop())
    while widest.chosen.fits and wider and not tried[-1].chosen.fits:
        tried.append(_searched(wider.pop(0)))
    return [*tried, widest]


def _shortage(decision: Decision) -> tuple[bool, int, bool, int]:
    """The order of decisions: the fewest sharers that fit, then the one that lacks least."""
    chosen = decision.chosen
    sharers = chosen.plan.context_parallel if chosen.fits else 0
    return not chosen.fits, sharers, chosen.lacking_host_bytes > 0, chosen.peak_bytes


def _searched(planned: PlannedRun) -> Decision:
    """Decide as `decide` does, without advice, by rows of one `context_parallel`."""
    run, shape, machine = planned.settings, planned.shape, planned.machine
    tokens, record = planned.tokens, planned.record
    limits = budget(run.hardware, machine)
    rows, _ = check_batch(run, machine)
    plan = replace(
        plan_from_settings(run, shape, machine),
        documents_per_row=tokens.documents_per_row,
        document_lengths=tokens.lengths,
        answer_rows=tokens.answer_rows,
    )
    speed = speed_of(machine, compute_bytes=plan.compute_bytes)
    choices = open_choices(run, shape, machine)
    lines = _lines(plan, choices, record, rows=rows, num_layers=shape.num_layers)
    question = Question(shape, machine, speed, limits, rows, tokens.trained_share, lines)

    def search() -> list[Candidate]:
        return candidates(question, plan, choices)

    try:
        if planned.estimate:
            options = search()
            chosen = choose(options, device=machine.device)
        else:
            chosen, options = confirmed(
                search, lines, device=machine.device, limits=limits, record=record
            )
    except NotRecordedError as error:
        chosen = _unpredicted(question, plan, choices, error)
        options = [chosen]
    bits = None
    if run.quantize.measures and chosen.fits and chosen.peaks is not NOTHING_KNOWN:
        order, estimate = _order(planned), planned.estimate
        choice = choose_bits(question, chosen, order, record, estimate=estimate)
        best, bits = choice.candidate, choice.curve
        if bits.kept < bits.weights:
            whole = decide(planned.in_16_bits(), advise=False)
            if whole.fits and as_fast(whole.chosen, chosen):
                best, bits = whole.chosen, with_all(bits)
            else:
                slower = _slower(whole, best, shape.num_layers)
                bits = bits.model_copy(update={"slower": slower})
        options = [best if option == chosen else option for option in options]
        chosen = best
    disk = disk_bytes(
        shape, chosen.plan, tokens,
        keep_checkpoints=run.train.keep_checkpoints + len(run.export.steps),
        keep_best=run.train.select == "best",
    )  # fmt: skip
    reason = None
    if chosen.lacking_bytes > 0:
        reason = _reason(chosen, limits, shape, machine)
    reason = reason or _host_lack(chosen, limits, machine)
    reason = reason or _disk_lack(disk["checkpoints"] + disk["adapter"], planned.disk_free_bytes)
    return Decision(
        fits=reason is None,
        reason=reason or _reason(chosen, limits, shape, machine),
        chosen=chosen,
        candidates=options,
        rows=rows,
        speed=speed,
        limits=limits,
        disk_bytes=disk,
        disk_free_bytes=planned.disk_free_bytes,
        bits=bits,
    )


def _order(planned: PlannedRun) -> BitOrder:
    if planned.costs is None:
        raise setting_error(
            "quantize.keep",
            "auto",
            "it follows from sensitivities, which the workflow measures on the run's text",
            "Run snakemake preflight, or name linears",
        )
    return BitOrder.of(planned.costs, planned.shape)


def _slower(whole: Decision, chosen: Candidate, num_layers: int) -> str | None:
    """Return the plan that holds all linears in 16 bits, if any does."""
    other = whole.chosen
    if not other.fits or not chosen.step_s:
        return None
    recomputation = in_words(other.plan, num_layers)["recomputation"]
    return (
        f"all linears in 16 bits fit another plan (micro-batch {other.micro_batch_size}, "
        f"recomputation: {recomputation}), in {other.step_s / chosen.step_s:.0%} of this time: "
        "quantize.method = none"
    )


def _lines(
    plan: StepPlan, choices: Choices, record: Recorder, *, rows: int, num_layers: int
) -> RecordedPeaks:
    """Return the lines for the open settings, with earlier gradients if any plan has some."""
    levels: Any = choices.values.get(RECOMPUTATION, [plan.activation_checkpointing])
    common = replace(plan, accumulation_steps=rows // min(choices.sizes))
    return RecordedPeaks(
        common, record.peaks, rows=choices.sizes, levels=levels, num_layers=num_layers
    )


def _unpredicted(
    question: Question, plan: StepPlan, choices: Choices, error: NotRecordedError
) -> Candidate:
    """Return the only plan of the settings; raises `UserError` if they leave more than one."""
    only, *others = choices.plans(plan, rows=question.rows)
    if others or choices.fewest:
        settings = ", ".join(option.setting for option in TABLE if option.searched)
        raise UserError(
            f"{error}. So no plan can be searched. Set train.micro_batch_size, {settings} to "
            "values other than auto: the run follows them, without a prediction of its memory."
        )
    logger.warning("%s; the plan of the settings is followed without a prediction", error)
    return Candidate(only, NOTHING_KNOWN, lacking_bytes=0, step_s=0.0)


def _reason(chosen: Candidate, limits: Budget, shape: ModelShape, machine: Machine) -> str:
    if chosen.peaks is NOTHING_KNOWN:
        return "the memory of this model cannot be predicted; the settings give the plan"
    needed = limits.capacity_bytes + chosen.lacking_bytes
    kind = "GPU" if machine.device == "cuda" else "process's share of the host"
    unsure = "" if chosen.replayed else ", estimated and not confirmed by a recording"
    recomputation = in_words(chosen.plan, shape.num_layers)["recomputation"]
    return (
        f"micro-batch {chosen.micro_batch_size}{chosen.plan.sharers} (recomputation: "
        f"{recomputation}) needs {needed / GIB:.2f} of {limits.capacity_bytes / GIB:.2f} GiB of "
        f"each {kind} (phase {chosen.peaks.peak_phase}{unsure})"
    )


def _advice(planned: PlannedRun, chosen: Candidate) -> str:
    options = remedies(planned, chosen.plan, before=chosen.peaks, most=MOST_REMEDIES)
    enough = [str(remedy) for remedy in options if remedy.fits]
    if enough:
        return f"Any one of these would fit: {'; '.join(enough)}"
    most = "; ".join(map(str, options)) or "there is none"
    return f"No single change is enough; the largest savings are: {most}"


def _host_lack(chosen: Candidate, limits: Budget, machine: Machine) -> str | None:
    if limits.host_capacity_bytes is None or chosen.lacking_host_bytes <= 0:
        return None
    origin = machine.imagined_host or "hardware.host_memory_gib, or what is free"
    return (
        f"the {machine.processes} processes need {chosen.host_bytes / GIB:.2f} GiB of host memory "
        f"together, {limits.host_capacity_bytes / GIB:.2f} GiB may be used ({origin}). Free host "
        "memory, or use fewer processes"
    )


def _disk_lack(needed: int, free: int | None) -> str | None:
    if free is None or needed <= free:
        return None
    return (
        f"checkpoints and adapter need {size(needed)} of disk, {size(free)} are free. Free disk "
        "space, lower train.keep_checkpoints or lora.r, or shorten export.steps"
    )
