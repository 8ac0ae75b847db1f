"""Two passes over the same tokens by the same experts.

Where two experts' scores are nearly equal, a rounding decides between them, and the token's state
is another. Two computations of one model that are to be compared take the choices of the first."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.model.experts.fused_experts import FusedExperts


class Arguments(NamedTuple):
    """What `FusedExperts.forward` takes."""

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


Routes = dict[str, Arguments]
"""By the path of the experts: what they were called with last."""


@contextmanager
def noted_routes(model: nn.Module) -> Iterator[Routes]:
    """Yield what the experts of each layer are called with from now on, empty without experts."""
    routes: Routes = {}

    def note(path: str, given: Arguments) -> Arguments:
        routes[path] = given
        return given

    with _before_experts(model, note):
        yield routes


@contextmanager
def fixed_routes(model: nn.Module, routes: Routes, tokens: slice) -> Iterator[None]:
    """Send the tokens of each pass to the experts that had `tokens` of the noted one."""

    def choose(path: str, given: Arguments) -> Arguments:
        _, index, weights = routes[path]
        return Arguments(given.hidden_states, index[tokens], weights[tokens])

    with _before_experts(model, choose):
        yield


@contextmanager
def _before_experts(
    model: nn.Module, change: Callable[[str, Arguments], Arguments]
) -> Iterator[None]:
    """Call experts with what `change` makes of their path and arguments."""

    def hook(path: str) -> Callable[..., Any]:
        def changed(_: nn.Module, args: Any, kwargs: Any) -> tuple[Arguments, dict[str, Any]]:
            return change(path, Arguments(*args, **kwargs)), {}

        return changed

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, FusedExperts):
                handle = module.register_forward_pre_hook(hook(path), with_kwargs=True)
                stack.callback(handle.remove)
        yield
