"""The seam between the output head and what is trained.

The head makes gradients while it makes log-probabilities, chunk by chunk, so a slope that is known
before costs nothing: `summed_loss` and `distilled_loss`. Slopes that follow from the
log-probabilities themselves (preferences: of the sums over documents) come in backward:
`log_probs`. Then a head that is trained whole computes its chunks twice, since the gradient of its
weight is a sum over all tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Teacher(NamedTuple):
    """What a teacher says of n trained tokens, and how it is learned: the loss of a token is
    T^2 KL(teacher || student) + sft_weight (-log p). KL is of k + 1 outcomes, the teacher's
    likeliest tokens and all others together, whose log-probabilities T divides on both sides."""

    ids: torch.Tensor  # (n, k) int64
    log_probs: torch.Tensor
    """(n, k + 1) fp32, the last of all other tokens; -inf where there are none."""
    temperature: float
    sft_weight: float

    def of(self, rows: slice) -> "Teacher":
        """Return what it says of some of the tokens."""
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
        """Return log p (n,) fp32 of each target; 0 of one that only pads."""


@dataclass(frozen=True, kw_only=True)
class TokensOfBatch:
    """What an objective reads of a micro-batch of n trained tokens. All ids are int64. What only
    some objectives read is None for others."""

    positions: torch.Tensor  # (n,) of the states that predict trained tokens
    targets: torch.Tensor  # (n,) trained tokens
    bounds: tuple[torch.Tensor, int]  # (documents + 1,) their first positions, the end; the longest
    weights: torch.Tensor | None = None  # (n,) fp32 of trained tokens; None = 1
    firsts: torch.Tensor | None = None  # (examples,) documents that are the first of two
    desirable: torch.Tensor | None = None  # (examples,) bool, of rated answers
    reference: torch.Tensor | None = None  # (n,) fp32, log p of trained tokens by the reference
    teacher_ids: torch.Tensor | None = None  # (n, k), the teacher's likeliest tokens
    teacher_log_probs: torch.Tensor | None = None
    """(n, k + 1) fp32, log p of these and of all others together."""
    step_sizes: torch.Tensor | None = None  # of the step (`Objective.step_sizes`), fp32
    estimate: torch.Tensor | None = None
    """() fp32, of the step: the figure `Objective.estimated`; None before it is known."""


class TokensOfRows(Protocol):
    """What an objective reads of rows (`data.tokens.token_store.TokenStore`)."""

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
    """A number that a step tells beside its loss: a sum over micro-batches, divided by a size."""

    name: str  # in `metrics.jsonl`
    per: int = 0  # which of `Objective.step_sizes`


class Objective(Protocol):
    """A step's loss = the sum of `loss` over micro-batches / the first of `step_sizes`."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """What a step tells beside its loss."""

    @property
    def estimated(self) -> int | None:
        """Which of the figures the loss needs of the whole step: it is found first, by a forward of
        all micro-batches; None: none."""

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss () fp32 of a micro-batch, and the sums of its figures
        (figures,) fp32 without a gradient, None without any; states: (n, hidden_size)."""

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return the sizes of a step of some rows, before anything has run."""


def document_sums(values: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
    """Return the sum (documents,) over each document's trained tokens of what they have (n,), in
    their order on every device; 0 of a document that only pads."""
    bounds, _ = batch.bounds
    document = torch.searchsorted(bounds, batch.positions, right=True) - 1
    sums = values.new_zeros(len(bounds) - 1)
    # atomic additions would come in any order: index_put_ sorts first on a GPU
    return sums.index_put((document,), values, accumulate=True)
