"""The decision of preflight: a run's plan, whether it fits, and if not, what would."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.memory.recorded_peaks import RecordedPeaks
from workflow.lib.planning.model_sizes import packed_bytes, trainable_parameters
from workflow.lib.planning.preflight.budget import Budget, budget
from workflow.lib.planning.preflight.checks import check_batch
from workflow.lib.planning.preflight.plan_search import (
    Candidate,
    Choices,
    Question,
    candidates,
    choose,
    open_choices,
)
from workflow.lib.planning.preflight.planning_inputs import plan_from_settings
from workflow.lib.planning.preflight.remedies import remedies
from workflow.lib.planning.preflight.replay_check import NotRecordedError, Recorder, confirmed
from workflow.lib.planning.timing.machine_speed import Speed, speed_of
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.settings.config import RunConfig
from workflow.lib.settings.optimizers import OPTIMIZERS
from workflow.lib.step_plan.memory_options import TABLE, in_words
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError
from workflow.lib.system.number_formats import size
from workflow.lib.system.units import GIB


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
    base = shape.total(lambda layer: packed_bytes(layer.linears, plan))
    base += packed_bytes(shape.other_linears, plan)
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


def decide(
    run: RunConfig,
    shape: ModelShape,
    machine: Machine,
    tokens: TokenCounts,
    *,
    disk_free_bytes: int | None,
    record: Recorder,
    estimate: bool = False,
    advise: bool = True,
) -> Decision:
    """Choose the plan and return whether the run fits memory and disk (`disk_free_bytes`: None
    without a disk). estimate: by lines alone; advise: also name changes that would fit. Raises
    `UserError` if a setting cannot work here, or is open for a model that cannot be recorded."""
    limits = budget(run.hardware, machine)
    rows, _ = check_batch(run, machine)
    plan = replace(
        plan_from_settings(run, shape, machine),
        documents_per_row=tokens.documents_per_row,
        document_lengths=tokens.lengths,
    )
    speed = speed_of(machine, compute_bytes=plan.compute_bytes)
    choices = open_choices(run, shape, machine)
    lines = _lines(plan, choices, record, rows=rows, num_layers=shape.num_layers)
    question = Question(shape, machine, speed, limits, rows, tokens.trained_share, lines)

    def search() -> list[Candidate]:
        return candidates(question, plan, choices)

    try:
        if estimate:
            options = search()
            chosen = choose(options, device=machine.device)
        else:
            chosen, options = confirmed(
                search, lines, device=machine.device, limits=limits, record=record
            )
    except NotRecordedError as error:
        chosen = _unpredicted(question, plan, choices, error)
        options = [chosen]
    disk = disk_bytes(
        shape, chosen.plan, tokens,
        keep_checkpoints=run.train.keep_checkpoints + len(run.export.steps),
        keep_best=run.train.select == "best",
    )  # fmt: skip
    lack = None
    if chosen.lacking_bytes > 0:
        lack = _reason(chosen, limits, machine)
        if advise:
            lack += f". {_advice(run, shape, machine, chosen, record)}"
    lack = lack or _host_lack(chosen, limits, machine)
    lack = lack or _disk_lack(disk["checkpoints"] + disk["adapter"], disk_free_bytes)
    return Decision(
        fits=lack is None,
        reason=lack or _reason(chosen, limits, machine),
        chosen=chosen,
        candidates=options,
        rows=rows,
        speed=speed,
        limits=limits,
        disk_bytes=disk,
        disk_free_bytes=disk_free_bytes,
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


def _reason(chosen: Candidate, limits: Budget, machine: Machine) -> str:
    if chosen.peaks is NOTHING_KNOWN:
        return "the memory of this model cannot be predicted; the settings give the plan"
    needed = limits.capacity_bytes + chosen.lacking_bytes
    kind = "GPU" if machine.device == "cuda" else "process's share of the host"
    unsure = "" if chosen.replayed else ", estimated and not confirmed by a recording"
    recomputation = in_words(chosen.plan)["recomputation"]
    return (
        f"micro-batch {chosen.micro_batch_size} (recomputation: {recomputation}) needs "
        f"{needed / GIB:.2f} of {limits.capacity_bytes / GIB:.2f} GiB of each {kind} (phase "
        f"{chosen.peaks.peak_phase}{unsure})"
    )


def _advice(
    run: RunConfig, shape: ModelShape, machine: Machine, chosen: Candidate, record: Recorder
) -> str:
    options = remedies(
        shape,
        chosen.plan,
        machine,
        run.hardware,
        record.peaks,
        before=chosen.peaks,
        global_batch_size=run.train.global_batch_size,
        most=MOST_REMEDIES,
    )
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
