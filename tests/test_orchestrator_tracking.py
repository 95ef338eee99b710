"""The MLflow mirror: each point once, whatever was logged before; a real SQLite store."""

import json
import math

import pytest

from orchestrator import ledger
from orchestrator.config import ModelEntry
from orchestrator.errors import UserError
from orchestrator.grid import Cell
from orchestrator.ledger import CellDir, MetricsTail
from orchestrator.tracking import Recorder, experiment_name

pytestmark = pytest.mark.filterwarnings("ignore")


def make_cell(rule: str) -> Cell:
    config = {
        "grid": "g", "rule": rule, "scope": "group", "seed": 3,
        "model": {"name": "m", "path": "models/m", "template": "qa", "config": {"rope_theta": 4}},
        "dataset": {"name": "d"},
        "train": {"steps": 4, "learning_rate": 0.001, "prompts_per_update": None},
    }  # fmt: skip
    return Cell(f"{rule}-m-d-s3-00000000", config, (0, 4), {"benchmarks": []}, ModelEntry(path="m", template="qa"), 0)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One database for the module: to make one takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    return folder, uri, Recorder(uri, "g", folder)


def write_steps(folder: CellDir, steps: range) -> MetricsTail:
    with folder.metrics.open("a") as file:
        for step in steps:
            metrics = {"reward/mean": step / 10, "policy/loss": math.nan if step == 2 else 0.1 * step}
            file.write(json.dumps({"step": step, "metrics": metrics, "non_finite": ["length/sign_gap"]}) + "\n")
    tail = MetricsTail(folder)
    tail.read()
    return tail


def write_summary(cell: Cell, folder: CellDir, step: int, mean: float) -> None:
    ledger.prepare_evaluation(cell, folder, step)
    ledger.write_atomic(folder.summary(step), json.dumps({"metrics": {"eval/mean": mean}}))


def history(recorder: Recorder, cell: Cell) -> dict[tuple[str, int], list[float]]:
    run = find_run(recorder, cell)
    points: dict[tuple[str, int], list[float]] = {}
    for key in run.data.metrics:
        for point in recorder._client.get_metric_history(run.info.run_id, key):
            points.setdefault((key, point.step), []).append(point.value)
    return points


def find_run(recorder: Recorder, cell: Cell):
    name = experiment_name(cell.grid)
    experiment = recorder._client.get_experiment_by_name(name)
    runs = recorder._client.search_runs([experiment.experiment_id], f"tags.`balagg.cell` = '{cell.id}'")
    assert len(runs) == 1
    return runs[0]


def test_a_cell_is_mirrored_whole_and_each_point_once(store, tmp_path):
    root, uri, first = store
    cell = make_cell("token")
    folder = ledger.open_cell(tmp_path, cell)
    first.open([cell])
    tail = write_steps(folder, range(1, 3))
    first.sync(cell, folder, tail, "training")
    first.sync(cell, folder, tail, "training")
    write_summary(cell, folder, 0, 0.25)
    assert find_run(first, cell).info.status == "RUNNING"

    # The command is killed here. Another one finds the run, and asks it what it has.
    second = Recorder(uri, "g", root)
    second.open([cell])
    assert not second.is_synced(cell, folder)
    tail = write_steps(folder, range(3, 5))
    write_summary(cell, folder, 4, 0.5)
    folder.rollouts.mkdir()
    for step in (1, 10, 9):
        (folder.rollouts / f"step-{step}.parquet").write_bytes(b"x")
    second.close(cell, folder, tail, "done")

    expected = {("reward/mean", step): [step / 10] for step in range(1, 5)}
    expected |= {("policy/loss", step): [0.1 * step] for step in (1, 3, 4)}
    expected |= {("eval/mean", 0): [0.25], ("eval/mean", 4): [0.5]}
    assert history(second, cell) == expected

    run = find_run(second, cell)
    assert run.info.run_name == cell.id
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "rule": "token", "scope": "group", "seed": "3", "model": "m", "dataset": "d",
        "train.steps": "4", "train.learning_rate": "0.001", "train.prompts_per_update": "null",
        "model.path": "models/m", "model.template": "qa", "model.config": '{"rope_theta": 4}',
    }  # fmt: skip
    assert run.data.tags["balagg.state"] == "done"
    assert run.data.tags["version.torch"].startswith("2.")
    assert json.loads(run.data.tags["balagg.non_finite"]) == {"length/sign_gap": 4, "policy/loss": 1}
    client = second._client
    artifacts = {
        file.path
        for place in ("", "rollouts", "evals/step-0", "evals/step-4")
        for file in client.list_artifacts(run.info.run_id, place)
        if not file.is_dir
    }
    assert artifacts == {
        "config.json", "rollouts/step-1.parquet", "rollouts/step-10.parquet",
        "evals/step-0/summary.json", "evals/step-4/summary.json",
    }  # fmt: skip
    assert (root / "artifacts" / "balagg-g" / run.info.run_id).is_dir()

    third = Recorder(uri, "g", root)
    third.open([cell])
    assert third.is_synced(cell, folder)
    write_summary(cell, folder, 4, 0.75)
    assert not third.is_synced(cell, folder)
    third.close(cell, folder, tail, "done")
    assert history(third, cell)[("eval/mean", 4)] == [0.5, 0.75]
    assert history(third, cell)[("eval/mean", 0)] == [0.25]


def test_after_an_error_the_store_is_asked_what_it_has(store, tmp_path, monkeypatch):
    _, _, recorder = store
    cell = make_cell("sequence")
    folder = ledger.open_cell(tmp_path, cell)
    recorder.open([cell])
    recorder.sync(cell, folder, write_steps(folder, range(1, 2)), "training")
    real = recorder._client.log_batch

    def stored_but_not_confirmed(*arguments, **keywords):
        real(*arguments, **keywords)
        raise recorder.errors[0]("the connection was lost")

    tail = write_steps(folder, range(2, 4))
    with monkeypatch.context() as patch:
        patch.setattr(recorder._client, "log_batch", stored_but_not_confirmed)
        with pytest.raises(recorder.errors, match="lost"):
            recorder.sync(cell, folder, tail, "training")
    recorder.sync(cell, folder, tail, "training")
    points = history(recorder, cell)
    assert {len(values) for values in points.values()} == {1}
    assert {step for key, step in points if key == "reward/mean"} == {1, 2, 3}


def test_a_run_that_lost_its_params_to_a_kill_gets_them(store, tmp_path):
    _, _, recorder = store
    cell = make_cell("balanced")
    folder = ledger.open_cell(tmp_path, cell)
    tags = {"balagg.cell": cell.id}
    recorder._client.create_run(recorder._experiment, run_name=cell.id, tags=tags)
    recorder.open([cell])
    recorder.sync(cell, folder, MetricsTail(folder), "training")
    assert find_run(recorder, cell).data.params["rule"] == "balanced"


def test_a_deleted_experiment_is_a_message(store):
    root, uri, _ = store
    other = Recorder(uri, "gone", root)
    other._client.delete_experiment(other._experiment)
    with pytest.raises(UserError, match="balagg-gone was deleted; restore it: mlflow experiments restore"):
        Recorder(uri, "gone", root)


def test_a_store_that_cannot_be_opened_is_a_message(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is no database, whatever its name says; " * 50)
    with pytest.raises(UserError, match="cannot use the MLflow store sqlite"):
        Recorder(f"sqlite:///{tmp_path / 'mlflow.db'}", "g", tmp_path)
