"""The optimization loop: one function per step, and a generator that yields the state after each.

Loss of a step = sum over its trained tokens of -log p, divided by their number over all
micro-batches and processes. That number is known beforehand on every process (data order is a pure
function), so each micro-batch's backward is already scaled, and gradients are summed over
processes.
"""

import functools
import logging
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import World
from workflow.lib.model.host_embedding import StoredRows
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.loss_scale import loss_scale_of
from workflow.lib.model.trained_modules import sum_copies_
from workflow.lib.settings.config import TrainConfig
from workflow.lib.settings.schedule import learning_rate, step_rows
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import short_hash
from workflow.lib.training.batches import MicroBatch, attention_costs, micro_batches, process_rows
from workflow.lib.training.nonfinite import find_origin
from workflow.lib.training.optimizers import ShardwiseAdam

logger = logging.getLogger("workflow")


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`; `step` counts from 1, `tokens` are those of the step over all
    processes.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    trained_tokens: int
    tokens: int
    tokens_per_s: float
    peak_bytes: int
    elapsed_s: float
    repeats: int | None = None
    """In float16: steps so far that were made once more with a smaller loss scale; None in other
    types."""
    heldout_loss: float | None = None
    """Measured after the step; None where it was not, and then not in the line."""

    def as_dict(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def make_optimizer(training: nn.Module, train: TrainConfig) -> ShardwiseAdam:
    """Return the AdamW that `train.optimizer` means over the adapter's fp32 masters."""
    return ShardwiseAdam(
        trainable_parameters(training),
        kind=train.optimizer,
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak so far, bytes: allocated by torch on a GPU, resident set on a
    CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def steps(
    training: nn.Module,
    optimizer: ShardwiseAdam,
    store: TokenStore,
    train: TrainConfig,
    *,
    first_step: int,
    num_steps: int,
    micro_batch_size: int,
    elapsed_s: float,
    world: World,
) -> Iterator[StepMetrics]:
    """Train from `first_step` (0-based) to `num_steps`; yield each step's metrics, equal on all
    processes. Collective.

    elapsed_s: seconds that earlier invocations of this run have trained. Raises `UserError` if the
    loss or the gradient is not finite, or the gradient is zero.
    """
    training.train()
    taken = _Taken(store, train, micro_batch_size=micro_batch_size, world=world)
    rows_of = training.rows_of
    batches = micro_batches(
        store,
        chain.from_iterable(taken.groups(step) for step in range(first_step, num_steps)),
        device=world.device,
        look_up=rows_of.on_host if isinstance(rows_of, StoredRows) else None,
    )
    for step in range(first_step, num_steps):
        began = time.monotonic()
        rows, groups = taken.rows(step), taken.groups(step)
        rate = learning_rate(train, step=step, num_steps=num_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        trained = int(store.trained_tokens_per_row[rows].sum())
        loss, norm = optimizer_step(
            training,
            optimizer,
            islice(batches, len(groups)),
            trained_tokens=trained,
            max_norm=train.max_grad_norm,
            seed=train.seed,
            step=step,
            world=world,
            again=functools.partial(_again, store, groups, world),
        )
        scale = loss_scale_of(training)
        seconds = time.monotonic() - began
        elapsed_s += seconds
        yield StepMetrics(
            step=step + 1,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            trained_tokens=trained,
            tokens=len(rows) * store.seq_len,
            tokens_per_s=len(rows) * store.seq_len / seconds,
            peak_bytes=peak_bytes(world.device),
            elapsed_s=elapsed_s,
            repeats=None if scale is None else scale.repeats,
        )


def seed_dropout(seed: int, *, step: int, rank: int) -> None:
    """Make the step's random numbers a function of (seed, step, rank), so that resuming needs no
    state.
    """
    torch.manual_seed(int(short_hash(["dropout", seed, step, rank]), 16))


def _again(
    store: TokenStore, groups: list[npt.NDArray[np.int64]], world: World
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Yield the row numbers and the micro-batch of each group."""
    listed = ([int(row) for row in group] for group in groups)
    yield from zip(listed, micro_batches(store, groups, device=world.device), strict=True)


class _Taken:
    """The rows that a step trains on, of all processes, and of this one by micro-batches."""

    def __init__(
        self, store: TokenStore, train: TrainConfig, *, micro_batch_size: int, world: World
    ) -> None:
        self._store, self._train, self._world = store, train, world
        self._size = micro_batch_size

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        """Return the row numbers (global_batch_size,) of a step, the same on all processes."""
        return step_rows(
            num_rows=self._store.num_rows,
            global_batch_size=self._train.global_batch_size,
            seed=self._train.seed,
            step=step,
        )

    def groups(self, step: int) -> list[npt.NDArray[np.int64]]:
        """Return the row numbers (micro_batch_size,) of each of this process's micro-batches."""
        rows = self.rows(step)
        costs = attention_costs(self._store.position_ids[rows])
        mine = process_rows(rows, costs, rank=self._world.rank, size=self._world.size)
        return [mine[i : i + self._size] for i in range(0, len(mine), self._size)]


def optimizer_step(
    training: nn.Module,
    optimizer: ShardwiseAdam,
    batches: Iterable[MicroBatch],
    *,
    trained_tokens: int,
    max_norm: float | None,
    seed: int,
    step: int,
    world: World,
    again: Callable[[], Iterable[tuple[list[int], MicroBatch]]],
) -> tuple[float, float]:
    """Forward, backward, clip, update over one global batch; return its loss and its gradient norm
    before clipping.

    batches: this process's part of it. again: the same with their row numbers, for a message that
    says what went wrong, and for a step in float16 whose gradients overflow, which is made once
    more with a smaller loss scale. Nothing is updated if `check_step` raises. Collective.
    """
    scale, pending = loss_scale_of(training), batches
    while True:
        seed_dropout(seed, step=step, rank=world.rank)
        factor = 1.0 if scale is None else scale.factor
        total = backward(
            training, pending, trained_tokens=trained_tokens, factor=factor, device=world.device
        )
        sum_copies_(training)
        if scale is not None:
            scale.unscale_(training)
        total_norm = clip_gradients(optimizer, max_norm=max_norm)
        dist.all_reduce(total)
        healthy = total.isfinite() & total_norm.isfinite() & (total_norm > 0)
        optimizer.begin(unless=~healthy)
        loss, norm = float(total), float(total_norm)
        if scale is None or not math.isfinite(loss) or not scale.must_repeat(norm):
            break
        optimizer.zero_grad(set_to_none=True)
        pending = (batch for _, batch in again())
    origin = None
    if not (math.isfinite(loss) and math.isfinite(norm)):
        seed_dropout(seed, step=step, rank=world.rank)  # so that the search drops the same
        origin = find_origin(training, again(), world=world)
    check_step(loss, norm, step=step, origin=origin)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm


def backward(
    training: nn.Module,
    batches: Iterable[MicroBatch],
    *,
    trained_tokens: int,
    factor: float,
    device: torch.device,
) -> torch.Tensor:
    """Accumulate gradients times `factor` over this process's micro-batches; return its part of the
    loss () float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        total += _part(training, batch, trained_tokens=trained_tokens, factor=factor)
    return total


def _part(
    training: nn.Module, batch: MicroBatch, *, trained_tokens: int, factor: float
) -> torch.Tensor:
    """Accumulate a micro-batch's gradients; return its part of the loss (). Its graph goes with
    this call: it holds hidden states.
    """
    summed = training(
        batch.input_ids,
        batch.position_ids,
        batch.positions,
        batch.targets,
        batch.bounds,
        batch.embedded,
    )
    part = summed / trained_tokens
    (part if factor == 1.0 else part * factor).backward()
    found: torch.Tensor = part.detach()
    return found


def clip_gradients(optimizer: torch.optim.Optimizer, *, max_norm: float | None) -> torch.Tensor:
    """Scale the gradients to a norm of at most `max_norm`; return the norm before. Collective.

    They stay as they are if `max_norm` is None, or if the norm is not finite: `find_origin` reads
    them then.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    groups = _by_mesh(params)
    norms = [_total_norm(group) for group in groups]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        bounded = norm.where(norm.isfinite(), 0.0)  # the device decides, and no host waits for it
        for group in groups:
            clip_grads_with_norm_(group, max_norm, bounded)
    return norm


def _by_mesh(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters that are cut over the same processes together: of others torch takes no
    common norm.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return list(groups.values())


def _total_norm(params: list[nn.Parameter]) -> torch.Tensor:
    norm = get_total_norm([p.grad for p in params if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def check_step(loss: float, norm: float, *, step: int, origin: str | None = None) -> None:
    """Raise `UserError` if a step's loss or gradient norm cannot be that of a healthy run; origin:
    where it arose.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(
            f"step {step + 1}: loss = {loss}, gradient norm = {norm}: training has "
            f"diverged{f' ({origin})' if origin else ''}. "
            "Lower train.learning_rate, raise train.warmup_share, or set train.max_grad_norm; "
            "the last checkpoint is kept."
        )
    if norm == 0.0:
        # Adapters start with gradients of their own; later ones vanish where the update has
        # saturated the model.
        causes = {
            True: "nothing is being learned. Check that the rows have trained tokens "
            "(data.loss_on).",
            False: "the updates have broken the model. Lower train.learning_rate or lora.alpha, "
            "or set train.max_grad_norm; the last checkpoint is kept.",
        }
        raise UserError(
            f"step {step + 1}: the gradient norm is exactly 0 (loss = {loss}): {causes[step == 0]}"
        )
