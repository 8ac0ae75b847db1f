"""Modules that compute long rows in tiles of tokens: their intermediates are never whole.

The first of two nodes (`layers.split_autograd`) keeps the input, or its norm's input. Backward
computes each tile again, without its output, and adds the gradients of weights in the order of the
tiles. Recomputation of a layer skips the module, so both together cost what recomputation costs.
Masks of dropout are those of the whole row."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from workflow.lib.model.layers.adapter_dropout import AdapterState
from workflow.lib.model.layers.fused_norm import keepable, restored
from workflow.lib.model.layers.split_autograd import apply_split, first_outputs

Inputs = tuple[torch.Tensor, ...]


class Tiled(Protocol):
    """A module whose output of a token depends on that token's inputs alone."""

    tiles: "TokenTiles | None"
    """None: it computes all tokens at once."""

    @property
    def compute(self) -> Callable[..., torch.Tensor]:
        """Returns y (..., hidden) of x (..., hidden) and other inputs (T, ...). With
        `valued=False`: any tensor of this shape with the gradient of y."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield its weights, gathered."""


class TokenTiles:
    """The division of a model's micro-batches."""

    def __init__(self, adapters: AdapterState, *, tokens: int) -> None:
        """tokens: of a tile."""
        self._adapters, self._tokens = adapters, tokens

    def output(self, module: Tiled, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the module's output for inputs as of `Tiled.compute`."""
        if inputs[0].shape[:-1].numel() <= self._tokens:
            return module.compute(*inputs)
        arguments = (*inputs, *_trained(module))
        value = lambda: self._value(module, inputs)  # noqa: E731
        return apply_split(_TiledGradient, self, module, len(inputs), *arguments, value=value)

    def _value(self, module: Tiled, inputs: Inputs) -> torch.Tensor:
        rows = _by_token(inputs)
        y = torch.empty_like(rows[0])
        for part in self.parts(len(y)):
            y[part] = module.compute(*(x[part] for x in rows))
        return y

    def parts(self, count: int) -> Iterator[slice]:
        """Yield the tiles of `count` tokens; within each, masks of dropout are its own."""
        for start in range(0, count, self._tokens):
            with self._adapters.part(start, count):
                yield slice(start, min(start + self._tokens, count))


def _trained(module: Tiled) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _by_token(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.reshape(-1, x.shape[-1]) for x in inputs]


class _TiledGradient(torch.autograd.Function):
    """The gradient of a tiled module."""

    @staticmethod
    def forward(
        ctx: Any, tiles: TokenTiles, module: Tiled, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x, *others = tensors[:count]
        ctx.norm, source = keepable(x)
        ctx.tiles, ctx.module = tiles, module
        ctx.save_for_backward(source, *others)
        return first_outputs(ctx, x, out_features=x.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[3 : 3 + len(saved)]
        rows, (grad,) = _by_token(saved), _by_token(grads)
        grad_inputs = [
            torch.empty_like(x) if wanted else None for x, wanted in zip(rows, needed, strict=True)
        ]
        weights = _trained(ctx.module)  # as gathered for backward
        sums: list[torch.Tensor | None] = [None] * len(weights)
        for part in ctx.tiles.parts(len(grad)):
            inputs = [restored(ctx.norm, rows[0][part]), *(x[part] for x in rows[1:])]
            made, made_sums = _tile_gradients(ctx.module, inputs, needed, weights, grad[part])
            for whole, tile_grad in zip(grad_inputs, made, strict=True):
                if whole is not None and tile_grad is not None:
                    whole[part] = tile_grad
            sums = [_added(*pair) for pair in zip(sums, made_sums, strict=True)]
            del inputs, made, made_sums  # before the next tile
        whole_grads = (
            None if x is None else x.view(*grads[0].shape[:-1], -1) if number == 0 else x
            for number, x in enumerate(grad_inputs)
        )
        return None, None, None, *whole_grads, *sums


def _tile_gradients(
    module: Tiled,
    inputs: Sequence[torch.Tensor],
    needed: Sequence[bool],
    weights: Sequence[nn.Parameter],
    grad: torch.Tensor,
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Return the gradients of a tile's inputs, None for those not needed, and of weights."""
    leaves = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, needed, strict=True)]
    with torch.enable_grad():
        output = module.compute(*leaves, valued=False)
    differentiated = [leaf for leaf in leaves if leaf.requires_grad]
    made = torch.autograd.grad(output, [*differentiated, *weights], grad, allow_unused=True)
    input_grads = iter(made[: len(differentiated)])
    return [next(input_grads) if wanted else None for wanted in needed], [
        *made[len(differentiated) :]
    ]


def _added(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    return part if total is None else total if part is None else total.add_(part)


def tile_(model: nn.Module, adapters: AdapterState, *, tokens: int) -> int:
    """Let a model's feed-forwards and experts compute `tokens` at a time; return their number.
    adapters: the state of the model's adapters."""
    tiles = TokenTiles(adapters, tokens=tokens)
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "tiles")]
    for module in modules:
        module.tiles = tiles
    return len(modules)
