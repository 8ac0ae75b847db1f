"""The decision of preflight: which plan a run takes, whether it fits, and if not, what would."""

from dataclasses import dataclass, replace

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.disk import disk_bytes
from workflow.lib.planning.preflight.budget import Budget, budget
from workflow.lib.planning.preflight.checks import check_batch
from workflow.lib.planning.preflight.plan_search import (
    Candidate,
    Question,
    candidates,
    open_choices,
)
from workflow.lib.planning.preflight.planning_inputs import plan_from_settings
from workflow.lib.planning.preflight.remedies import remedies
from workflow.lib.planning.preflight.replay_check import Recorder, confirmed
from workflow.lib.planning.timing.machine_speed import Speed, speed_of
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.settings.config import RunConfig
from workflow.lib.step_plan.memory_options import in_words
from workflow.lib.system.units import GIB

MOST_REMEDIES = 3  # named to who has a run that does not fit


@dataclass(frozen=True)
class Decision:
    """The chosen candidate, all candidates, and what it was held against; `reason` says what
    decided.
    """

    fits: bool
    reason: str
    chosen: Candidate
    candidates: list[Candidate]
    rows: int
    speed: Speed
    limits: Budget
    host_bytes: int
    disk_bytes: dict[str, int]
    disk_free_bytes: int | None


def decide(
    run: RunConfig,
    shape: ModelShape,
    machine: Machine,
    tokens: TokenCounts,
    *,
    disk_free_bytes: int | None,
    record: Recorder | None = None,
) -> Decision:
    """Choose the plan and say whether the run fits GPU (or host) memory and disk.

    `disk_free_bytes` is None where there is no disk to ask; `record` as in `confirmed`. Raises
    `UserError` if a setting cannot work with this model or machine, whatever its memory.
    """
    limits = budget(run.hardware, machine)
    rows, _ = check_batch(run, machine)
    plan = replace(
        plan_from_settings(run, shape, machine), documents_per_row=tokens.documents_per_row
    )
    speed = speed_of(
        machine, calibration=run.hardware.calibration, compute_bytes=plan.compute_bytes
    )
    question = Question(shape, machine, speed, limits, rows, tokens.trained_share)
    choices = open_choices(run, shape, machine)
    chosen, options = confirmed(
        lambda shares: candidates(replace(question, shares=shares), plan, choices),
        device=machine.device,
        limits=limits,
        record=record,
    )
    disk = disk_bytes(
        shape, chosen.plan, tokens,
        keep_checkpoints=run.train.keep_checkpoints, keep_best=run.train.select == "best",
    )  # fmt: skip
    lack = _memory_lack(run, shape, machine, chosen, limits)
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
        host_bytes=chosen.host_bytes,
        disk_bytes=disk,
        disk_free_bytes=disk_free_bytes,
    )


def _reason(chosen: Candidate, limits: Budget, machine: Machine) -> str:
    needed = limits.capacity_bytes + chosen.lacking_bytes
    peak = chosen.replayed or chosen.prediction
    kind = "GPU" if machine.device == "cuda" else "process's share of the host"
    alone = machine.device == "cuda" and chosen.replayed is None
    unsure = ", estimated and not confirmed by a recording" if alone else ""
    recomputation = in_words(chosen.plan)["recomputation"]
    return (
        f"micro-batch {chosen.micro_batch_size} (recomputation: {recomputation}) needs "
        f"{needed / GIB:.2f} of "
        f"{limits.capacity_bytes / GIB:.2f} GiB of each {kind} (phase {peak.peak_phase}{unsure})"
    )


def _memory_lack(
    run: RunConfig, shape: ModelShape, machine: Machine, chosen: Candidate, limits: Budget
) -> str | None:
    if chosen.lacking_bytes <= 0:
        return None
    options = remedies(
        shape,
        chosen.plan,
        machine,
        run.hardware,
        global_batch_size=run.train.global_batch_size,
    )
    enough = [str(remedy) for remedy in options if remedy.fits]
    advice = f"Any one of these would fit: {'; '.join(enough[:MOST_REMEDIES])}"
    if not enough:
        most = "; ".join(map(str, options[:MOST_REMEDIES])) or "there is none"
        advice = f"No single change is enough; the largest savings are: {most}"
    return f"{_reason(chosen, limits, machine)}. {advice}"


def _host_lack(chosen: Candidate, limits: Budget, machine: Machine) -> str | None:
    if limits.host_capacity_bytes is None or chosen.lacking_host_bytes <= 0:
        return None
    origin = machine.imagined_host or "hardware.host_memory_gib, or what is free"
    return (
        f"the {machine.processes} processes need {chosen.host_bytes / GIB:.2f} GiB of host memory "
        "together, "
        f"{limits.host_capacity_bytes / GIB:.2f} GiB may be used ({origin}). "
        "Free host memory, or use fewer processes"
    )


def _disk_lack(needed: int, free: int | None) -> str | None:
    if free is None or needed <= free:
        return None
    return (
        f"checkpoints and adapter need {needed / GIB:.2f} GiB of disk, {free / GIB:.2f} GiB are "
        "free. "
        "Free disk space, or lower train.keep_checkpoints or lora.r"
    )
