"""Recurrent layers with their family's code, but our recurrence and short convolution
(`kernels.recurrences`).

A function of the family's file is identified by its results on random values and replaced
(`called_functions`), except in calls with more arguments: an initial state, or the last one."""

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import product
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.recurrences.gated_delta_rule import gated_delta_rule
from workflow.lib.kernels.recurrences.short_convolution import short_convolution
from workflow.lib.kernels.recurrences.state_space import state_space
from workflow.lib.model.tried_classes.called_functions import call_ours_
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes

ROWS, TOKENS = 2, 11  # of a compared function
TOLERANCE = 1e-5
# Arguments for what ours lacks: states before and after, packed rows, a gate.
MORE = (
    "initial_state", "initial_states", "output_final_state", "return_final_states", "cu_seqlens",
    "seq_idx", "z",
)  # fmt: skip
ACTIVATIONS = {None: False, "silu": True, "swish": True}
NO_LIMITS = (0.0, float("inf"))
DELTA_RULE = ("query", "key", "value", "g", "beta")
STATE_SPACE = ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias")
CONVOLUTION = ("hidden_states", "weight", "bias")
# All of a layer with its last linear, which has an adapter and a packed weight here.
WHOLE_LAYER = ("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size")
Arguments = dict[str, Any]


class Known(NamedTuple):
    """A function with an equivalent of ours."""

    parameters: tuple[str, ...]  # by name; it may have more
    ours: Callable[[Arguments], Any]
    """Takes a call's arguments by name, defaults included."""
    tries: Callable[[], Iterator[Arguments]]
    scaled: tuple[str, ...] = ()
    """Arguments of any magnitude: neither exponents nor keys, with which a state grows."""
    takes: Callable[[Arguments], bool] = lambda given: True
    """Whether ours computes a call with these arguments."""


def recur_by_ours_(module: nn.Module) -> bool:
    """Call ours for each function of its file that we know; return whether there is one."""
    return call_ours_(module, _ours_of)


@functools.cache
def _ours_of(function: FunctionType) -> Callable[..., Any] | None:
    """Return ours with the arguments and the result of `function`, which gets calls with more
    arguments; None if `function` is unknown."""
    code = inspect.unwrap(function)
    signature = inspect.signature(code)
    for known in KNOWN:
        if not signature.parameters.keys() >= {*known.parameters}:
            continue
        at = magnitudes(code)
        if all(_agrees(code, signature, known, given, at) for given in known.tries()):
            return _calling(function, signature, known)
    return None


def _calling(
    function: Callable[..., Any], signature: inspect.Signature, known: Known
) -> Callable[..., Any]:
    def calling(*args: Any, **options: Any) -> Any:
        given = _by_name(signature, *args, **options)
        more = [given[name] for name in MORE if given.get(name) is not None]
        if any(x is not False for x in more) or not known.takes(given):
            return function(*args, **options)
        return known.ours(given)

    return calling


def _by_name(signature: inspect.Signature, *args: Any, **options: Any) -> Arguments:
    """Return a call's arguments by name, including defaults."""
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    given = dict(bound.arguments)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    others = [name for name in given if kinds[name] is inspect.Parameter.VAR_KEYWORD]
    for name in others:
        given |= given.pop(name)
    return given


@torch.no_grad()
def _agrees(
    code: FunctionType,
    signature: inspect.Signature,
    known: Known,
    given: Arguments,
    at: list[float],
) -> bool:
    def times(magnitude: float) -> Arguments:
        scaled = {name: given[name] for name in known.scaled if given[name] is not None}
        return given | {name: magnitude * x for name, x in scaled.items()}

    try:
        found = code(**given)
    except (TypeError, RuntimeError, ValueError):
        return False
    made = known.ours(_by_name(signature, **given))
    if made is None:
        return found is None
    states = made[1:] if isinstance(made, tuple) else ()  # none
    if states and (not isinstance(found, tuple) or found[1:] != states):
        return False

    def output(result: Any) -> Any:
        return result[0] if states else result

    return agree(
        lambda magnitude: output(code(**times(magnitude))),
        lambda magnitude: output(known.ours(_by_name(signature, **times(magnitude)))),
        at=at,
        tolerance=TOLERANCE,
    )


def _delta_rule(given: Arguments) -> tuple[torch.Tensor, None]:
    tensors = (given[name] for name in DELTA_RULE)
    return gated_delta_rule(*tensors, normalize=given["use_qk_l2norm_in_kernel"]), None


def _tried_delta_rules() -> Iterator[Arguments]:
    draw = torch.Generator().manual_seed(0)
    for heads, normalize in product((2, 3), (True, False)):
        query, key = torch.randn(2, ROWS, TOKENS, heads, 4, generator=draw)
        value = torch.randn(ROWS, TOKENS, heads, 6, generator=draw)
        decay, beta = torch.rand(2, ROWS, TOKENS, heads, generator=draw)
        tensors = (query, key / 4, value, -decay, beta)
        yield {**dict(zip(DELTA_RULE, tensors, strict=True)), "use_qk_l2norm_in_kernel": normalize}


def _state_space(given: Arguments) -> torch.Tensor:
    x, dt, *others = (given[name] for name in STATE_SPACE)
    options: Any = {"softplus": given["dt_softplus"], "limits": given["dt_limit"]}
    return state_space(x, dt, *others, **options)


def _tried_state_spaces() -> Iterator[Arguments]:
    draw = torch.Generator().manual_seed(0)
    for groups, of_heads, softplus, limits in product(
        (1, 2), (True, False), (True, False), (NO_LIMITS, (0.4, 0.9))
    ):
        x = torch.randn(ROWS, TOKENS, 4, 6, generator=draw)
        steps = torch.rand(ROWS, TOKENS, 4, generator=draw)
        into, out_of = torch.randn(2, ROWS, TOKENS, groups, 5, generator=draw)
        decay, skip, bias = torch.rand(3, 4, generator=draw)
        tensors = (x, steps, -decay, into, out_of, *((skip, bias) if of_heads else (None, None)))
        yield {
            **dict(zip(STATE_SPACE, tensors, strict=True)),
            "chunk_size": 4,
            "dt_softplus": softplus,
            "dt_limit": limits,
        }


def _convolution(given: Arguments) -> torch.Tensor:
    x, weight, bias = (given[name] for name in CONVOLUTION)
    return short_convolution(x, weight, bias, silu=ACTIVATIONS[given["activation"]])


def _tried_convolutions() -> Iterator[Arguments]:
    draw = torch.Generator().manual_seed(0)
    for taps, biased, activation in product((2, 4), (True, False), (None, "silu")):
        x = torch.randn(ROWS, 6, TOKENS, generator=draw)
        weight = torch.randn(6, taps, generator=draw)
        bias = torch.randn(6, generator=draw) if biased else None
        tensors = (x, weight, bias)
        yield {**dict(zip(CONVOLUTION, tensors, strict=True)), "activation": activation}


def _is_frozen_convolution(given: Arguments) -> bool:
    _, *frozen = (given[name] for name in CONVOLUTION)
    trained = any(x is not None and x.requires_grad for x in frozen)
    return given["activation"] in ACTIVATIONS and not trained


def _no_layer(given: Arguments) -> None:
    """Families' torch code returns nothing here, and the layer goes on step by step. A kernel
    package's function would use the last linear's weight alone, whatever its adapter."""


def _tried_layers() -> Iterator[Arguments]:
    yield dict.fromkeys(WHOLE_LAYER)


KNOWN = (
    Known(
        (*DELTA_RULE, "use_qk_l2norm_in_kernel"),
        _delta_rule,
        _tried_delta_rules,
        ("query", "value"),
    ),
    Known(
        (*STATE_SPACE, "dt_softplus", "dt_limit"),
        _state_space,
        _tried_state_spaces,
        ("hidden_states", "B", "C", "D"),
    ),
    Known(
        (*CONVOLUTION, "activation"),
        _convolution,
        _tried_convolutions,
        CONVOLUTION,
        _is_frozen_convolution,
    ),
    Known((*WHOLE_LAYER, "outproj_weight"), _no_layer, _tried_layers),
)
