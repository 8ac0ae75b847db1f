"""Where NaN or infinity came from: the first module, or else the gradient, that is not finite, and the rows.

Called once a step has gone wrong and before its update, so the weights are still those that made it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workflow.lib.batches import MicroBatch
from workflow.lib.lora import trainable_parameters
from workflow.lib.model import local
from workflow.lib.world import World


def find_origin(
    training: nn.Module, batches: Iterable[tuple[list[int], MicroBatch]], *, world: World
) -> str:
    """Return in words where the step's first value that is not finite arose. Collective.

    batches: this process's rows and micro-batches of the step, equally many on all processes. They are run forward once
    more; gradients of the step must still be there.
    """
    mine: str | None = None
    with torch.no_grad():
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
                mine = f"first in {found[0] if found else 'the loss'}, forward, rows {rows} of the tokens, process {world.rank}"
    return _agreed(mine, world) or _agreed(_first_gradient(training, world), world) or "in the sum"


def _agreed(mine: str | None, world: World) -> str | None:
    everyone: list[str | None] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.io_group)
    return next((text for text in everyone if text is not None), None)


def _first_gradient(training: nn.Module, world: World) -> str | None:
    """Backward runs from the last layer to the first, so the last one is where it began."""
    wrong = [
        name
        for name, param in trainable_parameters(training).items()
        if param.grad is not None and not local(param.grad).isfinite().all()
    ]
    return f"first in the gradient of {wrong[-1]}, process {world.rank}" if wrong else None


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
