"""Statistics against scipy, against numbers worked out by hand, and against planted truths."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.statistics import (
    correlation,
    improvement_probability,
    interquartile_mean,
    interquartile_mean_interval,
    mean_interval,
    mean_of_means_interval,
    peak_to_last,
    seeds_and_problems_interval,
)
from benchmarks.analysis_coverage import Kind, coverage, kinds


def test_interval_is_students_t():
    values = np.array([[0.30, 1.0], [0.34, 5.0], [0.38, 3.0], [0.31, 2.0]])
    mean, low, high = mean_interval(values)
    for column in range(2):
        expected = stats.t.interval(0.95, df=3, loc=values[:, column].mean(), scale=stats.sem(values[:, column]))
        assert (low[column], high[column]) == pytest.approx(expected, rel=1e-12)
    assert mean == pytest.approx(values.mean(axis=0), rel=1e-12)


def test_three_seeds_by_hand():
    # mean 2, standard error 1/sqrt(3), t(0.975, 2 degrees) = 4.302653
    mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0]))
    assert mean == 2.0
    assert high - mean == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert mean - low == pytest.approx(high - mean, rel=1e-12)


def test_fewer_than_three_seeds_give_no_interval():
    for num_seeds in (1, 2):
        mean, low, high = mean_interval(np.full((num_seeds, 4), 0.5))
        assert np.array_equal(mean, np.full(4, 0.5))
        assert np.isnan(low).all() and np.isnan(high).all()
        estimate, low, high = seeds_and_problems_interval(np.full((num_seeds, 4), 0.5), [0, 0, 1, 1])
        assert estimate == 0.5 and math.isnan(low) and math.isnan(high)
        estimate, low, high = mean_of_means_interval([np.full(5, 0.5), np.full(num_seeds, 0.7)])
        assert estimate == pytest.approx(0.6) and math.isnan(low) and math.isnan(high)
        estimate, low, high = interquartile_mean_interval([np.full((num_seeds, 4), 0.5)])
        assert estimate == 0.5 and math.isnan(low) and math.isnan(high)


def test_nan_leaves_a_seed_out_where_it_has_no_value():
    values = np.array([[1.0, 1.0], [2.0, np.nan], [3.0, 4.0], [6.0, 4.0]])
    mean, low, high = mean_interval(values)
    without = mean_interval(np.array([1.0, 4.0, 4.0]))
    assert mean[0] == 3.0
    assert (mean[1], low[1], high[1]) == pytest.approx(without, rel=1e-12)


def test_no_values_at_all():
    assert np.isnan(mean_interval(np.full((3, 2), np.nan))).all()
    assert np.isnan(mean_of_means_interval([])).all()
    assert np.isnan(interquartile_mean_interval([])).all()
    assert math.isnan(interquartile_mean([]))


def test_problems_that_do_not_vary_leave_the_t_interval_over_seeds():
    by_seed = np.array([0.2, 0.3, 0.7, 0.4])
    scores = np.repeat(by_seed[:, None], 10, axis=1)
    assert seeds_and_problems_interval(scores, np.zeros(10)) == pytest.approx(mean_interval(by_seed), rel=1e-9)


def test_seeds_that_do_not_vary_leave_the_t_interval_over_problems():
    by_problem = np.array([0.2, 0.3, 0.7, 0.4, 0.9])
    scores = np.repeat(by_problem[None], 3, axis=0)
    assert seeds_and_problems_interval(scores, np.zeros(5)) == pytest.approx(mean_interval(by_problem), rel=1e-9)


def test_crossed_variance_by_hand():
    scores = np.array([[1.0, 3.0], [2.0, 5.0], [6.0, 7.0]])
    # Means of seeds 2, 3.5, 6.5: variance 5.25, over 3 seeds 1.75, 2 degrees. Means of problems 3, 5: variance 2, over
    # 2 problems 1, 1 degree. Residuals +-0, +-0.5, -+0.5: sum of squares 1, over 2 degrees 0.5, over 6 scores 1/12.
    estimate, low, high = seeds_and_problems_interval(scores, ["a", "a"])
    variance = 1.75 + 1 - 1 / 12
    freedom = variance**2 / (1.75**2 / 2 + 1 + (1 / 12) ** 2 / 2)
    half_width = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    assert estimate == 4.0
    assert (low, high) == pytest.approx((4 - half_width, 4 + half_width), rel=1e-9)


def test_every_benchmark_counts_the_same_whatever_its_number_of_problems():
    scores = np.hstack([np.zeros((3, 90)), np.ones((3, 10))])
    assert seeds_and_problems_interval(scores, np.repeat(["long", "short"], [90, 10])).estimate == 0.5


def test_mean_of_two_cells_is_welchs_interval():
    one, other = np.array([0.3, 0.5, 0.4]), np.array([0.9, 0.5, 0.7, 0.8])
    welch = stats.ttest_ind(one, -other, equal_var=False).confidence_interval(0.95)
    interval = mean_of_means_interval([one, other])
    assert (interval.low, interval.high) == pytest.approx((welch.low / 2, welch.high / 2), rel=1e-9)
    assert interval.estimate == pytest.approx((0.4 + 0.725) / 2)


def test_interquartile_mean_cuts_a_quarter_of_any_number():
    assert interquartile_mean([4.0, 1.0, 100.0, 2.0]) == 3.0
    # Of five a quarter is one and a quarter: the second and the fourth count three quarters each.
    assert interquartile_mean([0.0, 1.0, 2.0, 6.0, 9.0]) == pytest.approx((0.75 * 1 + 2 + 0.75 * 6) / 2.5)
    values = np.random.default_rng(0).normal(size=400)
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25), rel=1e-12)


def test_interquartile_mean_varies_as_the_winsorised_scores():
    # Quartiles 0.325 and 0.6, so the scores pull like 0.325, 0.4, 0.5, 0.6, each over the two that are kept.
    interval = interquartile_mean_interval([[[0.1], [0.4], [0.5], [0.9]]])
    error = np.std([0.325, 0.4, 0.5, 0.6], ddof=1) * 2 / 2
    assert interval.estimate == pytest.approx(0.45)
    assert interval.high - interval.estimate == pytest.approx(stats.t.ppf(0.975, 3) * error, rel=1e-9)


def test_improvement_is_certain_only_as_far_as_the_noncentral_t_says():
    values = np.array([0.01, 0.03, 0.02])
    estimate, low, high = improvement_probability(values)
    assert estimate == pytest.approx(stats.norm.cdf(2.0))
    statistic = 2.0 * math.sqrt(3)
    for end, probability in ((low, 0.975), (high, 0.025)):
        noncentrality = stats.norm.ppf(end) * math.sqrt(3)
        assert stats.nct.cdf(statistic, 2, noncentrality) == pytest.approx(probability, abs=1e-4)
    mirrored = improvement_probability(-values)
    assert mirrored == pytest.approx((1 - estimate, 1 - high, 1 - low), abs=1e-9)


def test_improvement_of_differences_that_do_not_vary_is_not_known():
    assert np.isnan(improvement_probability([0.02, 0.02, 0.02])).all()
    estimate, low, high = improvement_probability([0.01, 0.03])
    assert estimate == pytest.approx(stats.norm.cdf(math.sqrt(2))) and math.isnan(low) and math.isnan(high)
    assert np.isnan(improvement_probability([0.02])).all()


def test_correlation_is_pearsons_and_its_interval_nears_fishers_with_many_pairs():
    rng = np.random.default_rng(1)
    x = rng.normal(size=60)
    y = 0.6 * x + rng.normal(size=60)
    expected = stats.pearsonr(x, y)
    ends = expected.confidence_interval(0.95)
    estimate, low, high = correlation([*x, np.nan], [*y, 1.0])
    assert estimate == pytest.approx(expected.statistic, rel=1e-9)
    assert (low, high) == pytest.approx((ends.low, ends.high), abs=0.01)


def test_interval_of_a_correlation_holds_zero_as_often_as_the_t_test_does():
    # Under no correlation r sqrt(n - 2) / sqrt(1 - r^2) is Student's t, so zero is an end exactly at its quantile.
    x = np.array([0.0, 1.0, 2.0, 4.0, 5.0])
    noise = np.array([1.0, -2.0, 1.5, -1.0, 0.5])
    residual = noise - np.polyval(np.polyfit(x, noise, 1), x)
    t = stats.t.ppf(0.975, 3)
    slope = t / math.sqrt(3) * np.linalg.norm(residual) / np.linalg.norm(x - x.mean())
    assert correlation(x, slope * x + residual).low == pytest.approx(0.0, abs=1e-3)


def test_correlation_of_too_few_pairs():
    estimate, low, high = correlation([1, 2, 4], [1, 3, 2])
    assert estimate == pytest.approx(stats.pearsonr([1, 2, 4], [1, 3, 2]).statistic)
    assert math.isnan(low) and math.isnan(high)
    assert np.isnan(correlation([1, 1, 1, 1], [1, 2, 3, 4])).all()
    assert np.isnan(correlation([1], [1])).all()


def test_peak_to_last():
    curves = [[0.1, 0.6, 0.4], [0.1, 0.4, 0.6]]
    assert peak_to_last(curves) == pytest.approx([0.2, 0.0])


NUM_DRAWS = 400
TOLERANCE = 0.045
"""Four standard errors of a share of 0.95 in so many draws; the percentile bootstrap of three seeds lies 0.15 off."""


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_every_printed_interval_covers_the_truth_as_often_as_it_says(kind: Kind, num_seeds: int):
    covered, _ = coverage(kind, num_seeds, NUM_DRAWS)
    assert covered == pytest.approx(0.95, abs=TOLERANCE)


def test_the_percentile_bootstrap_would_not():
    [kind] = [kind for kind in kinds() if kind.name == "accuracy, seeds"]
    _, covered = coverage(kind, 3, 200, with_bootstrap=True)
    assert covered < 0.9
