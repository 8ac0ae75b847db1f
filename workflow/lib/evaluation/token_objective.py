"""The run's loss of held-out documents where it is not the mean -log p of their trained tokens: of
tokens with weights, and of a teacher's student. The objective's own functions compute it, as they
do while the run trains (`training.best_adapter`)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.evaluation.task_scores import Loss
from workflow.lib.model.loss.chunked_loss import LinearCrossEntropy, OutputHead, TrainedHead
from workflow.lib.objectives.objective import DocumentSums, NextToken, Objective, TokensOfBatch
from workflow.lib.quantization.calibration import SummedLoss

CHUNK_ROWS = 1024  # rows in fp32 at a time: 0.5 GiB at a 128k vocabulary


class LogitsHead(LinearCrossEntropy):
    """An output head whose hidden states are logits."""

    def __init__(self) -> None:
        super().__init__(OutputHead(nn.Identity(), scale=1.0, softcap=None, fused=False))

    def chunk_rows(self) -> int:
        return CHUNK_ROWS

    def leaf_and_logits(
        self, hidden: torch.Tensor, trained: TrainedHead | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, hidden.float()


@dataclass(frozen=True)
class TokenObjective:
    """An objective of single tokens, and the tokens' weights and teacher's scores in `store`."""

    objective: Objective
    store: TokenStore

    @classmethod
    def of(cls, store: TokenStore, objective: Objective) -> "TokenObjective | None":
        """Return None if the loss is the mean -log p."""
        plain = isinstance(objective, NextToken) and not store.heldout_is_weighted
        return None if plain else cls(objective, store)

    @property
    def is_weighted_loss(self) -> bool:
        """Whether the loss is -log p, by weights; else it has a teacher."""
        return isinstance(self.objective, NextToken)

    def summed(self, numbers: Sequence[int]) -> SummedLoss:
        """Return the function that sums the weighted losses of some trained tokens of one of these
        documents."""
        head = LogitsHead()

        def summed(
            index: int, tokens: slice, logits: torch.Tensor, targets: torch.Tensor
        ) -> torch.Tensor:
            number = numbers[index]
            batch = self._tokens(number, tokens, targets)
            losses = self.objective.token_losses(head, logits, batch)
            weights = torch.from_numpy(self.store.heldout_weights(number)[tokens])
            return losses.double().cpu() @ weights

        return summed

    def _tokens(self, number: int, tokens: slice, targets: torch.Tensor) -> TokensOfBatch:
        every = torch.arange(len(targets))
        batch = TokensOfBatch(positions=every, targets=targets, bounds=(every[:0], 0))
        if self.is_weighted_loss:
            return batch
        scores = self.store.scores.heldout(number)
        ids = torch.from_numpy(scores.top_ids[tokens].astype(np.int64))
        log_probs = torch.from_numpy(scores.outcomes()[tokens])
        device = targets.device
        return replace(batch, teacher_ids=ids.to(device), teacher_log_probs=log_probs.to(device))

    def example_losses(
        self, numbers: Sequence[int], losses: Sequence[Loss], sums: Sequence[float]
    ) -> list[Loss]:
        """Return each document's loss and its size. sums: of `summed`."""
        nll, tokens = torch.tensor(losses, dtype=torch.float64).unbind(1)
        weights = [float(self.store.heldout_weights(number).sum()) for number in numbers]
        pairs = self.objective.example_losses(
            DocumentSums(
                log_p=-nll,
                tokens=tokens,
                loss=torch.tensor(sums, dtype=torch.float64),
                weight=torch.tensor(weights, dtype=torch.float64),
            )
        )
        return list(zip(*(x.tolist() for x in pairs), strict=True))

    def facts(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return all that decides the loss besides the documents: the objective, and a hash of
        weights and scores."""
        digest = hashlib.sha256()
        for number in numbers:
            digest.update(self.store.heldout_weights(number).tobytes())
            if not self.is_weighted_loss:
                scores = self.store.scores.heldout(number)
                digest.update(scores.top_ids.tobytes() + scores.outcomes().tobytes())
        return {"objective": vars(self.objective), "tokens": digest.hexdigest()}
