"""How often does each 95 % interval that we print cover the truth?

    python benchmarks/analysis_coverage.py [--draws 1000]

Simulates studies with a planted truth and 3, 5 or 10 seeds, and prints the share of intervals that cover it, beside the
percentile bootstrap on the same draws. With 1,000 draws the standard error of a share of 0.95 is 0.007.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis import statistics
from analysis.statistics import Interval
from analysis.synthetic import Lengths, length_statistics, responses
from trainers import metric_names

Array = NDArray[np.float64]
SEEDS = (3, 5, 10)
RESAMPLES = 400
SEED_STD = 0.012
RUN_STD = 0.01
PROBLEMS = (400, 100, 30)
"""Numbers of problems of three benchmarks, as far apart as the real ones'."""
LEVELS = (0.7, 0.5, 0.3)
NUM_PANELS = 4
LENGTHS = Lengths(mean=60, gap=-0.4, cv=0.5, limit=160)
MARGIN_OF_GAIN = 0.02


@dataclass(frozen=True)
class Kind:
    """One interval: how its data are drawn, what is true of them, how it is worked out, how a bootstrap would."""

    name: str
    draw: Callable[[int, np.random.Generator], Any]
    truth: Callable[[int], float]
    interval: Callable[[Any], Interval]
    bootstrap: Callable[[Any, np.random.Generator], Sequence[float]]


def accuracy_of_seeds(num_seeds: int, rng: np.random.Generator) -> Array:
    """(num_seeds,) Accuracy on the same 1,200 problems, one sample each."""
    level = 0.6 + SEED_STD * rng.standard_normal(num_seeds)
    return rng.binomial(1200, level) / 1200


def difference_of_seeds(num_seeds: int, rng: np.random.Generator) -> Array:
    """(num_seeds,) Accuracy of one rule minus that of another at the same seed."""
    shared = SEED_STD * rng.standard_normal(num_seeds)
    ours, theirs = RUN_STD * rng.standard_normal((2, num_seeds)) + shared
    return (rng.binomial(1200, 0.6 + MARGIN_OF_GAIN + ours) - rng.binomial(1200, 0.6 + theirs)) / 1200


def lengths_of_seeds(metric: str) -> Callable[[int, np.random.Generator], Array]:
    """(num_seeds,) A length statistic of one step of 16 groups of 8."""

    def draw(num_seeds: int, rng: np.random.Generator) -> Array:
        _, advantages, lengths = responses(np.full(num_seeds, 0.5), LENGTHS, 16, 8, rng)
        return length_statistics(lengths, advantages)[metric]

    return draw


def scores_of_problems(seed_std: float) -> Callable[[int, np.random.Generator], Array]:
    """(num_seeds, num_problems) Share of 4 samples right, problems of each benchmark in a row."""

    def draw(num_seeds: int, rng: np.random.Generator) -> Array:
        shift = seed_std * rng.standard_normal((num_seeds, 1))
        parts = [
            level + 0.4 * (rng.random(num) - 0.5) + 0.05 * rng.standard_normal((num_seeds, num)) + shift
            for level, num in zip(LEVELS, PROBLEMS, strict=True)
        ]
        return rng.binomial(4, np.clip(np.concatenate(parts, axis=1), 0, 1)) / 4

    return draw


def differences_of_problems(seed_std: float) -> Callable[[int, np.random.Generator], Array]:
    """(num_seeds, num_problems) The same of one rule minus another, on problems of which some suit the one better."""

    def draw(num_seeds: int, rng: np.random.Generator) -> Array:
        total = sum(PROBLEMS)
        difficulty = np.repeat(LEVELS, PROBLEMS) + 0.4 * (rng.random(total) - 0.5)
        suits = 0.05 * rng.standard_normal(total)
        chances = [
            difficulty + gain + seed_std * rng.standard_normal((num_seeds, 1)) for gain in (MARGIN_OF_GAIN + suits, 0.0)
        ]
        ours, theirs = (rng.binomial(4, np.clip(chance, 0, 1)) / 4 for chance in chances)
        return ours - theirs

    return draw


def differences_of_panels(num_seeds: int, rng: np.random.Generator) -> Array:
    """(num_panels, num_seeds) Paired differences, with another effect and another noise in every panel."""
    effects, noise = np.linspace(-0.02, 0.04, NUM_PANELS)[:, None], np.linspace(0.008, 0.02, NUM_PANELS)[:, None]
    return effects + noise * rng.standard_normal((NUM_PANELS, num_seeds))


def scores_of_panels(num_seeds: int, rng: np.random.Generator) -> Array:
    """(num_panels, num_seeds, num_benchmarks) Scores whose seeds move all benchmarks of a run together."""
    levels = np.linspace(0.2, 0.8, 6) + np.linspace(-0.05, 0.05, NUM_PANELS)[:, None]
    runs = 0.01 * rng.standard_normal((NUM_PANELS, num_seeds, 1))
    return levels[:, None, :] + runs + 0.015 * rng.standard_normal((NUM_PANELS, num_seeds, 6))


def normal_differences(num_seeds: int, rng: np.random.Generator) -> Array:
    """(num_seeds,) Paired differences half a standard deviation above zero."""
    return 0.01 + 0.02 * rng.standard_normal(num_seeds)


def drop_differences(num_seeds: int, rng: np.random.Generator) -> Array:
    """(num_seeds,) Drop from peak to last of a rule that loses 0.03 late minus that of one that does not."""
    means = np.array([[0.4, 0.55, 0.6, 0.62, 0.59], [0.4, 0.55, 0.6, 0.61, 0.62]])
    shared = SEED_STD * rng.standard_normal((num_seeds, 1))
    curves = means[:, None, :] + shared + 0.012 * rng.standard_normal((2, num_seeds, 5))
    falling, rising = statistics.peak_to_last(curves)
    return falling - rising


def regimes_of(num_panels: int) -> Callable[[int, np.random.Generator], Array]:
    """(2, num_panels) Gap of each panel, and its mean advantage over the seeds, which depends on the gap."""

    def draw(num_seeds: int, rng: np.random.Generator) -> Array:
        gap = -0.2 + 0.15 * rng.standard_normal(num_panels)
        noise = 0.02 * rng.standard_normal((num_panels, num_seeds)).mean(axis=1)
        return np.stack([gap, 0.1 * gap + noise])

    return draw


def correlation_of(num_seeds: int) -> float:
    """What `regimes_of` plants."""
    return 0.015 / np.hypot(0.015, 0.02 / np.sqrt(num_seeds))


def simulated(
    draw: Callable[[int, np.random.Generator], Any], statistic: Callable[[Any], float]
) -> Callable[[int], float]:
    """The truth of a statistic that has no formula: its value with very many seeds."""
    value = statistic(draw(20_000, np.random.default_rng(999)))
    return lambda _: value


def resampled(statistic: Callable[[Any], float], axis: int = 0) -> Callable[[Any, np.random.Generator], list[float]]:
    """Percentile bootstrap: draw seeds again with replacement."""

    def bootstrap(data: Array, rng: np.random.Generator) -> list[float]:
        num = data.shape[axis]
        values = [statistic(np.take(data, rng.integers(num, size=num), axis=axis)) for _ in range(RESAMPLES)]
        return list(np.percentile(values, [2.5, 97.5]))

    return bootstrap


def resampled_twice(data: Array, rng: np.random.Generator) -> list[float]:
    """The hierarchical one: draw seeds again, and problems within their benchmark."""
    starts = np.cumsum([0, *PROBLEMS])
    values = []
    for _ in range(RESAMPLES):
        columns = np.concatenate(
            [start + rng.integers(num, size=num) for start, num in zip(starts[:-1], PROBLEMS, strict=True)]
        )
        values.append(benchmark_mean(data[rng.integers(len(data), size=len(data))][:, columns]))
    return list(np.percentile(values, [2.5, 97.5]))


def resampled_panels(statistic: Callable[[Any], float]) -> Callable[[Any, np.random.Generator], list[float]]:
    """The stratified one: draw seeds again within every panel."""

    def bootstrap(data: Array, rng: np.random.Generator) -> list[float]:
        num = data.shape[1]
        values = [statistic(np.stack([panel[rng.integers(num, size=num)] for panel in data])) for _ in range(RESAMPLES)]
        return list(np.percentile(values, [2.5, 97.5]))

    return bootstrap


def benchmark_mean(scores: Array) -> float:
    parts = np.split(scores, np.cumsum(PROBLEMS)[:-1], axis=1)
    return float(np.mean([part.mean() for part in parts]))


BENCHMARKS = np.repeat(np.arange(len(PROBLEMS)), PROBLEMS)


def crossed(scores: Array) -> Interval:
    return statistics.seeds_and_problems_interval(scores, BENCHMARKS)


def over_seeds(name: str, draw: Callable[[int, np.random.Generator], Array], truth: Callable[[int], float]) -> Kind:
    return Kind(name, draw, truth, statistics.mean_interval, resampled(np.mean))


def over_problems(name: str, draw: Callable[[int, np.random.Generator], Array], truth: Callable[[int], float]) -> Kind:
    return Kind(name, draw, truth, crossed, resampled_twice)


def kinds() -> list[Kind]:
    """Every interval that figures, tables and captions print."""
    gap, cv = (lengths_of_seeds(name) for name in (metric_names.SIGN_GAP_REL, metric_names.GROUP_CV))
    chance = 0.6914624612740131  # Phi(1 / 2)
    return [
        over_seeds("accuracy, seeds", accuracy_of_seeds, lambda _: 0.6),
        over_seeds("relative gap, seeds", gap, simulated(gap, np.mean)),
        over_seeds("length variation, seeds", cv, simulated(cv, np.mean)),
        over_seeds("paired difference, seeds", difference_of_seeds, lambda _: MARGIN_OF_GAIN),
        over_problems("accuracy, seeds and problems", scores_of_problems(0.012), lambda _: 0.5),
        over_problems("same, seeds vary little", scores_of_problems(0.002), lambda _: 0.5),
        over_problems("same, seeds vary much", scores_of_problems(0.05), lambda _: 0.5),
        over_problems("difference, seeds and problems", differences_of_problems(0.012), lambda _: MARGIN_OF_GAIN),
        over_problems("same, seeds vary little", differences_of_problems(0.002), lambda _: MARGIN_OF_GAIN),
        over_problems("same, seeds vary much", differences_of_problems(0.05), lambda _: MARGIN_OF_GAIN),
        Kind(
            "mean difference over panels", differences_of_panels, lambda _: 0.01,
            statistics.mean_of_means_interval, resampled_panels(np.mean),
        ),
        Kind(
            "interquartile mean", scores_of_panels, simulated(scores_of_panels, statistics.interquartile_mean),
            statistics.interquartile_mean_interval, resampled_panels(statistics.interquartile_mean),
        ),
        Kind(
            "probability of improvement", normal_differences, lambda _: chance,
            statistics.improvement_probability, resampled(lambda values: float(np.mean(values > 0))),
        ),
        over_seeds("difference of drops", drop_differences, simulated(drop_differences, np.mean)),
        *(
            Kind(
                f"correlation over {num} panels", regimes_of(num), correlation_of,
                lambda data: statistics.correlation(*data), resampled(lambda data: np.corrcoef(data)[0, 1], axis=1),
            )
            for num in (4, 8, 20)
        ),
    ]  # fmt: skip


def coverage(kind: Kind, num_seeds: int, num_draws: int, *, with_bootstrap: bool = False) -> tuple[float, float]:
    """Share of draws whose interval, and whose bootstrap interval (else NaN), holds the truth."""
    rng = np.random.default_rng([num_seeds, *kind.name.encode()])
    truth = kind.truth(num_seeds)
    hits, bootstrap_hits = 0, 0
    for _ in range(num_draws):
        data = kind.draw(num_seeds, rng)
        _, low, high = kind.interval(data)
        hits += bool(low <= truth <= high)
        if with_bootstrap:
            low, high = kind.bootstrap(data, rng)
            bootstrap_hits += bool(low <= truth <= high)
    return hits / num_draws, bootstrap_hits / num_draws if with_bootstrap else np.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--without-bootstrap", action="store_true")
    arguments = parser.parse_args()
    print(f"{'interval':34}" + "".join(f"{f'{num} seeds':>10}{'bootstrap':>10}" for num in SEEDS))
    for kind in kinds():
        shares = []
        for num in SEEDS:
            shares += coverage(kind, num, arguments.draws, with_bootstrap=not arguments.without_bootstrap)
        print(f"{kind.name:34}" + "".join(f"{100 * share:9.1f}%" for share in shares), flush=True)


if __name__ == "__main__":
    main()
