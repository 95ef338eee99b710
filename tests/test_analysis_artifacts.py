"""Files that runs logged, through a real MLflow store in SQLite, and what is drawn from them."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
from mlflow import MlflowClient

from analysis import comparisons
from analysis.figures import draw_all
from analysis.runs import LoggedRuns, digest, load_runs
from analysis.synthetic import Lengths, Study, draw_study, log_study, simulate

STUDY = Study(seeds=3, models={"gapped": Lengths(gap=-0.4)}, datasets=("chains",), steps=12)
EXPERIMENT = "balagg-study"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def store(folder: Path) -> str:
    uri = f"sqlite:///{folder}/mlflow.db"
    log_study(STUDY, uri, EXPERIMENT, folder / "artifacts")
    return uri


@pytest.fixture(scope="module")
def loaded(store: str) -> LoggedRuns:
    return load_runs(store, EXPERIMENT)


def by_cell(table: pd.DataFrame) -> pd.DataFrame:
    """Without the run's name, in one order, in plain types."""
    columns = [name for name in table if name != "run"]
    texts = {name: "str" for name in columns if table[name].dtype == "category" or table[name].dtype == object}
    return table[columns].astype(texts).sort_values(columns, ignore_index=True)


def test_every_table_arrives_as_it_was_drawn(loaded: LoggedRuns):
    drawn = draw_study(STUDY)
    for name in ("metrics", "lengths", "problems"):
        ours, theirs = by_cell(getattr(loaded, name)), by_cell(getattr(drawn, name))
        pd.testing.assert_frame_equal(ours, theirs[ours.columns], check_dtype=False)


def test_lengths_are_counts_of_signed_responses(loaded: LoggedRuns):
    run = next(simulate(STUDY))
    rollout = run.rollouts[12]
    rule, model, _, _, seed = run.cell
    table = loaded.lengths
    found = table[(table.rule == rule) & (table.model == model) & (table.seed == seed) & (table.step == 12)]
    for sign, chosen in ((1, rollout.advantage > 0), (-1, rollout.advantage < 0)):
        counts = found[found.sign == sign].set_index("length")["count"]
        assert counts.to_dict() == rollout.length[chosen].value_counts().to_dict()
    assert set(table.step) == {1, 6, 12}


def test_evaluations_are_the_last_ones_with_their_error(loaded: LoggedRuns):
    assert set(loaded.evaluations.step) == {12}
    assert loaded.evaluations.groupby("benchmark").problems.unique().map(list).to_dict() == {
        "heldout": [200], "long": [60], "short": [100],
    }  # fmt: skip
    scores = loaded.problems.groupby(["run", "benchmark"])["score"]
    errors = (scores.std(ddof=1) / scores.size() ** 0.5).rename("expected").reset_index()
    both = loaded.evaluations.merge(errors, on=["run", "benchmark"])
    assert both.se.tolist() == pytest.approx(both.expected.tolist(), rel=1e-9)


def test_intervals_of_a_stored_study_are_over_seeds_and_problems(loaded: LoggedRuns):
    assert set(comparisons.final_accuracy(loaded).over) == {comparisons.SEEDS_AND_PROBLEMS}


def test_runs_without_files_have_empty_tables(store: str):
    client = MlflowClient(store)
    experiment = client.create_experiment("plain", artifact_location="unused")
    run = client.create_run(experiment).info.run_id
    for name, text in zip(
        ("rule", "model", "dataset", "scope", "seed"), ("token", "m", "d", "group", "0"), strict=True
    ):
        client.log_param(run, name, text)
    client.log_metric(run, "reward/mean", 0.5, step=1)
    client.set_terminated(run)
    loaded = load_runs(store, "plain")
    assert loaded.lengths.empty and loaded.evaluations.empty and loaded.problems.empty
    assert {"run", "rule", "benchmark", "problem", "score"} <= set(loaded.problems.columns)


def test_a_file_that_cannot_be_read_is_named(store: str, tmp_path: Path):
    experiment = "damaged"
    log_study(
        Study(seeds=1, models=STUDY.models, datasets=("d",), rules=("token",), steps=4), store, experiment, tmp_path
    )
    damaged = next(iter(tmp_path.glob("**/rollouts/step-4.parquet")))
    damaged.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"rollouts/step-4\.parquet of MLflow run \w{32} cannot be read"):
        load_runs(store, experiment)


def test_the_same_runs_give_the_same_bytes_wherever_the_command_is_started(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There is no folder of runs in either place: what is drawn comes from MLflow alone."""

    def drawn(where: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in draw_all(store, EXPERIMENT, where)}

    first = drawn(tmp_path / "first")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert drawn(tmp_path / "second") == first
    assert len(first) == 2 * 13 + 3 * 4 and not list(elsewhere.iterdir())


def test_the_digest_changes_with_any_file(store: str, folder: Path, loaded: LoggedRuns):
    assert digest(load_runs(store, EXPERIMENT)) == digest(loaded)
    scores = next(iter((folder / "artifacts").glob("**/evals/step-12/short.scores.parquet")))
    kept = scores.with_suffix(".kept")
    shutil.copy(scores, kept)
    table = pd.read_parquet(scores)
    table.loc[0, "correct"] = not table.correct[0]
    table.to_parquet(scores)
    try:
        assert digest(load_runs(store, EXPERIMENT)) != digest(loaded)
    finally:
        kept.replace(scores)
