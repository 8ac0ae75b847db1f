"""The logits of a chunk of the loss on a GPU: one kernel reads the head's product for log-sum-exp,
another puts the gradient in its place. So no logit is stored, and 6 bytes move for each in 16 bits;
torch's operations keep up to 12, in fp32, and move 36.
"""

from typing import NamedTuple

import torch

from workflow.lib.model.layers import kernels
from workflow.lib.system.device_types import RECORDED

ELSEWHERE = -1  # the column of a target that another process's slice of the vocabulary has
ELEMENTS = 4096  # of a row that a program has at a time
WARPS = 8

if kernels.INSTALLED:
    from workflow.lib.model.loss import logit_code


class LogitForm(NamedTuple):
    """logit = softcap * tanh(scale * product / softcap), without the cap if it is None."""

    scale: float
    softcap: float | None


class FusedLogits:
    """What the product (rows, vocab) of hidden states and head, in a 16-bit type, means for the
    loss; it is overwritten by its gradient.
    """

    def __init__(self, product: torch.Tensor, form: LogitForm) -> None:
        assert product.stride(1) == 1
        self._product, self._form = product, form

    def sums(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-sum-exp and the logit of each row's column, 0 if it is negative; (rows,)
        fp32. columns: (rows,) int64.
        """
        rows = len(self._product)
        log_sums, chosen = (
            torch.empty(rows, dtype=torch.float32, device=self._product.device) for _ in range(2)
        )
        self._launch("logit_sums", (rows,), log_sums, chosen, self._product, columns)
        return log_sums, chosen

    def slopes(
        self, log_sums: torch.Tensor, columns: torch.Tensor, *, ignored: int
    ) -> torch.Tensor:
        """Return the gradient (rows, vocab) of the sum of log_sums - chosen with respect to the
        product, in its place; 0 where the column is `ignored`.

        log_sums: (rows,), over the whole vocabulary.
        """
        rows, vocab = self._product.shape
        grid = (rows, -(-vocab // ELEMENTS))
        self._launch("logits_to_slopes", grid, self._product, log_sums, columns, ignored=ignored)
        return self._product

    def _launch(
        self, name: str, grid: tuple[int, ...], *tensors: torch.Tensor, **numbers: int
    ) -> None:
        """Start a kernel, unless there is nothing to do; a device that is recorded computes
        nothing.
        """
        scale, softcap = self._form
        if self._product.device.type != RECORDED and all(grid):
            getattr(logit_code, name)[grid](
                *tensors, self._product.stride(0), self._product.shape[1], scale, softcap or 1.0,
                **numbers, capped=softcap is not None, size=ELEMENTS, num_warps=WARPS,
            )  # fmt: skip
