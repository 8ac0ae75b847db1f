"""The phases of a micro-batch and their layers, noted on a tape as the engine enters them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.recording.layer_tape import NONE, LayerTape

FIRST_PHASE = "look_up_embedding"
queue_callback: Any = Variable._execution_engine.queue_callback


class Phases:
    """Follows forward passes that keep something for backward; others are part of what goes on."""

    def __init__(self, tape: LayerTape) -> None:
        self._tape = tape

    def follow_(
        self, training: CausalLMForTraining, embedding: nn.Module, layers: Sequence[nn.Module]
    ) -> None:
        """Have the modules tell when they begin and end."""
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._at_work, number))
            layer.register_forward_hook(partial(self._layer_ends, number))
        training.register_forward_pre_hook(lambda *_: self._enter(FIRST_PHASE))
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
            # Hooks of this tensor that come later, as FSDP2's do, queue their callbacks later.
            loss.register_hook(lambda _: queue_callback(lambda: self._at_work(NONE)))

    def _forward_ends(self, *_: Any) -> None:
        self._enter("backward")

    def _enter(self, phase: str) -> None:
        if torch.is_grad_enabled():
            self._tape.phase(phase)
