"""Terms of a recorded tape's tensors: by their module, else by the code that makes them, else by
the phase that makes them and their lifetime."""

import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import nn

from workflow.lib.model.layers.frozen_linear import FrozenLinear
from workflow.lib.planning.memory.allocation_tape import CHECKS, EMPTY_CACHE, LOAD, Tape

UNNAMED = "layer_workspace"
SCALES = ("absmax", "nested_absmax")
OUTSIDE = (LOAD, CHECKS, "optimizer_step")  # of a micro-batch
# Code that makes a tensor, as file and function, or file -> its term. The innermost call in this
# table decides.
MAKERS = {
    ("_fsdp_collectives", "foreach_all_gather"): "gather_buffer",
    ("_fsdp_collectives", "foreach_all_gather_copy_out"): "gathered_layer",
    ("_fsdp_collectives", "foreach_reduce"): "gathered_gradients",
    ("activation_offload", ""): "offloaded_activations",
    ("packed_layers", "fetch"): "gathered_layer",
    ("lora_matmul", "_cast"): "adapter_casts",
    ("frozen_linear", "_keep"): "decoded_weights",
    ("frozen_linear", "dequantize"): "dequantized_weight",
    ("frozen_stack", ""): "dequantized_weight",
    ("optimizers", "__init__"): "adam_moments",
    ("vocabulary_parallel", "_gathered"): "gathered_rows",
    ("vocabulary_parallel", "gradient"): "module_gradients",
}
# Phase that makes a tensor -> its term if the same phase releases it, and if not.
BY_PHASE = {
    "look_up_embedding": ("hidden_states", "inputs"),
    "forward": (UNNAMED, "saved_activations"),
    "loss": ("logits", "hidden_states"),
    "backward": (UNNAMED, UNNAMED),
}


def module_tensors(
    training: nn.Module, tables: tuple[nn.Module, ...]
) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield parameters and buffers with their terms; tables: of tokens, and head."""
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
    if not isinstance(module, FrozenLinear) or name == "bias":
        return "norms_and_biases"
    if name == "weight":
        return "nf4_weights"
    return "nf4_scales" if name in SCALES else "nf4_tables"


def made_by() -> str:
    """Return the term of a tensor that is made now, or `UNNAMED`."""
    frame = inspect.currentframe()
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        named = _named_in(code.co_filename)
        if named and (term := named.get(code.co_name) or named.get("")):
            return term
    return UNNAMED


@cache
def _named_in(path: str) -> dict[str, str]:
    """Return the terms of a file's code, by function."""
    stem = Path(path).stem
    return {function: term for (file, function), term in MAKERS.items() if file == stem}


def name_terms(tape: Tape) -> None:
    """Name the tensors without a term."""
    made: dict[int, str] = {}
    released: dict[int, str] = {}
    phase = LOAD
    for event in tape.events:
        if isinstance(event, str):
            phase = phase if event == EMPTY_CACHE else event
        elif event >= 0:
            made[event] = phase
        else:
            released[~event] = phase
    for tensor, term in enumerate(tape.terms):
        lasts = made[tensor] == "backward" and released.get(tensor) != "backward"
        if term in (UNNAMED, "gathered_gradients") and lasts:
            tape.terms[tensor] = "lora_gradients"
        elif term == UNNAMED:
            tape.terms[tensor] = _by_lifetime(made[tensor], released.get(tensor))


def _by_lifetime(made: str, released: str | None) -> str:
    if made in BY_PHASE:
        return BY_PHASE[made][released != made]
    if released is None:
        return "adam_moments"
    return UNNAMED if released in OUTSIDE else "inputs"
