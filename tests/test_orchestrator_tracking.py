"""The MLflow mirror: each point once, whatever was logged before and whatever becomes of the store; real stores."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from orchestrator import ledger
from orchestrator.config import ModelEntry
from orchestrator.errors import UserError
from orchestrator.grid import Cell
from orchestrator.ledger import CellDir, MetricsTail
from orchestrator.tracking import Recorder, StoreAway, experiment_name

pytestmark = pytest.mark.filterwarnings("ignore")


def make_cell(rule: str) -> Cell:
    config = {
        "grid": "g", "rule": rule, "scope": "group", "seed": 3,
        "model": {"name": "m2.5", "path": "models/m", "template": "qa", "config": {"rope_theta": 4}},
        "dataset": {"name": "d"},
        "train": {"steps": 4, "learning_rate": 0.001, "prompts_per_update": None},
    }  # fmt: skip
    model = ModelEntry(path="m", template="qa")
    return Cell(f"{rule}-m2.5-d-s3-0123abcd", config, (0, 4), {"benchmarks": []}, model, 0)


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
            line = {"step": step, "time": 1_700_000_000 + step, "metrics": metrics}
            file.write(json.dumps(line | ({"non_finite": ["length/sign_gap"]} if step < 3 else {})) + "\n")
    tail = MetricsTail(folder)
    tail.read()
    return tail


def write_evaluation(cell: Cell, folder: CellDir, step: int, score: float, benchmark: str = "aime24") -> None:
    ledger.prepare_evaluation(cell, folder, step)
    scores = {"k": 2, "problems": 2, "problems_digest": "d1", "source": "a file"}
    metrics = {"eval/mean": score, f"eval/{benchmark}_avg_at_2": score, f"eval/{benchmark}_length": 8.0}
    text = json.dumps({"metrics": metrics, "benchmarks": {benchmark: scores}})
    rows = [
        {"id": problem, "sample": sample, "correct": sample == 0, "reason": reason, "tokens": 7, "truncated": False}
        for problem, reason in (("p1", "correct"), ("p2", "grader_error"), ("beyond the limit", "wrong"))
        for sample in range(2)
    ]
    (folder.evaluation(step) / f"{benchmark}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger.write_atomic(folder.summary(step), text)


def write_provenance(folder: CellDir, gpu: str | None = None) -> None:
    dataset = {"name": "d", "source": "generated", "problems": 5, "digest": "d0"}
    facts = {"dataset": dataset, "host": "node7", "gpu": gpu, "cuda": None, "torch": "2.0.1", "python": "3.11"}
    folder.provenance.write_text(json.dumps(facts))


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


def artifacts(recorder: Recorder, cell: Cell, *places: str) -> set[str]:
    client, run_id = recorder._client, find_run(recorder, cell).info.run_id
    return {file.path for place in places for file in client.list_artifacts(run_id, place) if not file.is_dir}


def test_a_cell_is_mirrored_whole_and_each_point_once(store, tmp_path):
    root, uri, first = store
    cell = make_cell("token")
    folder = ledger.open_cell(tmp_path, cell)
    first.open([cell])
    tail = write_steps(folder, range(1, 3))
    first.sync(cell, folder, tail, "training")
    first.sync(cell, folder, tail, "training")
    write_evaluation(cell, folder, 0, 0.25)
    assert find_run(first, cell).info.status == "RUNNING"

    # The command is killed here. Another one finds the run, and asks it what it has.
    second = Recorder(uri, "g", root)
    second.open([cell])
    assert not second.is_synced(cell, folder)
    tail = write_steps(folder, range(3, 5))
    write_evaluation(cell, folder, 4, 0.5)
    write_provenance(folder, gpu="NVIDIA H200")
    folder.rollouts.mkdir()
    for step in (1, 10, 9, 4):
        (folder.rollouts / f"step-{step}.parquet").write_bytes(b"x")
    second.close(cell, folder, tail, "done")

    expected = {("reward/mean", step): [step / 10] for step in range(1, 5)}
    expected |= {("policy/loss", step): [0.1 * step] for step in (1, 3, 4)}
    expected |= {("events/non_finite", 1): [1], ("events/non_finite", 2): [2]}
    for step, score in ((0, 0.25), (4, 0.5)):
        expected |= {("eval/mean", step): [score], ("eval/aime24_avg_at_2", step): [score]}
        expected |= {("eval/aime24_length", step): [8.0]}
    assert history(second, cell) == expected

    run = find_run(second, cell)
    assert run.info.run_name == cell.id
    assert run.info.status == "FINISHED"
    assert run.info.start_time == 1_700_000_001_000
    assert abs(run.info.end_time / 1000 - folder.summary(4).stat().st_mtime) < 0.002
    assert run.data.params == {
        "rule": "token", "scope": "group", "seed": "3", "model": "m2.5", "dataset": "d",
        "train.steps": "4", "train.learning_rate": "0.001", "train.prompts_per_update": "null",
        "model.path": "models/m", "model.template": "qa", "model.config": '{"rope_theta": 4}',
    }  # fmt: skip
    tags = run.data.tags
    assert (tags["balagg.state"], tags["balagg.config_hash"]) == ("done", "0123abcd")
    assert (tags["host"], tags["gpu"], tags["version.torch"]) == ("node7", "NVIDIA H200", "2.0.1")
    assert tags["version.mlflow"].startswith("3.")
    assert json.loads(tags["balagg.non_finite"]) == {"length/sign_gap": 2, "policy/loss": 1}
    assert artifacts(second, cell, "", "rollouts") == {
        "config.json", "rollouts/step-1.parquet", "rollouts/step-9.parquet", "rollouts/step-10.parquet",
    }  # fmt: skip
    assert (root / "artifacts" / "balagg-g" / run.info.run_id).is_dir()
    times = [p.timestamp for p in second._client.get_metric_history(run.info.run_id, "reward/mean")]
    assert times == [(1_700_000_000 + step) * 1000 for step in range(1, 5)]

    third = Recorder(uri, "g", root)
    third.open([cell])
    assert third.is_synced(cell, folder)
    write_evaluation(cell, folder, 4, 0.75)
    assert not third.is_synced(cell, folder)
    third.close(cell, folder, tail, "done")
    assert history(third, cell)[("eval/mean", 4)] == [0.5, 0.75]
    assert history(third, cell)[("eval/mean", 0)] == [0.25]


def test_evaluations_hang_on_checkpoints_and_problems(store, tmp_path):
    _, _, recorder = store
    cell = make_cell("constant")
    folder = ledger.open_cell(tmp_path, cell)
    write_provenance(folder)
    write_evaluation(cell, folder, 4, 0.5)
    # Asked for later: another benchmark, whose mean over itself is not the mean over the grid's benchmarks.
    extra = replace(cell, evaluation={"benchmarks": [{"name": "math500"}]})

    class Extra(CellDir):
        def evaluation(self, step: int) -> Path:
            return self.path / "evals" / "math500" / f"step-{step}"

    write_evaluation(extra, Extra(folder.path), 4, 0.125, benchmark="math500")
    recorder.close(cell, folder, MetricsTail(folder), "done")

    run = find_run(recorder, cell)
    inputs = {(item.dataset.name, item.dataset.digest): item for item in run.inputs.dataset_inputs}
    assert set(inputs) == {("d", "d0"), ("aime24", "d1"), ("math500", "d1")}
    assert inputs["d", "d0"].tags[0].value == "train"
    assert inputs["aime24", "d1"].tags[0].value == "evaluation"
    assert json.loads(inputs["aime24", "d1"].dataset.source) == {"uri": "a file"}

    (output,) = run.outputs.model_outputs
    assert output.step == 4
    model = recorder._client.get_logged_model(output.model_id)
    assert model.name == "step-4-constant-m2_5-d-s3"
    assert (model.source_run_id, model.status, model.model_type) == (run.info.run_id, "READY", "checkpoint")
    assert model.params == {
        "rule": "constant", "model": "m2.5", "dataset": "d", "seed": "3", "scope": "group", "step": "4",
    }  # fmt: skip
    assert model.tags["checkpoint"] == str(folder.checkpoint(4))
    scores = {(m.key, m.dataset_name): m.value for m in model.metrics}
    assert scores == {
        ("eval/mean", None): 0.5,
        ("eval/aime24_avg_at_2", "aime24"): 0.5, ("eval/aime24_length", "aime24"): 8.0,
        ("eval/math500_avg_at_2", "math500"): 0.125, ("eval/math500_length", "math500"): 8.0,
    }  # fmt: skip
    assert history(recorder, cell)[("eval/mean", 4)] == [0.5]

    assert artifacts(recorder, cell, "evals/step-4") == {
        "evals/step-4/summary.json", "evals/step-4/math500.summary.json",
        "evals/step-4/aime24.scores.parquet", "evals/step-4/math500.scores.parquet",
    }  # fmt: skip
    local = recorder._client.download_artifacts(run.info.run_id, "evals/step-4/aime24.scores.parquet", str(tmp_path))
    table = pd.read_parquet(local)
    assert list(table.columns) == ["problem_id", "sample", "correct", "length", "truncated"]
    rows = [tuple(None if pd.isna(value) else value for value in row) for row in table.itertuples(index=False)]
    assert rows == [
        ("p1", 0, True, 7, False), ("p1", 1, False, 7, False), ("p2", 0, None, 7, False), ("p2", 1, None, 7, False),
    ]  # fmt: skip


class Counting:
    """An MLflow client that notes what is called."""

    def __init__(self, client) -> None:
        self._client, self.calls = client, []

    def __getattr__(self, name: str):
        self.calls.append(name)
        return getattr(self._client, name)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_like_things_go_in_one_call(store, tmp_path):
    root, uri, _ = store
    recorder = Recorder(uri, "g", root)
    recorder._client = client = Counting(recorder._client)
    cell = replace(make_cell("token"), id="token-m-d-s6-00000000")
    folder = ledger.open_cell(tmp_path, cell)
    write_provenance(folder)
    recorder.sync(cell, folder, write_steps(folder, range(1, 3)), "training")
    assert client.take() == ["search_runs", "create_run", "log_inputs", "log_batch"]
    recorder.sync(cell, folder, write_steps(folder, range(3, 4)), "training")
    assert client.take() == ["log_batch"]

    # More points than MLflow takes at once.
    tail = write_steps(folder, range(4, 701))
    for step in (0, 4):
        write_evaluation(cell, folder, step, 0.5)
    recorder.close(cell, folder, tail, "done")
    models = ["create_logged_model"] * 2 + ["finalize_logged_model"] * 2 + ["log_outputs"]
    assert client.take() == ["log_inputs", *models, "log_batch", "set_terminated"]
    points = history(recorder, cell)
    assert {len(values) for values in points.values()} == {1}
    assert sorted(step for key, step in points if key == "reward/mean") == list(range(1, 701))
    assert {step for key, step in points if key == "eval/mean"} == {0, 4}


def test_a_run_is_synced_once_it_says_that_it_finished(store, tmp_path, monkeypatch):
    root, uri, _ = store
    cell = replace(make_cell("token"), id="token-m-d-s7-00000000")
    folder = ledger.open_cell(tmp_path, cell)
    tail = write_steps(folder, range(1, 5))

    def look_again() -> Recorder:
        recorder = Recorder(uri, "g", root)
        recorder.open([cell])
        return recorder

    def fail(*arguments: object) -> None:
        raise OSError("the disk is full")

    for score in (0.25, 0.5):
        write_evaluation(cell, folder, 4, score)
        recorder = look_again()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk is full"):
            patch.setattr("orchestrator.run_facts.write_scores", fail)
            recorder.close(cell, folder, tail, "done")
        recorder = look_again()
        assert find_run(recorder, cell).info.status == "RUNNING"
        assert not recorder.is_synced(cell, folder)
        recorder.close(cell, folder, tail, "done")
        assert look_again().is_synced(cell, folder)
    assert history(recorder, cell)["eval/mean", 4] == [0.25, 0.5]
    assert artifacts(recorder, cell, "", "evals/step-4") == {
        "config.json", "evals/step-4/summary.json", "evals/step-4/aime24.scores.parquet",
    }  # fmt: skip


def test_a_model_that_a_kill_left_unlinked_is_linked(store, tmp_path):
    _, _, recorder = store
    cell = make_cell("sequence")
    folder = ledger.open_cell(tmp_path, cell)
    run = recorder._client.create_run(recorder._experiment, run_name=cell.id, tags={"balagg.cell": cell.id})
    left = recorder._client.create_logged_model(
        recorder._experiment, "any", source_run_id=run.info.run_id, params={"step": "4"}
    )
    write_evaluation(cell, folder, 4, 0.5)
    recorder.close(cell, folder, MetricsTail(folder), "done")
    run = find_run(recorder, cell)
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(left.model_id, 4)]
    # The same kill came before the params were there.
    assert run.data.params["rule"] == "sequence"


def test_a_run_that_was_deleted_is_made_again(store, tmp_path):
    _, _, recorder = store
    cell = replace(make_cell("balanced"), id="balanced-m-d-s4-00000000")
    folder = ledger.open_cell(tmp_path, cell)
    recorder.sync(cell, folder, write_steps(folder, range(1, 3)), "training")
    recorder._client.delete_run(find_run(recorder, cell).info.run_id)
    with pytest.raises(recorder.errors, match="must be in the 'active' state"):
        recorder.sync(cell, folder, write_steps(folder, range(3, 4)), "training")
    # One cell's trouble is no reason to leave the store alone.
    recorder.sync(cell, folder, write_steps(folder, range(4, 5)), "training")
    assert {step for key, step in history(recorder, cell) if key == "reward/mean"} == {1, 2, 3, 4}


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


class Server:
    """A real tracking server that can be killed, frozen and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
                "--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder / 'mlflow.db'}",
                "--artifacts-destination", str(self._folder / "artifacts"),
            ],
            start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                    assert answer.status == 200
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError("the server does not start")

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.signal(signal.SIGKILL)


def retry(recorder: Recorder, call) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            return call()
        except recorder.errors:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.timeout(900)  # a server that starts twice takes minutes on a busy machine
@pytest.mark.slow
def test_a_server_that_is_killed_or_frozen_loses_and_doubles_nothing(store, server, tmp_path, monkeypatch):
    """The files are the queue: what was made meanwhile is replayed in order."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    recorder = Recorder(server.uri, "g", tmp_path)
    cell = replace(make_cell("token"), id="token-m-d-s5-00000000")
    folder = ledger.open_cell(tmp_path / "runs", cell)
    recorder.sync(cell, folder, write_steps(folder, range(1, 4)), "training")

    server.signal(signal.SIGKILL)
    tail = write_steps(folder, range(4, 6))
    with pytest.raises(recorder.errors, match=r"Connection refused|Max retries"):
        recorder.sync(cell, folder, tail, "training")
    with pytest.raises(StoreAway):
        recorder.sync(cell, folder, tail, "training")
    write_evaluation(cell, folder, 0, 0.25)
    server.start()
    retry(recorder, lambda: recorder.sync(cell, folder, tail, "training"))

    # A frozen server takes the batch, and answers when nobody listens any more.
    server.signal(signal.SIGSTOP)
    tail = write_steps(folder, range(6, 9))
    with monkeypatch.context() as patch, pytest.raises(recorder.errors, match="timed out"):
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        recorder.sync(cell, folder, tail, "training")
    server.signal(signal.SIGCONT)
    write_evaluation(cell, folder, 4, 0.5)
    tail = write_steps(folder, range(9, 11))
    retry(recorder, lambda: recorder.close(cell, folder, tail, "done"))

    points = history(recorder, cell)
    assert {len(values) for values in points.values()} == {1}
    assert sorted(step for key, step in points if key == "reward/mean") == list(range(1, 11))
    assert [points["eval/mean", step] for step in (0, 4)] == [[0.25], [0.5]]
    run = find_run(recorder, cell)
    assert run.info.status == "FINISHED"
    stored = recorder._client.get_metric_history(run.info.run_id, "reward/mean")
    assert [point.step for point in stored] == list(range(1, 11))
    assert artifacts(recorder, cell, "evals/step-4") >= {"evals/step-4/aime24.scores.parquet"}

    # The same files fill another store, which never heard of the first one.
    other = store[2]
    other.open([cell])
    assert not other.is_synced(cell, folder)
    other.close(cell, folder, tail, "done")
    assert history(other, cell) == points


def test_files_that_go_to_a_folder_of_another_machine_are_refused(server, tmp_path):
    from mlflow import MlflowClient

    MlflowClient(server.uri).create_experiment(experiment_name("far"), artifact_location="file:///far/away")
    with pytest.raises(UserError, match=r"balagg-far was begun without its server .* its files go to /far/away, which"):
        Recorder(server.uri, "far", tmp_path)


def test_no_server_at_the_start_is_a_message(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=r"cannot use the MLflow store http://127\.0\.0\.1:9"):
        Recorder("http://127.0.0.1:9", "g", tmp_path)
