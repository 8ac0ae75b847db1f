"""Changes for a run that does not fit: single settings, each recorded like the run itself."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.peaks import Peaks, combined
from workflow.lib.planning.memory.recorded_peaks import RecordPeaks
from workflow.lib.planning.preflight.budget import budget, host_bytes
from workflow.lib.planning.preflight.planning_inputs import circumstances, divisors
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.settings.optimizers import SMALLEST
from workflow.lib.step_plan.memory_options import TABLE, Circumstances, MemoryOption, Value
from workflow.lib.step_plan.plan import StepPlan
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


def remedies(
    shape: ModelShape,
    plan: StepPlan,
    machine: Machine,
    hardware: HardwareConfig,
    record: RecordPeaks,
    *,
    before: Peaks,
    global_batch_size: int,
    most: int,
) -> list[Remedy]:
    """Return up to `most` single changes that fit, the nearest first, of each kind the smallest; if
    there is none, those that save most of the plan's peak (`before`). Lines between recordings find
    the smallest, and each is recorded."""
    kinds = sorted(
        filter(None, _options(shape, plan, machine, global_batch_size=global_batch_size)),
        key=_place,
    )

    def judged(option: Option, peaks: Peaks) -> Remedy:
        change, changed = option
        there = replace(machine, processes=changed.processes)
        limits, host = budget(hardware, there), host_bytes(shape, changed, there, peaks)
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
        some = kinds[first : first + most]
        largest = record([options[-1][1] for options in some])
        for options, peaks in zip(some, largest, strict=True):
            helpful.append(judged(options[-1], peaks))
            if helpful[-1].fits and len(fitting) < most:
                fitting.append(smallest(options, peaks))
        if len(fitting) == most:
            break
    helpful = [remedy for remedy in helpful if remedy.peak_bytes < before.allocated_bytes]
    return fitting or sorted(helpful, key=lambda remedy: remedy.peak_bytes)[:most]


def _size(plan: StepPlan) -> float:
    """The number with which peaks grow, almost linearly, among plans with one difference."""
    rows = plan.micro_batch_size + plan.seq_len
    return rows + plan.rank + 1 / plan.processes - plan.offload_layers


def _place(options: Sequence[Option]) -> int:
    """The rank of a kind of change among all, the nearest first."""
    setting = options[0][0].split(" = ")[0]
    assert setting in NEAREST, f"{setting} has no place among the remedies"
    return NEAREST.index(setting)


def _options(
    shape: ModelShape, plan: StepPlan, machine: Machine, *, global_batch_size: int
) -> Iterator[list[Option]]:
    """Yield the changes of one setting at a time, from the smallest to the largest."""
    rows = global_batch_size // plan.processes
    smaller = [d for d in reversed(divisors(rows)) if d < plan.micro_batch_size]
    yield [
        (
            f"train.micro_batch_size = {d}",
            replace(plan, micro_batch_size=d, accumulation_steps=rows // d),
        )
        for d in smaller
    ]
    yield from ([option] for option in _switches(plan))
    where = circumstances(shape, machine)
    yield from (_of_option(option, plan, where) for option in TABLE)
    lengths = _halves(plan.seq_len, SHORTEST_ROW)
    yield [(f"data.seq_len = {n} (tokenizes again)", replace(plan, seq_len=n)) for n in lengths]
    processes = "hardware.gpus" if machine.device == "cuda" else "hardware.cpu_processes"
    yield [
        (f"{processes} = {p // machine.nodes}", replace(plan, processes=p))
        for p in _process_counts(machine, global_batch_size)
        if p % plan.replicas == 0
    ]
    yield [(f"lora.r = {r}", replace(plan, rank=r)) for r in _halves(plan.rank, SMALLEST_RANK)]


def _of_option(option: MemoryOption, plan: StepPlan, where: Circumstances) -> list[Option]:
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
