"""Loss and slopes of `objectives.objective.Teacher` for a slice of the vocabulary.

z: logits; A: log-sum-exp of all; R: of the tokens outside the teacher's likeliest i. The student's
outcomes are softmax([z_i, R] / T) = r, the teacher's q. T^2 KL has the slopes T (r_i - q_i) by z_i
and T (r_R - q_R) exp(z_j - R) by the others; -log p has exp(z - A), and 1 less by the target's."""

import torch
from torch.nn.functional import pad

from workflow.lib.kernels.loss.fused_logits import IGNORED
from workflow.lib.objectives.objective import Teacher

SUMS = 2  # how many numbers of a row are log-sum-exp: A and R


class Outcomes:
    """Of rows of fp32 logits (rows, columns), the vocabulary from `first` on; targets, teacher."""

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
