"""Rewards of held-out answers, counted by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from workflow.lib.data.tokens.token_store import ARRAYS, DESIRABLE, TokenStore
from workflow.lib.evaluation.rewards import (
    Preferences,
    objective_record,
    rewards_difference,
    rewards_record,
)
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.scores.store import Scores
from workflow.lib.settings.config import (
    DistillConfig,
    EvaluateConfig,
    GrpoConfig,
    PreferencesConfig,
)
from workflow.lib.settings.forms import TRAINED

SETTINGS = EvaluateConfig(tasks=())
LENGTH = 5
# -log p of three examples of two documents, each of two trained tokens
LOSSES = {0: (2.0, 2), 1: (5.0, 2), 2: (6.0, 2), 3: (4.0, 2), 4: (1.0, 2), 5: (7.0, 2)}
REFERENCE = {0: -3.0, 1: -4.0, 2: -5.0, 3: -5.0, 4: -2.0, 5: -3.0}
# log p - log p_ref: 1, -1; -1, 1; 1, -4


def pairs_store(*, examples="pairs", good=None):
    """Return a store with as many held-out documents as there are losses."""
    count, row = len(LOSSES), np.zeros((1, LENGTH))
    mask = np.tile(np.arange(LENGTH) >= 3, count)
    arrays = dict(zip(ARRAYS, [row, row, row, np.arange(count * LENGTH), mask], strict=False))
    arrays["heldout.offsets.npy"] = np.arange(count + 1) * LENGTH
    if good is not None:
        tokens = np.repeat(np.repeat(good, 2), LENGTH)
        arrays |= dict(zip(DESIRABLE, [row, tokens], strict=True))
    sources = [{"source": "a", "documents": 2}, {"source": "b", "documents": 4}]
    manifest = {"examples": examples, "splits": {"heldout": {"sources": sources}}}
    return TokenStore(manifest=manifest, arrays=arrays)


def reference_scores():
    """Return what a reference says of the same documents: half of its sum on each token."""
    halves = {n: np.full(2, total / 2, dtype=np.float32) for n, total in REFERENCE.items()}
    return SimpleNamespace(heldout=lambda number: Scores(halves[number]))


def preferences(name, *, scores=None, settings=SETTINGS, good=None, **given):
    objective = objective_of(name, PreferencesConfig(**given), DistillConfig(), GrpoConfig())
    store = pairs_store(examples="pairs" if good is None else "rated", good=good)
    return Preferences.of(store, objective, scores, settings=settings)


def test_pair_is_right_by_the_difference_of_its_rewards():
    asked = preferences("dpo", scores=reference_scores(), beta=0.5)
    assert asked.margins(LOSSES) == pytest.approx([1.0, -1.0, 2.5])
    found = rewards_record(asked, LOSSES)
    assert (found.of, found.examples) == ("pairs", 3)
    assert (found.accuracy, found.margin) == pytest.approx((2 / 3, 2.5 / 3))
    low, high = found.accuracy_ci95
    assert 0.0 <= low < found.accuracy < high <= 1.0
    assert found.margins == pytest.approx([1.0, -1.0, 2.5])
    assert found.margin_ci95 is None, "of three pairs"


def test_distance_to_the_reference_is_of_the_answers_tokens():
    asked = preferences("dpo", scores=reference_scores())
    found = rewards_record(asked, LOSSES)
    assert found.chosen_log_ratio == pytest.approx((1 - 1 + 1) / 6)
    assert found.rejected_log_ratio == pytest.approx((-1 + 1 - 4) / 6)


def test_measured_start_is_the_reference():
    """Its log p are those of the same forward as the subjects'."""
    objective = objective_of("dpo", PreferencesConfig(beta=0.5), DistillConfig(), GrpoConfig())
    asked = Preferences.of(
        pairs_store(), objective, None, settings=SETTINGS, measured_reference="base"
    )
    assert asked.subjects == ("base", *TRAINED)
    base = {number: (-total, 2) for number, total in REFERENCE.items()}
    stored = preferences("dpo", scores=reference_scores(), beta=0.5)
    assert asked.with_reference(base).margins(LOSSES) == stored.margins(LOSSES)


def test_objectives_loss_is_of_an_example_and_paired_with_the_references():
    """Margins of rewards are 1, -1, 2.5; the reference's own losses are log 2."""
    asked = preferences("dpo", scores=reference_scores(), beta=0.5)
    own = [math.log1p(math.exp(-margin)) for margin in (1.0, -1.0, 2.5)]
    after = asked.example_losses(LOSSES)
    assert after == [(pytest.approx(loss), 1) for loss in own]
    before = asked.example_losses(asked.reference_losses(LOSSES))
    assert before == [(pytest.approx(math.log(2)), 1)] * 3
    found = objective_record(before, after, of="pairs", against="reference", sources=asked.sources)
    assert found.loss == pytest.approx(sum(own) / 3)
    assert found.loss_difference == pytest.approx(math.log(2) - sum(own) / 3)
    assert found.per_example == after
    assert found.sources["b"].loss_difference == pytest.approx(math.log(2) - sum(own[1:]) / 2)


def test_objectives_loss_of_rated_answers_has_the_reference_point_of_all():
    asked = preferences(
        "kto", scores=reference_scores(), good=[True, False, False], beta=0.5, desirable_weight=2.0
    )
    higher = LOSSES | {5: (0.0, 2)}  # of other rows' answers -1, 1, 3: the point is 1

    def lost(reward):
        return 1 / (1 + math.exp(reward))

    expected = [2.0 * lost(0.5 * (1 - 1)), lost(0.5 * (1 + 1)), lost(0.5 * (1 - 1))]
    assert asked.example_losses(higher) == [(pytest.approx(loss), 1) for loss in expected]


def test_reward_without_a_reference_is_by_the_length_of_the_answer():
    asked = preferences("simpo", beta=2.0)
    longer = LOSSES | {1: (5.0, 10)}  # half a nat per token, the chosen answer one
    assert asked.margins(longer) == pytest.approx([2 * (0.5 - 1.0), 2 * -1.0, 2 * 3.0])
    found = rewards_record(asked, longer)
    assert (found.chosen_log_ratio, found.rejected_log_ratio) == (None, None)


def test_rated_answer_is_right_on_its_side_of_the_reference_point():
    """log p - log p_ref of the answers are 1, -1, 1; of other rows' answers -1, 1, -4, whose mean
    is below 0, so the point is 0.
    """
    asked = preferences("kto", scores=reference_scores(), good=[True, False, False], beta=0.5)
    assert asked.margins(LOSSES) == pytest.approx([0.5, 0.5, -0.5])
    higher = LOSSES | {5: (0.0, 2)}  # of other rows' answers -1, 1, 3: the point is 1
    assert asked.margins(higher) == pytest.approx([0.0, 1.0, 0.0])
    found = rewards_record(asked, LOSSES)
    assert (found.of, found.accuracy) == ("rated answers", pytest.approx(2 / 3))
    assert found.chosen_log_ratio_ci95 is None, "an interval of one answer"


def test_heldout_loss_is_of_chosen_or_good_answers_alone():
    assert preferences("simpo").losses_of == [0, 2, 4]
    assert preferences("simpo").others == [1, 3, 5]
    rated = preferences("kto", scores=reference_scores(), good=[True, False, True])
    assert (rated.losses_of, rated.others) == ([0, 4], [1, 2, 3, 5])


def test_max_documents_takes_whole_examples():
    asked = preferences("simpo", settings=SETTINGS.model_copy(update={"max_documents": 2}))
    assert len(asked.losses_of) == 2
    assert asked.others == [number + 1 for number in asked.losses_of]


def test_rewards_by_a_reference_are_those_of_trained_models():
    """Of the model that is the reference they are 0."""
    assert "base" not in preferences("dpo", scores=reference_scores()).subjects
    assert {"original", "base", "start", "tuned"} <= {*preferences("orpo").subjects}


def test_difference_is_paired_over_examples():
    asked = preferences("simpo", beta=2.0)
    found = rewards_difference(
        asked,
        LOSSES,
        {n: (loss / 2, count) for n, (loss, count) in LOSSES.items()},
    )
    low, high = found.accuracy_ci95
    assert found.accuracy == 0.0, "both are right on the same pairs"
    assert low == -high < 0, "three pairs without a change say little about others"
    assert found.margin == pytest.approx(-(3 - 2 + 6) / 2 / 3)
