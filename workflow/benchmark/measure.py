"""One case of the benchmark in its worker processes, by the functions of `finetune` itself.

A step ends when its loss and gradient norm have arrived from the device, which works in order. So
the time between two ends is the device's work on the steps between, also if launched ahead."""

import gc
import os
import resource
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from workflow.benchmark.random_base import random_rows
from workflow.benchmark.random_groups import group_rows, random_groups
from workflow.benchmark.random_pairs import pair_rows, random_pairs
from workflow.benchmark.record import Measurement, Observed
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.heartbeat import Pulse
from workflow.lib.distributed.world import World, process_group
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.scores.store import Scores
from workflow.lib.settings.config import RunConfig
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError
from workflow.lib.training.batches import stored_batch
from workflow.lib.training.build import TrainingModel, build_training_model, plan_of_device
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs
from workflow.lib.training.startup_checks import startup_checks

STEP_S = 60.0  # least bound of a later step
OUT_OF_MEMORY = "out of GPU memory"
# The largest value over processes counts; of other fields the main process's.
LARGEST = (
    "allocated_bytes",
    "reserved_bytes",
    "setup_allocated_bytes",
    "host_bytes",
    "load_s",
    "bytes_read",
)


@dataclass(frozen=True)
class Job:
    """A worker's task, as JSON in a file."""

    base: str  # folder of the random NF4 base
    run: dict[str, Any]
    plan: StepPlan
    documents: int
    rows: int
    pairs: int | None
    groups: int | None
    vocab_size: int
    check_bytes: bool
    peer: dict[str, Any] | None
    timeout_s: float
    """What a collective, loading or the first step may take until it counts as hung."""

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        return cls(**document | {"plan": StepPlan.of(document["plan"])})

    def document(self) -> dict[str, Any]:
        return asdict(self)


def measure(jobs: Sequence[Job]) -> Iterator[Measurement | None]:
    """Build, check and train each job's model; yield the measurement on the main process, None on
    others. Collective. All jobs have the same device, groups of processes and timeout. Raises
    `UserError` if GPU memory runs out."""
    plan, timeout_s = jobs[0].plan, jobs[0].timeout_s
    with (
        Pulse(rank=int(os.environ["RANK"]), start_s=timeout_s, step_s=STEP_S) as pulse,
        process_group(
            plan.device,
            timeout_s=timeout_s,
            shard_size=plan.shards,
            context_parallel=plan.context_parallel,
        ) as world,
    ):
        for job in jobs:
            pulse.phase("loading", least_s=timeout_s)
            observed = Observed()
            try:
                _train(job, RunConfig.model_validate(job.run), world, observed, pulse)
            except torch.OutOfMemoryError as error:
                raise UserError(f"{OUT_OF_MEMORY}: {error}") from None
            everyone = world.gathered(observed)
            if world.device.type == "cuda":  # for the next measurement of this process
                gc.collect()
                torch.cuda.empty_cache()
            yield together(everyone, job) if world.is_main else None


def together(everyone: Sequence[Observed], job: Job) -> Measurement:
    """Return the measurement over all processes; speed is of the last two thirds of steps, but the
    last: work launched ahead delays the numbers of all others, so the last one looks short."""
    main = everyone[0]
    timed = main.step_s[len(main.step_s) // 3 : -1] or main.step_s
    tokens = job.plan.tokens * job.plan.accumulation_steps
    pairs_per_s = job.pairs and job.pairs / len(everyone) / statistics.median(timed)
    largest = {name: max(getattr(observed, name) for observed in everyone) for name in LARGEST}
    return Measurement(
        **dict(main) | largest,
        tokens_per_s_per_process=tokens * len(timed) / sum(timed),
        pairs_per_s_per_process=pairs_per_s,
        allocated_bytes_by_process=[observed.allocated_bytes for observed in everyone],
        reserved_bytes_by_process=[observed.reserved_bytes for observed in everyone],
    )


def start_training(observed: Observed) -> None:
    """Note the peak so far, and reset it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        observed.setup_allocated_bytes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()


def end_training(observed: Observed) -> None:
    """Note the peaks of the steps, bytes."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        observed.allocated_bytes = torch.cuda.max_memory_allocated()
        observed.reserved_bytes = torch.cuda.max_memory_reserved()
    observed.host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _train(job: Job, config: RunConfig, world: World, observed: Observed, pulse: Pulse) -> None:
    """Build, check and train the job's model; fill `observed` with the measurement. Collective."""
    plan = job.plan
    store = _rows(job, config)
    if world.device.type == "cuda":  # without those of the case before
        torch.cuda.reset_peak_memory_stats()
    model = _load(job, config, world, observed)
    if job.pairs is not None and not plan.start_reference:
        store = store.with_scores(_ScoresOfStart.of(model.training, store, world))
    if job.check_bytes:
        observed.checks = startup_checks(model, store, Checkpoint(Path(job.base)), world)
    trainer = Trainer.over(
        model.training,
        make_optimizer(model.training, config.train),
        store,
        config.train,
        plan.micro_batch_size,
        world,
        MicroBatchGraphs(model.training, world) if plan.graphed else None,
    )
    start_training(observed)
    take_steps(trainer, plan.num_steps, observed, pulse)
    end_training(observed)
    observed.graphs_off = trainer.graphs_off


def take_steps(trainer: Trainer, count: int, observed: Observed, pulse: Pulse) -> None:
    """Train for `count` steps; note the seconds, loss and gradient norm of each. Collective."""
    pulse.step(0)  # which may compile
    ended_s = 0.0
    for metrics in trainer.steps(first_step=0, num_steps=count):
        pulse.step(metrics.step + 1)
        observed.step_s.append(metrics.elapsed_s - ended_s)
        observed.losses.append(metrics.loss)
        observed.grad_norms.append(metrics.grad_norm)
        ended_s = metrics.elapsed_s


def _rows(job: Job, config: RunConfig) -> TokenStore:
    seq_len, vocab_size = config.data.seq_len, job.vocab_size
    if job.groups is not None:
        groups = random_groups(job.groups, seq_len=seq_len, vocab_size=vocab_size)
        return group_rows(groups, seq_len=seq_len)
    if job.pairs is not None:
        pairs = random_pairs(job.pairs, seq_len=seq_len, vocab_size=vocab_size)
        return pair_rows(pairs, seq_len=seq_len)
    return random_rows(
        rows=job.rows, seq_len=seq_len, documents=job.documents, vocab_size=vocab_size
    )


class _ScoresOfStart:
    """Log-probabilities of trained tokens by the model before its first step, as a reference."""

    def __init__(self, by_row: list[npt.NDArray[np.float32]]) -> None:
        self._by_row = by_row

    @classmethod
    def of(cls, training: CausalLMForTraining, store: TokenStore, world: World) -> Self:
        """Score every row on every process. Collective."""
        by_row = []
        training.eval()
        with forward_only(training):
            for number in range(store.num_rows):
                batch = stored_batch(store, np.array([number])).to(world.device)
                states = training.trained_states(batch)
                by_row.append(training.head_loss.log_probs(states, batch.targets).cpu().numpy())
        return cls(by_row)

    def for_rows(self, indices: Iterable[int]) -> Scores:
        return Scores(np.concatenate([self._by_row[int(row)] for row in indices]))


def _load(job: Job, config: RunConfig, world: World, observed: Observed) -> TrainingModel:
    """Return the model; note its attention, the seconds of loading and the bytes. Collective."""
    base = Checkpoint(Path(job.base))
    plan = plan_of_device(job.plan, base, config, world)
    observed.attention = plan.attention
    began = time.monotonic()
    model = build_training_model(base, config, plan, world)
    synchronize(world.device)
    observed.load_s, observed.bytes_read = time.monotonic() - began, model.bytes_read
    return model


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
