import json

import numpy as np
import pytest

from workflow.lib.artifacts.evaluation_record import Metric, Task
from workflow.lib.evaluation.task_scores import TaskScores, estimate_ratio, task_differences


def made(values, *, value=None):
    items = {(n, "document", "prompt"): v for n, v in enumerate(values)}
    mean = float(np.mean(values)) if value is None else value
    metrics = {"acc": Metric(value=mean, stderr=None, higher_is_better=None)}
    return TaskScores(
        scores={"t": Task(metrics=metrics, items=len(values), version=None)},
        items={("t", "acc"): items} if value is None else {},
    )


def test_difference_is_tuned_minus_base_with_an_interval_over_paired_items():
    base, tuned = made([0.0, 1.0] * 50), made([0.5, 1.5] * 50)
    found = task_differences(base, tuned, resamples=100, seed=0)
    assert found["t"]["acc"].as_json() == {
        "difference": 0.5,
        "difference_ci95": (0.5, 0.5),
        "p_value": pytest.approx(2 / 101),
        "test": "paired bootstrap",
        "gained": None,
        "lost": None,
    }


def test_metric_that_is_no_mean_over_items_has_no_interval():
    found = task_differences(made([0.0], value=2.0), made([0.0], value=3.0), resamples=100, seed=0)
    paired = found["t"]["acc"].as_json()
    assert paired.pop("difference") == 1.0
    assert set(paired.values()) == {None}


def test_items_that_differ_between_base_and_tuned_are_a_defect():
    with pytest.raises(AssertionError, match="did not answer the same items"):
        task_differences(made([0.0, 1.0]), made([0.0, 1.0, 1.0]), resamples=100, seed=0)


def test_right_and_wrong_answers_are_compared_by_the_exact_mcnemar_test():
    base, tuned = made([0.0] * 9 + [1.0] * 5), made([1.0] * 7 + [0.0] * 3 + [1.0] * 4)
    found = task_differences(base, tuned, resamples=100, seed=0)["t"]["acc"]
    assert (found.test, found.gained, found.lost) == ("exact McNemar", 7, 1)
    assert found.p_value == pytest.approx(2 * (1 + 8) / 2**8)
    assert found.difference == pytest.approx(6 / 14)


def test_scores_survive_the_archive():
    scores = made([0.0, 1.0, 0.25])
    assert TaskScores.from_json(json.loads(json.dumps(scores.to_json()))) == scores


def test_interval_of_two_units_is_that_of_their_three_resamples():
    """Resamples: (a, a) = 3 with p = 1/4, (a, b) = 1 with 1/2, (b, b) = 0.2 with 1/4."""
    estimate = estimate_ratio([6.0, 1.0], [2, 5], resamples=1000, seed=0)
    assert estimate.ci95 == (0.2, 3.0)


def test_interval_of_a_mean_is_the_normal_one_for_many_units():
    values = np.random.default_rng(0).normal(2.0, 3.0, size=2000)
    low, high = estimate_ratio(values, np.ones(2000), resamples=4000, seed=1).ci95
    half = 1.96 * values.std() / np.sqrt(2000)
    # The 2.5% quantile of 4,000 resamples has a standard error of about 2.7% of `half`; five of
    # them.
    assert low == pytest.approx(values.mean() - half, abs=0.14 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.14 * half)


def test_interval_of_a_ratio_agrees_with_the_delta_method():
    generator = np.random.default_rng(2)
    tokens = generator.integers(5, 200, size=1500)
    sums = tokens * generator.normal(2.0, 0.5, size=1500)
    low, high = estimate_ratio(sums, tokens, resamples=4000, seed=3).ci95
    ratio = sums.sum() / tokens.sum()
    half = 1.96 * (sums - ratio * tokens).std() / tokens.mean() / np.sqrt(1500)
    assert (low, high) == pytest.approx((ratio - half, ratio + half), abs=0.14 * half)


def test_paired_interval_is_narrower_than_what_both_share():
    generator = np.random.default_rng(4)
    base = generator.normal(3.0, 1.0, size=300)
    tuned = base - 0.1 + generator.normal(0.0, 0.05, size=300)
    low, high = estimate_ratio(base - tuned, np.ones(300), resamples=1000, seed=0).ci95
    assert 0.08 < low < 0.1 < high < 0.12


def test_p_value_is_smallest_when_every_unit_agrees():
    for sign in (1.0, -1.0):
        estimate = estimate_ratio(sign * np.arange(1, 30), np.ones(29), resamples=999, seed=0)
        assert estimate.p_value == 2 / 1000


def test_p_value_is_below_five_percent_in_about_five_percent_of_null_samples():
    generator = np.random.default_rng(5)
    p_values = [
        estimate_ratio(generator.normal(size=80), np.ones(80), resamples=300, seed=i).p_value
        for i in range(300)
    ]
    share = np.mean(np.array(p_values) < 0.05)
    assert 0.02 < share < 0.09  # 5% +- three standard errors of 300 draws (1.3% each)
