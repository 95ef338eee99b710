"""A grid as two tables: the same values, whether they come from the files or from MLflow."""

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from orchestrator import ledger
from orchestrator.cells import look_up
from orchestrator.cli import app
from orchestrator.config import load_config
from orchestrator.grid import expand
from orchestrator.tracking import Recorder, tracking_uri

pytestmark = pytest.mark.filterwarnings("ignore")

GRID = """\
models: {tiny: {path: tiny, template: qa}}
grids:
  demo:
    rules: [token, balanced]
    models: [tiny]
    datasets: [gen_chains]
    train: {steps: 2}
    evaluate: {benchmarks: [gen_short], at: [last]}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """One cell is done and in MLflow, one has made a step."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "experiments.yaml").write_text(GRID)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    done, started = cells = expand(load_config(tmp_path / "experiments.yaml"), "demo")
    for cell, steps in ((done, 2), (started, 1)):
        ledger.open_cell(tmp_path / "runs", cell)
        folder = ledger.cell_dir(tmp_path / "runs", cell)
        lines = [
            {"step": step, "metrics": {"reward/mean": step / 3, "length/mean": 1e9}} for step in range(1, steps + 1)
        ]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = ledger.cell_dir(tmp_path / "runs", done)
    folder.checkpoint(2).mkdir(parents=True)
    (folder.checkpoint(2) / ledger.COMPLETE).touch()
    ledger.prepare_evaluation(done, folder, 2)
    folder.summary(2).write_text(json.dumps({"metrics": {"eval/mean": 0.1}, "benchmarks": {}}))
    recorder = Recorder(tracking_uri(tmp_path), "demo", tmp_path)
    run = look_up(tmp_path / "runs", done)
    recorder.close(done, folder, run.tail, "done")
    return tmp_path, cells


def export(*arguments: str) -> None:
    result = CliRunner().invoke(app, ["export", *arguments])
    assert result.exit_code == 0, result.stderr


def points(table: pd.DataFrame, cell) -> dict[tuple[str, int], float]:
    mine = table[table.cell == cell.id]
    assert set(mine.rule) == {cell.rule}
    return {(row.metric, row.step): row.value for row in mine.itertuples()}


def test_files_and_mlflow_give_the_same_tables(project):
    folder, (done, started) = project
    expected = {("reward/mean", 1): 1 / 3, ("reward/mean", 2): 2 / 3, ("eval/mean", 2): 0.1}
    expected |= {("length/mean", step): 1e9 for step in (1, 2)}

    export()
    runs, metrics = (pd.read_csv(folder / "exports" / "demo" / f"{name}.csv") for name in ("runs", "metrics"))
    assert list(runs.columns[:6]) == ["cell", "rule", "model", "dataset", "scope", "seed"]
    assert dict(zip(runs.cell, runs.state, strict=True)) == {done.id: "done", started.id: "pending"}
    assert set(runs["train.steps"]) == {2}
    assert list(metrics.columns) == ["cell", "rule", "model", "dataset", "scope", "seed", "metric", "step", "value"]
    assert points(metrics, done) == expected
    assert points(metrics, started) == {("reward/mean", 1): 1 / 3, ("length/mean", 1): 1e9}

    export("--format", "parquet", "--out", "tables", "--only", "rule=token")
    parquet = pd.read_parquet(folder / "tables" / "metrics.parquet")
    assert points(parquet, done) == expected
    assert set(parquet.cell) == {done.id}
    assert pd.read_parquet(folder / "tables" / "runs.parquet").cell.tolist() == [done.id]

    export("--from", "mlflow", "--format", "parquet", "--out", "stored")
    stored = pd.read_parquet(folder / "stored" / "metrics.parquet")
    assert points(stored, done) == expected
    assert list(stored.columns) == list(metrics.columns)
    runs = pd.read_parquet(folder / "stored" / "runs.parquet")
    assert (runs.cell.tolist(), runs.state.tolist()) == ([done.id], ["FINISHED"])
    assert not list(folder.rglob("*.partial"))
