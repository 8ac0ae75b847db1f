"""The optimization loop: `Trainer.steps` takes steps and yields the metrics after each.

Loss of a step = sum over its trained tokens of -log p, divided by their number over all
micro-batches and processes. That number is known beforehand on every process (data order is a pure
function), so each micro-batch's backward is already scaled, and gradients are summed over
processes.
"""

import logging
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
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
from workflow.lib.model.layers.adapter_dropout import row_keys
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.loss_scale import LossScale, loss_scale_of
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.trained_modules import sum_copies_
from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.settings.config import TrainConfig
from workflow.lib.settings.schedule import learning_rate, step_rows
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import short_hash
from workflow.lib.training.batches import (
    RowGroup,
    attention_costs,
    micro_batches,
    process_rows,
)
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs, forward_backward
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

    def as_dict(self) -> dict[str, float]:
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


@dataclass(frozen=True)
class StepRows:
    """The rows of the tokens folder that a step trains on."""

    step: int
    """Counts from 0."""
    numbers: npt.NDArray[np.int64]
    """(global_batch_size,), the same on all processes."""
    groups: list[RowGroup]
    """Of this process's micro-batches."""
    trained_tokens: int
    """Over all processes."""


@dataclass(frozen=True)
class Trainer:
    """What takes steps: a model and its optimizer, over tokens, on this process among others.

    Steps are collective.
    """

    training: CausalLMForTraining
    optimizer: ShardwiseAdam
    store: TokenStore
    settings: TrainConfig
    micro_batch_size: int
    world: World
    graphs: MicroBatchGraphs | None = None
    """What launches micro-batches as CUDA graphs; None: Python launches each kernel."""

    def steps(
        self, *, first_step: int, num_steps: int, elapsed_s: float = 0.0
    ) -> Iterator[StepMetrics]:
        """Train from `first_step` (0-based) to `num_steps`; yield each step's metrics, equal on all
        processes.

        elapsed_s: seconds that earlier invocations of this run have trained. Raises `UserError` if
        the loss or the gradient is not finite, or the gradient is zero.
        """
        self.training.train()
        batches = self._batches_ahead(range(first_step, num_steps))
        for step in range(first_step, num_steps):
            began = time.monotonic()
            rows = self._rows_of(step)
            rate = learning_rate(self.settings, step=step, num_steps=num_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss, norm = self._update(rows, islice(batches, len(rows.groups)))
            seconds = time.monotonic() - began
            elapsed_s += seconds
            tokens = len(rows.numbers) * self.store.seq_len
            scale = loss_scale_of(self.training)
            yield StepMetrics(
                step=step + 1,
                loss=loss,
                grad_norm=norm,
                learning_rate=rate,
                trained_tokens=rows.trained_tokens,
                tokens=tokens,
                tokens_per_s=tokens / seconds,
                peak_bytes=peak_bytes(self.world.device),
                elapsed_s=elapsed_s,
                repeats=None if scale is None else scale.repeats,
            )
        self.release_graphs()

    def release_graphs(self) -> None:
        """Give back the memory that CUDA graphs hold: what follows needs it. Later steps capture
        them anew.
        """
        if self.graphs is not None:
            self.graphs.release()

    def _batches_ahead(self, steps: range) -> Iterator[MicroBatch]:
        """Yield this process's micro-batches of all steps; the next one is being made meanwhile."""
        rows_of = self.training.rows_of
        return micro_batches(
            self.store,
            chain.from_iterable(self._rows_of(step).groups for step in steps),
            device=self.world.device,
            look_up=rows_of.on_host if isinstance(rows_of, StoredRows) else None,
        )

    def _rows_of(self, step: int) -> StepRows:
        """Return the rows of a step, a pure function of settings and process."""
        numbers = step_rows(
            num_rows=self.store.num_rows,
            global_batch_size=self.settings.global_batch_size,
            seed=self.settings.seed,
            step=step,
        )
        costs = attention_costs(self.store.position_ids[numbers])
        own_numbers = process_rows(numbers, costs, rank=self.world.rank, size=self.world.size)
        size = self.micro_batch_size
        parts = [own_numbers[start : start + size] for start in range(0, len(own_numbers), size)]
        groups = [
            RowGroup(part, row_keys(self.settings.seed, step=step, rows=part)) for part in parts
        ]
        trained_tokens = int(self.store.trained_tokens_per_row[numbers].sum())
        return StepRows(step, numbers, groups, trained_tokens)

    def _update(self, rows: StepRows, batches: Iterable[MicroBatch]) -> tuple[float, float]:
        """Take one step; return its loss and its gradient norm before clipping.

        batches: this process's part of the step. Nothing is updated if `check_step` raises.
        """
        loss, norm = self._gradients(rows, batches)
        origin = None
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._seed_dropout(rows)  # so that the search drops the same
            self.release_graphs()
            with self.training.product_types.in_eight_bits():
                origin = find_origin(self.training, self._made_again(rows), world=self.world)
        check_step(loss, norm, step=rows.step, origin=origin)
        self.optimizer.step()
        self._drop_gradients()
        return loss, norm

    def _drop_gradients(self) -> None:
        """Graphs add to gradients where these were when they were captured."""
        self.optimizer.zero_grad(set_to_none=self.graphs is None)

    def _gradients(self, rows: StepRows, batches: Iterable[MicroBatch]) -> tuple[float, float]:
        """Make the gradients of a step and begin its update; return its loss and gradient norm.

        In float16 they may overflow; they are made once more then, with a smaller loss scale.
        """
        scale = loss_scale_of(self.training)
        while True:
            loss, norm = self._attempt(rows, batches, scale)
            if scale is None or not math.isfinite(loss) or not scale.must_repeat(norm):
                return loss, norm
            self._drop_gradients()
            batches = (batch for _, batch in self._made_again(rows))

    def _attempt(
        self, rows: StepRows, batches: Iterable[MicroBatch], scale: LossScale | None
    ) -> tuple[float, float]:
        """Forward, backward, clip, and begin the update; return loss and gradient norm."""
        self._seed_dropout(rows)
        products = self.training.product_types.in_eight_bits()
        with self.training.adapters.unchanged(), products:
            loss = backward(
                self.graphs or partial(forward_backward, self.training),
                batches,
                trained_tokens=rows.trained_tokens,
                factor=1.0 if scale is None else scale.factor,
                device=self.world.device,
            )
        sum_copies_(self.training)
        if scale is not None:
            scale.unscale_(self.training)
        norm = clip_gradients(self.optimizer, max_norm=self.settings.max_grad_norm)
        dist.all_reduce(loss)  # all processes judge the step by the same numbers, so alike
        # The device itself decides whether it updates. So the update is queued before `float` has
        # the host wait for the step, and the device need not wait for the host.
        healthy = loss.isfinite() & norm.isfinite() & (norm > 0)
        self.optimizer.begin(unless=~healthy)
        return float(loss), float(norm)

    def _seed_dropout(self, rows: StepRows) -> None:
        seed_dropout(self.settings.seed, step=rows.step, rank=self.world.rank)

    def _made_again(self, rows: StepRows) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield the row numbers and the micro-batch of each group of a step."""
        numbers = ([int(number) for number in group.numbers] for group in rows.groups)
        batches = micro_batches(self.store, rows.groups, device=self.world.device)
        yield from zip(numbers, batches, strict=True)


def seed_dropout(seed: int, *, step: int, rank: int) -> None:
    """Make what a family itself drops a function of (seed, step, rank), so that resuming needs no
    state. The adapters' dropout has numbers of its own (`adapter_dropout`).
    """
    torch.manual_seed(int(short_hash(["dropout", seed, step, rank]), 16))


def backward(
    run: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
    batches: Iterable[MicroBatch],
    *,
    trained_tokens: int,
    factor: float,
    device: torch.device,
) -> torch.Tensor:
    """Accumulate gradients times `factor` over this process's micro-batches; return its part of the
    loss () float64.

    run: `forward_backward` of the model, or its graphs.
    """
    exact = torch.full((), factor / trained_tokens, dtype=torch.float64, device=device)
    slope = exact.float()  # infinite where it is too large for that: the step is repeated
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        total += run(batch, slope)
    return total / trained_tokens


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
    """Return the norm of all gradients together (). Collective: each process has its shards'."""
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
