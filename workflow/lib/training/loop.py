"""The optimization loop: `Trainer.steps` takes steps and yields the metrics after each.

The loss of a step is the sum of its objective's losses, divided by a number over all micro-batches
and processes (`objectives.objective`). Every process knows that number beforehand (data order is a
pure function), so each micro-batch's backward is already scaled, and gradients are summed over
processes.

If micro-batches are CUDA graphs, the next step's first one is launched before the host waits for a
step's loss and gradient norm. So the device has work while metrics are written and the next update
is prepared. That micro-batch changes gradients alone: weights, moments and counts belong to the
step whose metrics are yielded.

A step whose gradient is exactly 0, where its objective allows that, is an update like any other, as
in torch: moments decay, and the weights move by what they hold."""

import logging
import math
import resource
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from workflow.lib.artifacts.training_record import Step
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import World
from workflow.lib.model.lora import sum_copies_, trainable_parameters
from workflow.lib.model.loss.loss_scale import loss_scale_of
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.training_module import CausalLMForTraining, loss_in
from workflow.lib.settings.config import TrainConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import short_hash
from workflow.lib.training.batches import StepBatches, StepRows, StoredBatches
from workflow.lib.training.gradients import (
    LossSum,
    clip_gradients,
    find_origin,
    is_healthy,
    step_estimate,
)
from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs, forward_backward
from workflow.lib.training.optimizers import ShardwiseOptimizer, learning_rate
from workflow.lib.training.start_reference import with_references

logger = logging.getLogger("workflow")

STANDSTILL_STEPS = 20  # with a gradient of 0, after which a warning says so


def make_optimizer(training: nn.Module, train: TrainConfig) -> ShardwiseOptimizer:
    """Return `train.optimizer` over the fp32 masters of the trained parameters."""
    return ShardwiseOptimizer(trainable_parameters(training), train)


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak so far, bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class StepNumbers(NamedTuple):
    """A step's numbers from the device."""

    loss: float
    grad_norm: float  # before clipping
    router_aux_loss: float | None
    figures: Mapping[str, float]


@dataclass(frozen=True)
class StepInProgress:
    """A step after some of its micro-batches, or none."""

    rows: StepRows
    batches: Iterator[MicroBatch]  # this process's remaining ones
    loss: LossSum


class PendingScalars:
    """Numbers of the device in transfer to the host, in the order of the device's work."""

    def __init__(self, *numbers: torch.Tensor) -> None:
        on_device = torch.cat([number.reshape(-1).double() for number in numbers])
        self._cuda = on_device.is_cuda
        self._copied = torch.cuda.Event() if self._cuda else None
        self._values = torch.empty_like(on_device, device="cpu", pin_memory=self._cuda)
        self._values.copy_(on_device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[float]:
        """Wait for them; the device continues with later work."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


@dataclass(frozen=True)
class Trainer:
    """Takes steps of a model and optimizer over tokens; all methods are collective."""

    training: CausalLMForTraining
    optimizer: ShardwiseOptimizer
    batches: StepBatches
    settings: TrainConfig
    world: World
    graphs: MicroBatchGraphs | None = None
    """Launches micro-batches as CUDA graphs; None: Python launches each kernel."""

    @classmethod
    def over(
        cls,
        training: CausalLMForTraining,
        optimizer: ShardwiseOptimizer,
        store: TokenStore,
        settings: TrainConfig,
        micro_batch_size: int,
        world: World,
        graphs: MicroBatchGraphs | None = None,
        waited: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] = iter,
    ) -> Self:
        """Return the trainer over the rows of `store`. waited: passes micro-batches on, and may
        note the wait for each."""
        batches = StoredBatches(
            training,
            store,
            settings,
            micro_batch_size,
            world,
            stay_on_host=graphs is not None,  # graphs copy them to their inputs
            waited=waited,
        )
        return cls(training, optimizer, batches, settings, world, graphs)

    def steps(self, *, first_step: int, num_steps: int, elapsed_s: float = 0.0) -> Generator[Step]:
        """Train from `first_step` (0-based) to `num_steps`; yield each step's metrics, equal on all
        processes. elapsed_s: training seconds of earlier invocations of this run. Raises
        `UserError` if the loss or the gradient is not finite, or the gradient is zero."""
        self.training.train()
        self._drop_gradients()  # of an unfinished step
        batches = self.batches.ahead(range(first_step, num_steps))
        ahead: StepInProgress | None = None
        standstill = Standstill()
        for step in range(first_step, num_steps):
            began = time.monotonic()
            current, ahead = ahead or self._start(step, batches), None
            rate = learning_rate(self.settings, step=step, num_steps=num_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            rows, result = current.rows, self._finish_backward(current)
            del current  # its sums are freed before the next step begins
            ahead = self._prefetch(range(step + 1, num_steps), batches)
            numbers = self._check_and_apply(rows, result, ahead)
            standstill.note(numbers.grad_norm, step=step)
            peak = peak_bytes(self.world.device)
            seconds = time.monotonic() - began
            elapsed_s += seconds
            tokens = len(rows.indices) * self.batches.seq_len
            scale = loss_scale_of(self.training)
            optional_metrics: dict[str, Any] = {
                "router_aux_loss": numbers.router_aux_loss,
                "repeats": None if scale is None else scale.repeats,
                **numbers.figures,
            }
            yield Step(
                step=step + 1,
                loss=numbers.loss,
                grad_norm=numbers.grad_norm,
                learning_rate=rate,
                trained_tokens=rows.trained_tokens,
                tokens=tokens,
                tokens_per_s=tokens / seconds,
                peak_bytes=peak,
                elapsed_s=elapsed_s,
                **{name: x for name, x in optional_metrics.items() if x is not None},
            )
        self.release_graphs()

    @property
    def graphs_off(self) -> str | None:
        """Why micro-batches are no CUDA graphs any more; None if they are, or never were to be."""
        return None if self.graphs is None else self.graphs.off

    def release_graphs(self) -> None:
        """Free the memory of CUDA graphs; later steps capture them anew."""
        if self.graphs is not None:
            self.graphs.release()

    def _start(self, step: int, batches: Iterator[MicroBatch]) -> StepInProgress:
        """Return a step before its first micro-batch; it takes its micro-batches from `batches`."""
        rows = self.batches.rows(step)
        return self._in_progress(rows, islice(batches, len(rows.groups)))

    def _in_progress(
        self, rows: StepRows, batches: Iterator[MicroBatch], *, by_graphs: bool = True
    ) -> StepInProgress:
        scale = loss_scale_of(self.training)
        references, estimate = self._with_references(rows, batches), self._estimate(rows)
        batches = (replace(batch, estimate=estimate) for batch in references)
        loss = LossSum(
            (self.graphs if by_graphs else None) or partial(forward_backward, self.training),
            divisor=rows.divisor,
            factor=1.0 if scale is None else scale.factor,
            device=self.world.device,
            figures=len(self.training.objective.figures),
        )
        self._seed_dropout(rows)
        if self.training.router_balance is not None:
            self.training.router_balance.begin_step_(
                divisor=rows.divisor,
                tokens=self.batches.text_tokens(rows),
                device=self.world.device,
            )
        return StepInProgress(rows, batches, loss)

    def _with_references(
        self, rows: StepRows, batches: Iterator[MicroBatch]
    ) -> Iterator[MicroBatch]:
        """Return a step's micro-batches with the start's log-probabilities, if it is the reference.
        Collective."""
        if self.training.reference is None:
            return batches
        with self.training.matmul_precision.training_step():
            references = self.training.reference.step_log_probs(
                self.training, rows, partial(self.batches.again, rows)
            )
        return with_references(batches, references)

    def _estimate(self, rows: StepRows) -> torch.Tensor | None:
        """Return the objective's estimate for the whole step, or None. Collective."""
        batches = (batch for _, batch in self._step_batches(rows))
        with self.training.matmul_precision.training_step():
            return step_estimate(self.training, batches, divisor=rows.divisor, world=self.world)

    def _prefetch(self, steps: range, batches: Iterator[MicroBatch]) -> StepInProgress | None:
        """Launch the first micro-batch of the first of these steps. Return None if there is none,
        or if it must wait for the host: without graphs, and if the host decides whether a step is
        updated or repeated."""
        host_decides = loss_scale_of(self.training) or not self.optimizer.device_decides
        possible = len(steps) > 0 and self.graphs is not None and not host_decides
        if not possible:
            return None
        self._drop_gradients()
        current = self._start(steps[0], batches)
        self.run_micro_batches(current, count=1)
        return current

    def run_micro_batches(self, current: StepInProgress, *, count: int | None = None) -> None:
        """Run the next `count` micro-batches of a step, by default all that are left."""
        with self.training.adapters.unchanged(), self.training.matmul_precision.training_step():
            current.loss.add(islice(current.batches, count))

    def _finish_backward(self, current: StepInProgress) -> PendingScalars:
        """Run the rest of a step, clip its gradients, and begin its update; return its gradient
        norm before clipping, the routers' balance if there is one, its loss, and its figures."""
        self.run_micro_batches(current)
        result, scale = current.loss.value(), loss_scale_of(self.training)
        sum_copies_(self.training)
        if scale is not None:
            scale.unscale_(self.training)
        norm = clip_gradients(self.optimizer, max_norm=self.settings.max_grad_norm)
        dist.all_reduce(result)  # all processes judge the step by the same numbers
        # The device itself decides whether to update. So the update is queued before the host waits
        # for the step, and the device need not wait for the host.
        possible = self._may_stand_still(current.rows)
        healthy = is_healthy(loss_in(result), norm, may_stand_still=possible)
        self.optimizer.begin(unless=~healthy)
        balance = self.training.router_balance
        balances = [] if balance is None else [balance.value()]
        return self.transfer(norm, *balances, result)

    def transfer(self, *numbers: torch.Tensor) -> PendingScalars:
        """Begin the transfer of a step's numbers to the host."""
        return PendingScalars(*numbers)

    def _numbers(self, rows: StepRows, pending: PendingScalars) -> StepNumbers:
        """Wait for a step's numbers from the device."""
        norm, *numbers = pending.wait()
        balance = None if self.training.router_balance is None else numbers.pop(0)
        loss, *sums = numbers
        figures = {
            figure.name: number * rows.divisor / rows.sizes[figure.per]
            for figure, number in zip(self.training.objective.figures, sums, strict=True)
            if rows.sizes[figure.per]
        }
        return StepNumbers(loss, norm, balance, figures)

    def _check_and_apply(
        self, rows: StepRows, result: PendingScalars, ahead: StepInProgress | None
    ) -> StepNumbers:
        """Complete a step, and return its numbers. Nothing is updated if `check_step` raises. In
        float16 gradients may overflow: then they are computed again, with a smaller loss scale."""
        numbers = self._numbers(rows, result)
        scale = loss_scale_of(self.training)
        while (
            scale is not None
            and math.isfinite(numbers.loss)
            and scale.must_repeat(numbers.grad_norm)
        ):
            self._drop_gradients()
            batches = (batch for _, batch in self._step_batches(rows))
            again = self._finish_backward(self._in_progress(rows, batches))
            numbers = self._numbers(rows, again)
        loss, norm = numbers.loss, numbers.grad_norm
        finite = math.isfinite(loss) and math.isfinite(norm)
        origin = None if finite else self._origin(rows, gradients_exist=ahead is None)
        possible = self._may_stand_still(rows)
        check_step(loss, norm, step=rows.step, origin=origin, may_stand_still=possible)
        self.optimizer.step()
        if ahead is None:
            self._drop_gradients()
        return numbers

    def _origin(self, rows: StepRows, *, gradients_exist: bool) -> str:
        """Return where the step's first value that is not finite arose. Collective."""
        self.release_graphs()
        if not gradients_exist:  # not updated, so the weights are still the step's
            self.optimizer.zero_grad()
            batches = (batch for _, batch in self._step_batches(rows))
            self.run_micro_batches(self._in_progress(rows, batches, by_graphs=False))
            sum_copies_(self.training)
        self._seed_dropout(rows)  # so that the search draws the same dropout
        with self.training.matmul_precision.training_step():
            return find_origin(self.training, self._step_batches(rows), world=self.world)

    def _may_stand_still(self, rows: StepRows) -> bool:
        """Whether a healthy step's gradient can be exactly 0, as where all of its weights are."""
        return self.training.objective.flat or rows.sizes[0] == 0

    def _drop_gradients(self) -> None:
        """Graphs add to gradients at their addresses during the capture."""
        self.optimizer.zero_grad(set_to_none=self.graphs is None)

    def _seed_dropout(self, rows: StepRows) -> None:
        seed_dropout(self.settings.seed, step=rows.step, rank=self.world.rank)

    def _step_batches(self, rows: StepRows) -> Iterator[tuple[list[int], MicroBatch]]:
        numbers = ([int(number) for number in group.indices] for group in rows.groups)
        batches = self._with_references(rows, self.batches.again(rows))
        yield from zip(numbers, batches, strict=True)


def seed_dropout(seed: int, *, step: int, rank: int) -> None:
    """Make a family's own dropout a function of (seed, step, rank), so that resuming needs no
    state. The adapters' dropout has its own random numbers (`adapter_dropout`)."""
    torch.manual_seed(int(short_hash(["dropout", seed, step, rank]), 16))


class Standstill:
    """Warns once if the gradient has been 0 for `STANDSTILL_STEPS` steps."""

    def __init__(self) -> None:
        self._steps, self._warned = 0, False

    def note(self, grad_norm: float, *, step: int) -> None:
        """Count a step (0-based) whose gradient is 0; any other begins the count anew."""
        self._steps = self._steps + 1 if grad_norm == 0.0 else 0
        if self._steps < STANDSTILL_STEPS or self._warned:
            return
        self._warned = True
        logger.warning(
            "the gradient has been exactly 0 in %d steps, up to step %d: nothing is learned. If "
            "the loss is as low as wanted, end the run; if not, check the weights of tokens and "
            "answers, and preferences.loss_type",
            *(self._steps, step + 1),
        )


def check_step(
    loss: float,
    norm: float,
    *,
    step: int,
    origin: str | None = None,
    may_stand_still: bool = False,
) -> None:
    """Raise `UserError` if a loss or gradient norm is not finite, or if the gradient is 0 where the
    objective has one; origin: where it arose; may_stand_still: whether it can be."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(
            f"step {step + 1}: loss = {loss}, gradient norm = {norm}: training has "
            f"diverged{f' ({origin})' if origin else ''}. Lower train.learning_rate, raise "
            "train.warmup_share, or set train.max_grad_norm; the last checkpoint is kept."
        )
    if norm == 0.0 and not may_stand_still:
        # Adapters begin with gradients; later ones vanish if an update has saturated the model.
        causes = {
            True: "nothing is being learned. Check that the rows have trained tokens "
            "(data.loss_on).",
            False: "the updates have broken the model. Lower train.learning_rate or lora.alpha, "
            "or set train.max_grad_norm; the last checkpoint is kept.",
        }
        raise UserError(
            f"step {step + 1}: the gradient norm is exactly 0 (loss = {loss}): {causes[step == 0]}"
        )
