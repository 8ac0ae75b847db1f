"""The gradients of a step: summed over its micro-batches together with its loss, and clipped.

Nothing here waits for the device, except `find_origin`, which finds the source of NaN or infinity.
It is called after a faulty step, before its update, on backward's unclipped gradients."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World, any_of_all
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.nf4_model import local
from workflow.lib.model.training_module import CausalLMForTraining, loss_in

CLIP_EPS = 1e-6  # as in `torch.nn.utils.clip_grad_norm_`


class LossSum:
    """The loss of a step over this process's micro-batches so far."""

    def __init__(
        self,
        run: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
        *,
        divisor: float,
        factor: float,
        device: torch.device,
        figures: int = 0,
    ) -> None:
        """run: `forward_backward` of the model, or its graphs. divisor: of the sum, over all
        processes. Gradients are of the step's loss times `factor`. figures: number of the
        objective's further figures."""
        self._run, self._divisor = run, divisor
        exact = torch.full((), factor / divisor, dtype=torch.float64, device=device)
        self._slope = exact.float()  # infinite if it is too large for that: the step is repeated
        shape = (1 + figures,) if figures else ()
        self._total = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, batches: Iterable[MicroBatch]) -> None:
        """Run micro-batches; add their losses here, and their gradients to the parameters."""
        for batch in batches:
            self._total += self._run(batch, self._slope)

    def value(self) -> torch.Tensor:
        """Return this process's part of the loss () float64; with figures (1 + figures,), all
        divided by the loss's divisor."""
        return self._total / self._divisor


def step_estimate(
    training: CausalLMForTraining, batches: Iterable[MicroBatch], *, divisor: float, world: World
) -> torch.Tensor | None:
    """Return the objective's estimate () fp32 for the whole step, by a forward of all micro-batches
    without dropout; None if it needs none. Collective. batches: this process's, equally many on
    all."""
    figure = training.objective.estimated
    if figure is None:
        return None
    was_training = training.training
    training.eval()
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    with forward_only(training):
        for batch in batches:
            total += training(batch)[1 + figure]
    training.train(was_training)
    dist.all_reduce(total)
    return (total / divisor).float()


def clip_gradients(optimizer: torch.optim.Optimizer, *, max_norm: float | None) -> torch.Tensor:
    """Scale the gradients to a norm of at most `max_norm`; return the norm before. Collective. They
    do not change if `max_norm` is None, or if the norm is not finite: `find_origin` reads them
    then."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    gradients = [param.grad for param in params if param.grad is not None]
    norms = [_norm(alike) for alike in _by_mesh(gradients)]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        bounded = norm.where(norm.isfinite(), 0.0)  # the device decides, and no host waits for it
        factor = (max_norm / (bounded + CLIP_EPS)).clamp(max=1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
    return norm


def is_healthy(loss: torch.Tensor, norm: torch.Tensor, *, may_stand_still: bool) -> torch.Tensor:
    """Return on the device whether a step may update the weights () bool; may_stand_still: whether
    a gradient of 0 is healthy (`Objective`)."""
    finite = loss.isfinite() & norm.isfinite()
    return finite if may_stand_still else finite & (norm > 0)


def _by_mesh(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group the gradients that are cut over the same processes."""
    groups: dict[Hashable, list[torch.Tensor]] = {}
    for gradient in gradients:
        key = None
        if isinstance(gradient, DTensor):
            key = (gradient.device_mesh, gradient.placements)
        groups.setdefault(key, []).append(gradient)
    return list(groups.values())


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm () of gradients with equal cuts. Collective: each process has its shards'.
    Computed from shards: torch's own norm of DTensors took a sixth of a recording of 62 layers."""
    own = get_total_norm([local(gradient) for gradient in gradients])
    first = gradients[0]
    if not isinstance(first, DTensor):
        return own
    square = own.square()
    for dimension, placement in enumerate(first.placements):
        if placement.is_shard():
            dist.all_reduce(square, group=first.device_mesh.get_group(dimension))
    return square.sqrt()


ValueT = TypeVar("ValueT")


def find_origin(
    training: CausalLMForTraining, batches: Iterable[tuple[list[int], MicroBatch]], *, world: World
) -> str:
    """Return in words where the step's first value that is not finite arose. Collective. batches:
    this process's rows and micro-batches of the step, equally many on all processes; they run
    forward once more. The step's gradients must still exist, unclipped: clipping by NaN makes all
    NaN."""
    origin: str | None = None
    with forward_only(training):
        for rows, batch in batches:  # all of them: every forward gathers weights from all processes
            with first_module(training) as names:
                loss = loss_in(training(batch))
            if origin is None and (names or not loss.isfinite()):
                origin = (
                    f"first in {names[0] if names else 'the loss'}, forward, rows {rows} of "
                    f"the tokens, process {world.rank}"
                )
    forward = any_of_all(origin, world=world)
    return forward or _first_gradient(training, world) or "in the sum"


def _first_gradient(training: nn.Module, world: World) -> str | None:
    """Return which gradient, summed over processes, is not finite, the first of several. Backward
    runs from the last layer to the first, so it is the last one in the model's order. Each process
    checks its shards. Collective."""
    params = trainable_parameters(training)
    indices = [
        index
        for index, param in enumerate(params.values())
        if param.grad is not None and not local(param.grad).isfinite().all()
    ]
    last = max(world.gathered(max(indices, default=-1)))
    return None if last < 0 else f"first in the gradient of {list(params)[last]}"


@contextmanager
def first_module(training: nn.Module) -> Iterator[list[str]]:
    """Within the block note the name of the first module whose output is not finite, in the yielded
    list, which is empty without one."""
    names: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not names and isinstance(first, torch.Tensor) and not first.isfinite().all():
                names.append(name)

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in training.named_modules()
        if name
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()
