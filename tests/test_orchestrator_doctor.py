"""What `doctor` tells about this machine, and the remedies for what it lacks."""

import http.server
import sqlite3
import threading

import pytest
from typer.testing import CliRunner

from orchestrator import doctor
from orchestrator.cli import app


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch, tmp_path):
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)


def examined(*arguments: str) -> tuple[int, dict[str, str]]:
    """Exit status, and what each line says, by the part that it is about."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    lines = [line.strip() for line in result.stdout.splitlines()]
    marks = {line.split("  ", 1)[1].partition(":")[0]: line for line in lines}
    return result.exit_code, marks


def test_each_part_is_named_with_a_remedy_for_what_is_missing(tmp_path):
    status, found = examined("--runs-dir", str(tmp_path))
    assert status == 0
    assert found["Python"].startswith("ok  Python: 3.")
    assert found["ray"].startswith("ok  ray: 2.")
    assert f"GiB free at {tmp_path}" in found["disk"]
    assert found["Hugging Face hub"].startswith("none")
    assert found["Hugging Face hub"].endswith("--data-dir reads local files")
    assert found["MLflow store"] == f"ok  MLflow store: {tmp_path}/mlruns/mlflow.db, made by the first run"
    assert found["Ray cluster"] == "ok  Ray cluster: none named: a run starts its own on this machine"
    assert set(found) >= {"torch", "mlflow", "vLLM", "GPU", "sandbox for code", "shared memory"}


def test_servers_that_are_named_and_do_not_answer_are_missing(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    status, found = examined()
    assert status == 1
    assert found["MLflow store"].startswith("missing  MLflow store: http://127.0.0.1:9: [Errno 111]")
    assert "-> start it (make ui, or mlflow server)" in found["MLflow store"]
    assert found["Ray cluster"].startswith("missing  Ray cluster: RAY_ADDRESS=127.0.0.1:9: [Errno 111]")


def test_servers_that_answer_are_ok(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"
    try:
        monkeypatch.setenv("RAY_ADDRESS", f"ray://{host}")
        assert doctor._ray_cluster() == doctor.Finding("Ray cluster", True, f"ray://{host} answers")
        monkeypatch.setenv("HF_ENDPOINT", f"http://{host}")
        assert doctor._hub().ok
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{host}")
        # It answers, but not like a tracking server.
        assert doctor._mlflow_store(doctor.Path()).found == f"http://{host}: File not found"
    finally:
        server.shutdown()


def test_a_database_is_opened_and_nothing_is_made(monkeypatch, tmp_path):
    file = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{file}")
    assert doctor._mlflow_store(tmp_path).found == f"{file}, made by the first run"
    assert not file.exists()
    with sqlite3.connect(file) as database:
        database.execute("create table runs (id)")
        database.execute("insert into runs values (1), (2)")
    assert doctor._mlflow_store(tmp_path) == doctor.Finding("MLflow store", True, f"{file}, 2 runs")
    file.write_text("no database" * 100)
    found = doctor._mlflow_store(tmp_path)
    assert (found.ok, found.found) == (False, f"{file}: file is not a database")
    assert found.remedy.startswith("move the file away")
