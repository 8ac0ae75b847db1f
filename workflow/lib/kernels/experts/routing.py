"""Which rows a layer's experts compute, and how they are named in matmuls."""

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """Which expert computes which row. A token has one row for each of its k experts."""

    order: torch.Tensor  # (T * k,) int64: place (token * k + choice) of each row, sorted by expert
    places: torch.Tensor  # (T, k) int64: the other way round, the row of each place
    ends: torch.Tensor  # (experts,) int32: where the rows of each expert end
    tiles: torch.Tensor | None  # how the kernels cut the rows; None without them
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
    """What the experts take: a row for each row of the routing, or each its token's, which need not
    be copied into the order of the experts."""

    values: torch.Tensor  # (R, width), or (T, width) if `by_token`
    by_token: bool = False
    scales: torch.Tensor | None = None  # of values in 8 bits: what each row is multiplied by, fp32


class Weights(NamedTuple):
    """The weights of all experts, as one matmul uses them."""

    values: torch.Tensor  # (experts, out, in), of any strides
    scales: torch.Tensor | None = None
    """In 8 bits: what each expert's values are multiplied by (experts,) fp32."""


class Update(NamedTuple):
    """What an adapter adds to a matmul: scale * B l."""

    low: torch.Tensor  # l (R, r)
    small: torch.Tensor  # b (experts, out, r)
    scale: float
