import numpy as np
import pytest
from scipy import stats

from analysis.statistics import mean_interval


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


def test_nan_leaves_a_seed_out_where_it_has_no_value():
    values = np.array([[1.0, 1.0], [2.0, np.nan], [3.0, 4.0], [6.0, 4.0]])
    mean, low, high = mean_interval(values)
    without = mean_interval(np.array([1.0, 4.0, 4.0]))
    assert mean[0] == 3.0
    assert (mean[1], low[1], high[1]) == pytest.approx(without, rel=1e-12)


def test_no_values_at_all():
    mean, low, high = mean_interval(np.full((3, 2), np.nan))
    assert np.isnan([mean, low, high]).all()


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for num_seeds in (3, 5, 10):
        _, low, high = mean_interval(rng.normal(0.4, 0.02, (num_seeds, 20_000)))
        assert np.mean((low <= 0.4) & (high >= 0.4)) == pytest.approx(0.95, abs=0.005)
