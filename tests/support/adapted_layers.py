"""A single linear with an adapter, as the fused nodes ask for it."""

from typing import Any

import torch

from workflow.lib.kernels.rows.dropout import Draw
from workflow.lib.model.layers.adapter_dropout import AdapterState
from workflow.lib.model.layers.frozen_linear import FrozenLinear

SCALE = 1.75


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """What the fused node asks of a PEFT layer: the base linear, and the masters A and B; and of
    DoRA the factor of each row, of dropout what it draws."""

    def __init__(
        self,
        base: Any,
        *weights: torch.Tensor,
        factor: torch.Tensor | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.base, self.weights = base, weights
        self.factor, self.draw, self.shared = factor, draw, AdapterState()
        self.changed_in_place = False

    def get_base_layer(self) -> FrozenLinear:
        return self.base

    def fused_weights(self) -> tuple[torch.Tensor, ...]:
        return self.weights

    def fused_scale(self) -> float:
        return SCALE

    def fused_draw(self) -> Draw | None:
        return self.draw

    def has_dora(self) -> bool:
        return self.factor is not None

    def fused_factor(self, dtype: torch.dtype) -> torch.Tensor | None:
        return self.factor
