"""Two passes over the same tokens, compared layer by layer.

The second pass gets each layer's input from the first, so rounding does not grow from layer to
layer (Gemma 4's large scores: to half of the size in six layers). It also takes the first pass's
choice of experts, which rounding decides where scores are nearly equal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from workflow.lib.model.experts.fused_experts import Arguments, FusedExperts

Routes = dict[str, Arguments]
"""The last arguments of each layer's experts, by their path."""


@contextmanager
def _before_experts(
    model: nn.Module, change: Callable[[str, Arguments], Arguments]
) -> Iterator[None]:
    """Call experts with the arguments that `change` returns for their path and arguments."""

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


class ComparedLayers:
    """Decoder layers of a model, and the differences of each layer's addition in two passes."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._model, self._layers = model, layers
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._routes: Routes = {}
        self._sums = [torch.zeros(2, dtype=torch.float64) for _ in layers]

    @contextmanager
    def noted(self, num_tokens: int) -> Iterator[None]:
        """Note the first tokens of the pass within the block: each layer's input and output, in
        host memory, and their experts."""

        def before(_: int, states: torch.Tensor) -> torch.Tensor:
            self._inputs.append(states[:, :num_tokens].cpu())
            return states

        def after(_: int, made: torch.Tensor) -> None:
            self._outputs.append(made[:, :num_tokens].cpu())

        def note(path: str, arguments: Arguments) -> Arguments:
            self._routes[path] = arguments
            return arguments

        with _before_experts(self._model, note), self._around_layers(before, after):
            yield

    @contextmanager
    def compared(self, tokens: slice) -> Iterator[None]:
        """Compare the pass within, of `tokens` of the noted ones; it gets the noted inputs."""

        def before(number: int, states: torch.Tensor) -> torch.Tensor:
            return self._inputs[number][:, tokens].to(states.device)

        def after(number: int, made: torch.Tensor) -> None:
            family_output, layer_input = (
                made.cpu().double(),
                self._inputs[number][:, tokens].double(),
            )
            difference = self._outputs[number][:, tokens].double() - family_output
            self._sums[number] += torch.stack(
                [x.square().sum() for x in (difference, family_output - layer_input)]
            )

        with self.routed(tokens), self._around_layers(before, after):
            yield

    def routed(self, tokens: slice) -> AbstractContextManager[None]:
        """Within the block send a pass of `tokens` of the noted ones to the noted experts."""

        def choose(path: str, arguments: Arguments) -> Arguments:
            _, index, weights = self._routes[path]
            return Arguments(arguments.hidden_states, index[tokens], weights[tokens])

        return _before_experts(self._model, choose)

    def largest_difference(self) -> float:
        """Return the largest difference of a layer, as a share of its addition (RMS)."""
        differences, added = torch.stack(self._sums).T
        shares = torch.where(differences > 0, differences / added, 0.0)
        return float(shares.max().sqrt())

    @contextmanager
    def _around_layers(
        self,
        before: Callable[[int, torch.Tensor], torch.Tensor],
        after: Callable[[int, torch.Tensor], None],
    ) -> Iterator[None]:
        """Replace states (1, tokens, hidden) by `before`'s at each layer; give `after` outputs."""

        def replaced(number: int) -> Callable[..., Any]:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
                if args:
                    return (before(number, args[0]), *args[1:]), kwargs
                return args, kwargs | {"hidden_states": before(number, kwargs["hidden_states"])}

            return hook

        def handed(number: int) -> Callable[..., None]:
            return lambda _, __, made: after(number, made[0] if isinstance(made, tuple) else made)

        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                input_hook = layer.register_forward_pre_hook(replaced(number), with_kwargs=True)
                stack.callback(input_hook.remove)
                stack.callback(layer.register_forward_hook(handed(number)).remove)
            yield
