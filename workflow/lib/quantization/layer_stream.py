"""A model of any family, run one decoder layer at a time: no more than one layer has weights.

The family's own forward is called with a stand-in in place of every decoder layer. What it passes
to each (masks, rotary tables, position ids) is kept, and each real layer is called with that as
soon as its weights are read. The same stand-ins hand the last hidden states back to the family's
forward, so what follows the layers (norm, head, scaling and capping of logits) is the family's own
too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workflow.lib.model.backends import read_attention_needs
from workflow.lib.model.decoder_layers import decoder_layers, drop_other_parts_
from workflow.lib.model.nf4_model import (
    allocate_,
    build_on_meta,
    compute_buffers_,
    stored_buffers,
)
from workflow.lib.model.safetensors_reader import CheckpointReader

# By safetensors' names: what a weight can be quantized from.
TORCH_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass
class Batch:
    """Rows that go through the layers together."""

    input_ids: torch.Tensor
    """int64, shape (rows, tokens)."""
    position_ids: torch.Tensor | None
    """int64, shape (rows, tokens): 0 where a document begins. None: one document a row."""
    counted: torch.Tensor | None = None
    """bool, shape (rows, tokens): which tokens calibrate. None: all."""
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """What the family passes to each layer besides the hidden states."""
    first_hidden: torch.Tensor | None = None
    """What goes into the first layer, shape (rows, tokens, hidden)."""


class _StandIn(nn.Module):
    """In place of a decoder layer in the family's forward; its attributes are the layer's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Not as a submodule: then the model would still hold the layer's parameters.
        object.__setattr__(self, "stands_for", layer)
        self.batch: Batch | None = None  # to record for
        self.answer: Any = None  # what to return, in place of what came in

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "stands_for"), name)

    def forward(self, hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        if self.batch is not None:
            if not self.batch.arguments:
                self.batch.first_hidden = hidden
            self.batch.arguments.append((others, named))
        return hidden if self.answer is None else self.answer


class LayerStream:
    """A checkpoint's causal LM whose decoder layers get their weights one after the other.

    Attributes: `layers`, on the meta device but for the one in `loaded`; `prefixes`, the names that
    the checkpoint gives their tensors.
    """

    def __init__(
        self, folder: Path, reader: CheckpointReader, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._reader, self._device = reader, device
        self.model = build_on_meta(folder, dtype=dtype, attention=attention_of(folder))
        drop_other_parts_(self.model)
        self.model.eval().requires_grad_(False)
        self.model.config.use_cache = False
        self.layers = decoder_layers(self.model)
        paths = {id(module): path for path, module in self.model.named_modules()}
        self.prefixes = [paths[id(layer)] for layer in self.layers]
        self._stand_ins = [_StandIn(layer) for layer in self.layers]
        for prefix, stand_in in zip(self.prefixes, self._stand_ins, strict=True):
            parent, _, name = prefix.rpartition(".")
            self.model.get_submodule(parent).register_module(name, stand_in)
        self._returns_tuple = False
        self._fill_(self.model, "")

    def _fill_(self, module: nn.Module, prefix: str) -> None:
        """Give a module its weights; of the model, all that does not belong to a decoder layer."""
        allocate_(module, device=self._device)
        compute_buffers_(self.model, module)  # first: it may draw random weights too
        for name, tensor in [*module.named_parameters(), *stored_buffers(module)]:
            tensor.data.copy_(self._reader.tensor(f"{prefix}.{name}" if prefix else name))

    @property
    def eager_heads(self) -> int:
        """Heads of a layer that make all scores of a row; 0 where none are made."""
        config = self.model.config.get_text_config()
        return config.num_attention_heads if config._attn_implementation == "eager" else 0

    def stored_names(self, number: int) -> list[str]:
        """Return the names of a layer's tensors in the checkpoint."""
        prefix = self.prefixes[number] + "."
        return [name for name in self._reader.names() if name.startswith(prefix)]

    def source_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint as it is stored, on the CPU."""
        return self._reader.tensor(name)

    def source_type(self, name: str) -> torch.dtype:
        """Return the type of a tensor of the checkpoint without reading it."""
        return TORCH_TYPES[self._reader.dtype(name)]

    @contextmanager
    def loaded(self, number: int) -> Iterator[nn.Module]:
        """Read the weights of a layer for as long as the context lasts."""
        layer = self.layers[number]
        self._fill_(layer, self.prefixes[number])
        try:
            yield layer
        finally:
            layer.to("meta")

    @torch.no_grad()
    def record(self, batches: Sequence[Batch]) -> None:
        """Learn what goes into the first layer, and what the family passes to each, for all
        batches.
        """
        for batch in batches:
            for stand_in in self._stand_ins:
                stand_in.batch = batch
            named = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
            self.model.get_decoder()(input_ids=batch.input_ids, use_cache=False, **named)
        for stand_in in self._stand_ins:
            stand_in.batch = None

    @torch.no_grad()
    def run(self, number: int, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a loaded layer makes of the hidden states of a batch."""
        others, named = batch.arguments[number]
        output = self.layers[number](hidden, *others, **named)
        self._returns_tuple = isinstance(output, tuple)
        states: torch.Tensor = output[0] if self._returns_tuple else output
        return states

    @torch.no_grad()
    def logits(self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the family's logits (rows, positions, vocabulary) after the last layer's
        states.
        """
        last = self._stand_ins[-1]
        last.answer = (hidden,) if self._returns_tuple else hidden
        try:
            logits: torch.Tensor = self.model(
                input_ids=batch.input_ids, logits_to_keep=positions, use_cache=False
            ).logits
        finally:
            last.answer = None
        return logits


def attention_of(folder: Path) -> str:
    """Return the attention that masks packed documents and computes what the family means by it."""
    needs = read_attention_needs(folder)
    return "eager" if needs.softcap or needs.sinks else "sdpa"
