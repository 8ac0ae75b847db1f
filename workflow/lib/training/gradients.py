"""The gradients of a step: summed over its micro-batches together with its loss, and clipped.

Nothing here waits for the device.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from workflow.lib.model.micro_batch import MicroBatch


class LossSum:
    """The loss of a step over those of this process's micro-batches that have run so far."""

    def __init__(
        self,
        run: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
        *,
        trained_tokens: int,
        factor: float,
        device: torch.device,
    ) -> None:
        """run: `forward_backward` of the model, or its graphs. Gradients are those of the step's
        loss times `factor`.
        """
        self._run, self._trained_tokens = run, trained_tokens
        exact = torch.full((), factor / trained_tokens, dtype=torch.float64, device=device)
        self._slope = exact.float()  # infinite where it is too large for that: the step is repeated
        self._total = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, batches: Iterable[MicroBatch]) -> None:
        """Run micro-batches forward and backward."""
        for batch in batches:
            self._total += self._run(batch, self._slope)

    def value(self) -> torch.Tensor:
        """Return this process's part of the loss () float64."""
        return self._total / self._trained_tokens


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
