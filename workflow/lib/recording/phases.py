"""The phases of a micro-batch, noted on a tape as the engine enters them."""

from typing import Any

import torch
from torch import nn

from workflow.lib.model.training_module import CausalLMForTraining
from workflow.lib.planning.memory.allocation_tape import Tape


class Phases:
    """Follows forward passes that keep something for backward; others are part of what goes on."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def follow_(self, training: CausalLMForTraining, embedding: nn.Module) -> None:
        """Have the modules tell when they begin and end."""
        training.register_forward_pre_hook(lambda *_: self._enter("look_up_embedding"))
        embedding.register_forward_hook(lambda *_: self._enter("forward"))
        training.head_loss.register_forward_pre_hook(lambda *_: self._enter("loss"))
        training.register_forward_hook(self._forward_ends)

    def _forward_ends(self, *_: Any) -> None:
        self._enter("backward")

    def _enter(self, phase: str) -> None:
        if torch.is_grad_enabled():
            self._tape.phase(phase)
