"""From what a decoder layer called (`layer_calls`) to its description (`DecoderLayer`).

A plain layer is attention of queries, keys and values between linears, and one feed-forward, with
norms around and within them. Of any other, `any_layer` says what it keeps.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.model.description.any_layer import any_layers
from workflow.lib.model.description.layer_calls import Attended, LayerCalls
from workflow.lib.model.description.layer_parameters import linears_of, others_of
from workflow.lib.model.fused_feed_forward import FusedFeedForward
from workflow.lib.model.fusion.fuse_layers import fuse_layer_
from workflow.lib.model.layers.fused_norm import FusedNorm
from workflow.lib.system.errors import UserError

LEAST_NORM_BYTES = 4  # an input in fp32, as the replay makes it of any norm that is not fused
MOST_HEAD_NORMS = 3  # of queries, keys and values


class _NotPlainError(Exception):
    """A layer has a part that the formulas do not know by name."""


def described_layers(model: PreTrainedModel, layers: Sequence[LayerCalls]) -> list[DecoderLayer]:
    """Return the description of every decoder layer of a model on the meta device, by what it
    called; raises `UserError` for what cannot be trained. Changes the layers.
    """
    kinds = any_layers(model, layers, [_plain(model, calls) for calls in layers])
    known: dict[tuple[DecoderLayer, Traits], DecoderLayer] = {}
    described = []
    for calls, kind in zip(layers, kinds, strict=True):
        key = kind, _traits(calls.layer)
        if key not in known:
            known[key] = _fused(kind, calls) if kind.plain else kind
        described.append(known[key])
    return described


Traits = frozenset[tuple[str, str, object]]  # path, attribute and value


def _traits(layer: nn.Module) -> Traits:
    """All that modules of a layer say of themselves but its number: equal in layers that do the
    same.
    """
    simple = (bool, int, float, str, type(None))
    return frozenset(
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, simple) and name != "layer_idx"
    )


def _plain(model: PreTrainedModel, calls: LayerCalls) -> DecoderLayer | None:
    """Return the description of a plain layer, as if nothing of it were fused; None of another."""
    try:
        return _of_plain_layer(calls, linears_of(model, calls))
    except _NotPlainError:
        return None


def _of_plain_layer(calls: LayerCalls, linears: Sequence[Linear]) -> DecoderLayer:
    attended = _attended(calls)
    of_attention, feed_forward = _divided(calls, linears, attended)
    inside = f"{attended.path}."
    hidden_size = of_attention[-1].out_features
    all_norms = _norms(calls, feed_forward)
    vectors, tensors = others_of(calls, linears)
    if any(_parent(name) not in all_norms for name, _ in tensors):
        raise _NotPlainError
    norms = [path for path in all_norms if not path.startswith(inside)]
    head_norms = [calls.widths[path] for path in all_norms if path.startswith(inside)]
    if len(head_norms) > MOST_HEAD_NORMS:
        raise _NotPlainError
    places = [path for path in calls.called if path == attended.path or path in norms]
    width = feed_forward[-1].in_features
    kept = calls.kept_bytes(_parent(feed_forward[-1].path), width=width)
    return DecoderLayer(
        attention=calls.attention,
        attention_softcap=attended.arguments.get("softcap") is not None,
        hidden_size=hidden_size,
        intermediate_size=width,
        num_heads=attended.query[0],
        num_kv_heads=attended.key[0],
        head_dim=attended.query[1],
        linears=(*of_attention, *feed_forward),
        attention_linears=len(of_attention),
        vectors=vectors,
        tensors=tensors,
        hidden_norms=len(norms),
        norms_before=places[0] in norms,
        norms_after=places[-1] in norms and _ends_with_a_norm(calls, norms),
        head_norms=tuple(head_norms),
        norm_bytes=max(LEAST_NORM_BYTES, *(_norm_bytes(calls, path) for path in all_norms)),
        feed_forward_tensors=math.ceil(kept / (2 * width)),
        fused_norms=False,
        fused_feed_forward=False,
    )


def _fused(kind: DecoderLayer, calls: LayerCalls) -> DecoderLayer:
    """Return the description with what `fuse_layers` replaces in the layer."""
    layer, norms = calls.layer, _norms(calls, kind.feed_forward)
    feed_forward = _parent(kind.feed_forward[-1].path)
    fuse_layer_(layer)
    return replace(
        kind,
        fused_norms=all(isinstance(layer.get_submodule(path), FusedNorm) for path in norms),
        fused_feed_forward=isinstance(layer.get_submodule(feed_forward), FusedFeedForward),
    )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _attended(calls: LayerCalls) -> Attended:
    """Return the one call of an attention function without sinks, with values as wide as keys."""
    if len(calls.attended) != 1:
        raise _NotPlainError
    (attended,) = calls.attended
    if attended.query[0] % attended.key[0]:
        raise UserError(
            f"{attended.query[0]} query heads cannot share {attended.key[0]} key heads equally. "
            "Give the config.json that belongs to the checkpoint (model.source)."
        )
    if attended.arguments.get("s_aux") is not None:
        raise _NotPlainError
    if not attended.path or attended.query[1] != attended.value[1]:
        raise _NotPlainError
    return attended


def _divided(
    calls: LayerCalls, linears: Sequence[Linear], attended: Attended
) -> tuple[list[Linear], list[Linear]]:
    """Return the linears of attention and of feed-forward, as they were called."""
    modules = dict(calls.layer.named_modules())
    called = [path for path in calls.called if isinstance(modules[path], nn.Linear)]
    there = [path for path, module in modules.items() if isinstance(module, nn.Linear)]
    if sorted(called) != sorted(there) or called != [x.path for x in linears]:
        raise _NotPlainError  # one is called twice or never, stays in 16 bits, or is a stack
    of_attention = [x for x in linears if x.path.startswith(f"{attended.path}.")]
    feed_forward = [x for x in linears if x not in of_attention]
    places = {_parent(x.path) for x in feed_forward}
    if len(places) != 1 or "" in places or len(feed_forward) < 2:
        raise _NotPlainError
    _check_projections(of_attention, attended)
    return of_attention, feed_forward


def _check_projections(linears: Sequence[Linear], attended: Attended) -> None:
    """Raise unless there are linears of queries, keys and values (or keys that are the values too),
    or one for all, and the output: latent, gated and shared projections are others.
    """
    query, key = math.prod(attended.query), math.prod(attended.key)
    into = [x.out_features for x in linears[:-1]]
    ways = ([query, key, key], [query, key], [query + 2 * key])
    if into not in ways or not linears or linears[-1].in_features != query:
        raise _NotPlainError


def _norms(calls: LayerCalls, feed_forward: Sequence[Linear]) -> list[str]:
    """Paths of the norms, in order: modules without children, outside the feed-forward, that give
    back what they get in its shape.
    """
    modules = dict(calls.layer.named_modules())
    within = _parent(feed_forward[-1].path) + "."
    return [
        path
        for path in calls.called
        if path in calls.widths
        and not isinstance(modules[path], nn.Linear | nn.Dropout | nn.Identity)
        and not path.startswith(within)
    ]


def _ends_with_a_norm(calls: LayerCalls, norms: Sequence[str]) -> bool:
    """Whether the last norm comes behind the feed-forward's last linear."""
    modules = dict(calls.layer.named_modules())
    last = [path for path in calls.called if isinstance(modules[path], nn.Linear)][-1]
    return bool(norms) and calls.called.index(norms[-1]) > calls.called.index(last)


def _norm_bytes(calls: LayerCalls, path: str) -> int:
    """Bytes by element of its input that a norm keeps for backward."""
    width = calls.widths[path]
    return math.ceil(calls.kept_bytes(path, width=width) / width)
