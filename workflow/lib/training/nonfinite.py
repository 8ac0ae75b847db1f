"""Where NaN or infinity came from: the first module, or else the gradient, that is not finite, and
the rows.

Called once a step has gone wrong, before its update and with its gradients as backward made them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import local
from workflow.lib.training.batches import MicroBatch


def find_origin(
    training: nn.Module, batches: Iterable[tuple[list[int], MicroBatch]], *, world: World
) -> str:
    """Return in words where the step's first value that is not finite arose. Collective.

    batches: this process's rows and micro-batches of the step, equally many on all processes. They
    are run forward once more. The step's gradients must still be there and not be clipped, which by
    NaN makes all NaN.
    """
    mine: str | None = None
    with forward_only(training):
        for rows, batch in batches:
            with first_module(training) as found:
                loss = training(
                    batch.input_ids,
                    batch.position_ids,
                    batch.positions,
                    batch.targets,
                    batch.bounds,
                )
            if mine is None and (found or not loss.isfinite()):
                mine = (
                    f"first in {found[0] if found else 'the loss'}, forward, rows {rows} of "
                    f"the tokens, process {world.rank}"
                )
    forward = next((text for text in _everyones(mine, world) if text is not None), None)
    return forward or _first_gradient(training, world) or "in the sum"


def _everyones(mine: Any, world: World) -> list[Any]:
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.io_group)
    return everyone


def _first_gradient(training: nn.Module, world: World) -> str | None:
    """Return which gradient, summed over processes, is not finite, the first of several.

    Backward runs from the last layer to the first, so it is the last one in the model's order.
    Each process looks at its shards. Collective.
    """
    params = trainable_parameters(training)
    wrong = [
        place
        for place, param in enumerate(params.values())
        if param.grad is not None and not local(param.grad).isfinite().all()
    ]
    last: int = max(_everyones(max(wrong, default=-1), world))
    return None if last < 0 else f"first in the gradient of {list(params)[last]}"


@contextmanager
def first_module(training: nn.Module) -> Iterator[list[str]]:
    """Within the block note the first module whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not found and isinstance(first, torch.Tensor) and not first.isfinite().all():
                found.append(name)

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in training.named_modules()
        if name
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
