"""A measurement before it is made: the run that it is, what preflight plans and predicts for it,
and its work in FLOP.

Preflight's own decision gives the plan and its verdict the memory, so a lever that it knows needs
nothing here. Nothing here imports torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.benchmark_record import Predicted
from workflow.lib.artifacts.preflight_record import Forecast, Plan
from workflow.lib.benchmark.cases import Request, model_config, run_settings
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.preflight.budget import budget
from workflow.lib.planning.preflight.checks import check_tokens, read_machine
from workflow.lib.planning.preflight.decision import decide
from workflow.lib.planning.preflight.forecast import forecast
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.recording.recording_process import PlanRecorder, RecordingProcess
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import setting_error
from workflow.lib.system.units import GIB

ROWS_OF_STEPS = 2  # the random rows suffice for so many steps, then they come again


@dataclass(frozen=True)
class Prepared:
    """A request on this machine: everything that its workers need, and what is predicted."""

    request: Request
    run: RunConfig
    plan: Plan
    config: dict[str, Any]
    """config.json of the model."""
    shape: ModelShape
    num_rows: int
    """Random rows to train on."""
    gpu_names: tuple[str, ...]
    """One per process; none on the CPU."""
    setup: Setup | None
    """None for a peer: the prediction is of our engine."""
    predicted: Predicted | None
    """None for a peer."""


def prepare(
    request: Request, *, num_gpus: int, recordings: RecordingProcess | None = None
) -> Prepared:
    """Plan and predict a request on this machine; raises `UserError` if it cannot run here,
    whatever its memory.

    recordings: predict what GPUs hold of our engine by a recording, as preflight does, and not by
    the closed form.
    """
    device = "cuda" if request.sizes.device == "auto" and num_gpus > 0 else "cpu"
    if device == "cuda" and request.processes > num_gpus:
        bound = f"this machine shows {num_gpus} GPU(s), one for each process"
        raise setting_error("benchmark.processes", request.processes, bound, "Lower it")
    run = run_settings(request, device=device)
    config = model_config(request.sizes)
    shape = describe_config(config, origin=Path(request.sizes.model))
    tokens = imagined_tokens(request, shape)
    check_tokens(tokens, run, shape)
    machine = read_machine(run.hardware)
    cap_bytes = _cap_bytes(request, machine)
    is_ours = request.peer is None
    record = None
    if is_ours and recordings is not None:
        checked = request.sizes.check_bytes
        record = PlanRecorder(recordings, config, shape, checked=checked)
    capped = _capped(machine, run, cap_bytes)
    decision = decide(run, shape, capped, tokens, disk_free_bytes=None, record=record)
    forecasted = forecast(decision, run, shape, machine, tokens)
    return Prepared(
        request=request,
        run=run,
        plan=forecasted.plan.model_copy(update={"gpu_memory_bytes": cap_bytes}),
        config=config,
        shape=shape,
        num_rows=tokens.packed_rows,
        gpu_names=machine.gpu_names,
        setup=decision.chosen.setup if is_ours else None,
        predicted=_predicted(forecasted) if is_ours else None,
    )


def _predicted(forecasted: Forecast) -> Predicted:
    """Return what the row says of a forecast."""
    return Predicted(
        peak_bytes=forecasted.peak_bytes,
        reserved_bytes=forecasted.reserved_bytes,
        phases=forecasted.phases,
        terms={term.name: term.bytes for term in forecasted.terms},
        host_bytes=forecasted.host_bytes,
        step_s=forecasted.time.step_s,
        tokens_per_s_per_process=forecasted.time.tokens_per_s_per_process,
        basis=forecasted.time.basis,
    )


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
    """Return the machine as one of whose GPUs PyTorch may take no more than `cap_bytes`."""
    if cap_bytes is None:
        return machine
    limits = budget(run.hardware, machine)
    outside = limits.outside_allocator_bytes + limits.margin_bytes
    return replace(machine, gpu_bytes=cap_bytes + outside)


def imagined_tokens(request: Request, shape: ModelShape) -> TokenCounts:
    """Return the counts of the random rows: all tokens are trained but the first
    of a document.
    """
    sizes = request.sizes
    rows = ROWS_OF_STEPS * request.processes * sizes.micro_batch_size * sizes.accumulation
    documents = len(range(0, sizes.seq_len, sizes.seq_len // sizes.documents))
    return TokenCounts(
        seq_len=sizes.seq_len,
        vocab_size=shape.vocab_size,
        heldout_tokens=sizes.seq_len,
        packed_rows=rows,
        trained_tokens=rows * (sizes.seq_len - documents),
    )


def model_flops_per_token(shape: ModelShape, *, seq_len: int, documents: int) -> float:
    """Return the least work that a trained token is: what model FLOP utilisation counts.

    4 FLOP per frozen weight that a token uses of the layers, and of the head (forward, and the
    gradient of the input; frozen weights have none of their own), and causal attention within
    documents: S q a layer and product forward, twice that backward. Recomputation, dequantization
    and the adapters (0.3% at rank 16) do not count.
    """
    document = seq_len / documents
    attention = 3 * document * shape.total(lambda layer: layer.query_width + layer.value_width)
    weights = shape.total(lambda layer: layer.used_weights)
    return 4.0 * (weights + shape.vocab_size * shape.hidden_size) + attention


def products_of(shape: ModelShape) -> list[list[int]]:
    """Return what a token of the decoder layers is multiplied by, as [out_features, in_features,
    how many]: of a stack, as many of its experts as a token goes to.
    """
    return [
        [linear.out_features // linear.experts, linear.in_features, count * kind.rows(linear)]
        for kind, count in ((shape.kinds[number], count) for number, count in shape.counts.items())
        for linear in kind.linears
    ]
