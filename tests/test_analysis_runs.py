"""Loading logged runs, against a real MLflow store in SQLite."""

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from analysis.figures import FIGURES, draw_all
from analysis.runs import (
    CELL,
    LoggedRuns,
    _ask_server,
    _last_values,
    base_scores,
    final_scores,
    load_runs,
    notes,
    scores,
)
from trainers import metric_names as names

MODELS, DATASETS = ("tiny-qwen2", "tiny-qwen3"), ("gen_chains", "gen_stories")
RULES = ("sequence", "token", "balanced")
BENCHMARKS = ("gen_short", "gen_long", "gen_tales", "gen_equations", "gen_series", "gen_functions")
TABLES = ("table_1", "differences", "overall", "stability")
STEPS = 4
STEP_METRICS = [
    *(names.REWARD_MEAN, names.GROUP_CV, names.POS_LENGTH, names.NEG_LENGTH, names.SIGN_GAP, names.SIGN_GAP_REL),
    *(mass(rule) for rule in RULES for mass in (names.positive_mass, names.negative_mass)),
]
Logged = dict[tuple[str, int], float]


def values_of_a_run(seed: int) -> Logged:
    """Plausible values of every metric of one run; exact doubles that rounding would change."""
    rng = np.random.default_rng(seed)
    logged = {(metric, step): rng.random() for metric in STEP_METRICS for step in range(1, STEPS + 1)}
    for step in (0, STEPS):
        for benchmark in (*BENCHMARKS, names.HELDOUT):
            logged[names.eval_avg(benchmark, 4), step] = rng.random()
            logged[names.eval_length(benchmark), step] = rng.random() * 100
        logged[names.EVAL_MEAN, step] = rng.random()
    return logged


def log_run(
    client: MlflowClient,
    experiment_id: str,
    cell: tuple[str, str, str, int],
    logged: Logged,
    *,
    status: str | None = "FINISHED",
    timestamp: int = 1000,
    started: int | None = None,
    params: dict[str, str] | None = None,
) -> str:
    rule, model, dataset, seed = cell
    run = client.create_run(experiment_id, start_time=started, run_name="-".join(map(str, cell))).info.run_id
    axes = {"rule": rule, "model": model, "dataset": dataset, "seed": str(seed), "scope": "group"}
    client.log_batch(
        run,
        metrics=[Metric(metric, value, timestamp, step) for (metric, step), value in logged.items()],
        params=[Param(name, value) for name, value in (axes | (params or {})).items()],
    )
    if status is not None:
        client.set_terminated(run, status)
    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tracking URI of a store with a full laptop-like grid, `balagg-full`."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.create_experiment("balagg-full", artifact_location="unused")
    for seed, (rule, model, dataset) in enumerate(itertools.product(RULES, MODELS, DATASETS)):
        log_run(client, experiment, (rule, model, dataset, 0), values_of_a_run(seed))
    return uri


@pytest.fixture(scope="module")
def full(store: str) -> LoggedRuns:
    return load_runs(store, "balagg-full")


def new_experiment(store: str, name: str) -> tuple[MlflowClient, str]:
    client = MlflowClient(store)
    return client, client.create_experiment(name, artifact_location="unused")


def value(metrics: pd.DataFrame, metric: str, step: int) -> float:
    [found] = metrics.value[(metrics.metric == metric) & (metrics.step == step)]
    return found


def test_every_value_arrives_exactly_once(full: LoggedRuns):
    assert len(full.params) == 12
    for seed, cell in enumerate(itertools.product(RULES, MODELS, DATASETS)):
        rule, model, dataset = cell
        table = full.metrics
        rows = table[(table.rule == rule) & (table.model == model) & (table.dataset == dataset)]
        expected = values_of_a_run(seed)
        assert len(rows) == len(expected)
        assert dict(zip(zip(rows.metric, rows.step, strict=True), rows.value, strict=True)) == expected
        assert set(rows.seed) == {0} and set(rows.scope) == {"group"}


def test_a_full_grid_needs_no_notes(full: LoggedRuns):
    assert notes(full) == []


def test_database_and_client_agree(store: str, full: LoggedRuns):
    run = full.params.run[0]
    [(_, history)] = _ask_server(MlflowClient(store), [run])
    asked = _last_values(history)
    loaded = full.metrics[full.metrics.run == run].sort_values(["metric", "step"])
    for column in ("metric", "step", "value"):
        assert list(asked[column]) == list(loaded[column])


def test_the_last_value_of_a_step_wins(store: str):
    client, experiment = new_experiment(store, "twice")
    run = log_run(client, experiment, ("token", "m", "d", 0), {("reward/mean", 1): 0.9, ("reward/mean", 2): 0.4})
    client.log_metric(run, "reward/mean", 0.2, timestamp=5000, step=1)
    client.log_metric(run, "reward/mean", 0.7, timestamp=3000, step=1)
    client.log_metric(run, "length/sign_gap", math.nan, timestamp=1, step=1)
    client.log_metric(run, "policy/loss", math.inf, timestamp=1, step=1)
    metrics = load_runs(store, "twice").metrics
    assert value(metrics, "reward/mean", 1) == 0.2
    assert value(metrics, "reward/mean", 2) == 0.4
    assert math.isnan(value(metrics, "length/sign_gap", 1))
    assert math.isnan(value(metrics, "policy/loss", 1))
    assert len(metrics) == 4


def test_the_latest_finished_try_at_a_cell_counts(store: str):
    client, experiment = new_experiment(store, "tries")
    cell = ("balanced", "m", "d", 3)
    for started, reward, status in (
        (1, 0.1, "FINISHED"),
        (3, 0.3, "FINISHED"),
        (2, 0.2, "FINISHED"),
        (9, 0.9, "FAILED"),
    ):
        log_run(client, experiment, cell, {("reward/mean", 1): reward}, started=started, status=status)
    loaded = load_runs(store, "tries")
    assert loaded.params[CELL].to_numpy().tolist() == [["balanced", "m", "d", "group", 3]]
    assert list(loaded.metrics.value) == [0.3]


def test_unfinished_cells_are_named_and_left_out(store: str):
    client, experiment = new_experiment(store, "partial")
    logged = {("reward/mean", 1): 0.5, (names.EVAL_MEAN, 1): 0.4, (names.eval_avg("gen_short", 2), 1): 0.4}
    recipe = {"train.learning_rate": "0.001"}
    log_run(client, experiment, ("sequence", "m", "d", 0), logged, params=recipe)
    log_run(client, experiment, ("balanced", "m", "d", 0), logged, status=None, params=recipe)
    log_run(
        client, experiment, ("balanced", "m", "d", 1), {("reward/mean", 1): 0.5}, params={"train.learning_rate": "0.01"}
    )
    client.create_run(experiment, run_name="not a cell")
    loaded = load_runs(store, "partial")
    assert set(loaded.metrics.rule) == {"sequence", "balanced"} and loaded.metrics.run.nunique() == 2
    absent, missing, differing, unscored = notes(loaded)
    assert absent == "No runs of the rule token."
    assert (
        missing == "Missing 2 of 4 cells: balanced on m · d seed 0 (running), sequence on m · d seed 1 (not started)."
    )
    assert differing == "Runs on m · d differ in train.learning_rate."
    assert unscored == "Not scored at the last step: gen_short in 1 of 2 runs, mean in 1 of 2 runs."


def test_scores_know_benchmark_samples_and_step(full: LoggedRuns):
    table = full.metrics
    assert set(scores(table).benchmark) == {*BENCHMARKS, "heldout", "mean"}
    assert set(scores(table).k) == {0, 4}
    assert set(base_scores(table).step) == {0} and set(final_scores(table).step) == {STEPS}
    assert len(final_scores(table)) == 12 * 8


def test_draw_all_on_a_partial_grid(store: str, tmp_path: Path):
    client, experiment = new_experiment(store, "two-cells")
    for seed, rule in enumerate(("sequence", "balanced")):
        log_run(client, experiment, (rule, "tiny-qwen2", "gen_chains", 0), values_of_a_run(seed))
    paths = draw_all(store, "two-cells", tmp_path / "new" / "figures")
    expected = {f"{name}.{suffix}" for name in FIGURES for suffix in ("png", "pdf")}
    expected |= {f"{table}.{suffix}" for table in TABLES for suffix in ("csv", "md", "tex")}
    assert {path.name for path in paths} == expected
    assert all(path.stat().st_size > 0 for path in paths)
    assert "No runs of the rule token." in (tmp_path / "new" / "figures" / "table_1.md").read_text("utf-8")

    assert draw_all(store, "two-cells", tmp_path / "new" / "figures", only_if_changed=True) == []
    log_run(client, experiment, ("token", "tiny-qwen2", "gen_chains", 0), values_of_a_run(2))
    assert draw_all(store, "two-cells", tmp_path / "new" / "figures", only_if_changed=True) == paths
    assert "No runs of the rule" not in (tmp_path / "new" / "figures" / "table_1.md").read_text("utf-8")


def test_missing_database_is_an_error_and_is_not_created(tmp_path: Path):
    path = tmp_path / "nowhere.db"
    with pytest.raises(ValueError, match=r"no MLflow database at .*nowhere\.db.*make reproduce"):
        load_runs(f"sqlite:///{path}", "balagg-laptop")
    assert not path.exists()


def test_unknown_experiment_names_the_known_ones(store: str):
    with pytest.raises(ValueError, match=r"no experiment named 'balagg-lapto'.*balagg-full"):
        load_runs(store, "balagg-lapto")


def test_no_finished_run_is_an_error(store: str):
    client, experiment = new_experiment(store, "early")
    with pytest.raises(ValueError, match=r"no finished run \(no runs\)"):
        load_runs(store, "early")
    log_run(client, experiment, ("token", "m", "d", 0), {("reward/mean", 1): 0.5}, status=None)
    with pytest.raises(ValueError, match=r"no finished run \(1 RUNNING\).*run the same command"):
        load_runs(store, "early")
