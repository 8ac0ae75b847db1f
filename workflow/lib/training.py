"""The optimization loop: one function per step, and a generator that yields the state after each.

Loss of a step = sum over its trained tokens of -log p, divided by their number over all micro-batches and
processes. That number is known beforehand on every process (data order is a pure function), so each
micro-batch's backward is already scaled, and gradients are summed over processes.
"""

import logging
import math
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from workflow.lib.artifacts import short_hash
from workflow.lib.batches import attention_costs, micro_batches, process_rows
from workflow.lib.config import TrainConfig
from workflow.lib.errors import UserError
from workflow.lib.lora import trainable_parameters
from workflow.lib.nonfinite import find_origin
from workflow.lib.optimizers import ShardwiseAdam
from workflow.lib.parallel import World
from workflow.lib.schedule import learning_rate, step_rows
from workflow.lib.tokens import TokenStore

logger = logging.getLogger("workflow")


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`; `step` counts from 1, `tokens` are those of the step over all processes."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    trained_tokens: int
    tokens: int
    tokens_per_s: float
    peak_bytes: int
    elapsed_s: float
    heldout_loss: float | None = None
    """Measured after the step; None where it was not, and then not in the line."""

    def as_dict(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def make_optimizer(
    training: nn.Module, train: TrainConfig, *, device: torch.device
) -> torch.optim.Optimizer:
    """Return the AdamW that `train.optimizer` means over the adapter's fp32 masters; torch's own is fused on GPUs."""
    params = list(trainable_parameters(training).values())
    settings: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_eps,
        "weight_decay": train.weight_decay,
    }
    if train.optimizer != "adamw":
        return ShardwiseAdam(params, kind=train.optimizer, **settings)
    return torch.optim.AdamW(params, **settings, fused=device.type == "cuda")


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak so far, bytes: allocated by torch on a GPU, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def steps(
    training: nn.Module,
    optimizer: torch.optim.Optimizer,
    store: TokenStore,
    train: TrainConfig,
    *,
    first_step: int,
    num_steps: int,
    micro_batch_size: int,
    elapsed_s: float,
    world: World,
) -> Iterator[StepMetrics]:
    """Train from `first_step` (0-based) to `num_steps`; yield each step's metrics, equal on all processes. Collective.

    elapsed_s: seconds that earlier invocations of this run have trained. Raises `UserError` if the loss or
    the gradient is not finite, or the gradient is zero.
    """
    training.train()
    for step in range(first_step, num_steps):
        began = time.monotonic()
        rows = step_rows(
            num_rows=store.num_rows,
            global_batch_size=train.global_batch_size,
            seed=train.seed,
            step=step,
        )
        rate = learning_rate(train, step=step, num_steps=num_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        seed_dropout(train.seed, step=step, rank=world.rank)
        trained = int(store.trained_tokens_per_row[rows].sum())
        loss, norm = optimizer_step(
            training, optimizer, store, rows,
            trained_tokens=trained, micro_batch_size=micro_batch_size, max_norm=train.max_grad_norm, step=step, world=world,
        )  # fmt: skip
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
        )


def seed_dropout(seed: int, *, step: int, rank: int) -> None:
    """Make the step's random numbers a function of (seed, step, rank), so that resuming needs no state."""
    torch.manual_seed(int(short_hash(["dropout", seed, step, rank]), 16))


def optimizer_step(
    training: nn.Module,
    optimizer: torch.optim.Optimizer,
    store: TokenStore,
    rows: Any,
    *,
    trained_tokens: int,
    micro_batch_size: int,
    max_norm: float | None,
    step: int,
    world: World,
) -> tuple[float, float]:
    """Forward, backward, clip, update over one global batch; return its loss and its gradient norm before clipping.

    rows: (global_batch_size,) row numbers, the same on all processes. Nothing is updated if `check_step` raises.
    Collective.
    """
    costs = attention_costs(store.position_ids[rows])
    mine = process_rows(rows, costs, rank=world.rank, size=world.size)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for batch in micro_batches(store, mine, micro_batch_size=micro_batch_size, device=world.device):
        part = (
            training(
                batch.input_ids, batch.position_ids, batch.positions, batch.targets, batch.bounds
            )
            / trained_tokens
        )
        part.backward()
        total += part.detach()
    total_norm = clip_gradients(training, max_norm=max_norm)
    dist.all_reduce(total)
    loss, norm = float(total), float(total_norm)
    origin = None
    if not (math.isfinite(loss) and math.isfinite(norm)):
        groups = (mine[i : i + micro_batch_size] for i in range(0, len(mine), micro_batch_size))
        batches = micro_batches(store, mine, micro_batch_size=micro_batch_size, device=world.device)
        listed = ([int(row) for row in group] for group in groups)
        origin = find_origin(training, zip(listed, batches, strict=True), world=world)
    check_step(loss, norm, step=step, origin=origin)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss, norm


def clip_gradients(training: nn.Module, *, max_norm: float | None) -> torch.Tensor:
    """Scale the gradients so that their global norm is at most `max_norm` (None: leave them); return the norm before. Collective."""
    params = list(trainable_parameters(training).values())
    norm = get_total_norm([p.grad for p in params if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm is not None:
        clip_grads_with_norm_(params, max_norm, norm)
    return norm


def check_step(loss: float, norm: float, *, step: int, origin: str | None = None) -> None:
    """Raise `UserError` if a step's loss or gradient norm cannot be that of a healthy run; origin: where it arose."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(
            f"step {step + 1}: loss = {loss}, gradient norm = {norm}: training has diverged{f' ({origin})' if origin else ''}. "
            "Lower train.learning_rate, raise train.warmup_share, or set train.max_grad_norm; "
            "the last checkpoint is kept."
        )
    if norm == 0.0:
        # Adapters start with gradients of their own; later ones vanish where the update has saturated the model.
        causes = {
            True: "nothing is being learned. Check that the rows have trained tokens (data.loss_on).",
            False: "the updates have broken the model. Lower train.learning_rate or lora.alpha, or set "
            "train.max_grad_norm; the last checkpoint is kept.",
        }
        raise UserError(
            f"step {step + 1}: the gradient norm is exactly 0 (loss = {loss}): {causes[step == 0]}"
        )
