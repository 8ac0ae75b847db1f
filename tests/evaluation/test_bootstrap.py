import numpy as np
import pytest

from workflow.lib.evaluation.bootstrap import estimate_ratio


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
