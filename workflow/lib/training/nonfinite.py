"""Where NaN or infinity came from: the first module, or else the gradient, that is not finite, and
the rows.

Called once a step has gone wrong, before its update and with its gradients as backward made them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from workflow.lib.distributed.fsdp import forward_only
from workflow.lib.distributed.world import World, any_of_all
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.model.nf4_model import local
from workflow.lib.model.training_module import CausalLMForTraining, loss_in

ValueT = TypeVar("ValueT")


def find_origin(
    training: CausalLMForTraining, batches: Iterable[tuple[list[int], MicroBatch]], *, world: World
) -> str:
    """Return in words where the step's first value that is not finite arose. Collective. batches:
    this process's rows and micro-batches of the step, equally many on all processes. They are run
    forward once more. The step's gradients must still be there and not be clipped, which by NaN
    makes all NaN."""
    origin: str | None = None
    with forward_only(training):
        for rows, batch in batches:  # to the end: every forward gathers weights from all processes
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
    looks at its shards. Collective."""
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
    """Within the block note the name of the first module whose output is not finite. The list that
    is yielded has no element, or this one."""
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
