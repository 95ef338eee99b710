"""Statistics over seeds: pure functions on arrays."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

MIN_SEEDS = 3
"""Below this many seeds an interval says more about the formula than about the runs, so none is given."""


def mean_interval(
    values: NDArray[np.float64], level: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Mean over seeds and Student's t interval of that mean.

    Args:
        values: (num_seeds, ...); NaN marks a seed without a value there and is left out of that position.
        level: coverage for normally distributed seeds.

    Returns:
        mean, low, high, each of shape (...). The mean is NaN without any value; low and high are NaN with
        fewer than `MIN_SEEDS` values.
    """
    values = np.asarray(values, dtype=np.float64)
    count = np.sum(~np.isnan(values), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis=0) / count
        variance = np.nansum((values - mean) ** 2, axis=0) / (count - 1)
        half_width = stdtrit(count - 1, (1 + level) / 2) * np.sqrt(variance / count)
    half_width = np.where(count >= MIN_SEEDS, half_width, np.nan)
    return mean, mean - half_width, mean + half_width
