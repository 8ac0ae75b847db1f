"""What the tensors of a recorded tape count as: by the module that has them, else by where they are
made and how long they are there.
"""

from collections.abc import Iterator

import torch
from torch import nn

from workflow.lib.model.layers.nf4_linear import NF4Linear
from workflow.lib.planning.memory.allocation_tape import COMPUTE, Tape
from workflow.lib.planning.memory.trace_step import CHECKS, LOAD

UNNAMED = "layer_workspace"
SCALES = ("absmax", "nested_absmax")
OUTSIDE = (LOAD, CHECKS, "optimizer_step")  # of a micro-batch
# Phase that makes a tensor -> what it counts as if the same phase releases it, and if not.
BY_PHASE = {
    "look_up_embedding": ("hidden_states", "inputs"),
    "forward": (UNNAMED, "saved_activations"),
    "loss": ("logits", "hidden_states"),
    "backward": (UNNAMED, "lora_gradients"),
}


def module_tensors(
    training: nn.Module, tables: tuple[nn.Module, ...]
) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield parameters and buffers with what they count as; tables: embedding and head."""
    for module in training.modules():
        own = dict(module.named_parameters(recurse=False)) | dict(
            module.named_buffers(recurse=False)
        )
        for name, tensor in own.items():
            yield tensor, _term(module, name, tensor, tables)


def _term(module: nn.Module, name: str, tensor: torch.Tensor, tables: tuple[nn.Module, ...]) -> str:
    if any(module is table for table in tables):
        return "module_weights" if tensor.requires_grad else "embedding_and_head"
    if tensor.requires_grad:
        return "lora_weights"
    if not isinstance(module, NF4Linear) or name == "bias":
        return "norms_and_biases"
    if name == "weight":
        return "nf4_weights"
    return "nf4_scales" if name in SCALES else "nf4_tables"


def name_terms(tape: Tape) -> None:
    """Name the tensors that are not named yet."""
    made: dict[int, str] = {}
    released: dict[int, str] = {}
    phase = LOAD
    for event in tape.events:
        if isinstance(event, str):
            phase = event
        elif event >= 0:
            made[event] = phase
        else:
            released[~event] = phase
    for tensor, term in enumerate(tape.terms):
        if term == UNNAMED:
            beside = tape.streams[tensor] != COMPUTE
            tape.terms[tensor] = _by_lifetime(made[tensor], released.get(tensor), beside=beside)


def _by_lifetime(made: str, released: str | None, *, beside: bool) -> str:
    if made == "backward" and released != "backward":
        return "lora_gradients"
    if beside:
        return "gather_buffer"
    if made in BY_PHASE:
        return BY_PHASE[made][released != made]
    if released is None:
        return "adam_moments"
    return UNNAMED if released in OUTSIDE else "inputs"
