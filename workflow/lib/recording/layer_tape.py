"""A tape with the decoder layer of each event, so that layers can be repeated (`repeat_layers`).

In forward and backward that is the running layer. Before and after them, in loops over all layers,
it is the layer of the tensors. `Phases` sets both as the engine enters them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.planning.memory.allocation_tape import EMPTY_CACHE, Tape
from workflow.lib.planning.work import NOTHING, Amount, Work

NONE = -1  # no layer
Amounts = dict[tuple[str, int, str], Amount]  # by phase, layer and kind


class LayerTape(Tape):
    """Events with their layers, which are numbers, or `NONE`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = NONE
        """The running layer."""
        self.follows_tensors = True
        """Whether events belong to the layers of their tensors, not to the running one."""
        self.layers: list[int] = []
        """The layer of each event."""
        self.layer_of: list[int] = []
        """By tensor: the layer of the event that made it."""
        self.counts = False  # whether work is counted now
        self.averages = False
        """Whether micro-batches are mean ones, which have the padding of graphs and none more."""
        self.works_for = ""  # the phase of counted work
        self._amounts: Amounts = {}
        self._made_at: list[int] = []
        self._ended = False

    def end(self) -> None:
        """End the run: the model is freed afterwards."""
        self._ended = True

    def _add(self, event: int | str) -> None:
        if self._ended:
            return
        layer = self.layer
        if isinstance(event, str):
            layer = self.layer = NONE
            self.works_for = self.works_for if event == EMPTY_CACHE else event
        elif event >= 0:
            self.layer_of.append(layer)
            self._made_at.append(len(self.events))
        elif self.follows_tensors or layer == NONE:
            layer = self.layer_of[~event]
        self.layers.append(layer)
        super()._add(event)

    def count(
        self, kind: str, amount: Amount, layer: int | None = None, share: float = 1.0
    ) -> None:
        """Count a share of an operation's work for the running layer, or for another."""
        if self.counts and not self._ended:
            key = (self.works_for, self.layer if layer is None else layer, kind)
            self._amounts[key] = self._amounts.get(key, NOTHING).plus(amount, share)

    @contextmanager
    def counted_apart(self) -> Iterator[Amounts]:
        """Count the work of the block, for `count_again` alone."""
        outside = self._amounts, self.counts
        self._amounts, self.counts = {}, True
        try:
            yield self._amounts
        finally:
            self._amounts, self.counts = outside

    def count_again(self, amounts: Amounts) -> None:
        """Count the work of an earlier block, if work is counted now."""
        if self.counts and not self._ended:
            for key, amount in amounts.items():
                self._amounts[key] = self._amounts.get(key, NOTHING).plus(amount)

    def work_of(self, layers: Mapping[int, int]) -> Work:
        """Return the work of a model with so many layers like each recorded one."""
        phases: dict[str, dict[str, Amount]] = {}
        for (phase, layer, kind), amount in self._amounts.items():
            amounts = phases.setdefault(phase, {})
            times = 1 if layer == NONE else layers.get(layer, 0)
            amounts[kind] = amounts.get(kind, NOTHING).plus(amount, times)
        return Work(phases)

    def assign(self, tensor: int, layer: int) -> None:
        """Assign a tensor that was made outside of layers to one."""
        self.layer_of[tensor] = self.layers[self._made_at[tensor]] = layer


FIRST_PHASE = "look_up_embedding"
queue_callback: Any = Variable._execution_engine.queue_callback


class Phases:
    """Follows forward passes that save tensors for backward; others belong to the current phase."""

    def __init__(self, tape: LayerTape) -> None:
        self._tape = tape

    def follow_(
        self, training: CausalLMForTraining, embedding: nn.Module, layers: Sequence[nn.Module]
    ) -> None:
        """Hook the begin and end of the modules."""
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._at_work, number))
            layer.register_forward_hook(partial(self._layer_ends, number))
        training.register_forward_pre_hook(self._forward_begins)
        embedding.register_forward_hook(lambda *_: self._enter("forward"))
        training.head_loss.register_forward_pre_hook(lambda *_: self._enter("loss"))
        training.head_loss.register_forward_hook(self._loss_made)
        training.register_forward_hook(self._forward_ends)

    def _at_work(self, layer: int, *_: Any) -> None:
        self._tape.layer = layer

    def _layer_ends(self, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._at_work, layer))

    def _loss_made(self, _: nn.Module, __: Any, made: Any) -> None:
        loss: torch.Tensor = made[0] if isinstance(made, tuple) else made
        if loss.requires_grad:
            # Later hooks of this tensor, such as FSDP2's, queue their callbacks later.
            loss.register_hook(lambda _: queue_callback(lambda: self._at_work(NONE)))

    def _forward_begins(self, *_: Any) -> None:
        self._tape.follows_tensors = False
        self._enter(FIRST_PHASE)

    def _forward_ends(self, *_: Any) -> None:
        self._enter("backward")
        if not torch.is_grad_enabled():
            self._tape.layer, self._tape.follows_tensors = NONE, True

    def _enter(self, phase: str) -> None:
        if torch.is_grad_enabled():
            self._tape.phase(phase)
