"""The rows that a layer's experts compute, and their names in matmuls."""

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """The expert of each row. A token has one row for each of its k experts."""

    order: torch.Tensor  # (T * k,) int64: place (token * k + choice) of each row, sorted by expert
    positions: torch.Tensor  # (T, k) int64: the inverse, the row of each place
    ends: torch.Tensor  # (experts,) int32: where the rows of each expert end
    tiles: torch.Tensor | None  # the kernels' tiles of rows; None without kernels
    top_k: int

    @property
    def tokens(self) -> torch.Tensor:
        """The token (T * k,) of each row."""
        return self.order // self.top_k

    @property
    def experts(self) -> torch.Tensor:
        """The expert (T * k,) of each row."""
        rows = torch.arange(len(self.order), device=self.order.device)
        return torch.searchsorted(self.ends, rows, right=True)

    @property
    def counts(self) -> torch.Tensor:
        """The rows (experts,) of each expert."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))


class Rows(NamedTuple):
    """Inputs of the experts: a row for each row of the routing, or for each token, without a copy
    into the order of the experts."""

    values: torch.Tensor  # (R, width), or (T, width) if `by_token`
    by_token: bool = False
    scales: torch.Tensor | None = None  # of values in 8 bits: factor of each row, fp32


class Weights(NamedTuple):
    """The weights of all experts for one matmul."""

    values: torch.Tensor  # (experts, out, in), of any strides
    scales: torch.Tensor | None = None
    """In 8 bits: the factor of each expert's values (experts,) fp32."""


class Update(NamedTuple):
    """An adapter's part of a matmul: scale * B l."""

    low: torch.Tensor  # l (R, r)
    small: torch.Tensor  # b (experts, out, r)
    scale: float
