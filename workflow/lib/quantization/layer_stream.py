"""A model of any family, run one decoder layer at a time: at most one layer has weights.

For each layer the family's own forward runs anew, with stand-ins for the others: those before it
return the last layer's states, the one after it ends the forward. So masks, rotary tables and parts
after the layers are the family's own. Hidden states and `Batch.beside` are kept between layers: a
layer may return more (tokens that an indexer chose, states of its router), and put tensors into a
mapping for all layers (keys and values that later layers attend to)."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import decoder_layers, drop_other_parts_
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.kernels.attention.attention_choice import FLEX
from workflow.lib.model.backends import resolve_training_attention
from workflow.lib.model.layers.adapter_dropout import AdapterState
from workflow.lib.model.nf4_model import allocate_, compute_buffers_, stored_buffers
from workflow.lib.model.prepared_decoder import PreparedDecoder, documents_in
from workflow.lib.quantization.layer_inputs import Counted, counted_tokens
from workflow.lib.system.errors import UserError

LayerArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a layer's forward, by place and by name."""
Shared = dict[str, dict[str, tuple[torch.Tensor, ...]]]
"""Tensors in mappings that layers share, by argument and key."""


@dataclass(frozen=True)
class LayerCarry:
    """A layer's inputs beside hidden states, from the layers before it, in host memory."""

    others: tuple[torch.Tensor | None, ...] | None = None
    """Outputs of the layer before after its hidden states; None: it returns these alone."""
    shared: Shared = field(default_factory=dict)

    def output(self, hidden: torch.Tensor) -> Any:
        """Return the output of the layer before, with these hidden states."""
        if self.others is None:
            return hidden
        return hidden, *(None if x is None else x.to(hidden.device) for x in self.others)

    def put_into(self, arguments: LayerArguments) -> None:
        """Put the shared values of the layers before into a layer's arguments."""
        device = next(tensors_in(arguments)).device
        for argument, mapping in _mappings(arguments):
            for key, tensors in self.shared.get(argument, {}).items():
                mapping[key] = tuple(x.to(device) for x in tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, for a safetensors file; `carry_of` reads them."""
        named: dict[str, torch.Tensor] = {}
        if self.others is not None:
            named["returned"] = torch.tensor(len(self.others))
            named |= {f"other/{n}": x for n, x in enumerate(self.others) if x is not None}
        for argument, mapping in self.shared.items():
            for key, parts in mapping.items():
                named |= {f"shared/{argument}/{key}/{n}": x for n, x in enumerate(parts)}
        return named


def carry_of(tensors: Mapping[str, torch.Tensor]) -> LayerCarry:
    """Return the layer's inputs from the tensors of `LayerCarry.tensors`."""
    others, shared = None, Shared()
    if "returned" in tensors:
        others = tuple(tensors.get(f"other/{n}") for n in range(int(tensors["returned"])))
    for name in sorted(tensors):  # parts in order: a layer shares fewer than ten
        if name.startswith("shared/"):
            _, argument, key, _ = name.split("/")
            kept = shared.setdefault(argument, {})
            kept[key] = (*kept.get(key, ()), tensors[name])
    return LayerCarry(others, shared)


class Watched:
    """A layer's forward, and its outputs beside hidden states."""

    def __init__(self, arguments: LayerArguments) -> None:
        self._arguments = arguments
        self._before = {name: dict(mapping) for name, mapping in _mappings(arguments)}

    def handed_on(
        self, output: Any, before: LayerCarry, next_arguments: LayerArguments | None
    ) -> LayerCarry:
        """Return the next layer's inputs beside hidden states, on the host. next_arguments: its
        arguments (None: no layer). before: inputs of this layer."""
        shared = {name: dict(mapping) for name, mapping in before.shared.items()}
        for name, mapping in _mappings(self._arguments):
            for key, value in mapping.items():
                if value is not self._before[name].get(key):
                    parts = value if isinstance(value, tuple) else (value,)
                    shared.setdefault(name, {})[key] = tuple(x.cpu() for x in parts)
        if not isinstance(output, tuple):
            return LayerCarry(None, shared)
        wanted = {id(x) for x in tensors_in(next_arguments)}
        return LayerCarry(tuple(x.cpu() if id(x) in wanted else None for x in output[1:]), shared)


def refuse_unlike(layer: str, expected: LayerArguments, followed: LayerArguments) -> None:
    """Raise `UserError` if a layer's actual tensors (`followed`) differ from the expected ones."""
    pairs = zip(tensors_in(expected), tensors_in(followed), strict=True)
    if not all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in pairs):
        raise UserError(
            f"{layer} is given more of the layers before it than what the last of them returns, so "
            "its model cannot be run layer by layer. Set quantize.method to absmax, and leave "
            "original out of evaluate.subjects if it is larger than memory"
        )


def hidden_in(arguments: LayerArguments) -> torch.Tensor:
    """Return the hidden states among a layer's arguments."""
    positional, named = arguments
    states: torch.Tensor = positional[0] if positional else named["hidden_states"]
    return states


def with_hidden(arguments: LayerArguments, hidden: torch.Tensor | None) -> LayerArguments:
    """Return a layer's arguments with other hidden states."""
    positional, named = arguments
    if positional:
        return (hidden, *positional[1:]), named
    return positional, named | {"hidden_states": hidden}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested mappings and sequences, mappings by sorted keys."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from tensors_in(value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def _mappings(arguments: LayerArguments) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """Yield name and value of mutable mappings among the arguments."""
    positional, named = arguments
    for name, value in [*((str(n), x) for n, x in enumerate(positional)), *named.items()]:
        if isinstance(value, MutableMapping):
            yield name, value


# Dtypes of quantizable weights, by safetensors' names.
TORCH_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass
class Batch:
    """Rows that pass through the layers of one model together."""

    input_ids: torch.Tensor  # int64, shape (rows, tokens)
    position_ids: torch.Tensor | None
    """int64, shape (rows, tokens): 0 where a document begins. None: one document a row."""
    counted: torch.Tensor | None = None
    """bool, shape (rows, tokens): the calibration tokens. None: all."""
    beside: dict[int, LayerCarry] = field(default_factory=lambda: {0: LayerCarry()})
    """A layer's inputs besides hidden states, by its number; of one layer, or of two."""

    @classmethod
    def from_document(cls, ids: np.ndarray, counted: np.ndarray, device: torch.device) -> "Batch":
        """Return a document (tokens,) as a batch of its own; counted: bool (tokens,)."""
        parts = (np.array(ids, dtype=np.int64), np.array(counted, dtype=bool))
        tokens, mask = (torch.from_numpy(part[None]).to(device) for part in parts)
        return cls(tokens, None, counted=mask)

    @property
    def targets(self) -> torch.Tensor:
        """Columns of the counted tokens of a document, (n,): the first is predicted by none."""
        assert self.counted is not None, "measured documents say what is predicted"
        return self.counted[0, 1:].nonzero().flatten() + 1

    @property
    def positions(self) -> torch.Tensor:
        """(rows, tokens) int64: each token's position in its document."""
        if self.position_ids is not None:
            return self.position_ids
        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return positions.expand_as(self.input_ids)

    def for_another_model(self) -> "Batch":
        """Return the same rows, before any layer of another model."""
        return replace(self, beside={0: LayerCarry()})


@dataclass
class LayerPass:
    """Stand-ins in one forward: those before `number` return `hidden` with `beside`; it may run."""

    number: int
    hidden: torch.Tensor | None = None
    beside: LayerCarry = field(default_factory=LayerCarry)
    runs: bool = False
    output: Any = None  # of the layer that ran
    watched: Watched | None = None
    arguments: LayerArguments | None = None
    """Arguments of the layer after it, or its own if it does not run; None after the last."""


IDLE = LayerPass(0)


class _ReachedError(Exception):
    """The family's forward has reached the needed point."""


class _StandIn(nn.Module):
    """Replaces a decoder layer in the family's forward, with the layer's attributes."""

    def __init__(self, number: int, layer: nn.Module) -> None:
        super().__init__()
        # Not as a submodule: then the model would still hold the layer's parameters.
        object.__setattr__(self, "stands_for", layer)
        self._number = number
        self.layer_pass = IDLE

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "stands_for"), name)

    def forward(self, *positional: Any, **named: Any) -> Any:
        layer_pass, arguments = self.layer_pass, (positional, named)
        if self._number < layer_pass.number:
            assert layer_pass.hidden is not None, "the layer before has returned hidden states"
            layer_pass.beside.put_into(arguments)
            return layer_pass.beside.output(layer_pass.hidden)
        if self._number > layer_pass.number or not layer_pass.runs:
            layer_pass.arguments = arguments
            raise _ReachedError
        if self._number == 0:  # no layer before it has returned them
            arguments = with_hidden(arguments, layer_pass.hidden)
        layer_pass.watched = Watched(arguments)
        layer_pass.output = self.stands_for(*arguments[0], **arguments[1])
        return layer_pass.output


class LayerStream:
    """A checkpoint's causal LM whose decoder layers (`layers`, on meta but the one in `loaded`;
    names by `prefixes`) get their weights one after the other."""

    def __init__(
        self,
        source: Checkpoint,
        reader: CheckpointReader,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: str | None = None,
    ) -> None:
        """attention: of rows of one document; None: stock Transformers' for the model."""
        self.reader, self._device = reader, device
        self._alone = attention or source.attention_needs.stock
        needs = replace(source.attention_needs, dropout=0.0)
        self.attention_of_packed = resolve_training_attention(
            "auto", device, needs, compute_dtype=dtype
        ).name
        self.model = source.build(dtype, attention=self._alone)
        drop_other_parts_(self.model)
        self.model.eval().requires_grad_(False)
        self.model.config.use_cache = False
        self.layers = decoder_layers(self.model)
        paths = {id(module): path for path, module in self.model.named_modules()}
        self.prefixes = [paths[id(layer)] for layer in self.layers]
        self._prepared = PreparedDecoder(self.model, AdapterState())
        self._stand_ins = [_StandIn(number, layer) for number, layer in enumerate(self.layers)]
        for number, stand_in in enumerate(self._stand_ins):
            self._put(number, stand_in)
        self._followed: set[int] = set()
        self._fill_(self.model, "")

    def _put(self, number: int, module: nn.Module) -> None:
        parent, _, name = self.prefixes[number].rpartition(".")
        self.model.get_submodule(parent).register_module(name, module)

    def _fill_(self, module: nn.Module, prefix: str) -> None:
        """Give a module its weights; of the model, all outside of decoder layers."""
        allocate_(module, device=self._device)
        compute_buffers_(self.model, module)  # first: it may draw random weights too
        for name, tensor in [*module.named_parameters(), *stored_buffers(module)]:
            tensor.data.copy_(self.reader.tensor(f"{prefix}.{name}" if prefix else name))

    @property
    def eager_heads(self) -> int:
        """Heads of a layer that make all scores of a row; 0 without such."""
        heads: int = self.model.config.get_text_config().num_attention_heads
        on_cpu = self._device.type == "cpu" and self.attention_of_packed == FLEX
        return heads if on_cpu or "eager" in (self._alone, self.attention_of_packed) else 0

    def stored_names(self, number: int) -> list[str]:
        """Return the names of a layer's tensors in the checkpoint."""
        prefix = self.prefixes[number] + "."
        return [name for name in self.reader.names() if name.startswith(prefix)]

    def source_type(self, name: str) -> torch.dtype:
        """Return the type of a tensor of the checkpoint without reading it."""
        return TORCH_TYPES[self.reader.dtype(name)]

    @contextmanager
    def loaded(self, number: int) -> Iterator[nn.Module]:
        """Read the weights of a layer for as long as the context lasts."""
        layer = self.layers[number]
        self._put(number, layer)  # a family may compute a layer's buffers together with its decoder
        self._fill_(layer, self.prefixes[number])
        self._put(number, self._stand_ins[number])
        try:
            yield layer
        finally:
            layer.to("meta")

    @torch.no_grad()
    def first_hidden(self, batch: Batch) -> torch.Tensor:
        """Return the input (rows, tokens, hidden) of the first layer for a batch."""
        arguments = self._take(LayerPass(0), batch).arguments
        assert arguments is not None, "a family's forward calls each of its layers"
        return hidden_in(arguments)

    def run(
        self, number: int, batch: Batch, hidden: torch.Tensor, *, grad: bool = False
    ) -> torch.Tensor:
        """Return a loaded layer's output for a batch's states, after the layers before it; grad:
        for a backward. Raises `UserError` if the family passes it more of them than the last one
        returns."""
        before = batch.beside[number]
        with torch.set_grad_enabled(grad):
            layer_pass = self._take(LayerPass(number, hidden, before, runs=True), batch)
        assert layer_pass.watched is not None, "a family's forward calls each of its layers"
        beside = layer_pass.watched.handed_on(layer_pass.output, before, layer_pass.arguments)
        states: torch.Tensor = (
            layer_pass.output[0] if isinstance(layer_pass.output, tuple) else layer_pass.output
        )
        batch.beside = {number: before, number + 1: beside}
        if layer_pass.arguments is not None and number not in self._followed:
            again = self._take(LayerPass(number + 1, states, beside), batch)
            assert again.arguments is not None, "there is a layer behind"
            refuse_unlike(self.prefixes[number + 1], layer_pass.arguments, again.arguments)
            self._followed.add(number)
        return states

    def counted(self, batch: Batch) -> Counted:
        recurrent = self._prepared.recurrent_layers
        documents = documents_in(batch.positions) if recurrent else None
        return counted_tokens(batch.counted, documents)

    def logits(
        self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor, *, grad: bool = False
    ) -> torch.Tensor:
        """Return the family's logits (rows, positions, vocabulary) of the last layer's states;
        grad: for a backward."""
        count = len(self.layers)
        with torch.set_grad_enabled(grad):
            layer_pass = LayerPass(count, hidden.index_select(1, positions), batch.beside[count])
            logits: torch.Tensor = self._forward(self.model, layer_pass, batch).logits
        return logits

    def _take(self, layer_pass: LayerPass, batch: Batch) -> LayerPass:
        """Return a turn that ends at the layer after it, or at the decoder's end."""
        with suppress(_ReachedError):
            self._forward(self.model.get_decoder(), layer_pass, batch)
        return layer_pass

    def _forward(self, module: Any, layer_pass: LayerPass, batch: Batch) -> Any:
        """Call the model or its decoder; the stand-ins take a turn."""
        alone = batch.position_ids is None
        config: Any = self.model.get_decoder().config
        config._attn_implementation = self._alone if alone else self.attention_of_packed
        inputs = self._prepared.inputs(batch.input_ids, batch.positions)
        for stand_in in self._stand_ins:
            stand_in.layer_pass = layer_pass
        try:
            return module(**inputs)
        finally:
            for stand_in in self._stand_ins:
                stand_in.layer_pass = IDLE
