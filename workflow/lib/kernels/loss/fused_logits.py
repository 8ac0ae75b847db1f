"""The logits of a chunk of the loss on a GPU: one kernel reads the head's product for log-sum-exp,
another puts the gradient in its place. So no logit is stored, and 6 bytes move for each in 16 bits;
torch's operations keep up to 12, in fp32, and move 36.
"""

import functools
from typing import NamedTuple

import torch

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.kernels.trials import are_right
from workflow.lib.system.device_types import RECORDED

IGNORED = -100  # the target of a row that is only padding; torch's cross_entropy leaves it out
ELSEWHERE = -1  # the column of a target that another process's slice of the vocabulary has
ELEMENTS = 4096  # of a row that a program has at a time
WARPS = 8
TRIED = (3, 5000)  # rows and vocabulary

if kernels.INSTALLED:
    from workflow.lib.kernels.triton_code import logits as logit_code


class LogitForm(NamedTuple):
    """logit = softcap * tanh(scale * product / softcap), without the cap if it is None."""

    scale: float
    softcap: float | None


def usable(hidden: torch.Tensor, form: LogitForm) -> bool:
    """Return whether the kernels can compute the loss of hidden states; tried once."""
    halves = hidden.dtype in (torch.bfloat16, torch.float16)
    return halves and kernels.usable(hidden.device) and _tried(hidden.device, hidden.dtype, form)


@functools.cache
@torch.no_grad()
def _tried(device: torch.device, dtype: torch.dtype, form: LogitForm) -> bool:
    """Whether they give what torch's operations give."""
    if device.type == RECORDED:
        return True
    draw = torch.Generator().manual_seed(0)
    product = (8 * torch.randn(TRIED, generator=draw)).to(device, dtype)
    columns = torch.tensor([7, 4999, 0], device=device)

    def made() -> tuple[torch.Tensor, ...]:
        fused = FusedLogits(product.clone(), form)
        log_sums, chosen = fused.sums(columns)
        return log_sums, chosen, fused.slopes(log_sums, columns)

    return are_right(made, _by_torch(product, columns, form), of="the loss")


def _by_torch(
    product: torch.Tensor, columns: torch.Tensor, form: LogitForm
) -> tuple[torch.Tensor, ...]:
    """Return log-sum-exp, the columns' logits, and the gradient with respect to the product."""
    logits, slope = product.float() * form.scale, torch.full_like(product[0, 0].float(), form.scale)
    if form.softcap is not None:
        bent = torch.tanh(logits / form.softcap)
        logits, slope = form.softcap * bent, form.scale * (1.0 - bent.square())
    rows = torch.arange(len(columns), device=columns.device)
    shares = logits.softmax(dim=1)
    shares[rows, columns] -= 1.0
    return logits.logsumexp(dim=1), logits[rows, columns], shares * slope


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

    def slopes(self, log_sums: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return the gradient (rows, vocab) of the sum of log_sums - chosen with respect to the
        product, in its place; 0 where the column is `IGNORED`.

        log_sums: (rows,), over the whole vocabulary.
        """
        rows, vocab = self._product.shape
        grid = (rows, -(-vocab // ELEMENTS))
        self._launch("logits_to_slopes", grid, self._product, log_sums, columns, ignored=IGNORED)
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
