"""Products of rows with the weights of the expert that each goes to.

Rows are sorted by expert, so those of an expert are one range, and where the ranges end stays on
the device: all shapes are known beforehand, and a GPU never waits for the host. There torch's
grouped product makes all products at once. It is a loop over experts on CPUs, where a product for
each expert costs no launch, and rows may have any width.
"""

from typing import NamedTuple

import torch
from torch import nn

from workflow.lib.model.layers import kernels
from workflow.lib.system.device_types import GPUS

ROW_UNIT = 8
"""Of 16-bit values in 16 bytes: torch's grouped products ask GPUs for rows of whole units."""


class Routing(NamedTuple):
    """Which expert computes which row. A token has one row for each of its k experts."""

    order: torch.Tensor
    """(T * k,) int64: place (token * k + choice) of each row, sorted by expert."""
    ends: torch.Tensor
    """(experts,) int32: where the rows of each expert end."""
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


def route(top_k_index: torch.Tensor, *, num_experts: int) -> Routing:
    """Return the rows of tokens whose experts are `top_k_index` (T, k)."""
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    numbers = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return Routing(order, ends, top_k_index.shape[-1])


def summed_by_token(
    rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum (T, width) of the rows (T * k, width) of each token, times `weights` (T, k) if
    there are any; in fp32, rounded once.

    One choice after the other: the sum does not depend on the order in which a GPU adds, and no
    copy of all rows is made.
    """
    place = torch.empty_like(routing.order)
    numbers = torch.arange(len(place), device=place.device)
    place = place.scatter_(0, routing.order, numbers).view(-1, routing.top_k)
    if kernels.usable(rows.device):
        return kernels.sum_by_token(rows, place, weights)
    total = rows.new_zeros((len(place), rows.shape[1]), dtype=torch.float32)
    for choice in range(routing.top_k):
        part = rows[place[:, choice]]
        if weights is None:
            total += part
        else:
            total.addcmul_(part, weights[:, choice, None])
    return total.to(rows.dtype)


def rows_product(rows: torch.Tensor, weights: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return x W^T (R, out) of each row x in `rows` (R, in), with W of `weights` (experts, out, in)
    of the row's expert.
    """
    transposed = weights.transpose(1, 2)
    if rows.device.type in GPUS:
        return nn.functional.grouped_mm(rows, transposed, offs=routing.ends)
    product = rows.new_empty(len(rows), weights.shape[1])
    for expert, (start, stop) in enumerate(_ranges(routing)):
        torch.mm(rows[start:stop], transposed[expert], out=product[start:stop])
    return product


def weights_product(left: torch.Tensor, right: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the sum (experts, m, n) fp32 over the rows of each expert of their outer products, of
    left (R, m) and right (R, n): of an expert without rows 0.
    """
    if left.device.type in GPUS:
        sums = nn.functional.grouped_mm(left.t(), right, offs=routing.ends)
        # A sum over nothing is left to the kernel otherwise.
        return sums.float().masked_fill_((routing.counts == 0)[:, None, None], 0.0)
    sums = left.new_empty(len(routing.ends), left.shape[1], right.shape[1])
    for expert, (start, stop) in enumerate(_ranges(routing)):
        torch.mm(left[start:stop].t(), right[start:stop], out=sums[expert])
    return sums.float()


def _ranges(routing: Routing) -> list[tuple[int, int]]:
    """Return where the rows of each expert begin and end; on a GPU it would wait for the device."""
    ends = routing.ends.tolist()
    return list(zip([0, *ends], ends, strict=False))
