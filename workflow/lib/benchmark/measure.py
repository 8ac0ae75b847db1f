"""One case of the benchmark in its worker processes: built and trained by the very functions that
`finetune` uses.

What is recorded of all processes is the same for other software that a benchmark compares with
(`Observed`).
"""

import gc
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from workflow.lib.artifacts.benchmark_record import (
    CheckpointCost,
    Profile,
    WorkerMeasurement,
)
from workflow.lib.artifacts.preflight_record import Plan
from workflow.lib.artifacts.training_record import Check
from workflow.lib.benchmark.checkpoint_cost import CheckpointTrial, remove_checkpoints
from workflow.lib.benchmark.profiling import profiled
from workflow.lib.benchmark.random_base import random_rows
from workflow.lib.distributed.heartbeat import Pulse
from workflow.lib.distributed.world import World, process_group
from workflow.lib.model.backends import (
    read_attention_needs,
    resolve_dtype,
    resolve_products,
    resolve_training_attention,
)
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import UserError
from workflow.lib.training.build import Numerics, TrainingModel, build_training_model
from workflow.lib.training.checkpoint import CheckpointWriter
from workflow.lib.training.loop import StepMetrics, Trainer, make_optimizer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs
from workflow.lib.training.optimizers import ShardwiseAdam
from workflow.lib.training.startup_checks import startup_checks

STEP_S = 60.0  # a later step may always take so long
OUT_OF_MEMORY = "out of GPU memory"
# Of what processes have seen, the row has the largest value of these, and that of the main process
# of those.
LARGEST = (
    "allocated_bytes",
    "reserved_bytes",
    "setup_allocated_bytes",
    "host_bytes",
    "load_s",
    "bytes_read",
)
OF_MAIN = (
    "step_s",
    "losses",
    "grad_norms",
    "attention",
    "graphs_off",
    "profile",
    "checkpoint",
    "checks",
)
GEMM_REPEATS = 5
GEMM_IN_A_ROW = 10  # so that what Python takes to start one is hidden, as in training
GEMM_WARM_UP_S = 1.0  # until clocks have settled


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do, as JSON in a file."""

    base: str
    """Folder of the random NF4 base."""
    run: dict[str, Any]
    plan: Plan
    documents: int
    rows: int
    vocab_size: int
    check_bytes: bool
    profile: bool
    """Record one step more by kernels (`profiling`)."""
    checkpoint_pairs: int
    """Pairs of blocks that tell what a checkpoint costs (`checkpoint_cost`)."""
    scratch: str
    """A folder to be made, for checkpoints."""
    products: list[list[int]]
    """What a token is multiplied by, as [out_features, in_features, how many]."""
    peer: dict[str, Any] | None
    timeout_s: float
    """What a collective, loading or the first step may take until it counts as hung."""

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """Return the job of a JSON document."""
        return cls(**document | {"plan": Plan.model_validate(document["plan"])})

    def document(self) -> dict[str, Any]:
        """Return the job as JSON."""
        return asdict(self) | {"plan": self.plan.model_dump()}


@dataclass
class Observed:
    """What one process has seen; peaks are those of the steps, after loading and checks."""

    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    load_s: float = 0.0
    bytes_read: int = 0
    setup_allocated_bytes: int = 0
    """Peak of loading and checks."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    host_bytes: int = 0
    """Peak resident set of the process."""
    gemm_flops_per_s: float = 0.0
    attention: str = ""
    graphs_off: str | None = None
    """Why micro-batches were no CUDA graphs though they were to be."""
    profile: Profile | None = None
    """Where the time of one more step goes; None if that was not asked for."""
    checkpoint: CheckpointCost | None = None
    """What a checkpoint costs; None if that was not asked for."""
    checks: list[Check] = field(default_factory=list)

    def start_setup(self) -> None:
        """Count peaks anew: those of products that were timed, and of the case before, are no
        part.
        """
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def start_training(self) -> None:
        """Note the peak of what came before, and count anew."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.setup_allocated_bytes = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def end_training(self) -> None:
        """Note the peaks."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.allocated_bytes = torch.cuda.max_memory_allocated()
            self.reserved_bytes = torch.cuda.max_memory_reserved()
        self.host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def warm_up_steps(count: int) -> int:
    """Return how many of `count` steps come before those that are timed."""
    return count // 3


def together(everyone: list[Observed], *, tokens_per_step: int) -> WorkerMeasurement:
    """Return the measurement over all processes: the largest peaks, the slowest load, the speed of
    the main process.

    tokens_per_step: of one process. Speed is that of the last two thirds of the steps together.
    """
    main = everyone[0]
    timed = main.step_s[warm_up_steps(len(main.step_s)) :]
    largest = {name: max(getattr(seen, name) for seen in everyone) for name in LARGEST}
    return WorkerMeasurement(
        tokens_per_s_per_process=tokens_per_step * len(timed) / sum(timed),
        **largest,
        allocated_bytes_by_process=[seen.allocated_bytes for seen in everyone],
        reserved_bytes_by_process=[seen.reserved_bytes for seen in everyone],
        gemm_flops_per_s=statistics.median(seen.gemm_flops_per_s for seen in everyone),
        **{name: getattr(main, name) for name in OF_MAIN},
    )


def measure(jobs: Sequence[Job]) -> Iterator[WorkerMeasurement | None]:
    """Build, check and train each job's model; yield the measurement on the main process, None on
    others. Collective.

    All jobs have the same device, shard size and timeout. Raises `UserError` if GPU memory runs
    out.
    """
    plan, timeout_s = jobs[0].plan, jobs[0].timeout_s
    with (
        Pulse(rank=int(os.environ["RANK"]), start_s=timeout_s, step_s=STEP_S) as pulse,
        process_group(plan.device, timeout_s=timeout_s, shard_size=plan.shard_size) as world,
    ):
        rates: dict[str, float] = {}  # of products that several jobs have in common
        for job in jobs:
            pulse.phase("loading")
            yield _measure(job, world, pulse, rates)


def _measure(
    job: Job, world: World, pulse: Pulse, rates: dict[str, float]
) -> WorkerMeasurement | None:
    config, seen = RunConfig.model_validate(job.run), Observed()
    try:
        _train(job, config, world, seen, pulse, rates)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{OUT_OF_MEMORY}: {error}") from None
    everyone: list[Observed] = [seen] * world.size
    dist.all_gather_object(everyone, seen, group=world.io_group)
    if world.device.type == "cuda":  # for what this process measures next
        gc.collect()
        torch.cuda.empty_cache()
    if not world.is_main:
        return None
    tokens = job.plan.micro_batch_size * job.plan.accumulation_steps * config.data.seq_len
    return together(everyone, tokens_per_step=tokens)


def _train(
    job: Job,
    config: RunConfig,
    world: World,
    seen: Observed,
    pulse: Pulse,
    rates: dict[str, float],
) -> None:
    """Build, check and train the job's model; note in `seen` what is measured. Collective."""
    plan = job.plan
    dtype = resolve_dtype(config.model.compute_dtype, world.device)
    rows = plan.micro_batch_size * config.data.seq_len
    seen.gemm_flops_per_s = _known_rate(job, rates, rows=rows, dtype=dtype, device=world.device)
    store = random_rows(
        rows=job.rows,
        seq_len=config.data.seq_len,
        documents=job.documents,
        vocab_size=job.vocab_size,
    )
    seen.start_setup()
    model = _load(job, config, world, seen, dtype)
    if job.check_bytes:
        seen.checks = startup_checks(model, store, Path(job.base), world)
    optimizer = make_optimizer(model.training, config.train)
    trainer = Trainer(
        model.training,
        optimizer,
        store,
        config.train,
        plan.micro_batch_size,
        world,
        MicroBatchGraphs(model.training, world) if plan.cuda_graphs else None,
    )
    count = plan.num_steps

    def training_steps(first: int, last: int, *, until: int | None = None) -> Iterator[StepMetrics]:
        return trainer.steps(first_step=first, num_steps=last, until=until)

    seen.start_training()
    warm = warm_up_steps(count)
    for first, until in ((0, warm), (warm, count)):
        block = islice(training_steps(first, count, until=until), until - first)
        _time_steps(block, seen, pulse, device=world.device)  # a slice keeps its graphs
    seen.end_training()
    seen.graphs_off = trainer.graphs_off
    if job.profile:  # by itself, so that no part of it has run before and none of the next one does
        step = training_steps(count, count + 1)
        seen.profile = profiled(lambda: next(step), device=world.device)
    if job.checkpoint_pairs:
        done = count + job.profile
        more = training_steps(done, done + 2 * job.checkpoint_pairs * count)
        seen.checkpoint = _checkpoint_cost(job, more, model, optimizer, world, pulse)


def _known_rate(
    job: Job, rates: dict[str, float], *, rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the FLOP/s of the job's products, measured unless `rates` has them."""
    key = f"{job.products} {rows} {dtype}"
    if key not in rates:
        rates[key] = gemm_rate(job.products, rows=rows, dtype=dtype, device=device)
    return rates[key]


def _load(
    job: Job, config: RunConfig, world: World, seen: Observed, dtype: torch.dtype
) -> TrainingModel:
    """Return the model; note its attention, the seconds of loading and the bytes. Collective."""
    base = Path(job.base)
    seen.attention = resolve_training_attention(
        config.model.attention,
        world.device,
        read_attention_needs(base).asked(config.model.attention_dropout),
        compute_dtype=dtype,
    ).name
    began = time.monotonic()
    products = resolve_products(config.train.products, world.device, compute_dtype=dtype)
    numerics = Numerics(dtype, seen.attention, products)
    model = build_training_model(base, config, job.plan, world, numerics=numerics)
    synchronize(world.device)
    seen.load_s, seen.bytes_read = time.monotonic() - began, model.bytes_read
    return model


def _time_steps(
    training: Iterator[StepMetrics], seen: Observed, pulse: Pulse, *, device: torch.device
) -> None:
    """Take the steps of a block; note seconds, loss and gradient norm of each.

    A step lasts from the end of the one before: the device may have begun it before this process
    asks for it. The block as a whole has all of its work and no other: the device is waited for
    before and behind it.
    """
    synchronize(device)
    ended = time.monotonic()
    for metrics in training:
        pulse.step(metrics.step + 1)
        began, ended = ended, time.monotonic()
        seen.step_s.append(ended - began)
        seen.losses.append(metrics.loss)
        seen.grad_norms.append(metrics.grad_norm)
    synchronize(device)
    if seen.step_s:
        seen.step_s[-1] += time.monotonic() - ended


def _checkpoint_cost(
    job: Job,
    training: Iterator[StepMetrics],
    model: TrainingModel,
    optimizer: ShardwiseAdam,
    world: World,
    pulse: Pulse,
) -> CheckpointCost:
    """Return what a checkpoint of this training costs. Collective."""
    folder = Path(job.scratch)
    writer = CheckpointWriter(folder, keep=2, identity="measured", world=world)

    def finish() -> None:
        pulse.phase("saving", num_bytes=model.state_bytes())
        writer.wait()

    trial = CheckpointTrial(
        steps=_watched(training, pulse),
        save=lambda step: writer.save(model.training, optimizer, step=step),
        finish=finish,
        steps_of_block=job.plan.num_steps,
    )
    trial.run(pairs=job.checkpoint_pairs)
    return trial.cost(num_bytes=remove_checkpoints(folder, world=world))


def _watched(training: Iterator[StepMetrics], pulse: Pulse) -> Iterator[int]:
    """Take steps and tell `pulse`; yield their numbers."""
    for metrics in training:
        yield metrics.step
        pulse.step(metrics.step + 1)


@torch.no_grad()
def gemm_rate(
    products: list[list[int]], *, rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the FLOP/s at which this device multiplies `rows` rows by the model's weights, and
    gradients by them.

    products: [out_features, in_features, how many]. What the training step is held against: the
    same machine, the same shapes, nothing else. Frees what it takes.
    """
    flops = seconds = 0.0
    warm_up_s = GEMM_WARM_UP_S
    for out, into, count in products:
        weight = torch.randn(out, into, dtype=dtype, device=device)
        forward = torch.randn(rows, into, dtype=dtype, device=device)
        backward = torch.randn(rows, out, dtype=dtype, device=device)
        for left, right in ((forward, weight.t()), (backward, weight)):
            seconds += count * _product_seconds(left, right, warm_up_s=warm_up_s)
            warm_up_s = 0.0
            flops += count * 2.0 * rows * out * into
    del weight, forward, backward, left, right
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return flops / seconds


def _product_seconds(left: torch.Tensor, right: torch.Tensor, *, warm_up_s: float) -> float:
    """Return the median seconds of a product, those of the first `warm_up_s` left out."""
    until = time.monotonic() + (warm_up_s if left.is_cuda else 0.0)
    in_a_row = GEMM_IN_A_ROW if left.is_cuda else 1
    torch.mm(left, right)
    while time.monotonic() < until:
        torch.mm(left, right)
        synchronize(left.device)
    seconds = []
    for _ in range(GEMM_REPEATS):
        synchronize(left.device)
        began = time.perf_counter()
        for _ in range(in_a_row):
            torch.mm(left, right)
        synchronize(left.device)
        seconds.append((time.perf_counter() - began) / in_a_row)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
