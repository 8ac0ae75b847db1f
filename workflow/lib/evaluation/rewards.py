"""A model's preferences on held-out examples: rewards by the run's objective, from summed
log-probabilities of answers.

A pair is right if the chosen answer has the higher reward. A good rated answer is right if its
reward is above the reference point of KTO (arXiv 2402.01306, section 4.1), a bad one if below; the
point is the mean reward of prompts with answers of other rows, at least 0. log p - log p_ref is of
given answers. Its mean is no KL divergence, which is over the model's own answers: it may be
negative."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from workflow.lib.artifacts.evaluation_record import RewardDifference, Rewards
from workflow.lib.data.tokens.token_store import TokenStore, choose_documents
from workflow.lib.evaluation.task_scores import draws_of, estimate_ratio
from workflow.lib.objectives import pairs
from workflow.lib.scores.store import ScoreStore
from workflow.lib.settings.config import EvaluateConfig
from workflow.lib.settings.subjects import SUBJECTS, SubjectName

# Subjects whose log-probabilities differ from the reference's because of the training.
TRAINED: tuple[SubjectName, ...] = ("tuned", "tuned_on_original", "merged")
Losses = Mapping[int, tuple[float, int]]
"""(summed -log p, tokens) by document."""


@dataclass(frozen=True)
class Preferences:
    """The held-out examples of two documents with measured rewards, and the reward's formula."""

    firsts: list[int]  # the first document of each
    desirable: list[bool] | None  # of rated answers: whether each is good; None of pairs
    rewards: pairs.Rewards
    reference: Mapping[int, float] | None
    """The reference's log p of the answer, by document; None for objectives without one."""

    @classmethod
    def of(
        cls,
        store: TokenStore,
        rewards: pairs.Rewards,
        scores: ScoreStore | None,
        *,
        settings: EvaluateConfig,
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
            both = [number + place for number in firsts for place in (0, 1)]
            reference = {n: float(scores.heldout(n).log_probs.sum(dtype=float)) for n in both}
        return cls(
            firsts, None if good is None else [bool(good[n]) for n in firsts], rewards, reference
        )

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
        every = {number + place for number in self.firsts for place in (0, 1)}
        return sorted(every - set(self.losses_of))

    @property
    def subjects(self) -> tuple[SubjectName, ...]:
        return SUBJECTS if self.reference is None else TRAINED

    def margins(self, losses: Losses) -> list[float]:
        """Return the margin of each example: positive if it is right."""
        own = self.rewards(self._answers(self.firsts, losses))
        other = self.rewards(self._answers([number + 1 for number in self.firsts], losses))
        if self.desirable is None:
            margins: list[float] = (own - other).tolist()
            return margins
        signs = 2.0 * torch.tensor(self.desirable, dtype=torch.float64) - 1.0
        signed: list[float] = (signs * (own - other.mean().clamp(min=0.0))).tolist()
        return signed

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
        of_reference = None if reference is None else [reference[number] for number in numbers]
        return pairs.Answers(
            -torch.tensor(sums, dtype=torch.float64),
            None if of_reference is None else torch.tensor(of_reference, dtype=torch.float64),
            torch.tensor(tokens, dtype=torch.float64),
        )


def rewards_record(
    preferences: Preferences, losses: Losses, *, settings: EvaluateConfig
) -> Rewards:
    margins = preferences.margins(losses)
    fields = _of_margins([float(m > 0) for m in margins], margins, settings=settings)
    for name, good in (("chosen_log_ratio", True), ("rejected_log_ratio", False)):
        if ratios := preferences.log_ratios(losses, good=good):
            fields |= _estimated(name, *ratios, settings=settings)
    return Rewards.model_validate({"of": preferences.examples, "examples": len(margins), **fields})


def rewards_difference(
    preferences: Preferences, before: Losses, after: Losses, *, settings: EvaluateConfig
) -> RewardDifference:
    both = list(zip(preferences.margins(before), preferences.margins(after), strict=True))
    right = [float(new > 0) - float(old > 0) for old, new in both]
    fields = _of_margins(right, [new - old for old, new in both], settings=settings)
    return RewardDifference.model_validate(fields)


def _of_margins(
    right: list[float], margins: list[float], *, settings: EvaluateConfig
) -> dict[str, Any]:
    ones = [1.0] * len(margins)
    return _estimated("accuracy", right, ones, settings=settings) | _estimated(
        "margin", margins, ones, settings=settings
    )


def _estimated(
    name: str, tops: list[float], bottoms: list[float], *, settings: EvaluateConfig
) -> dict[str, Any]:
    """Return a ratio of sums and its interval as fields; there is none of a single unit."""
    estimate = estimate_ratio(tops, bottoms, **draws_of(settings))
    return {name: sum(tops) / sum(bottoms), f"{name}_ci95": estimate.ci95}
