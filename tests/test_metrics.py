"""Scores: averages over what is present, the unbiased estimator, errors and intervals."""

import itertools
import math

import numpy as np
import pytest

from evals import metrics


def test_average_divides_by_the_samples_present():
    """Sixteen samples were asked for and four came back."""
    assert metrics.avg_at_k([[True, True, True, False]]) == 0.75
    assert metrics.avg_at_k([[True], [True, False], []]) == 0.75  # a problem without samples is left out
    assert math.isnan(metrics.avg_at_k([[]]))


def test_problems_count_alike_whatever_their_number_of_samples():
    assert metrics.avg_at_k([[True] * 9 + [False], [False]]) == pytest.approx(0.45)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (5, 2, 3), (6, 6, 1), (6, 0, 6), (7, 3, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c, k):
    verdicts = [i < c for i in range(n)]
    subsets = list(itertools.combinations(verdicts, k))
    assert metrics.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (0, 0, 1), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_numbers(n, c, k):
    with pytest.raises(ValueError, match=r"samples"):
        metrics.pass_at_k(n, c, k)


def test_mean_pass_at_k():
    correct = [[True, False], [False, False], []]
    assert metrics.mean_pass_at_k(correct, 2) == 0.5
    assert metrics.mean_pass_at_k(correct, 1) == metrics.avg_at_k(correct) == 0.25
    with pytest.raises(ValueError, match="pass@2"):
        metrics.mean_pass_at_k([[True], [True, False]], 2)


def test_standard_error_is_over_problems():
    values = [0.0, 1.0, 1.0, 0.5]
    assert metrics.standard_error(values) == pytest.approx(np.std(values, ddof=1) / 2)
    assert math.isnan(metrics.standard_error([1.0]))


def test_bootstrap_interval_is_seeded_and_close_to_the_normal_one():
    values = [float(i % 3 == 0) for i in range(300)]
    low, high = metrics.bootstrap_interval(values, num_resamples=4000)
    assert (low, high) == metrics.bootstrap_interval(values, num_resamples=4000)
    margin = 1.96 * metrics.standard_error(values)
    assert low == pytest.approx(1 / 3 - margin, abs=0.006)
    assert high == pytest.approx(1 / 3 + margin, abs=0.006)
    narrow = metrics.bootstrap_interval(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_another_seed_resamples_differently():
    values = np.random.default_rng(0).normal(size=50).tolist()
    assert metrics.bootstrap_interval(values, seed=0) != metrics.bootstrap_interval(values, seed=1)


def test_bootstrap_interval_at_its_edges():
    assert metrics.bootstrap_interval([1.0, 1.0]) == (1.0, 1.0)
    assert all(math.isnan(end) for end in metrics.bootstrap_interval([1.0]))
    with pytest.raises(ValueError, match="between 0 and 1"):
        metrics.bootstrap_interval([0.0, 1.0], level=95)


def test_lengths_and_truncation():
    assert metrics.mean_length([3, 5, 10]) == 6.0
    assert metrics.share_truncated([True, False, False, False]) == 0.25
    assert math.isnan(metrics.mean_length([]))
