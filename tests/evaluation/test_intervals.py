"""Intervals and p-values of few and many units: their level, by enumeration or simulation.

Seeds are fixed. Bounds are the nominal level, 1 point, and three standard errors of the draws."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, multinomial, permutation_test, ttest_1samp

from workflow.lib.evaluation.intervals import FEWEST, mean, mean_gain, positive_ratio, signed_ratio

POINT = 0.01
SHARES = (0.5, 0.9, 0.97)


def standard_errors(draws, *, count=3):
    return count * math.sqrt(0.05 * 0.95 / draws)


def contains(ends, value):
    return ends[0] - 1e-12 <= value <= ends[1] + 1e-12


def right(count, units):
    return [1.0] * count + [0.0] * (units - count)


@pytest.mark.parametrize("units", [1, 2, 3, 5, 10, 50, 100, 500])
def test_interval_of_a_share_has_its_level_whatever_the_share(units):
    likely = [n for n in range(units + 1) if binom.pmf(n, units, SHARES).max() > 1e-4]
    ends = {count: mean(right(count, units)).ci95 for count in likely}
    for share in SHARES:
        coverage = sum(binom.pmf(n, units, share) for n in likely if contains(ends[n], share))
        assert coverage >= 0.95 - POINT, share


def paired(gained, lost, units):
    before = [0.0] * gained + [1.0] * lost + [1.0] * (units - gained - lost)
    after = [1.0] * gained + [0.0] * lost + [1.0] * (units - gained - lost)
    return mean_gain(before, after)


@pytest.mark.parametrize("units", [2, 5, 6, 20])
def test_interval_of_paired_shares_has_its_level_and_agrees_with_mcnemar(units):
    estimates = {
        (gained, lost): paired(gained, lost, units)
        for gained in range(units + 1)
        for lost in range(units + 1 - gained)
    }
    for counts, found in estimates.items():
        assert (found.p_value < 0.05) == (not contains(found.ci95, 0.0)), counts
    for gain, loss in (
        (0.0, 0.0),
        (0.02, 0.0),
        (0.05, 0.05),
        (0.3, 0.1),
        (0.5, 0.5),
        (0.9, 0.0),
        (0.0, 0.3),
    ):
        rates = [gain, loss, 1 - gain - loss]
        coverage = sum(
            multinomial.pmf([gained, lost, units - gained - lost], units, rates)
            for (gained, lost), found in estimates.items()
            if contains(found.ci95, gain - loss)
        )
        assert coverage >= 0.95 - POINT, rates


def lengths(generator, units, sigma):
    return np.round(np.exp(generator.normal(5.0, sigma, size=units))) + 1


@pytest.mark.parametrize("units", [2, 3, 5, 10, 20, 100, 500])
@pytest.mark.parametrize("length_sigma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("loss_sigma", [0.3, 0.5])
def test_interval_of_log_normal_losses_has_its_level(units, length_sigma, loss_sigma):
    """Documents of these lengths; at 0.5 few losses are far above the others."""
    generator, draws, hits = np.random.default_rng(units), 600, 0
    for _ in range(draws):
        tokens = lengths(generator, units, length_sigma)
        losses = np.exp(generator.normal(0.0, loss_sigma, size=units))
        hits += contains(positive_ratio(losses * tokens, tokens).ci95, math.exp(loss_sigma**2 / 2))
    assert hits / draws >= 0.95 - POINT - standard_errors(draws)


NULLS = {
    "normal": lambda g, n: g.normal(size=n),
    "heavy tails": lambda g, n: g.standard_t(2, size=n),
    "exchanged log-normal losses": lambda g, n: -np.subtract(*np.exp(g.normal(0, 1, size=(2, n)))),
    "few values": lambda g, n: g.choice([-0.3, -0.1, 0.0, 0.1, 0.3], size=n),
}


@pytest.mark.parametrize("units", [2, 3, 5, 6, 9, 20])
@pytest.mark.parametrize("null", NULLS)
def test_equal_subjects_differ_in_at_most_five_percent_whatever_the_lengths(units, null):
    generator, draws, wrong = np.random.default_rng(units), 300, 0
    for _ in range(draws):
        tokens = lengths(generator, units, 1.0)
        found = signed_ratio(NULLS[null](generator, units) * tokens, tokens)
        excluded = found.ci95 is not None and not contains(found.ci95, 0.0)
        assert excluded == (found.p_value < 0.05)
        wrong += excluded
    assert wrong / draws <= (0.05 + POINT + standard_errors(draws) if units >= FEWEST else 0.0)


def test_interval_of_a_difference_covers_it_in_nineteen_of_twenty():
    generator, draws, hits = np.random.default_rng(1), 400, 0
    for _ in range(draws):
        tokens = lengths(generator, 20, 1.0)
        gains = tokens * generator.normal(0.3, 0.5, size=20)
        hits += contains(signed_ratio(gains, tokens).ci95, 0.3)
    assert hits / draws == pytest.approx(0.95, abs=POINT + standard_errors(draws))


@pytest.mark.parametrize(("units", "p_value"), [(1, 1.0), (2, 0.5), (5, 1 / 16), (6, 1 / 32)])
def test_units_that_all_agree_have_the_p_value_of_the_sign_test(units, p_value):
    found = signed_ratio(np.arange(1, units + 1), np.ones(units))
    assert found.p_value == p_value
    assert (found.ci95 is None) == (units < FEWEST)


def test_p_value_of_few_units_is_that_of_all_sign_flips():
    gains = np.random.default_rng(3).normal(0.4, 1.0, size=9)
    stock = permutation_test((gains,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert signed_ratio(gains, np.ones(9)).p_value == pytest.approx(stock.pvalue)


def test_many_units_agree_with_the_t_test():
    gains = np.random.default_rng(4).normal(0.08, 1.0, size=500)
    stock, found = ttest_1samp(gains, 0.0), signed_ratio(gains, np.ones(500))
    low, high = stock.confidence_interval(0.95)
    assert found.p_value == pytest.approx(stock.pvalue, abs=0.01)
    assert found.ci95 == pytest.approx((low, high), abs=0.1 * (high - low))


def test_gains_that_cancel_but_for_rounding_are_no_gain():
    gains = [0.3, -0.1, -0.2] * 2
    assert sum(gains) != 0.0
    assert signed_ratio(gains, np.ones(6)).p_value == 1.0


def test_loss_of_one_document_or_of_0_has_no_spread():
    assert positive_ratio([3.0], [2]).ci95 is None
    assert positive_ratio([0.0, 0.0], [2, 3]).ci95 == (0.0, 0.0)


def test_interval_of_two_documents_that_share_nothing_has_ends():
    low, high = positive_ratio([1.0, 5.0], [1000, 1]).ci95
    assert 0.0 <= low < 6 / 1001 < high < math.inf


def test_losses_of_which_some_are_negative_are_taken_as_signed():
    sums, tokens = [-1.0, 2.0, 3.0, 1.0, 2.0, 2.5], [1, 2, 3, 1, 2, 4]
    assert positive_ratio(sums, tokens) == signed_ratio(sums, tokens)


def test_corrected_comparisons_of_equal_runs_with_the_luckiest_err_in_five_percent_of_sweeps():
    generator, sweeps, runs, wrong = np.random.default_rng(5), 100, 6, 0
    for _ in range(sweeps):
        losses = generator.normal(size=12) + 0.3 * generator.normal(size=(runs, 12))
        best = losses[losses.mean(axis=1).argmin()]
        pairs = len(list(itertools.combinations(range(runs), 2)))
        found = [signed_ratio(own - best, np.ones(12), comparisons=pairs) for own in losses]
        wrong += any(each.ci95 is not None and each.ci95[0] > 0 for each in found)
    assert wrong / sweeps <= 0.05 + POINT + standard_errors(sweeps)
