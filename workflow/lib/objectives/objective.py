"""The interface between the output head and objectives, and the losses of single tokens: supervised
training, and distillation.

The head computes gradients together with log-probabilities, chunk by chunk, so a slope that is
known beforehand costs nothing: `summed_loss` and `distilled_loss`. Slopes that follow from the
log-probabilities themselves (preferences: of the sums over documents) come in backward:
`log_probs`. Then a fully trained head computes its chunks twice, since the gradient of its weight
is a sum over all tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.kernels.attention.head_exchange import RowCut
from workflow.lib.kernels.loss.fused_logits import IGNORED


class Teacher(NamedTuple):
    """A teacher's outcomes of n trained tokens. The loss of a token is T^2 KL(teacher || student) +
    sft_weight (-log p). KL is over k + 1 outcomes, the teacher's likeliest tokens and all others
    together, whose log-probabilities T divides on both sides."""

    ids: torch.Tensor  # (n, k) int64
    log_probs: torch.Tensor
    """(n, k + 1) fp32, the last of all other tokens; -inf without others."""
    temperature: float
    sft_weight: float

    def of(self, rows: slice) -> "Teacher":
        """Return the outcomes of some of the tokens."""
        return self._replace(ids=self.ids[rows], log_probs=self.log_probs[rows])


class Head(Protocol):
    """The output head: trained tokens by the hidden states that predict them."""

    def summed_loss(
        self, states: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Return sum(w (-log p)) () fp32. states: (n, hidden_size); targets: (n,) int64; weights:
        (n,) fp32, None = 1."""

    def distilled_loss(
        self,
        states: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        teacher: Teacher,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over tokens of w times the loss of `Teacher` () fp32, and the sums (2,) of
        w KL and w (-log p) without a gradient."""

    def log_probs(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return log p (n,) fp32 of each target; 0 of padding."""

    def distilled_losses(
        self, states: torch.Tensor, targets: torch.Tensor, teacher: Teacher
    ) -> torch.Tensor:
        """Return each token's loss of `Teacher` (n,) fp32, without a gradient."""


@dataclass(frozen=True, kw_only=True)
class TokensOfBatch:
    """A micro-batch of n trained tokens for an objective. All ids are int64. Fields for some
    objectives are None for others. A CUDA graph's have padding at the end (`PADDING`): tokens of
    the first document, examples of none, documents without a token."""

    positions: torch.Tensor  # (n,) of the states that predict trained tokens
    targets: torch.Tensor  # (n,) trained tokens
    bounds: tuple[torch.Tensor, int]  # (documents + 1,) their first positions, the end; the longest
    weights: torch.Tensor | None = None  # (n,) fp32 of trained tokens; None = 1
    firsts: torch.Tensor | None = None  # (examples,) documents that are the first of two
    desirable: torch.Tensor | None = None  # (examples,) bool, of rated answers
    advantages: torch.Tensor | None = None  # (n,) fp32, of the answers that trained tokens are of
    sampled_log_probs: torch.Tensor | None = None
    """(n,) fp32, log p of trained tokens by the model that sampled them."""
    reference: torch.Tensor | None = None  # (n,) fp32, log p of trained tokens by the reference
    scored: torch.Tensor | None = None
    """(n,) fp32, the same by another model, where the reference is the start of the training."""
    teacher_ids: torch.Tensor | None = None  # (n, k), the teacher's likeliest tokens
    teacher_log_probs: torch.Tensor | None = None
    """(n, k + 1) fp32, log p of these and of all others together."""
    cut: RowCut | None = None
    """Of rows that processes share; documents are those of whole rows."""
    step_sizes: torch.Tensor | None = None  # of the step (`Objective.step_sizes`), fp32
    estimate: torch.Tensor | None = None
    """() fp32, of the step: the figure `Objective.estimated`; None before its computation."""


BY_TOKEN = (
    *("targets", "weights", "advantages", "sampled_log_probs", "reference", "scored"),
    *("teacher_ids", "teacher_log_probs"),
)
"""Fields of `TokensOfBatch` with a row for each trained token, besides `positions`."""
BY_EXAMPLE = ("firsts", "desirable")
PADDING = {"targets": IGNORED, "teacher_ids": IGNORED, "firsts": -1}
"""The values of padding in fields of both kinds that are not 0."""


class TokensOfRows(Protocol):
    """Rows for an objective (`data.tokens.token_store.TokenStore`)."""

    @property
    def weights_per_row(self) -> npt.NDArray[Any]:
        """(rows,), the sum over trained tokens."""

    @property
    def position_ids(self) -> npt.NDArray[Any]:
        """(rows, seq_len)"""

    @property
    def loss_mask(self) -> npt.NDArray[Any]:
        """(rows, seq_len) bool"""

    @property
    def desirable(self) -> npt.NDArray[np.bool_] | None:
        """(rows, seq_len) bool, of rated answers."""


class Figure(NamedTuple):
    """A step's number beside its loss: a sum over micro-batches, divided by a size."""

    name: str  # in `metrics.jsonl`
    per: int = 0  # which of `Objective.step_sizes`


class DocumentSums(NamedTuple):
    """Measured documents (documents,) float64, those of an example next to each other: sums over
    the trained tokens."""

    log_p: torch.Tensor
    tokens: torch.Tensor
    loss: torch.Tensor  # of the tokens' losses by the objective, times their weights
    weight: torch.Tensor  # of the tokens' weights
    reference: torch.Tensor | None = None  # of log p by the reference
    desirable: torch.Tensor | None = None  # bool, of rated answers


class Objective(Protocol):
    """A step's loss = the sum of `loss` over micro-batches / the first of `step_sizes`."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """A step's numbers beside its loss."""

    @property
    def estimated(self) -> int | None:
        """The figure that the loss needs of the whole step, by number: a forward of all
        micro-batches computes it first; None: none."""

    @property
    def dropout(self) -> bool:
        """Whether training drops activations; preferences compare the model with its reference,
        and dropout would be part of the difference."""

    @property
    def flat(self) -> bool:
        """Whether the gradient can be exactly 0 where the divisor is not, in a healthy run."""

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss () fp32 of a micro-batch, and the sums of its figures
        (figures,) fp32 without a gradient, None without any; states: (n, hidden_size)."""

    def token_losses(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        """Return the loss (n,) fp32 of each trained token without its weight and a gradient; -log p
        where losses are of documents."""

    def example_losses(self, documents: DocumentSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each example's summed loss and its size (examples,): the loss of all is the
        quotient of their sums. So are the held-out loss of training and of evaluation."""

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return the sizes of a step of these rows, before it runs."""


def exact_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum () fp32 of values (n,), which padding of 0 does not round otherwise."""
    return values.sum(dtype=torch.float64).float()


def document_sums(values: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
    """Return the sum (documents,) of `values` (n,) over each document's trained tokens, in their
    order on every device; 0 of padding. Collective where rows are shared."""
    sums = values.new_zeros(len(batch.bounds[0]) - 1)
    # atomic additions have a random order: index_put_ sorts first on a GPU
    sums = sums.index_put((document_numbers(batch),), values, accumulate=True)
    return sums if batch.cut is None else batch.cut.summed(sums)


def document_tokens(batch: TokensOfBatch) -> torch.Tensor:
    """Return the number (documents,) fp32 of each document's trained tokens."""
    return document_sums((batch.targets != IGNORED).float(), batch)


def document_numbers(batch: TokensOfBatch) -> torch.Tensor:
    """Return the document (n,) int64 of each trained token, by number in the micro-batch."""
    positions = batch.positions if batch.cut is None else batch.cut.positions
    return torch.searchsorted(batch.bounds[0], positions, right=True) - 1


class OfTokens:
    """What an objective has unless it says otherwise: losses of trained tokens, each by its
    weight w; w is 1 without weights."""

    estimated: int | None = None
    dropout = True

    def token_losses(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        """Return -log p."""
        return -head.log_probs(states, batch.targets)

    def example_losses(self, documents: DocumentSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of each document."""
        return documents.loss, documents.weight

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return sum(w)."""
        return (float(rows.weights_per_row[indices].sum()),)


class NextToken(OfTokens):
    """A step's loss is sum(w (-log p)) / sum(w)."""

    figures: tuple[Figure, ...] = ()
    flat = False

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return sum(w (-log p)) () fp32."""
        return head.summed_loss(states, batch.targets, batch.weights), None


NEXT_TOKEN = NextToken()


@dataclass(frozen=True)
class TokenLosses(NextToken):
    """No loss; its figures are the losses (n,) of each trained token by another objective."""

    objective: Objective

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = self.objective.token_losses(head, states, batch)
        return losses.new_zeros(()), losses


@dataclass(frozen=True)
class Distill(OfTokens):
    """The student learns a teacher's distribution of each trained token (Hinton et al., arXiv
    1503.02531, with forward KL to the teacher's likeliest tokens and all others as one outcome).

    The loss of a step is sum(w (T^2 KL + sft_weight (-log p))) / sum(w) over trained tokens. T^2
    keeps the size of gradients, as published. With k as large as the vocabulary it is the usual
    distillation."""

    temperature: float
    sft_weight: float

    figures = (Figure("teacher_kl"), Figure("sft_loss"))
    flat = True  # a student may equal its teacher

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return head.distilled_loss(states, batch.targets, batch.weights, self._teacher(batch))

    def token_losses(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        """Return T^2 KL + sft_weight (-log p)."""
        return head.distilled_losses(states, batch.targets, self._teacher(batch))

    def _teacher(self, batch: TokensOfBatch) -> Teacher:
        ids, log_probs = batch.teacher_ids, batch.teacher_log_probs
        assert ids is not None, "the tokens have a teacher's scores"
        assert log_probs is not None
        return Teacher(ids, log_probs, self.temperature, self.sft_weight)
