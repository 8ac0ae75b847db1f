"""Attention one linear of which makes queries, keys and values (Phi-3), so backward keeps these
and not that linear's whole value.

It replaces a module that projects, rotates heads or a part of each, calls an attention function and
projects again, found by random values (`fuse_layers`). Its arguments for the attention function
(scale, window) are recorded and handed on. For training: without a cache."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workflow.lib.kernels.rows.rotary import split_rotary
from workflow.lib.model.tried_classes.magnitudes import alike, magnitudes

INTO, OUTPUT = "qkv_proj", "o_proj"  # all queries, then all keys, then all values
RECORDER = "workflow_recorder"
TOLERANCE = 1e-5
TOKENS, WIDTH = 5, 8  # of what a class is tried on


class FusedAttention(nn.Module):
    """The projections keep their names; `arguments`: the attention function's besides q, k, v."""

    def __init__(
        self,
        original: Any,
        *,
        arguments: dict[str, object],
        eager: Callable[..., Any],
        neighbours: bool,
    ) -> None:
        """neighbours: which dimensions are a pair, as in `kernels.rows.rotary`."""
        super().__init__()
        for name, value in vars(original).items():  # attention functions ask for some of these
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, child in original.named_children():
            self.add_module(name, child)
        self.head_dim: int = original.head_dim
        self._arguments, self._eager, self._neighbours = arguments, eager, neighbours

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output (rows, seq_len, hidden_size) and the attention's weights, if told."""
        assert past_key_values is None, "fused layers are for training, which has no cache"
        query, key, value = self._turned(hidden_states, *position_embeddings)
        config: Any = self.config
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, self._eager)
        heads = (x.transpose(1, 2) for x in (query, key, value))
        output, weights = attend(self, *heads, attention_mask, **self._arguments, **kwargs)
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.get_submodule(OUTPUT)(output), weights

    def _turned(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return queries and keys, rotated, and values (rows, seq_len, heads, head_dim)."""
        heads = self.get_submodule(INTO)(x).unflatten(-1, (-1, self.head_dim))
        cos, sin = (table.chunk(2, dim=-1)[0] for table in (cos, sin))  # both halves are alike
        counts = _head_counts(self)
        return split_rotary(heads, counts, cos=cos, sin=sin, neighbours=self._neighbours)


def _head_counts(attention: Any) -> tuple[int, int, int]:
    """Return how many heads of queries, keys and values one linear makes."""
    queries = attention.get_submodule(OUTPUT).in_features // attention.head_dim
    heads = attention.get_submodule(INTO).out_features // attention.head_dim
    keys = (heads - queries) // 2
    return queries, keys, keys


def as_fused_attention(module: nn.Module) -> FusedAttention | None:
    """Return an attention that does what this module does, None for a module of any other kind."""
    if {name for name, _ in module.named_children()} != {INTO, OUTPUT}:
        return None
    # Transformers registers all attention functions but eager, which each family has in its file.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    for neighbours in (False, True):
        # A class that wants other attributes or arguments, or makes other shapes, is none of ours.
        try:
            arguments = _agreed(module, neighbours=neighbours)
        except (AttributeError, TypeError, RuntimeError, ValueError):
            return None
        if arguments is not None and eager is not None:
            return FusedAttention(module, arguments=arguments, eager=eager, neighbours=neighbours)
    return None


def _turned_dims(module: Any) -> list[int]:
    """Return how many dimensions of each head the model may rotate, fewest first: whole heads alone
    would hide how parts are rotated. Parameters may be nested by layer type (Gemma 3)."""
    config = module.config
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    shares = {part.get("partial_rotary_factor") for part in parts}
    shares.add(getattr(config, "partial_rotary_factor", None))
    return sorted({int(module.head_dim * share) for share in shares - {None}} or {module.head_dim})


@torch.no_grad()
def _agreed(module: Any, *, neighbours: bool) -> dict[str, object] | None:
    """Return what the module's class hands to the attention function, if ours does the same."""
    told = [
        _agreed_on(module, dims, magnitude, neighbours=neighbours)
        for dims in _turned_dims(module)
        for magnitude in magnitudes(module)
    ]
    return told[0] if all(arguments == told[0] for arguments in told) else None


def _agreed_on(
    module: Any, dims: int, magnitude: float, *, neighbours: bool
) -> dict[str, object] | None:
    """The same of inputs of a magnitude, where `dims` dimensions of each head are rotated."""
    draw = torch.Generator().manual_seed(0)
    x = magnitude * torch.randn(2, TOKENS, WIDTH, generator=draw)
    half = torch.randn(2, 1, TOKENS, dims // 2, generator=draw)
    cos, sin = torch.cat((half, half), dim=-1)
    stand_in = _stand_in(module, draw)
    calls: list[tuple[Any, ...]] = []
    # Both modes: arguments that differ (a dropout) cannot be recorded once and for all.
    for training in (True, False):
        stand_in.train(training)
        calls.append(_recorded(type(module), stand_in, x, (cos, sin)))
    arguments: dict[str, object] = calls[0][-1]
    # A tensor is no constant: it may be a parameter (attention sinks) or depend on this call.
    if any(isinstance(value, torch.Tensor) for value in arguments.values()):
        return None
    ours: Any = FusedAttention(
        stand_in, arguments=arguments, eager=_recorder, neighbours=neighbours
    )
    calls.append(_recorded(FusedAttention, ours, x, (cos, sin)))
    *tensors, arguments = calls[0]
    for *others, other_arguments in calls[1:]:
        if other_arguments != arguments or not alike(
            tuple(tensors), tuple(others), tolerance=TOLERANCE
        ):
            return None
    return arguments


def _stand_in(module: Any, draw: torch.Generator) -> nn.Module:
    """Return a module with the attributes of `module`, and small random projections."""
    stand_in = nn.Module()
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "training":
            setattr(stand_in, name, value)
    config = copy.copy(module.config)
    config._attn_implementation = RECORDER
    stand_in.config = config
    for name, into, out in _sizes(module):
        linear = nn.Linear(into, out, bias=False)
        linear.weight.copy_(torch.randn(out, into, generator=draw))
        setattr(stand_in, name, linear)
    return stand_in


def _sizes(module: Any) -> list[tuple[str, int, int]]:
    """Return name, in_features and out_features of a stand-in's projections, heads as they are."""
    queries, keys, values = _head_counts(module)
    inner, outer = (module.head_dim * heads for heads in (queries, queries + keys + values))
    return [(INTO, WIDTH, outer), (OUTPUT, inner, WIDTH)]


def _recorded(
    kind: type[nn.Module],
    stand_in: nn.Module,
    x: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
) -> tuple[Any, ...]:
    """Return what the class's forward hands to the attention function, and its output."""
    calls: list[tuple[Any, ...]] = []
    stand_in.recorded = calls  # type: ignore[assignment]
    output, _ = kind.forward(
        stand_in, hidden_states=x, position_embeddings=turns, attention_mask=None
    )
    ((*heads, arguments),) = calls
    return *heads, output, arguments


def _recorder(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that notes how it is called; its value depends on all arguments."""
    module.recorded.append((query, key, value, arguments))
    groups = query.shape[1] // key.shape[1]
    mixed = query + (key * value).repeat_interleave(groups, dim=1)
    return mixed.transpose(1, 2), None


AttentionInterface.register(RECORDER, _recorder)
