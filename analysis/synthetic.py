"""Studies with a known truth, to check what this package says about them.

A run is simulated from what is planted: problems of known difficulty, seeds that differ by a known amount, responses
whose lengths have a known variation and a known gap between right and wrong ones. `draw_study` gives the tables that
`analysis.runs` would read; `log_study` writes the same runs to MLflow, through its client, as the orchestrator does.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from analysis import artifacts
from analysis.diagnose_weights import RULES, group_advantages, token_weights
from analysis.runs import CELL, FINISHED, LoggedRuns
from trainers import metric_names as names

Array = NDArray[np.float64]
LOGGED_AT_ONCE = 1000
"""MLflow takes so many metrics in one batch."""


@dataclass(frozen=True)
class Lengths:
    """How long the responses of a model are, in tokens.

    Attributes:
        mean: of all responses.
        gap: mean of right minus mean of wrong responses, relative to `mean`.
        cv: coefficient of variation among responses of one sign.
        limit: where a response is cut.
    """

    mean: float = 60.0
    gap: float = 0.0
    cv: float = 0.3
    limit: int = 96


@dataclass(frozen=True)
class Study:
    """What is planted.

    Attributes:
        rules, models, datasets, seeds: axes of the grid; `models` says how long their responses are.
        effects: accuracy of a rule at the last step, less `base` and `gain`.
        drops: how much of that accuracy a rule loses after three quarters of training.
        base, gain: accuracy before training, and what training adds to it for a rule without an effect.
        seed_std: standard deviation of what all rules share at one seed.
        run_std: standard deviation of what a run does not share with the others at its seed.
        problem_std: standard deviation of the problems' difficulty (uniform).
        interaction_std: standard deviation of how much each problem suits each run.
        benchmarks: name -> number of problems.
        samples: responses per problem in evaluation.
        steps, num_groups, group_size: of training.
        checkpoints: where evaluated, as shares of training; 0 is the base model.
    """

    rules: tuple[str, ...] = ("sequence", "token", "balanced")
    models: dict[str, Lengths] = field(default_factory=lambda: {"even": Lengths(), "gapped": Lengths(gap=-0.4)})
    datasets: tuple[str, ...] = ("chains", "stories")
    seeds: int = 3
    effects: dict[str, float] = field(default_factory=dict)
    drops: dict[str, float] = field(default_factory=dict)
    base: float = 0.4
    gain: float = 0.15
    seed_std: float = 0.01
    run_std: float = 0.01
    problem_std: float = 0.12
    interaction_std: float = 0.05
    benchmarks: dict[str, int] = field(default_factory=lambda: {"short": 100, "long": 60})
    samples: int = 4
    steps: int = 40
    num_groups: int = 16
    group_size: int = 8
    checkpoints: tuple[float, ...] = (0.0, 0.5, 0.75, 1.0)

    def accuracy(self, rule: str, progress: Array) -> Array:
        """The true mean accuracy of a rule after a share of training."""
        risen = (self.gain + self.effects.get(rule, 0.0) + self.drops.get(rule, 0.0)) * np.minimum(progress / 0.75, 1)
        return self.base + risen - self.drops.get(rule, 0.0) * np.maximum(progress - 0.75, 0) / 0.25


class Run(NamedTuple):
    """One simulated run.

    Attributes:
        cell: rule, model, dataset, scope, seed.
        metrics: (metric, step) -> value.
        rollouts: step -> one row per response, as the trainers write it.
        scores: benchmark -> one row per sample of the last evaluation, as the tracking logs it.
    """

    cell: tuple[str, str, str, str, int]
    metrics: dict[tuple[str, int], float]
    rollouts: dict[int, pd.DataFrame]
    scores: dict[str, pd.DataFrame]


def simulate(study: Study, seed: int = 0) -> Iterator[Run]:
    """The runs of a study, one after the other; the same for the same `seed`."""
    for model, dataset in itertools.product(study.models, study.datasets):
        panel = _stream(seed, model, dataset)
        problems = {
            name: np.sqrt(12) * study.problem_std * (panel.random(num) - 0.5) for name, num in study.benchmarks.items()
        }
        shared = study.seed_std * panel.standard_normal(study.seeds)
        for rule, number in itertools.product(study.rules, range(study.seeds)):
            rng = _stream(seed, model, dataset, rule, number)
            own = shared[number] + study.run_std * rng.standard_normal()
            yield _simulate_run(study, (rule, model, dataset, "group", number), problems, own, rng)


def draw_study(study: Study, seed: int = 0) -> LoggedRuns:
    """The tables of a study as `analysis.runs.load_runs` would read them."""
    runs = list(simulate(study, seed))
    cells = pd.DataFrame([run.cell for run in runs], columns=CELL)
    cells.insert(0, "run", [f"run{place}" for place in range(len(runs))])
    params = cells.assign(
        name=["-".join(map(str, run.cell)) for run in runs], status=FINISHED, started=1000 + cells.index
    )
    values = [(f"run{place}", *key, value) for place, run in enumerate(runs) for key, value in run.metrics.items()]
    metrics = cells.merge(pd.DataFrame(values, columns=["run", "metric", "step", "value"]), on="run")
    lengths = [
        (f"run{place}", {"step": step}, artifacts.count_lengths(pa.Table.from_pandas(rollout)))
        for place, run in enumerate(runs)
        for step, rollout in run.rollouts.items()
    ]
    scores = [
        (
            f"run{place}",
            {"step": study.steps, "benchmark": name},
            artifacts.problem_scores(pa.Table.from_pandas(samples)),
        )
        for place, run in enumerate(runs)
        for name, samples in run.scores.items()
    ]
    gathered = artifacts.gather(cells, lengths), artifacts.gather(cells, scores)
    return LoggedRuns(params, metrics, lengths=gathered[0], problems=gathered[1])


def log_study(study: Study, tracking_uri: str, experiment: str, artifact_root: Path, seed: int = 0) -> None:
    """Write a study's runs to MLflow under a new experiment, with the files that the orchestrator logs."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(tracking_uri)
    experiment_id = client.create_experiment(experiment, artifact_location=(artifact_root / experiment).as_uri())
    for place, run in enumerate(simulate(study, seed)):
        name = "-".join(str(part) for part in (*run.cell[:3], f"s{run.cell[4]}", f"{place:08x}"))
        tags = {"mlflow.source.git.commit": "0" * 40, "version.balagg": "0.1.0"}
        logged = client.create_run(experiment_id, start_time=1000 + place, run_name=name, tags=tags).info.run_id
        client.log_batch(logged, params=[Param(key, str(text)) for key, text in zip(CELL, run.cell, strict=True)])
        points = [Metric(metric, value, 1000, step) for (metric, step), value in run.metrics.items()]
        for start in range(0, len(points), LOGGED_AT_ONCE):
            client.log_batch(logged, metrics=points[start : start + LOGGED_AT_ONCE])
        with tempfile.TemporaryDirectory() as folder:
            _write_files(run, Path(folder), study.steps)
            client.log_artifacts(logged, folder)
        client.set_terminated(logged, FINISHED)


def length_statistics(lengths: Array, advantages: Array) -> dict[str, Array]:
    """Length statistics of every step, by metric name; the definitions are those of the trainers.

    Args:
        lengths, advantages: (num_steps, num_groups, group_size).
    """
    positive, negative = advantages > 0, advantages < 0
    mean = lengths.mean(axis=-1)
    gap = _mean(lengths, positive, -1) - _mean(lengths, negative, -1)
    with np.errstate(invalid="ignore"):
        found = {
            names.GROUP_CV: (lengths.std(axis=-1) / mean).mean(axis=-1),
            names.SIGN_GAP: _mean(gap, ~np.isnan(gap), -1),
            names.SIGN_GAP_REL: _mean(gap / mean, ~np.isnan(gap), -1),
        }
    flat = lengths.reshape(len(lengths), -1)
    return found | {
        names.POS_LENGTH: _mean(flat, positive.reshape(flat.shape), -1),
        names.NEG_LENGTH: _mean(flat, negative.reshape(flat.shape), -1),
        names.LENGTH_MEAN: flat.mean(axis=-1),
        names.LENGTH_STD: flat.std(axis=-1),
        names.LENGTH_MIN: flat.min(axis=-1),
        names.LENGTH_MAX: flat.max(axis=-1),
    }


def responses(
    accuracy: Array, lengths: Lengths, num_groups: int, group_size: int, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Rewards (0 or 1), group-normalised advantages and lengths of sampled responses.

    Args:
        accuracy: (num_steps,).

    Returns:
        Each (num_steps, num_groups, group_size).
    """
    shape = (len(accuracy), num_groups, group_size)
    difficulty = accuracy[:, None, None] + 0.5 * (rng.random((*shape[:2], 1)) - 0.5)
    rewards = (rng.random(shape) < difficulty).astype(float)
    groups = np.repeat(np.arange(shape[0] * num_groups), group_size)
    advantages = group_advantages(rewards.ravel(), groups).reshape(shape)
    means = lengths.mean * (1 + lengths.gap * (rewards - 0.5))
    sigma = np.sqrt(np.log1p(lengths.cv**2))
    drawn = means * np.exp(sigma * rng.standard_normal(shape) - sigma**2 / 2)
    return rewards, advantages, np.clip(np.rint(drawn), 1, lengths.limit)


def _simulate_run(
    study: Study,
    cell: tuple[str, str, str, str, int],
    problems: dict[str, Array],
    own: float,
    rng: np.random.Generator,
) -> Run:
    rule, lengths = cell[0], study.models[cell[1]]
    metrics: dict[tuple[str, int], float] = {}
    scores: dict[str, pd.DataFrame] = {}
    # The part of a problem's score that only this run has; its mean over problems is zero, not the draw's.
    fits = {name: study.interaction_std * rng.standard_normal(len(hard)) for name, hard in problems.items()}
    for progress in study.checkpoints:
        step, level = round(progress * study.steps), float(study.accuracy(rule, np.array(progress)))
        level += own * progress
        means = []
        for name, hard in problems.items():
            scores[name] = _samples(level + hard + fits[name] * progress, study.samples, lengths, rng)
            means.append(scores[name].correct.mean())
            metrics[names.eval_avg(name, study.samples), step] = float(means[-1])
            metrics[names.eval_length(name), step] = float(scores[name].length.mean())
        metrics[names.EVAL_MEAN, step] = float(np.mean(means))
        heldout = _samples(np.full(200, level), 1, lengths, rng)
        metrics[names.eval_avg(names.HELDOUT, 1), step] = float(heldout.correct.mean())
    scores[names.HELDOUT] = heldout
    steps = np.arange(1, study.steps + 1)
    curve = study.accuracy(rule, steps / study.steps) + own * steps / study.steps
    rewards, advantages, drawn = responses(curve, lengths, study.num_groups, study.group_size, rng)
    for metric, values in _step_metrics(rewards, advantages, drawn, lengths, rng).items():
        metrics |= {(metric, int(step)): float(value) for step, value in zip(steps, values, strict=True)}
    metrics = {key: value for key, value in metrics.items() if np.isfinite(value)}  # as the tracking does
    logged = sorted({1, study.steps // 2, study.steps} - {0})
    rollouts = {
        step: _rollout(rewards[step - 1], advantages[step - 1], drawn[step - 1], lengths.limit) for step in logged
    }
    return Run(cell, metrics, rollouts, scores)


def _step_metrics(
    rewards: Array, advantages: Array, lengths: Array, kind: Lengths, rng: np.random.Generator
) -> dict[str, Array]:
    num_steps = len(rewards)
    metrics = length_statistics(lengths, advantages) | {
        names.REWARD_MEAN: rewards.mean(axis=(1, 2)),
        names.REWARD_STD: rewards.std(axis=(1, 2)),
        names.ZERO_VARIANCE_GROUPS: (rewards.std(axis=-1) == 0).mean(axis=-1),
        names.TRUNCATED: (lengths >= kind.limit).mean(axis=(1, 2)),
    }
    metrics |= dict(_masses(lengths, advantages, kind.limit))
    noise: tuple[str, ...] = (
        names.LOSS,
        names.GRAD_NORM,
        names.ENTROPY,
        names.APPROX_KL,
        names.LEARNING_RATE,
        names.STEP_SECONDS,
    )
    noise += (names.ROLLOUT_SECONDS, names.TRAIN_SECONDS, names.TOKENS_PER_SECOND)
    return metrics | {name: rng.random(num_steps) for name in noise}


def _masses(lengths: Array, advantages: Array, limit: int) -> Iterator[tuple[str, Array]]:
    """Name and value at every step of the mass on either sign under each rule."""
    num_steps, num_groups, group_size = lengths.shape
    groups = np.repeat(np.arange(num_steps * num_groups), group_size)
    steps = groups // num_groups

    def by_step(values: Array) -> Array:
        return np.bincount(steps, values).astype(np.float64)

    n, a = lengths.ravel(), advantages.ravel()
    for rule in RULES:
        mass = token_weights(rule, n, a, groups, steps, max_length=limit) * n * a
        yield names.positive_mass(rule), by_step(np.clip(mass, 0, None))
        yield names.negative_mass(rule), by_step(-np.clip(mass, None, 0))


def _samples(chance: Array, samples: int, lengths: Lengths, rng: np.random.Generator) -> pd.DataFrame:
    """Graded samples of problems that are solved with a given probability."""
    correct = rng.random((len(chance), samples)) < chance[:, None]
    return pd.DataFrame(
        {
            "problem_id": np.repeat([f"p{place:04d}" for place in range(len(chance))], samples),
            "sample": np.tile(np.arange(samples, dtype=np.int32), len(chance)),
            "correct": correct.ravel(),
            "length": rng.integers(1, lengths.limit, correct.size).astype(np.int32),
            "truncated": np.zeros(correct.size, dtype=bool),
        }
    )


def _rollout(rewards: Array, advantages: Array, lengths: Array, limit: int) -> pd.DataFrame:
    """(num_groups, group_size) each."""
    groups = np.repeat(np.arange(len(rewards)), rewards.shape[1])
    columns = {"group": groups, "length": lengths.ravel().astype(int), "reward": rewards.ravel()}
    return pd.DataFrame(columns | {"advantage": advantages.ravel(), "truncated": lengths.ravel() >= limit})


def _write_files(run: Run, folder: Path, last_step: int) -> None:
    (folder / "rollouts").mkdir()
    for step, rollout in run.rollouts.items():
        rollout.to_parquet(folder / "rollouts" / f"step-{step}.parquet")
    evaluation = folder / "evals" / f"step-{last_step}"
    evaluation.mkdir(parents=True)
    benchmarks = {}
    for name, samples in run.scores.items():
        samples.to_parquet(evaluation / f"{name}{artifacts.SCORES_SUFFIX}")
        means = artifacts.problem_scores(pa.Table.from_pandas(samples))["score"].to_numpy()
        benchmarks[name] = {"problems": len(means), "se": float(means.std(ddof=1) / np.sqrt(len(means)))}
    (evaluation / artifacts.SUMMARY).write_text(json.dumps({"benchmarks": benchmarks}), encoding="utf-8")


def _mean(values: Array, where: NDArray[Any], axis: int) -> Array:
    """Mean of the chosen values; NaN where none is."""
    total = np.where(where, values, 0.0).sum(axis=axis)
    count = where.sum(axis=axis)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def _stream(seed: int, *names: object) -> np.random.Generator:
    """A generator of its own for every name, whatever else the study holds."""
    return np.random.default_rng([seed, *"/".join(map(str, names)).encode()])
