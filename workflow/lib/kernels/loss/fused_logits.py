"""The logits of a chunk of the loss on a GPU: one kernel reads the head's matmul for log-sum-exp,
another overwrites it with the gradient. So no logit is stored, and 6 bytes move for each in 16
bits; torch's operations keep up to 12, in fp32, and move 36."""

from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.kernel_launch import launch
from workflow.lib.kernels.op import Case, Op, drawn

IGNORED = -100  # the target of a padding row; torch's cross_entropy leaves it out
ELSEWHERE = -1  # the column of a target in another process's slice of the vocabulary
ELEMENTS = 4096  # of a row that a program has at a time
WARPS = 8
CASE = (3, 5000)  # rows and vocabulary


class LogitForm(NamedTuple):
    """logit = softcap * tanh(scale * matmul / softcap), without the cap if it is None."""

    scale: float
    softcap: float | None


def _by_torch(
    raw_logits: torch.Tensor, columns: torch.Tensor, form: LogitForm
) -> tuple[torch.Tensor, ...]:
    """Return log-sum-exp, the columns' logits, and the gradient with respect to the matmul."""
    logits = raw_logits.float() * form.scale
    slope = torch.full_like(raw_logits[0, 0].float(), form.scale)
    if form.softcap is not None:
        bent = torch.tanh(logits / form.softcap)
        logits, slope = form.softcap * bent, form.scale * (1.0 - bent.square())
    rows = torch.arange(len(columns), device=columns.device)
    shares = logits.softmax(dim=1)
    shares[rows, columns] -= 1.0
    return logits.logsumexp(dim=1), logits[rows, columns], shares * slope


class FusedLogits:
    """Loss and gradient from the 16-bit matmul (rows, vocab) of hidden states and head, which is
    overwritten by its gradient."""

    def __init__(self, raw_logits: torch.Tensor, form: LogitForm) -> None:
        assert raw_logits.stride(1) == 1
        self._raw_logits, self._form = raw_logits, form

    def sums(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-sum-exp and the logit of each row's column (int64), or 0; (rows,) fp32."""
        rows = len(self._raw_logits)
        log_sums, chosen = (
            torch.empty(rows, dtype=torch.float32, device=self._raw_logits.device) for _ in range(2)
        )
        self._launch("logit_sums", (rows,), log_sums, chosen, self._raw_logits, columns)
        return log_sums, chosen

    def slopes(self, log_sums: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return the gradient (rows, vocab) of the sum of log_sums - chosen with respect to the
        matmul, in its place; 0 where the column is `IGNORED`. log_sums: (rows,), over the whole
        vocabulary."""
        rows, vocab = self._raw_logits.shape
        grid = (rows, -(-vocab // ELEMENTS))
        self._launch("logits_to_slopes", grid, self._raw_logits, log_sums, columns, ignored=IGNORED)
        return self._raw_logits

    def _launch(
        self, name: str, grid: tuple[int, ...], *tensors: torch.Tensor, **numbers: Any
    ) -> None:
        scale, softcap = self._form
        launch(
            f"logits.{name}", grid, *tensors, self._raw_logits.stride(0), self._raw_logits.shape[1],
            scale, softcap or 1.0, **numbers, capped=softcap is not None, size=ELEMENTS,
            num_warps=WARPS,
        )  # fmt: skip


def _by_kernel(
    raw_logits: torch.Tensor, columns: torch.Tensor, form: LogitForm
) -> tuple[torch.Tensor, ...]:
    fused = FusedLogits(raw_logits, form)
    log_sums, chosen = fused.sums(columns)
    return log_sums, chosen, fused.slopes(log_sums, columns)


def _case(device: torch.device, dtype: torch.dtype, form: LogitForm) -> Case:
    (raw_logits,) = drawn(device, dtype, CASE)
    return 8 * raw_logits, torch.tensor([7, 4999, 0], device=device), form


_logits = Op(
    "the loss",
    reference=_by_torch,
    kernel=_by_kernel,
    case=_case,
    variant=lambda raw_logits, columns, form: (raw_logits.dtype, form),
)


def usable(hidden: torch.Tensor, form: LogitForm) -> bool:
    """Whether the kernels can compute the loss of hidden states."""
    halves = hidden.dtype in (torch.bfloat16, torch.float16)
    return halves and _logits.works_on(hidden.device, hidden.dtype, form)
