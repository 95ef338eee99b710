"""Scores over the samples of a benchmark: pure functions of verdicts and lengths.

`correct` holds, for each problem, the verdicts of the samples that are present. Averages divide by those, never by the
number that was asked for; a problem without samples is left out of the averages.
"""

import math
from collections.abc import Sequence

import numpy as np

Verdicts = Sequence[Sequence[bool]]


def problem_means(correct: Verdicts) -> list[float]:
    """Share of right samples of each problem that has any."""
    return [sum(samples) / len(samples) for samples in correct if len(samples)]


def avg_at_k(correct: Verdicts) -> float:
    """Mean over problems of the share of right samples; with one sample each, the accuracy. NaN without samples."""
    return _mean(problem_means(correct))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is right, from n samples with c right.

    1 - C(n - c, k) / C(n, k), equation 1 of Chen et al. 2021 (arXiv 2107.03374).

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples and k of at least 1; there are {num_samples}")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples cannot be right")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(correct: Verdicts, k: int) -> float:
    """Mean of `pass_at_k` over the problems that have samples; NaN when none has.

    Raises:
        ValueError: a problem has some samples, but fewer than k.
    """
    return _mean([pass_at_k(len(samples), sum(samples), k) for samples in correct if len(samples)])


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of independent values (here: one per problem). NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, num_resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, resampling problems; the same for the same seed.

    NaN for fewer than two values.

    Raises:
        ValueError: `level` is not inside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    if len(values) < 2:
        return math.nan, math.nan
    array = np.asarray(values, dtype=float)
    draws = np.random.default_rng(seed).integers(len(array), size=(num_resamples, len(array)))
    tail = 50 * (1 - level)
    low, high = np.percentile(array[draws].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


def mean_length(lengths: Sequence[int]) -> float:
    """Mean response length in tokens over all samples. NaN without samples."""
    return _mean(lengths)


def share_truncated(truncated: Sequence[bool]) -> float:
    """Share of responses cut at the length limit. NaN without samples."""
    return _mean(truncated)


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if len(values) else math.nan
