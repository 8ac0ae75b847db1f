"""Preflight as a whole: what is read and checked, the decision, and the document that the later
stages read.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workflow.lib.model.architecture.model_shape import ModelShape, read_config, shape_of_config
from workflow.lib.planning.machine import (
    Machine,
    asked_machine,
    imagined_machine,
    imagined_model,
    num_processes,
    requested_processes,
)
from workflow.lib.planning.memory.closed_form import EXPLANATIONS
from workflow.lib.planning.memory.disk import disk_bytes
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import offload_window, trainable_parameters
from workflow.lib.planning.preflight.plan_search import (
    Candidate,
    Question,
    candidates,
    explain,
    open_choices,
)
from workflow.lib.planning.preflight.planning_inputs import (
    Budget,
    budget,
    compute_dtype,
    make_setup,
    micro_batch_sizes,
    rows_per_process,
    target_ranks,
    trained_modules,
)
from workflow.lib.planning.preflight.remedies import remedies
from workflow.lib.planning.preflight.replay_check import confirmed
from workflow.lib.planning.timing import step_time
from workflow.lib.planning.timing.machine_speed import Speed, speed_of
from workflow.lib.settings.config import HardwareConfig, RunConfig
from workflow.lib.settings.schedule import total_steps
from workflow.lib.system import hardware
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import read_json
from workflow.lib.system.gpu_models import parse_gpu
from workflow.lib.system.units import GIB

CHECKS_HELP = "runs (JSON) whose settings are held against the model's config.json before any work"
MOST_REMEDIES = 3  # named to who has a run that does not fit


@dataclass(frozen=True)
class Decision:
    """The chosen candidate, all candidates, and what it was held against; `reason` says what
    decided.
    """

    fits: bool
    reason: str
    chosen: Candidate
    found: list[Candidate]
    rows: int
    speed: Speed
    limits: Budget
    host_bytes: int
    disk_bytes: dict[str, int]
    disk_free_bytes: int | None


def read_machine(settings: HardwareConfig) -> Machine:
    """Ask this machine what a run gets on each node; raises `UserError` if that is less than the
    settings ask for.

    Where no GPU is visible it may be asked to plan for `hardware.gpu_model`.
    """
    device, processes = num_processes(settings)
    imagined = imagined_model(settings)
    if imagined is not None:
        return imagined_machine(processes, imagined, nodes=settings.nodes)
    # Which of them a run gets is decided by a lease when it starts (see `gpu_leases`).
    visible = hardware.visible_gpus() if device == "cuda" else []
    gpus = hardware.interchangeable(visible, count=processes)
    return Machine(
        device=device,
        processes=processes * settings.nodes,
        nodes=settings.nodes,
        gpu_names=tuple(gpu.name for gpu in gpus[:processes]) * settings.nodes,
        gpu_bytes=min((gpu.total_bytes for gpu in gpus), default=None),
        host_bytes=hardware.available_host_bytes(),
        bfloat16=all(gpu.bfloat16 for gpu in gpus)
        if device == "cuda"
        else hardware.cpu_has_bfloat16(),
        flash_attention=importlib.util.find_spec("flash_attn") is not None,
    )


def read_tokens(path: Path) -> dict[str, Any]:
    """Read the manifest of a tokens folder; raises `UserError` if it lacks what preflight needs."""
    try:
        manifest: dict[str, Any] = read_json(path)
        train = manifest["splits"]["train"]
        sizes = [
            manifest["seq_len"],
            manifest["vocab_size"],
            manifest["splits"]["heldout"]["tokens"],
        ]
        sizes += [train["packed_rows"], train["trained_tokens"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no manifest of a tokens folder ({error!r}). Delete the folder and run "
            "again."
        ) from None
    if any(not isinstance(size, int) for size in sizes) or sizes[3] < 1:
        raise UserError(
            f"{path}: the tokens folder has no training row. Check data.train and rejects.jsonl "
            "beside it."
        )
    return manifest


def check_model(name: str, run: RunConfig, *, folder: Path, trains_here: bool = False) -> None:
    """Raise `UserError` if settings of the run `name` cannot work with the model in `folder`,
    whatever the data.

    Only config.json is read: its weights may still be on their way. trains_here: as for
    `check_settings`.
    """
    path = folder / "config.json"
    try:
        check_settings(
            run, shape_of_config(read_config(path), origin=path), trains_here=trains_here
        )
    except UserError as error:
        raise UserError(f"run {name}: {error}") from None


def check_models(checks: Mapping[str, Any], *, folder: Path) -> None:
    """Call `check_model` for each of the runs that `layout.checks_json` names."""
    for name, run in checks.get("runs", {}).items():
        settings = RunConfig.model_validate(run)
        check_model(name, settings, folder=folder, trains_here=checks["trains_here"])


def check_settings(run: RunConfig, shape: ModelShape, *, trains_here: bool) -> None:
    """Raise `UserError` if settings cannot work with this model and with the processes of the run.

    trains_here: whether this is the machine that will train it, so that `hardware.gpus` can be held
    against what is visible. Elsewhere a number is believed, and of `auto` nothing is known but that
    it suits any model.
    """
    check_context(run.data.seq_len, shape)
    if run.hardware.gpu_model is not None:
        parse_gpu(run.hardware.gpu_model, setting="hardware.gpu_model")
    if trains_here:
        machine = read_machine(run.hardware)
        budget(run.hardware, machine)
    elif run.hardware.gpus == "auto":
        trained_modules(run, shape)
        target_ranks(run, shape)
        return
    else:
        machine = asked_machine(*requested_processes(run.hardware), run.hardware.nodes)
    check_batch(run, machine)
    make_setup(run, shape, machine)


def check_context(seq_len: int, shape: ModelShape) -> None:
    """Raise `UserError` if rows are longer than the model can read, or than LongRoPE treats as it
    would each document.

    Rows up to max_position_embeddings are those that dynamic NTK scaling leaves alone, too.
    """
    if seq_len > shape.max_position_embeddings:
        raise setting_error(
            "data.seq_len",
            seq_len,
            f"the model's max_position_embeddings is {shape.max_position_embeddings}",
            "Set it to that or below, or choose a model with a longer context",
        )
    if shape.short_positions is not None and seq_len > shape.short_positions:
        raise setting_error(
            "data.seq_len",
            seq_len,
            "this model's LongRoPE rotates every position of a micro-batch by its long factors as "
            "soon as one position is "
            f"beyond original_max_position_embeddings, which is {shape.short_positions}: shorter "
            "documents beside a long "
            "one, or beside a long padding tail, would be trained with other positions than they "
            "are used with",
            f"Set it to {shape.short_positions} or below, or choose a model without LongRoPE",
        )


def check_batch(run: RunConfig, machine: Machine) -> tuple[int, list[int]]:
    """Return a process's rows of a step, and the micro-batch sizes to consider; raises `UserError`
    if either is impossible.
    """
    rows = rows_per_process(run.train.global_batch_size, processes=machine.processes)
    sizes = micro_batch_sizes(run.train.micro_batch_size, rows=rows, processes=machine.processes)
    return rows, sizes


def check_tokens(manifest: Mapping[str, Any], run: RunConfig, shape: ModelShape) -> None:
    """Raise `UserError` if the rows do not suit the settings or the model."""
    seq_len, vocab_size = run.data.seq_len, manifest["vocab_size"]
    check_context(seq_len, shape)
    if manifest["seq_len"] != seq_len:
        raise setting_error(
            "data.seq_len",
            seq_len,
            f"the tokens were packed into rows of {manifest['seq_len']}",
            "Tokenize again with this setting, or set it to that length",
        )
    if vocab_size > shape.vocab_size:
        raise UserError(
            f"model.source: the tokenizer has {vocab_size} tokens, the model's embedding "
            f"{shape.vocab_size} "
            "rows. They do not belong together: use the tokenizer that came with the checkpoint."
        )


def decide(
    run: RunConfig,
    shape: ModelShape,
    machine: Machine,
    manifest: Mapping[str, Any],
    *,
    disk_free_bytes: int | None,
) -> Decision:
    """Choose the plan and say whether the run fits GPU (or host) memory and disk.

    `disk_free_bytes` is None where there is no disk to ask. Raises `UserError` if a setting cannot
    work with this model or machine, whatever its memory.
    """
    limits = budget(run.hardware, machine)
    rows, sizes = check_batch(run, machine)
    setup = make_setup(run, shape, machine)
    speed = speed_of(
        machine, calibration=run.hardware.calibration, compute_bytes=setup.compute_bytes
    )
    question = Question(shape, machine, speed, limits, rows, trained_share(manifest))
    found = candidates(
        question, setup, open_choices(run, machine, sizes=sizes, num_layers=shape.num_layers)
    )
    chosen, found = confirmed(found, shape, device=machine.device, limits=limits)
    disk = disk_bytes(
        shape, chosen.setup, manifest,
        keep_checkpoints=run.train.keep_checkpoints, keep_best=run.train.select == "best",
    )  # fmt: skip
    lack = _memory_lack(run, shape, machine, chosen, limits)
    lack = lack or _host_lack(chosen, limits, machine)
    lack = lack or _disk_lack(disk["checkpoints"] + disk["adapter"], disk_free_bytes)
    return Decision(
        fits=lack is None,
        reason=lack or _reason(chosen, limits, machine),
        chosen=chosen,
        found=found,
        rows=rows,
        speed=speed,
        limits=limits,
        host_bytes=chosen.host_bytes,
        disk_bytes=disk,
        disk_free_bytes=disk_free_bytes,
    )


def trained_share(manifest: Mapping[str, Any]) -> float:
    """Return the share of the training rows' tokens that reach the loss."""
    train = manifest["splits"]["train"]
    return float(min(1.0, train["trained_tokens"] / (train["packed_rows"] * manifest["seq_len"])))


def _reason(chosen: Candidate, limits: Budget, machine: Machine) -> str:
    needed = limits.capacity_bytes + chosen.lacking_bytes
    peak = chosen.replayed or chosen.prediction
    kind = "GPU" if machine.device == "cuda" else "process's share of the host"
    return (
        f"micro-batch {chosen.micro_batch_size} (recomputation: {chosen.recomputation}) needs "
        f"{needed / GIB:.2f} of "
        f"{limits.capacity_bytes / GIB:.2f} GiB of each {kind} (phase {peak.peak_phase})"
    )


def _memory_lack(
    run: RunConfig, shape: ModelShape, machine: Machine, chosen: Candidate, limits: Budget
) -> str | None:
    if chosen.lacking_bytes <= 0:
        return None
    options = remedies(
        shape,
        chosen.setup,
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
    return (
        f"the {machine.processes} processes need {chosen.host_bytes / GIB:.2f} GiB of host memory "
        "together, "
        f"{limits.host_capacity_bytes / GIB:.2f} GiB may be used (hardware.host_memory_gib, or "
        "what is free). "
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


def document(
    decision: Decision,
    run: RunConfig,
    shape: ModelShape,
    machine: Machine,
    manifest: Mapping[str, Any],
) -> dict[str, Any]:
    """Return preflight.json without its provenance."""
    chosen, limits = decision.chosen, decision.limits
    setup = chosen.setup
    train = manifest["splits"]["train"]
    plan = _plan(decision, run, shape, machine, num_rows=train["packed_rows"])
    return {
        "verdict": "fits" if decision.fits else "does_not_fit",
        "reason": decision.reason,
        "plan": plan,
        **_peaks(chosen, limits),
        "outside_allocator_bytes": limits.outside_allocator_bytes,
        "capacity_bytes": limits.capacity_bytes,
        "margin_bytes": limits.margin_bytes,
        "host_bytes": decision.host_bytes,
        "host_capacity_bytes": limits.host_capacity_bytes,
        "disk_bytes": decision.disk_bytes,
        "disk_free_bytes": decision.disk_free_bytes,
        "time": step_time.estimate(
            _parts(decision, shape, setup, manifest),
            basis=decision.speed.basis,
            num_gpus=len(machine.gpu_names),
            tokens=setup.tokens,
            accumulation_steps=plan["accumulation_steps"],
            num_steps=plan["num_steps"],
            price_per_gpu_hour=run.hardware.price_per_gpu_hour,
        ),
        "candidates": [_candidate(candidate, chosen) for candidate in decision.found],
        "model": asdict(shape)
        | {
            "total_parameters": shape.quantized_weights + shape.plain_weights,
            "quantized_parameters": shape.quantized_weights,
            "trainable_parameters": trainable_parameters(shape, setup),
        },
    }


def _peaks(chosen: Candidate, limits: Budget) -> dict[str, Any]:
    """Return peaks, phases and terms: by the replay where there is one, else by the closed form."""
    prediction, replayed = chosen.prediction, chosen.replayed
    terms = replayed.terms if replayed else prediction.phases[prediction.peak_phase]
    phases = {name: sum(terms.values()) for name, terms in prediction.phases.items()}
    peak = replayed.allocated_bytes if replayed else prediction.peak_bytes
    slack = replayed.reserved_bytes - peak if replayed else limits.slack_bytes(peak)
    return {
        "method": "replay" if replayed else "closed_form",
        "terms": [
            {"name": name, "bytes": size, "explanation": EXPLANATIONS[name]}
            for name, size in terms.items()
        ],
        "phases": replayed.phases if replayed else phases,
        "peak_phase": replayed.peak_phase if replayed else prediction.peak_phase,
        "peak_bytes": peak,
        "allocator_slack_bytes": slack,
        "reserved_bytes": peak + slack,
    }


def _parts(
    decision: Decision, shape: ModelShape, setup: Setup, manifest: Mapping[str, Any]
) -> step_time.Parts | None:
    """Seconds of a micro-batch by what they are spent on; None where the speed is not known."""
    if not decision.speed.known:
        return None
    return decision.speed.parts(shape, setup, trained_share=trained_share(manifest))


def _plan(
    decision: Decision, run: RunConfig, shape: ModelShape, machine: Machine, *, num_rows: int
) -> dict[str, Any]:
    """Return what `finetune` follows."""
    chosen, limits = decision.chosen, decision.limits
    enforced = machine.device == "cuda" and run.hardware.gpu_memory_gib != "auto"
    allowed = limits.capacity_bytes - limits.outside_allocator_bytes
    return {
        "device": machine.device,
        "processes": machine.processes,
        "nodes": machine.nodes,
        "shard_size": chosen.setup.shards,
        "micro_batch_size": chosen.micro_batch_size,
        "accumulation_steps": decision.rows // chosen.micro_batch_size,
        "activation_checkpointing": chosen.setup.activation_checkpointing,
        "offload_activations": chosen.setup.offload_activations,
        "offload_window_bytes": offload_window(shape, chosen.setup),
        "reshard_after_forward": chosen.setup.reshard_after_forward,
        "offload_embedding": chosen.setup.offload_embedding,
        "offload_layers": chosen.setup.offload_layers,
        "gpu_memory_bytes": allowed if enforced else None,
        "compute_dtype": compute_dtype(run.model.compute_dtype, machine),
        "num_steps": total_steps(run.train, num_rows=num_rows),
    }


def _candidate(candidate: Candidate, chosen: Candidate) -> dict[str, Any]:
    return {
        "micro_batch_size": candidate.micro_batch_size,
        "activation_checkpointing": candidate.setup.activation_checkpointing,
        "recomputation": candidate.recomputation,
        "offload_activations": candidate.setup.offload_activations,
        "offload_layers": candidate.setup.offload_layers,
        "reshard_after_forward": candidate.setup.reshard_after_forward,
        "host_bytes": candidate.host_bytes,
        "peak_bytes": candidate.prediction.peak_bytes,
        "relative_time": candidate.step_s / chosen.step_s,
        "fits": candidate.fits,
        "why": explain(candidate, chosen),
    }
