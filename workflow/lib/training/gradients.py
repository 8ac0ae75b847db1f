"""The gradients of a step: summed over its micro-batches together with its loss, and clipped.

Nothing here waits for the device."""

from collections.abc import Callable, Hashable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.nf4_model import local
from workflow.lib.model.training_module import CausalLMForTraining

CLIP_EPS = 1e-6  # as in `torch.nn.utils.clip_grad_norm_`


class LossSum:
    """The loss of a step over those of this process's micro-batches that have run so far."""

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
        processes. Gradients are those of the step's loss times `factor`. figures: how many the
        objective tells beside it."""
        self._run, self._divisor = run, divisor
        exact = torch.full((), factor / divisor, dtype=torch.float64, device=device)
        self._slope = exact.float()  # infinite where it is too large for that: the step is repeated
        shape = (1 + figures,) if figures else ()
        self._total = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, batches: Iterable[MicroBatch]) -> None:
        for batch in batches:
            self._total += self._run(batch, self._slope)

    def value(self) -> torch.Tensor:
        """Return this process's part of the loss () float64; with figures (1 + figures,), as if all
        were divided by what divides the loss."""
        return self._total / self._divisor


def step_estimate(
    training: CausalLMForTraining, batches: Iterable[MicroBatch], *, divisor: float, world: World
) -> torch.Tensor | None:
    """Return what the objective needs of the whole step before it () fp32, by a forward of all
    micro-batches without dropout; None where it needs nothing. Collective. batches: this
    process's, as many as of the others."""
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
    stay as they are if `max_norm` is None, or if the norm is not finite: `find_origin` reads them
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


def _by_mesh(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the gradients that are cut over the same processes together."""
    groups: dict[Hashable, list[torch.Tensor]] = {}
    for gradient in gradients:
        key = None
        if isinstance(gradient, DTensor):
            key = (gradient.device_mesh, gradient.placements)
        groups.setdefault(key, []).append(gradient)
    return list(groups.values())


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of gradients that are cut alike (). Collective: each process has its shards'.
    Of the shards alone: torch's own norm of DTensors took a sixth of a recording of 62 layers."""
    own = get_total_norm([local(gradient) for gradient in gradients])
    first = gradients[0]
    if not isinstance(first, DTensor):
        return own
    square = own.square()
    for dimension, placement in enumerate(first.placements):
        if placement.is_shard():
            dist.all_reduce(square, group=first.device_mesh.get_group(dimension))
    return square.sqrt()
