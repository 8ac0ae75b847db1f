"""Recurrent layers with their family's code, but our recurrence and short convolution
(`kernels.recurrences`).

A function of the family's file is identified by its results on random values and replaced
(`called_functions`), except in calls with more arguments: an initial state, or the last one."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.recurrences.gated_delta_rule import gated_delta_rule
from workflow.lib.kernels.recurrences.short_convolution import short_convolution
from workflow.lib.kernels.recurrences.state_space import Steps, state_space
from workflow.lib.model.tried_classes.called_functions import replace_called_functions_
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


class Replacement(NamedTuple):
    """A family's function with an equivalent of the engine's."""

    parameters: tuple[str, ...]  # by name; it may have more
    compute: Callable[[Arguments], Any]
    """Takes a call's arguments by name, defaults included."""
    tries: Callable[[], Iterable[Arguments]]
    scaled: tuple[str, ...] = ()
    """Arguments of any magnitude: neither exponents nor keys, with which a state grows."""
    takes: Callable[[Arguments], bool] = lambda arguments: True
    """Whether ours computes a call with these arguments."""


def replace_recurrences_(module: nn.Module) -> bool:
    """Replace the known functions that a module calls; return whether there is one."""
    return replace_called_functions_(module, _replacement_of)


@functools.cache
def _replacement_of(function: FunctionType) -> Callable[..., Any] | None:
    """Return the engine's function with the arguments and the result of `function`, which gets
    calls with more arguments; None if `function` is unknown."""
    code = inspect.unwrap(function)
    signature = inspect.signature(code)
    for replacement in REPLACEMENTS:
        if not signature.parameters.keys() >= {*replacement.parameters}:
            continue
        at = magnitudes(code)
        if all(
            _agrees(code, signature, replacement, arguments, at)
            for arguments in replacement.tries()
        ):
            return _calling(function, signature, replacement)
    return None


def _calling(
    function: Callable[..., Any], signature: inspect.Signature, replacement: Replacement
) -> Callable[..., Any]:
    def calling(*args: Any, **options: Any) -> Any:
        arguments = _by_name(signature, *args, **options)
        more = [arguments[name] for name in MORE if arguments.get(name) is not None]
        if any(x is not False for x in more) or not replacement.takes(arguments):
            return function(*args, **options)
        return replacement.compute(arguments)

    return calling


def _by_name(signature: inspect.Signature, *args: Any, **options: Any) -> Arguments:
    """Return a call's arguments by name, including defaults."""
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    others = [name for name in arguments if kinds[name] is inspect.Parameter.VAR_KEYWORD]
    for name in others:
        arguments |= arguments.pop(name)
    return arguments


@torch.no_grad()
def _agrees(
    code: FunctionType,
    signature: inspect.Signature,
    replacement: Replacement,
    arguments: Arguments,
    at: list[float],
) -> bool:
    def times(magnitude: float) -> Arguments:
        scaled = {
            name: arguments[name] for name in replacement.scaled if arguments[name] is not None
        }
        return arguments | {name: magnitude * x for name, x in scaled.items()}

    try:
        family_result = code(**arguments)
    except (TypeError, RuntimeError, ValueError):
        return False
    made = replacement.compute(_by_name(signature, **arguments))
    if made is None:
        return family_result is None
    states = made[1:] if isinstance(made, tuple) else ()  # none
    if states and (not isinstance(family_result, tuple) or family_result[1:] != states):
        return False

    def output(result: Any) -> Any:
        return result[0] if states else result

    return agree(
        lambda magnitude: output(code(**times(magnitude))),
        lambda magnitude: output(replacement.compute(_by_name(signature, **times(magnitude)))),
        at=at,
        tolerance=TOLERANCE,
    )


def _delta_rule(arguments: Arguments) -> tuple[torch.Tensor, None]:
    tensors = (arguments[name] for name in DELTA_RULE)
    return gated_delta_rule(*tensors, arguments["use_qk_l2norm_in_kernel"]), None


def _tried_delta_rules() -> Iterator[Arguments]:
    draw = torch.Generator().manual_seed(0)
    for heads, normalize in product((2, 3), (True, False)):
        query, key = torch.randn(2, ROWS, TOKENS, heads, 4, generator=draw)
        value = torch.randn(ROWS, TOKENS, heads, 6, generator=draw)
        decay, beta = torch.rand(2, ROWS, TOKENS, heads, generator=draw)
        tensors = (query, key / 4, value, -decay, beta)
        yield {**dict(zip(DELTA_RULE, tensors, strict=True)), "use_qk_l2norm_in_kernel": normalize}


def _state_space(arguments: Arguments) -> torch.Tensor:
    x, dt, decay, into, out_of, *head_inputs = (arguments[name] for name in STATE_SPACE)
    steps = Steps(arguments["dt_softplus"], arguments["dt_limit"])
    return state_space(x, dt, into, out_of, decay, *head_inputs, steps)


def _tried_state_spaces() -> Iterator[Arguments]:
    draw = torch.Generator().manual_seed(0)
    for groups, by_head, softplus, limits in product(
        (1, 2), (True, False), (True, False), (NO_LIMITS, (0.4, 0.9))
    ):
        x = torch.randn(ROWS, TOKENS, 4, 6, generator=draw)
        steps = torch.rand(ROWS, TOKENS, 4, generator=draw)
        into, out_of = torch.randn(2, ROWS, TOKENS, groups, 5, generator=draw)
        decay, skip, bias = torch.rand(3, 4, generator=draw)
        tensors = (x, steps, -decay, into, out_of, *((skip, bias) if by_head else (None, None)))
        yield {
            **dict(zip(STATE_SPACE, tensors, strict=True)),
            "chunk_size": 4,
            "dt_softplus": softplus,
            "dt_limit": limits,
        }


def _convolution(arguments: Arguments) -> torch.Tensor:
    x, weight, bias = (arguments[name] for name in CONVOLUTION)
    return short_convolution(x, weight, bias, silu=ACTIVATIONS[arguments["activation"]])


def _tried_convolutions() -> Iterator[Arguments]:
    draw = torch.Generator().manual_seed(0)
    for taps, biased, activation in product((2, 4), (True, False), (None, "silu")):
        x = torch.randn(ROWS, 6, TOKENS, generator=draw)
        weight = torch.randn(6, taps, generator=draw)
        bias = torch.randn(6, generator=draw) if biased else None
        tensors = (x, weight, bias)
        yield {**dict(zip(CONVOLUTION, tensors, strict=True)), "activation": activation}


def _is_frozen_convolution(arguments: Arguments) -> bool:
    _, *frozen = (arguments[name] for name in CONVOLUTION)
    trained = any(x is not None and x.requires_grad for x in frozen)
    return arguments["activation"] in ACTIVATIONS and not trained


def _no_layer(arguments: Arguments) -> None:
    """Families' torch code returns nothing here, and the layer goes on step by step. A kernel
    package's function would use the last linear's weight alone, whatever its adapter."""


REPLACEMENTS = (
    Replacement(
        (*DELTA_RULE, "use_qk_l2norm_in_kernel"),
        _delta_rule,
        _tried_delta_rules,
        ("query", "value"),
    ),
    Replacement(
        (*STATE_SPACE, "dt_softplus", "dt_limit"),
        _state_space,
        _tried_state_spaces,
        ("hidden_states", "B", "C", "D"),
    ),
    Replacement(
        (*CONVOLUTION, "activation"),
        _convolution,
        _tried_convolutions,
        CONVOLUTION,
        _is_frozen_convolution,
    ),
    Replacement((*WHOLE_LAYER, "outproj_weight"), _no_layer, lambda: [dict.fromkeys(WHOLE_LAYER)]),
)
