"""The logits of a chunk of the loss on a GPU: one kernel reads the head's matmul for log-sum-exp,
another overwrites it with the gradient. So no logit is stored, and 6 bytes move for each in 16
bits; torch's operations keep up to 12, in fp32, and move 36.

Matmuls with the head are as fast as for a round number of rows. cuBLAS is fast only where a
matmul's sizes are multiples of 8 and matrix rows begin at whole 16 bytes; for the head of Hunyuan
(128,167 rows) its other kernels take 7 times as long. So logits lie in aligned rows, and the rest
beyond a multiple of 64 is a matmul of its own."""

from typing import Any, NamedTuple

import torch
from torch import nn

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


ALIGNED_BYTES = 16
ROUND = 64


def aligned(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return an empty matrix (rows, columns) with aligned rows, of the type of `like`."""
    unit = ALIGNED_BYTES // like.element_size()
    return like.new_empty(rows, -(-columns // unit) * unit)[:, :columns]


def head_matmul(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return hidden W^T + b (rows, vocab) in aligned rows. It has no gradient. hidden: (rows,
    hidden_size); weight: (vocab, hidden_size); bias: (vocab,). They are cast to the type of the
    hidden states."""
    with torch.no_grad():
        weight = weight.to(hidden.dtype)
        raw_logits = aligned(len(hidden), len(weight), hidden)
        for part in _parts(len(weight)):
            if bias is None:
                torch.mm(hidden, weight[part].T, out=raw_logits[:, part])
            else:
                own = bias[part].to(hidden.dtype)
                torch.addmm(own, hidden, weight[part].T, out=raw_logits[:, part])
        return raw_logits


def states_gradient(slope: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return slope W (rows, hidden_size): the gradient of the hidden states of `head_matmul`.
    slope: (rows, vocab), fast in aligned rows; weight: (vocab, hidden_size), cast to its type."""
    weight = weight.to(slope.dtype)
    whole, *remaining_parts = _parts(len(weight))
    gradient = slope[:, whole] @ weight[whole]
    for part in remaining_parts:
        gradient.addmm_(slope[:, part], weight[part])
    return gradient


def _parts(vocab: int) -> list[slice]:
    """Return the columns of the matmuls of one over a vocabulary."""
    whole = vocab // ROUND * ROUND
    parts = [slice(0, whole), slice(whole, vocab)]
    return [part for part in parts if part.stop > part.start] or [slice(0, 0)]


class _FrozenHead(torch.autograd.Function):
    """`head_matmul` with a gradient for the hidden states alone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return head_matmul(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return states_gradient(grads[0], weight), None, None


class _Float32(torch.autograd.Function):
    """A 16-bit matrix in fp32, whose gradient has aligned rows. As a node of its own, it lets
    autograd free the fp32 gradient before the matmul."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        ctx.dtype = matrix.dtype
        return matrix.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        return aligned(len(grad), grad.shape[1], grad.new_empty(0, dtype=ctx.dtype)).copy_(grad)


def frozen_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits (rows, vocab) fp32 of `head_matmul`, with their gradient."""
    if hidden.dtype == torch.float32:
        bias = None if bias is None else bias.to(hidden.dtype)
        return nn.functional.linear(hidden, weight.to(hidden.dtype), bias)
    raw_logits = _FrozenHead.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
    logits: torch.Tensor = _Float32.apply(raw_logits)  # type: ignore[no-untyped-call]
    return logits


def with_aligned_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix itself if its rows are aligned, else a copy with aligned rows."""
    if matrix.stride(0) * matrix.element_size() % ALIGNED_BYTES == 0:
        return matrix
    return aligned(len(matrix), matrix.shape[1], matrix).copy_(matrix)
