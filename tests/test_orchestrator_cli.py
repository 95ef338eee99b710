"""Commands that outlive their terminal or use existing checkpoints; on real Ray and MLflow, with stand-in work."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.cluster import ENVIRONMENT

pytestmark = pytest.mark.timeout(900)  # a dozen commands, each of which imports Ray and MLflow
ROOT = Path(__file__).resolve().parent.parent
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
EVALUATE = ("--evaluate", "test_orchestrator_cli:evaluate")
GRID = """\
models: {tiny: {path: tiny, template: qa}}
benchmarks: {gen_long: {limit: 7}}
grids:
  demo:
    rules: [sequence, token]
    models: [tiny]
    datasets: [gen_chains]
    train: {steps: 10, checkpoint_every: 4}
    evaluate: {benchmarks: [gen_short]}
"""


def evaluate(checkpoint: Path, evaluation: dict, out_dir: Path, *, data_dir=None) -> None:
    """Every benchmark of a checkpoint scores its step / 100; the base model's evaluations leave a trace."""
    step = int(checkpoint.name[5:])
    print(f"scored {checkpoint.parent.parent.name} step {step}")
    benchmarks = {entry["name"]: entry for entry in evaluation["benchmarks"] if "dataset" not in entry}
    metrics = {f"eval/{name}_avg_at_1": step / 100 for name in benchmarks}
    rows = [{"id": "p", "sample": 0, "correct": True, "reason": "correct", "tokens": 5, "truncated": False}]
    scores = {}
    for name, entry in benchmarks.items():
        (out_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        problems = entry.get("limit", 200)
        scores[name] = {"k": 1, "problems": problems, "problems_digest": f"first-{problems}", "source": "made up"}
    summary = {"step": step, "metrics": metrics | {"eval/mean": step / 100}, "benchmarks": scores}
    (out_dir / ".summary").write_text(json.dumps(summary))
    (out_dir / ".summary").replace(out_dir / "summary.json")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text("{}")
    (folder / "experiments.yaml").write_text(GRID)
    return folder


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """A home of its own, and a Ray cluster of two cores that outlives the commands."""
    inherited = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    own = {"HOME": str(tmp_path_factory.mktemp("home")), "PYTHONPATH": PYTHONPATH, "RAY_AUTH_MODE": "token"}
    code = (
        "import ray, sys\n"
        "ray.init('local', num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()"
    )
    head = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env=inherited | ENVIRONMENT | own, start_new_session=True,
    )  # fmt: skip
    yield inherited | own | {"RAY_ADDRESS": head.stdout.readline().strip()}
    head.communicate("", timeout=60)


@pytest.fixture(scope="module")
def balagg(project, surroundings):
    def run(*arguments: str, status: int = 0, **environment: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments],
            cwd=project, env=surroundings | environment, text=True, capture_output=True, timeout=240,
        )  # fmt: skip
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    return run


@pytest.fixture(scope="module")
def detached(project, balagg):
    """A grid that ran detached to its end: what the command said, its session, its terminal, and its log.

    It leaves checkpoints of steps 0, 4, 5, 8 and 10, of which the grid has evaluated 0, 5 and 10.
    """
    said = balagg("run", "--detach", "--train", "test_orchestrator_run:train", *EVALUATE)
    process = psutil.Process(int(said.split("running as process ")[1].split(",")[0]))
    session, terminal = os.getsid(process.pid), process.terminal()
    deadline = time.monotonic() + 240
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return said, process.pid, session, terminal, Path(said.split("tail -f ")[1].split("\n")[0])


def stored_points(project: Path) -> dict[tuple[str, str, int], float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project / 'mlruns' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("balagg-demo")
    return {
        (run.data.params["rule"], key, point.step): point.value
        for run in client.search_runs([experiment.experiment_id])
        for key in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, key)
    }


def test_a_detached_run_goes_on_in_a_session_of_its_own(project, detached):
    said, pid, session, terminal, log = detached
    assert (session, terminal) == (pid, None)
    assert "  watch:  balagg status --watch\n" in said
    assert "  stop:   balagg stop\n" in said
    assert log.parent == project / "runs" / "demo"
    assert "2 of 2 cells done" in log.read_text()
    assert stored_points(project)["token", "eval/gen_short_avg_at_1", 10] == 0.1


def test_a_detached_run_that_cannot_start_says_so(balagg):
    said = balagg("run", "--detach", "--grid", "dmo", status=2)
    assert said.startswith("experiments.yaml: unknown grid 'dmo'; did you mean 'demo'?")
    said = balagg("run", "--detach", "--seeds", "1", status=2, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert said.startswith("the command ended at once with exit status 2:\ncannot use the MLflow store http://127.0")
    assert "Traceback" not in said


def test_existing_checkpoints_are_scored_later(project, detached, balagg):
    # A checkpoint without a model is of use to training alone.
    (trained,) = project.glob("runs/demo/token-*/checkpoints")
    (trained / "step-9" / "trainer").mkdir(parents=True)
    (trained / "step-9" / "COMPLETE").touch()
    before = stored_points(project)
    said = balagg("evaluate-checkpoints", "--only", "rule=token", *EVALUATE)
    assert "2 of 5 evaluations are missing" in said
    after = stored_points(project)
    assert {key: value for key, value in after.items() if key not in before} == {
        ("token", metric, step): step / 100 for metric in ("eval/mean", "eval/gen_short_avg_at_1") for step in (4, 8)
    }

    # Another benchmark: with its own settings, beside the grid's, and the base model once for all cells.
    arguments = ("evaluate-checkpoints", "--benchmarks", "gen_long", "--steps", "0,10", *EVALUATE)
    said = balagg(*arguments)
    assert "4 of 4 evaluations are missing" in said
    assert said.count(": step 0 on gen_long: done") == 2
    logs = "".join(file.read_text() for file in project.glob("runs/demo/*/log.txt"))
    assert logs.count("step 0\n") == 2, "once by the grid, and once now"
    scores = stored_points(project)
    assert {key: value for key, value in scores.items() if key not in after} == {
        (rule, "eval/gen_long_avg_at_1", step): step / 100 for rule in ("token", "sequence") for step in (0, 10)
    }
    (settings,) = project.glob("runs/demo/token-*/evals/gen_long/step-10/settings.json")
    assert json.loads(settings.read_text())["benchmarks"] == [{"name": "gen_long", "limit": 7}]
    assert "0 of 4 evaluations are missing" in balagg(*arguments)

    # A store that never heard of any of it gets the same from the files.
    for file in (project / "mlruns").glob("mlflow.db*"):
        file.unlink()
    assert "2 of 2 cells done" in balagg("run")
    assert stored_points(project) == scores
