"""Decoder layers that are recomputed in backward with the same random numbers.

The random state is kept for a layer until one of its forwards in training draws nothing: it costs
the host 0.1 ms a layer, and no CUDA graph can hold it (torch 2.11 to 2.13)."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.kernels.attention.kept_results import KeptResults


class Recomputed:
    """Replaces torch's `checkpoint` in one layer."""

    def __init__(self, kept: KeptResults | None = None) -> None:
        """kept: results that it does not compute again."""
        self._contexts: dict[str, Any] = {} if kept is None else {"context_fn": kept.contexts}
        self.draws: bool | None = None
        """Whether its forward draws random numbers; None: not known yet."""

    def __call__(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        options: Any = {"use_reentrant": False, "preserve_rng_state": self.draws is not False}
        options |= self._contexts
        if self.draws is not None:
            return checkpoint(forward, *inputs, **options)
        devices = {x.device for x in inputs if isinstance(x, torch.Tensor)}
        before = _random_states(devices)
        outputs = checkpoint(forward, *inputs, **options)
        self.draws = not all(map(torch.equal, before, _random_states(devices)))
        return outputs


def _random_states(devices: Collection[torch.device]) -> list[torch.Tensor]:
    """Return the random states of the CPU and of these devices."""
    others = [device for device in devices if device.type != "cpu"]
    modules = (torch.get_device_module(device) for device in others)
    on_device = [x.get_rng_state(device) for x, device in zip(modules, others, strict=True)]
    return [torch.get_rng_state(), *on_device]


def checkpoint_activations_(
    model: PreTrainedModel, numbers: Collection[int], *, kept: KeptResults | None = None
) -> None:
    """Recompute the decoder layers of these numbers in backward, except `kept` results, by the
    switch of Transformers' layers. That of a whole model is refused where its other parts have none
    (Granite Speech)."""
    for number, layer in enumerate(decoder_layers(model)):
        switched: Any = layer
        switched.gradient_checkpointing = number in numbers
        switched._gradient_checkpointing_func = Recomputed(kept)


def recompute_without_draws_(layers: Iterable[nn.Module]) -> None:
    """Assume that layers draw no random numbers: their state would be on the host."""
    for layer in layers:
        keeping: Any = getattr(layer, "_gradient_checkpointing_func", None)
        if isinstance(keeping, Recomputed):
            keeping.draws = False


@contextmanager
def nothing_recomputed(model: PreTrainedModel) -> Iterator[None]:
    """Within the block all layers keep their activations."""
    layers: list[Any] = decoder_layers(model)
    switched = [layer for layer in layers if recomputes(layer)]
    for layer in switched:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in switched:
            layer.gradient_checkpointing = True


def recomputes(layer: Any) -> bool:
    """Whether backward recomputes a decoder layer."""
    return bool(getattr(layer, "gradient_checkpointing", False))
