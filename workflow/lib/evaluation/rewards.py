"""A model's preferences on held-out examples: rewards by the run's objective, from summed
log-probabilities of answers.

A pair is right if the chosen answer has the higher reward. A good rated answer is right if its
reward is above the reference point of KTO (arXiv 2402.01306, section 4.1), a bad one if below; the
point is the mean reward of prompts with answers of other rows, at least 0. log p - log p_ref is of
given answers. Its mean is no KL divergence, which is over the model's own answers: it may be
negative."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from workflow.lib.artifacts.evaluation_record import ObjectiveLoss, RewardDifference, Rewards
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents
from workflow.lib.evaluation.intervals import (
    Estimate,
    mean,
    mean_gain,
    positive_ratio,
    signed_ratio,
)
from workflow.lib.evaluation.task_scores import Loss, text_difference_fields
from workflow.lib.objectives import pairs
from workflow.lib.objectives.objective import DocumentSums
from workflow.lib.objectives.pairs import RatedAnswers, reference_point
from workflow.lib.scores.store import ScoreStore
from workflow.lib.settings.config import EvaluateConfig
from workflow.lib.settings.forms import SUBJECTS, TRAINED, SubjectName

Losses = Mapping[int, Loss]
"""(summed -log p, tokens) by document."""


@dataclass(frozen=True)
class Preferences:
    """The held-out examples of two documents with measured rewards, and the reward's formula."""

    firsts: list[int]  # the first document of each
    sources: list[str]  # the name of each one's source
    desirable: list[bool] | None  # of rated answers: whether each is good; None of pairs
    objective: pairs.Pairs | RatedAnswers
    reference: Mapping[int, float] | None
    """The reference's log p of the answer, by document; None for objectives without one, and until
    the reference is measured."""
    measured_reference: SubjectName | None = None
    """The subject that is the reference; None: scores of another model, or no reference."""

    @classmethod
    def of(
        cls,
        store: TokenStore,
        objective: pairs.Pairs | RatedAnswers,
        scores: ScoreStore | None,
        *,
        settings: EvaluateConfig,
        measured_reference: SubjectName | None = None,
    ) -> "Preferences":
        """Choose the examples: all with trained tokens, or `evaluate.max_documents` of them."""
        documents = store.heldout_documents()
        chosen = choose_documents(
            documents[::2], at_most=settings.max_documents, seed=settings.seed
        )
        firsts = [2 * number for number in chosen]
        good = store.heldout_desirable
        reference = None
        if scores is not None:
            both = [number + offset for number in firsts for offset in (0, 1)]
            reference = {n: float(scores.heldout(n).log_probs.sum(dtype=float)) for n in both}
        desirable = None if good is None else [bool(good[n]) for n in firsts]
        every = store.heldout_sources()
        sources = [every[number] for number in firsts]
        return cls(firsts, sources, desirable, objective, reference, measured_reference)

    def with_reference(self, losses: Losses) -> "Preferences":
        """Return the same with the losses of the subject that is the reference."""
        return replace(self, reference={number: -loss for number, (loss, _) in losses.items()})

    @property
    def what(self) -> str:
        """The answers of the held-out loss, in words."""
        return "chosen answers" if self.desirable is None else "good answers"

    @property
    def examples(self) -> str:
        return "pairs" if self.desirable is None else "rated answers"

    @cached_property
    def losses_of(self) -> list[int]:
        """The documents of the held-out loss: chosen, or good, answers."""
        good = self.desirable or [True] * len(self.firsts)
        return [number for number, counts in zip(self.firsts, good, strict=True) if counts]

    @cached_property
    def others(self) -> list[int]:
        every = {number + offset for number in self.firsts for offset in (0, 1)}
        return sorted(every - set(self.losses_of))

    @property
    def subjects(self) -> tuple[SubjectName, ...]:
        if self.measured_reference is not None:
            return (self.measured_reference, *TRAINED)
        return SUBJECTS if self.reference is None else TRAINED

    def margins(self, losses: Losses) -> list[float]:
        """Return the margin of each example: positive if it is right."""
        rewards = self.objective.rewards
        own = rewards(self._answers(self.firsts, losses))
        other = rewards(self._answers([number + 1 for number in self.firsts], losses))
        if self.desirable is None:
            margins: list[float] = (own - other).tolist()
            return margins
        signs = 2.0 * torch.tensor(self.desirable, dtype=torch.float64) - 1.0
        signed: list[float] = (signs * (own - reference_point(other.mean()))).tolist()
        return signed

    def example_losses(self, losses: Losses) -> list[Loss]:
        """Return the objective's loss of each example, and 1."""
        numbers = [number + offset for number in self.firsts for offset in (0, 1)]
        answers = self._answers(numbers, losses)
        good = None if self.desirable is None else torch.tensor(self.desirable)
        sums, _ = self.objective.example_losses(
            DocumentSums(
                log_p=answers.log_p,
                tokens=answers.tokens,
                loss=-answers.log_p,
                weight=answers.tokens,
                reference=answers.reference,
                desirable=None if good is None else good.repeat_interleave(2),
            )
        )
        return [(float(loss), 1) for loss in sums]

    def reference_losses(self, losses: Losses) -> Losses:
        """Return the reference's own losses of the same documents."""
        assert self.reference is not None, "the objective has no reference"
        return {number: (-self.reference[number], n) for number, (_, n) in losses.items()}

    def log_ratios(self, losses: Losses, *, good: bool) -> tuple[list[float], list[float]] | None:
        """Return log p - log p_ref and the tokens of each good or each bad answer; None without a
        reference, or without such answers."""
        numbers = self.losses_of if good else self._bad
        if self.reference is None or not numbers:
            return None
        answers = self._answers(numbers, losses)
        return answers.ratio.tolist(), answers.tokens.tolist()

    @property
    def _bad(self) -> list[int]:
        if self.desirable is None:
            return [number + 1 for number in self.firsts]
        return [n for n, good in zip(self.firsts, self.desirable, strict=True) if not good]

    def _answers(self, numbers: Sequence[int], losses: Losses) -> pairs.Answers:
        sums, tokens = zip(*(losses[number] for number in numbers), strict=True)
        reference = self.reference
        log_p_reference = None if reference is None else [reference[number] for number in numbers]
        return pairs.Answers(
            -torch.tensor(sums, dtype=torch.float64),
            None if log_p_reference is None else torch.tensor(log_p_reference, dtype=torch.float64),
            torch.tensor(tokens, dtype=torch.float64),
        )


def rewards_record(preferences: Preferences, losses: Losses) -> Rewards:
    margins = preferences.margins(losses)
    right = [float(margin > 0) for margin in margins]
    fields = _estimated("accuracy", mean(right)) | _estimated("margin", _mean_margin(margins))
    for name, good in (("chosen_log_ratio", True), ("rejected_log_ratio", False)):
        if ratios := preferences.log_ratios(losses, good=good):
            fields |= _estimated(name, signed_ratio(*ratios))
    examples = {"of": preferences.examples, "examples": len(margins), "margins": margins}
    return Rewards.model_validate(examples | fields)


def objective_record(
    before: Sequence[Loss], after: Sequence[Loss], *, of: str, against: str, sources: Sequence[str]
) -> ObjectiveLoss:
    """Return the objective's loss of a subject's examples, and its difference to that of others.
    sources: of each example."""
    own = positive_ratio(*zip(*after, strict=True))
    return ObjectiveLoss(
        of=of,
        against=against,
        loss=own.value,
        loss_ci95=own.ci95,
        per_example=list(after),
        **text_difference_fields(list(zip(before, after, strict=True)), sources),
    )


def rewards_difference(preferences: Preferences, before: Losses, after: Losses) -> RewardDifference:
    old, new = preferences.margins(before), preferences.margins(after)
    right = ([float(margin > 0) for margin in margins] for margins in (old, new))
    gains = [last - first for first, last in zip(old, new, strict=True)]
    fields = _estimated("accuracy", mean_gain(*right))
    return RewardDifference.model_validate(fields | _estimated("margin", _mean_margin(gains)))


def _mean_margin(margins: Sequence[float]) -> Estimate:
    return signed_ratio(margins, [1.0] * len(margins))


def _estimated(name: str, estimate: Estimate) -> dict[str, Any]:
    return {name: estimate.value, f"{name}_ci95": estimate.ci95}
