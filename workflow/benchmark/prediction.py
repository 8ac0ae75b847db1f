"""The plan and prediction of a measurement, by preflight.

Preflight's own decision gives the plan and its verdict the memory, so a memory option needs no code
here. Nothing here imports torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workflow.benchmark.cases import BenchmarkConfig, Request, model_config, run_settings
from workflow.benchmark.random_groups import ANSWERS, group_rows, random_groups
from workflow.benchmark.random_pairs import pair_rows, random_pairs
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.kernels.attention.answer_rows import answer_rows
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.preflight.budget import budget
from workflow.lib.planning.preflight.checks import check_tokens, read_machine
from workflow.lib.planning.preflight.decision import decide
from workflow.lib.planning.preflight.forecast import forecast
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.recording.recording_process import PlanRecorder, RecordingProcess
from workflow.lib.settings.config import RunConfig
from workflow.lib.settings.objectives import PAIRED
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.units import GIB

# Fields of the forecast in a line.
PREDICTED = {"peak_bytes", "reserved_bytes", "host_bytes", "phases", "time"}
ROWS_OF_STEPS = 2  # random rows for this many steps, then they repeat


@dataclass(frozen=True)
class Prepared:
    """A request on this machine: its workers' inputs, and its prediction."""

    request: Request
    run: RunConfig
    plan: StepPlan
    config: dict[str, Any]  # config.json of the model
    shape: ModelShape
    num_rows: int  # random rows to train on
    gpu_names: tuple[str, ...]  # one per process; none on the CPU
    predicted: dict[str, Any] | None  # none for a peer


def prepare(
    request: Request, *, num_gpus: int, recordings: RecordingProcess, gpu_model: str | None = None
) -> Prepared:
    """Plan and predict a request (a peer: plan alone) for this machine's GPUs, or for `num_gpus` of
    a named model; raises `UserError` if it cannot run."""
    device = "cuda" if request.sizes.device == "auto" and num_gpus > 0 else "cpu"
    if device == "cuda" and request.processes > num_gpus:
        bound = f"this machine shows {num_gpus} GPU(s), one for each process"
        raise setting_error("benchmark.processes", request.processes, bound, "Lower it")
    run = run_settings(request, device=device, gpu_model=gpu_model)
    config = model_config(request.sizes)
    shape = _described(request.sizes, config)
    tokens = imagined_tokens(request, shape)
    check_tokens(tokens, run, shape)
    machine = read_machine(run.hardware)
    cap_bytes = _cap_bytes(request, machine)
    is_ours = request.peer is None
    record = PlanRecorder(recordings, config, shape, checked=request.sizes.check_bytes)
    capped = _capped(machine, run, cap_bytes)
    planned = PlannedRun(run, shape, capped, tokens, record, estimate=not is_ours)
    forecasted = forecast(decide(planned), replace(planned, machine=machine))
    return Prepared(
        request=request,
        run=run,
        plan=replace(forecasted.plan, gpu_memory_bytes=cap_bytes),
        config=config,
        shape=shape,
        num_rows=tokens.packed_rows,
        gpu_names=machine.gpu_names,
        predicted=forecasted.model_dump(include=PREDICTED) if is_ours else None,
    )


def _described(sizes: BenchmarkConfig, config: dict[str, Any]) -> ModelShape:
    """Describe the measured decoder; raises `UserError` that names the benchmark's own settings."""
    try:
        return describe_config(config, origin=Path(sizes.model))
    except UserError as error:
        if sizes.layers is None:
            reason = str(error).replace("model.source", "benchmark.model")
            raise UserError(f"benchmark.model: {reason}") from None
        raise setting_error(
            "benchmark.layers",
            sizes.layers,
            f"{sizes.model} with its first layers alone cannot be built ({error})",
            "Set more layers, null for all of them, or another benchmark.model",
        ) from None


def _cap_bytes(request: Request, machine: Machine) -> int | None:
    cap = request.sizes.memory_cap_gib
    if cap is None:
        return None
    if machine.gpu_bytes is None:
        reason = "it runs on the CPU, whose memory PyTorch does not bound"
        raise setting_error("benchmark.memory_cap_gib", cap, reason, "Set it to null")
    if cap * GIB > machine.gpu_bytes:
        raise setting_error(
            "benchmark.memory_cap_gib",
            cap,
            f"the smallest GPU has {machine.gpu_bytes / GIB:.2f} GiB",
            "Lower it, or set it to null",
        )
    return int(cap * GIB)


def _capped(machine: Machine, run: RunConfig, cap_bytes: int | None) -> Machine:
    """Return the machine with smaller GPUs, on which PyTorch may take `cap_bytes`: a plan leaves
    its margin of them free, as on any GPU."""
    if cap_bytes is None:
        return machine
    outside = budget(run.hardware, machine).outside_allocator_bytes
    return replace(machine, gpu_bytes=cap_bytes + outside)


def imagined_tokens(request: Request, shape: ModelShape) -> TokenCounts:
    """Return the counts of the random rows: all tokens are trained except each document's first,
    and prompts."""
    sizes = request.sizes
    drawn: dict[str, Any] = {"seq_len": sizes.seq_len, "vocab_size": shape.vocab_size}
    if sizes.groups is not None:
        store = group_rows(random_groups(sizes.groups, **drawn), seq_len=sizes.seq_len)
        return _counts(store, shape, documents=ANSWERS * sizes.groups)
    if sizes.pairs is not None:
        store = pair_rows(random_pairs(sizes.pairs, **drawn), seq_len=sizes.seq_len)
        return _counts(store, shape, documents=2 * sizes.pairs)
    rows = ROWS_OF_STEPS * request.processes * sizes.micro_batch_size * sizes.accumulation
    documents = len(range(0, sizes.seq_len, sizes.seq_len // sizes.documents))
    return TokenCounts(
        seq_len=sizes.seq_len,
        vocab_size=shape.vocab_size,
        heldout_tokens=sizes.seq_len,
        packed_rows=rows,
        trained_tokens=rows * (sizes.seq_len - documents),
        documents=rows * documents,
    )


def _counts(store: TokenStore, shape: ModelShape, *, documents: int) -> TokenCounts:
    arrays = store.input_ids, store.position_ids, store.loss_mask
    return TokenCounts(
        seq_len=store.seq_len,
        vocab_size=shape.vocab_size,
        heldout_tokens=store.seq_len,
        packed_rows=store.num_rows,
        trained_tokens=int(store.loss_mask.sum()),
        documents=documents,
        answer_rows=answer_rows(*arrays, paired=store.examples in PAIRED),
    )
