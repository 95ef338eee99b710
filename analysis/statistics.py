"""Statistics over seeds and problems: pure functions on arrays, without random numbers.

The intervals are t intervals with the degrees of freedom that the data afford (Satterthwaite), or exact under
normality: with three to ten seeds the percentile bootstrap covers the truth far less often than it says, because it
takes three values for a population. `benchmarks/analysis_coverage.py` measures how often each covers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import gammaincinv, ndtr, stdtrit

MIN_SEEDS = 3
"""Below this many seeds an interval says more about the formula than about the runs, so none is given."""
MIN_PAIRS_TO_CORRELATE = 4
"""Of three pairs almost any correlation is possible."""
LEVEL = 0.95

# Gauss-Legendre on (0, 1): expectations as means over quantiles.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(80)
_NODES, _WEIGHTS = (1 + _NODES) / 2, _WEIGHTS / 2


class Interval(NamedTuple):
    """An estimate with the ends of its interval, which are NaN where there are too few values for one.

    Numbers or arrays of one shape.
    """

    estimate: Any
    low: Any
    high: Any


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Mean over seeds and Student's t interval of that mean.

    Given paired differences of two rules (same seed, same prompts in the same order) it is the interval of the
    paired t test.

    Args:
        values: (num_seeds, ...); NaN marks a seed without a value there and is left out of that position.
        level: coverage for normally distributed seeds.

    Returns:
        Each of shape (...). The mean is NaN without any value; low and high are NaN with fewer than `MIN_SEEDS`
        values.
    """
    values = np.asarray(values, dtype=np.float64)
    count = np.sum(~np.isnan(values), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis=0) / count
        variance = np.nansum((values - mean) ** 2, axis=0) / (count - 1)
        half_width = stdtrit(count - 1, (1 + level) / 2) * np.sqrt(variance / count)
    half_width = np.where(count >= MIN_SEEDS, half_width, np.nan)
    return Interval(mean, mean - half_width, mean + half_width)


def seeds_and_problems_interval(scores: ArrayLike, benchmarks: ArrayLike, level: float = LEVEL) -> Interval:
    """Mean score, and its interval over new seeds *and* new problems of the same benchmarks.

    Every seed is scored on every problem, so the two are crossed and neither is nested in the other. The variance of
    the mean is the one between seeds plus the one between problems minus the part that both count (two-way random
    effects; Searle, Casella & McCulloch, Variance Components, ch. 4), with Satterthwaite's degrees of freedom.
    Given differences of two rules it is the paired interval.

    Args:
        scores: (num_seeds, num_problems), without NaN.
        benchmarks: (num_problems,) which benchmark a problem belongs to. Each benchmark counts the same, whatever its
            number of problems; one of a single problem counts as fixed.

    Returns:
        Numbers; low and high are NaN with fewer than `MIN_SEEDS` seeds.
    """
    scores = np.asarray(scores, dtype=np.float64)
    names, codes = np.unique(np.asarray(benchmarks), return_inverse=True)
    by_benchmark = [scores[:, codes == code] for code in range(len(names))]
    num_seeds = len(scores)
    by_seed = np.mean([part.mean(axis=1) for part in by_benchmark], axis=0)
    estimate = float(by_seed.mean())
    if num_seeds < MIN_SEEDS:
        return Interval(estimate, math.nan, math.nan)
    parts = [(float(by_seed.var(ddof=1)) / num_seeds, num_seeds - 1.0)]
    for part in by_benchmark:
        num_problems = part.shape[1]
        if num_problems < 2:
            continue
        share = 1 / (num_problems * len(names) ** 2)
        by_problem = part.mean(axis=0)
        residual = part - by_problem - part.mean(axis=1, keepdims=True) + part.mean()
        freedom = (num_seeds - 1.0) * (num_problems - 1.0)
        parts.append((float(by_problem.var(ddof=1)) * share, num_problems - 1.0))
        parts.append((-float((residual**2).sum()) / freedom / num_seeds * share, freedom))
    return _t_interval(estimate, parts, level)


def mean_of_means_interval(cells: Sequence[ArrayLike], level: float = LEVEL) -> Interval:
    """Mean over cells of their means over seeds, every cell counting the same; the cells are the ones meant.

    Variances may differ between cells (Welch), and the degrees of freedom are Satterthwaite's.

    Args:
        cells: for each cell its (num_seeds,) values.

    Returns:
        Numbers; low and high are NaN where a cell has fewer than `MIN_SEEDS` seeds, all without cells.
    """
    arrays = [np.asarray(cell, dtype=np.float64) for cell in cells]
    if not arrays:
        return Interval(math.nan, math.nan, math.nan)
    estimate = float(np.mean([array.mean() for array in arrays]))
    if min(map(len, arrays)) < MIN_SEEDS:
        return Interval(estimate, math.nan, math.nan)
    parts = [(float(array.var(ddof=1)) / len(array) / len(arrays) ** 2, len(array) - 1.0) for array in arrays]
    return _t_interval(estimate, parts, level)


def interquartile_mean(values: ArrayLike) -> float:
    """Mean of the middle half of all values, the two at its edges counted in part; NaN without values.

    Agarwal et al. 2021 (arXiv 2108.13264), with an exact quarter cut on either side for any number of values.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64).ravel())
    if not len(ordered):
        return math.nan
    cut = len(ordered) / 4
    left = np.arange(len(ordered))
    weights = np.clip(np.minimum(left + 1, len(ordered) - cut) - np.maximum(left, cut), 0, 1)
    return float(weights @ ordered / weights.sum())


def interquartile_mean_interval(cells: Sequence[ArrayLike], level: float = LEVEL) -> Interval:
    """Interquartile mean over all scores of all cells, and its interval over new seeds.

    The variance is that of the scores winsorised at the quartiles (Tukey & McLaughlin 1963), summed over what a seed
    scored and stratified by cell, with Satterthwaite's degrees of freedom.

    Args:
        cells: for each cell its (num_seeds, num_benchmarks) scores; a seed's scores stay together.

    Returns:
        Numbers; low and high are NaN where a cell has fewer than `MIN_SEEDS` seeds, all without cells.
    """
    arrays = [np.atleast_2d(np.asarray(cell, dtype=np.float64)) for cell in cells]
    scores = np.concatenate([array.ravel() for array in arrays]) if arrays else np.empty(0)
    estimate = interquartile_mean(scores)
    if not arrays or min(map(len, arrays)) < MIN_SEEDS:
        return Interval(estimate, math.nan, math.nan)
    quartiles = np.quantile(scores, [0.25, 0.75])
    pulls = [np.clip(array, *quartiles).sum(axis=1) / (len(scores) / 2) for array in arrays]
    parts = [(len(pull) * float(pull.var(ddof=1)), len(pull) - 1.0) for pull in pulls]
    return _t_interval(estimate, parts, level)


def improvement_probability(differences: ArrayLike, level: float = LEVEL) -> Interval:
    """Probability that a new seed ends higher with one rule than with another, from paired differences.

    The estimate is Phi(mean / std). The interval is exact for normally distributed differences: it inverts the
    noncentral t distribution of the paired t statistic (Owen 1968, section 8).

    Args:
        differences: (num_seeds,) of the two rules' scores at the same seed, without NaN.

    Returns:
        Numbers; low and high are NaN with fewer than `MIN_SEEDS` seeds. All are NaN when the differences do not vary.
    """
    values = np.asarray(differences, dtype=np.float64)
    num_seeds = len(values)
    spread = float(values.std(ddof=1)) if num_seeds > 1 else 0.0
    if spread <= 1e-12 * float(np.abs(values).max(initial=0.0)):
        return Interval(math.nan, math.nan, math.nan)
    effect = float(values.mean()) / spread
    estimate = float(ndtr(effect))
    if num_seeds < MIN_SEEDS:
        return Interval(estimate, math.nan, math.nan)
    # The statistic is (Z + d sqrt n) / (chi / sqrt(n - 1)), d the true effect and Z normal.
    scales = effect * math.sqrt(num_seeds / (num_seeds - 1)) * _chi(num_seeds - 1)
    low, high = _invert(lambda true_effect: _WEIGHTS @ ndtr(scales - true_effect * math.sqrt(num_seeds)), effect, level)
    return Interval(estimate, float(ndtr(low)), float(ndtr(high)))


def correlation(x: ArrayLike, y: ArrayLike, level: float = LEVEL) -> Interval:
    """Pearson's correlation of paired values, with the interval that is exact for normally distributed pairs.

    It inverts Ruben's (1966) representation of the sample correlation: r / sqrt(1 - r^2) is distributed as
    (Z + rho / sqrt(1 - rho^2) chi_{n-1}) / chi_{n-2}. Fisher's z covers too often with so few pairs.

    Args:
        x, y: (num_pairs,); pairs with a NaN are left out.

    Returns:
        Numbers; low and high are NaN with fewer than `MIN_PAIRS_TO_CORRELATE` pairs; all are NaN with fewer than two
        or where x or y does not vary.
    """
    pairs = np.stack([np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)])
    pairs = pairs[:, ~np.isnan(pairs).any(axis=0)]
    num_pairs = pairs.shape[1]
    if num_pairs < 2 or (np.ptp(pairs, axis=1) == 0).any():
        return Interval(math.nan, math.nan, math.nan)
    x_off, y_off = pairs - pairs.mean(axis=1, keepdims=True)
    estimate = float(np.clip(x_off @ y_off / math.sqrt((x_off @ x_off) * (y_off @ y_off)), -1, 1))
    if num_pairs < MIN_PAIRS_TO_CORRELATE or abs(estimate) > 1 - 1e-12:
        return Interval(estimate, math.nan, math.nan)
    slope = estimate / math.sqrt(1 - estimate**2)
    scales, pulls = slope * _chi(num_pairs - 2)[:, None], _chi(num_pairs - 1)
    low, high = _invert(lambda true_slope: _WEIGHTS @ ndtr(scales - true_slope * pulls) @ _WEIGHTS, slope, level)
    return Interval(estimate, low / math.sqrt(1 + low**2), high / math.sqrt(1 + high**2))


def peak_to_last(curves: ArrayLike) -> NDArray[np.float64]:
    """How far the last value lies below the highest one: the paper's stability claim, in units of the curve.

    Never negative: the highest of several noisy values lies above the last one by chance too. Compare rules, not a rule
    with zero.

    Args:
        curves: (..., num_steps) without NaN.

    Returns:
        (...).
    """
    curves = np.asarray(curves, dtype=np.float64)
    return curves.max(axis=-1) - curves[..., -1]


def _t_interval(estimate: float, parts: Sequence[tuple[float, float]], level: float) -> Interval:
    """t interval of an estimate whose variance is a sum of `(part, degrees of freedom)`; a part may be subtracted.

    Degrees of freedom after Satterthwaite (1946): the squared sum over the sum of squares, each by its own freedom.
    """
    variance = sum(part for part, _ in parts)
    variance = max(variance, max(part for part, _ in parts))
    if variance == 0:
        return Interval(estimate, estimate, estimate)
    freedom = variance**2 / sum(part**2 / own for part, own in parts)
    half_width = float(stdtrit(freedom, (1 + level) / 2)) * math.sqrt(variance)
    return Interval(estimate, estimate - half_width, estimate + half_width)


def _chi(freedom: int) -> NDArray[np.float64]:
    """Quantiles of the chi distribution at `_NODES`."""
    return np.sqrt(2 * gammaincinv(freedom / 2, _NODES))


def _invert(probability: Callable[[float], float], near: float, level: float) -> tuple[float, float]:
    """The parameters under which a value as low, or as high, as the one seen has half of what is outside `level`.

    Args:
        probability: of a value no higher than the one seen, falling in the parameter.
        near: an estimate of the parameter.
    """
    reach = 100 * (1 + abs(near))
    ends = [
        brentq(lambda parameter, tail=tail: float(probability(parameter)) - tail, -reach, reach, xtol=1e-7)
        for tail in ((1 + level) / 2, (1 - level) / 2)
    ]
    return ends[0], ends[1]
