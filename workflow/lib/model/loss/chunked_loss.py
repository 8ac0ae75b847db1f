"""Cross-entropy of the output head over trained positions only, in chunks: the logits of a whole
batch never exist.

The forward computes the gradient of the hidden states chunk by chunk, and sums a trained head's
(`lora`), so backward needs no logits. Only a trained head's gradient with unknown slopes
(`log_probs`) makes backward compute the chunks again. The idea is fused linear cross-entropy
(Liger, arXiv 2410.10989); masked rows are dropped before the matmul (TRL's chunked_nll)."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from workflow.lib.kernels.loss.fused_logits import (
    IGNORED,
    FusedLogits,
    LogitForm,
    frozen_logits,
    head_matmul,
    states_gradient,
    usable,
    with_aligned_rows,
)
from workflow.lib.model.lora import ROWS, trained_parts
from workflow.lib.model.loss.vocabulary_slices import GRADIENT_ROWS, TRAINED_ROWS, chunk_rows
from workflow.lib.objectives.objective import Teacher, exact_sum
from workflow.lib.system.device_types import GPUS

SUMS = 2  # how many numbers of a row are log-sum-exp: A and R


class Outcomes:
    """Loss and slopes of `objective.Teacher` for a slice of the vocabulary: of rows of fp32 logits
    (rows, columns), the vocabulary from `first` on; targets, teacher.

    z: logits; A: log-sum-exp of all; R: of the tokens outside the teacher's likeliest i. The
    student's outcomes are softmax([z_i, R] / T) = r, the teacher's q. T^2 KL has the slopes
    T (r_i - q_i) by z_i and T (r_R - q_R) exp(z_j - R) by the others; -log p has exp(z - A), and 1
    less by the target's."""

    def __init__(
        self, logits: torch.Tensor, targets: torch.Tensor, teacher: Teacher, *, first: int = 0
    ) -> None:
        self._logits, self._teacher = logits, teacher
        self._ignored = targets == IGNORED
        self._ids = self._columns(teacher.ids, first)
        self._target = self._columns(targets[:, None], first)

    def _columns(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Return the columns of tokens; a token of another slice gets the one after the last."""
        width = self._logits.shape[1]
        columns = ids - first
        return columns.where((columns >= 0) & (columns < width), width)

    def _padded(self) -> torch.Tensor:
        """Return a copy of the logits with a column of 0 for tokens of other slices."""
        return pad(self._logits, (0, 1))

    def numbers(self) -> torch.Tensor:
        """Return A, R, z of the target and z_i of each row (3 + k, rows) fp32. Values outside this
        slice are -inf in A and R, and 0 in the logits."""
        logits = self._padded()
        target, likeliest = logits.gather(1, self._target), logits.gather(1, self._ids)
        logits[:, -1] = -torch.inf
        logits.scatter_(1, self._ids, -torch.inf)
        # in place: `logsumexp` would make one more matrix
        largest = logits.amax(dim=1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
        other_log_sum = largest + logits.sub_(largest).exp_().sum(dim=1, keepdim=True).log()
        own_likeliest = likeliest.masked_fill(self._ids == self._logits.shape[1], -torch.inf)
        whole = torch.cat([other_log_sum, own_likeliest], dim=1).logsumexp(dim=1, keepdim=True)
        return torch.cat([whole, other_log_sum, target, likeliest], dim=1).T.contiguous()

    def losses(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return KL and -log p (rows, 2) of each row. numbers: over all slices."""
        q, r = self._teacher_log_q(), self._log_r(numbers)
        share = q.exp()
        kl = (share * (q - r)).where(share > 0, 0.0).sum(dim=1)
        losses = torch.stack([kl, numbers[0] - numbers[2]], dim=1)
        return losses.masked_fill(self._ignored[:, None], 0.0)

    def slopes(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the slopes (rows, columns) of each row's loss by this slice's logits. A token
        outside the likeliest has the share exp(z_j - R) of the slope of all others."""
        t, sft = self._teacher.temperature, self._teacher.sft_weight
        outcome_slopes = t * (self._log_r(numbers).exp() - self._teacher_log_q().exp())
        outcome_slopes += sft * (_outcomes(numbers) - numbers[0][:, None]).exp()
        outcome_slopes.masked_fill_(self._ignored[:, None], 0.0)
        slopes = self._padded()
        slopes.sub_(numbers[1][:, None]).exp_().mul_(outcome_slopes[:, -1:])
        slopes.scatter_(1, self._ids, outcome_slopes[:, :-1])
        slopes.scatter_add_(1, self._target, outcome_slopes.new_full((len(slopes), 1), -sft))
        return slopes[:, :-1]

    def _teacher_log_q(self) -> torch.Tensor:
        return (self._teacher.log_probs / self._teacher.temperature).log_softmax(dim=1)

    def _log_r(self, numbers: torch.Tensor) -> torch.Tensor:
        return (_outcomes(numbers) / self._teacher.temperature).log_softmax(dim=1)


def _outcomes(numbers: torch.Tensor) -> torch.Tensor:
    """Return z_i and R (rows, k + 1)."""
    return torch.cat([numbers[SUMS + 1 :], numbers[1:SUMS]]).T


def over_slices(numbers: torch.Tensor) -> torch.Tensor:
    """Combine the numbers (slices, 3 + k, rows) of all slices to (3 + k, rows)."""
    return torch.cat([numbers[:, :SUMS].logsumexp(dim=0), numbers[:, SUMS:].sum(dim=0)])


@dataclass(frozen=True)
class OutputHead:
    """logits = softcap * tanh(scale * head(h) / softcap), without the cap if it is None; fp32."""

    module: nn.Module
    scale: float
    softcap: float | None
    fused: bool = True  # whether kernels compute its loss where they can

    @property
    def form(self) -> LogitForm:
        """Its scale and cap after the matmul."""
        return LogitForm(self.scale, self.softcap)

    @property
    def vocab_size(self) -> int:
        weight = self.module.weight
        assert isinstance(weight, torch.Tensor)
        return weight.shape[0]

    def chunk_rows(self, slices: int) -> int:
        """Return the rows of a chunk from each process with one of so many slices."""
        weight: Any = self.module.weight
        whole = bool(trained_parts(self.module)) and not hasattr(self.module, ROWS)
        by_kernels = self.fused and weight.device.type in GPUS  # torch has copies in fp32
        times = TRAINED_ROWS if whole and by_kernels else 1
        return chunk_rows(slices, vocab_size=self.vocab_size, times=times)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.finished(self.module(hidden))

    def finished(self, raw_logits: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits of the head's matmul, element by element."""
        logits = raw_logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


class LinearCrossEntropy(nn.Module):
    """-log softmax(logits)[target] of rows, by the model's own head (`objectives.objective.Head`).
    A head divided among processes overrides `chunks`, `weight_and_bias` and `chunk_losses`."""

    def __init__(self, head: OutputHead) -> None:
        super().__init__()
        self.head = head  # no module, so that the model's head is no submodule of this one

    def summed_loss(
        self, states: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return sum(w (-log p)) () fp32; 0 with a gradient if there are no rows. states: (rows,
        hidden_size); targets: (rows,) int64; weights: (rows,) fp32, None = 1."""
        loss: torch.Tensor = self(states, targets, weights)
        return loss

    def log_probs(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return log p (rows,) fp32 of the targets; 0 where a target is `IGNORED`."""
        losses: torch.Tensor = self(states, targets, by_row=True)
        return -losses

    def distilled_losses(
        self, states: torch.Tensor, targets: torch.Tensor, teacher: Teacher
    ) -> torch.Tensor:
        """Return T^2 KL + sft_weight (-log p) (rows,), without a gradient."""
        kl, nll = self.computed(states, targets, None, None, teacher).losses.unbind(1)
        return teacher.temperature**2 * kl + teacher.sft_weight * nll

    def distilled_loss(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        teacher: Teacher,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of w (T^2 KL + sft_weight (-log p)) (), and w KL and w (-log p) (2,)."""
        sums: tuple[torch.Tensor, torch.Tensor] = self(states, targets, weights, teacher=teacher)
        return sums

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        by_row: bool = False,
        teacher: Teacher | None = None,
    ) -> Any:
        """Return as `summed_loss` or `distilled_loss`, or the losses of each row (rows,) fp32."""
        masters = trained_parts(self.head.module)
        if by_row:
            return _RowLosses.apply(hidden, targets, self, *masters)  # type: ignore[no-untyped-call]
        return _SummedLoss.apply(hidden, targets, weights, teacher, self, *masters)  # type: ignore[no-untyped-call]

    def computed(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        masters: Sequence[torch.Tensor] | None,
        teacher: Teacher | None = None,
    ) -> "Computed":
        """Return the results of all chunks, each row times its weight. masters: of a trained head,
        for their gradients; None: no gradients. teacher: of `distilled_loss`."""
        wants_grad = masters is not None
        trained = self._trained(masters, hidden.dtype) if masters else None
        grad = torch.empty_like(hidden) if wants_grad else None
        shape = (len(targets),) if teacher is None else (len(targets), 2)
        losses = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
        hidden = hidden.detach()
        for rows in self.chunks(len(targets)):
            with torch.set_grad_enabled(wants_grad):
                chunk_losses, chunk_grad = self.chunk_losses(
                    hidden, targets, weights, rows, trained, teacher
                )
            losses[rows] = chunk_losses
            if grad is not None:
                assert chunk_grad is not None
                grad[rows] = chunk_grad
        if weights is not None:
            losses.mul_(weights if teacher is None else weights[:, None])
            if grad is not None and trained is None:
                grad.mul_(weights[:, None])
        return Computed(losses, grad, trained.gradients if trained else [])

    def _trained(self, masters: Sequence[torch.Tensor], dtype: torch.dtype) -> "TrainedHead":
        module: Any = self.head.module
        if hasattr(module, ROWS):
            slices = getattr(module, ROWS).within(module.weight)
            return TrainedHead(*self.weight_and_bias(), masters, slices)
        weight, *bias = (master.detach().to(dtype) for master in masters)
        return TrainedHead(weight, bias[0] if bias else None, masters)

    def chunk_rows(self) -> int:
        return self.head.chunk_rows(1)

    def equal_rows(self) -> AbstractContextManager[None]:
        """Within the block all processes have equally many rows, and exchange no counts."""
        return nullcontext()

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk of the loss of `num_rows` rows."""
        size = self.chunk_rows()
        for start in range(0, num_rows, size):
            yield slice(start, start + size)

    def weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        module: Any = self.head.module
        return module.weight, module.bias

    def by_kernels(self, hidden: torch.Tensor) -> bool:
        """Return whether kernels compute the loss of these hidden states; torch does in fp32."""
        return self.head.fused and usable(hidden, self.head.form)

    def fused_logits(self, hidden: torch.Tensor, trained: "TrainedHead | None") -> FusedLogits:
        """Return the logits of hidden states, for `by_kernels`."""
        if trained is None:
            raw_logits = head_matmul(hidden, *self.weight_and_bias())
        else:
            raw_logits = trained.raw_logits(hidden).detach()
        return FusedLogits(raw_logits, self.head.form)

    def states_gradient(
        self,
        slopes: torch.Tensor,
        hidden: torch.Tensor,
        weights: torch.Tensor | None,
        trained: "TrainedHead | None",
    ) -> torch.Tensor:
        """Return the gradient of hidden states for `slopes`, the gradient of the head's matmul; add
        a trained head's to `trained`, of rows times their weights."""
        if trained is None:
            return states_gradient(slopes, self.weight_and_bias()[0])
        return trained.backward(hidden, slopes, weights)

    def leaf_and_logits(
        self, hidden: torch.Tensor, trained: "TrainedHead | None"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensor that a chunk's loss is differentiated by, and the fp32 logits computed
        from it. For a frozen head it is the hidden states. For a trained head it is the head's
        matmul: `TrainedHead.backward` continues from there."""
        if trained is None:
            leaf = hidden.detach().requires_grad_(torch.is_grad_enabled())
            return leaf, self.head.finished(frozen_logits(leaf, *self.weight_and_bias()))
        leaf = trained.raw_logits(hidden)
        return leaf, self.head.finished(leaf)

    def chunk_losses(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        rows: slice,
        trained: "TrainedHead | None",
        teacher: Teacher | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses of a chunk's rows and the gradient of their sum by `hidden[rows]`, None
        where gradients are off. Rows have no weights here. Only with a trained head both gradients
        have them, and the head's is added to `trained`. With a teacher the losses are KL and -log p
        (rows, 2), and the gradient is that of `distilled_loss`."""
        states, targets = hidden[rows], targets[rows]
        weights = None if weights is None else weights[rows]
        if teacher is None and self.by_kernels(states):
            fused = self.fused_logits(states, trained)
            log_sums, chosen = fused.sums(targets)
            losses = (log_sums - chosen).masked_fill(targets == IGNORED, 0.0)
            if not torch.is_grad_enabled():
                return losses, None
            slopes = fused.slopes(log_sums, targets)
            return losses, self.states_gradient(slopes, states, weights, trained)
        leaf, logits = self.leaf_and_logits(states, trained)
        if teacher is not None:
            outcomes = Outcomes(logits.detach(), targets, teacher.of(rows))
            numbers = outcomes.numbers()
            losses = outcomes.losses(numbers)
            if not torch.is_grad_enabled():
                return losses, None
            (grad,) = torch.autograd.grad(logits, leaf, outcomes.slopes(numbers))
        else:
            losses = nn.functional.cross_entropy(logits, targets, reduction="none")
            del logits  # else they stay in memory in backward, which needs their log-softmax alone
            if not torch.is_grad_enabled():
                return losses, None
            (grad,) = torch.autograd.grad(losses.sum(), leaf)
        if trained is not None:
            grad = trained.backward(states, grad, weights)
        return losses.detach(), grad


class Computed(NamedTuple):
    """Results of a micro-batch: losses (rows,), gradients of their sum: states, trained head."""

    losses: torch.Tensor
    grad: torch.Tensor | None
    head_grads: list[torch.Tensor]


class _SummedLoss(torch.autograd.Function):
    """The sum of all rows' losses, with a teacher also of their parts; forward computes
    gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        teacher: Teacher | None,
        cross_entropy: LinearCrossEntropy,
        *masters: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        wanted = masters if ctx.needs_input_grad[0] else None
        computed = cross_entropy.computed(hidden, targets, weights, wanted, teacher)
        # Not by `save_for_backward`: backward scales these results in place and frees them.
        ctx.grad, ctx.head_grads = computed.grad, computed.head_grads
        if teacher is None:
            return computed.losses.sum()
        sums = torch.stack([*map(exact_sum, computed.losses.unbind(1))])
        ctx.mark_non_differentiable(sums)
        return teacher.temperature**2 * sums[0] + teacher.sft_weight * sums[1], sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The loss keeps this node alive, so only what the node drops is freed after its use.
        grad, ctx.grad = ctx.grad, None
        head_grads, ctx.head_grads = ctx.head_grads, []
        scaled = (g.mul_(grads[0]) for g in head_grads)
        return grad.mul_(grads[0]), None, None, None, None, *scaled


class _RowLosses(torch.autograd.Function):
    """The losses of all rows. Forward computes gradients of a frozen head; backward
    computes a trained head's, whose sum over rows needs the rows' slopes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        cross_entropy: LinearCrossEntropy,
        *masters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = () if ctx.needs_input_grad[0] and not masters else None
        computed = cross_entropy.computed(hidden, targets, None, wanted)
        ctx.grad, ctx.cross_entropy = computed.grad, cross_entropy
        if masters:
            ctx.save_for_backward(hidden, targets, *masters)
        return computed.losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, ctx.grad = ctx.grad, None
        if grad is not None:
            return grad.mul_(grads[0][:, None]), None, None
        hidden, targets, *masters = ctx.saved_tensors
        again = ctx.cross_entropy.computed(hidden, targets, grads[0], masters)
        return again.grad, None, None, *again.head_grads


class TrainedHead:
    """A trained head's weight (vocab, hidden) and bias (vocab,) in the compute dtype, and its
    masters' gradients in fp32, summed over chunks of rows. slices: the weight's rows in the first
    master, and these rows of the master; by default all."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        masters: Sequence[torch.Tensor],
        slices: tuple[slice, slice] = (slice(None), slice(None)),
    ) -> None:
        self.weight, self._bias, self._slices = weight, bias, slices
        self.gradients = [torch.zeros_like(master) for master in masters]

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the matmul (rows, vocab) of states (rows, hidden) as a leaf with a gradient."""
        return head_matmul(hidden, self.weight, self._bias).requires_grad_()

    def backward(
        self, hidden: torch.Tensor, slope: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the gradients of weight and bias for the slope (rows, vocab) of a matmul times the
        rows' weights (rows,); return the gradient of the hidden states."""
        weight, *bias = self.gradients
        if weights is not None:
            slope = slope.mul_(weights[:, None])
        slope = with_aligned_rows(slope)
        columns, rows = self._slices
        # By pieces of the vocabulary: a matmul for the whole weight would be as large as the head,
        # for every chunk, before it is added in fp32.
        for start in range(0, len(weight[rows]), GRADIENT_ROWS):
            part = slice(start, start + GRADIENT_ROWS)
            weight[rows][part] += slope[:, columns][:, part].T @ hidden
        for gradient in bias:
            gradient += slope.sum(dim=0, dtype=torch.float32)
        return states_gradient(slope, self.weight)
