"""Grids run end to end on Ray with MLflow, both real; only the trainer and the evaluator are small stand-ins.

The stand-ins keep the contract of the real ones: they append metrics, write whole checkpoints, resume from the newest,
and write a summary last. Files in the working directory tell them to be slow, to die, to hang, or to fail.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchestrator import ledger, schedule
from orchestrator.cells import look_up
from orchestrator.cli import app
from orchestrator.cluster import ENVIRONMENT
from orchestrator.config import load_config
from orchestrator.grid import expand
from orchestrator.leases import is_held
from orchestrator.results import describe
from orchestrator.run_grid import run_grid

ROOT = Path(__file__).resolve().parent.parent
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
STEPS = 10
EVERY = 4
GRID = f"""\
models:
  tiny: {{path: tiny, template: qa}}
  pair: {{path: tiny, template: qa, workers: 2}}
  big: {{path: tiny, template: qa, gpus: 8}}
grids:
  demo:
    rules: [sequence, token, balanced]
    models: [tiny]
    datasets: [gen_chains]
    train: {{steps: {STEPS}, checkpoint_every: {EVERY}}}
    evaluate: {{benchmarks: [gen_short]}}
    retries: 1
    retry_wait_s: 0.2
  troubled:
    rules: [sequence, token, balanced]
    models: [tiny, pair]
    datasets: [gen_chains]
    train: {{steps: {STEPS}, checkpoint_every: {EVERY}, max_tokens_per_micro_batch: 2048}}
    evaluate: {{at: [last], benchmarks: [gen_short]}}
    retries: 2
    retry_wait_s: 0.2
    hang_after_s: 12
  gpus:
    rules: [token]
    models: [big]
    datasets: [gen_chains]
    evaluate: {{benchmarks: [gen_short]}}
"""
STAND_INS = ("--train", "test_orchestrator_run:train", "--evaluate", "test_orchestrator_run:evaluate")


def train(cell_dir: Path, cell: dict, *, data_dir=None, keep_steps=(), should_stop=lambda: False) -> None:
    """Reward is a known function of rule and step; a resumed step is not logged twice."""
    done = max(
        (int(marker.parent.name[5:]) for marker in (cell_dir / "checkpoints").glob("step-*/COMPLETE")), default=0
    )
    print(f"pid {os.getpid()} threads {os.environ['OMP_NUM_THREADS']} from {done}")
    if Path(f"fail-{cell['rule']}").exists():
        raise ValueError("no such problem\nand more words")
    if Path(f"nan-{cell['rule']}").exists():
        raise FloatingPointError("the gradient norm is nan at step 1")
    if Path(f"memory-{cell['rule']}").exists() and cell["train"]["max_tokens_per_micro_batch"] > 512:
        raise MemoryError("no room")
    mark(cell_dir, 0)
    metrics = cell_dir / "metrics.jsonl"
    for step in range(done + 1, STEPS + 1):
        if Path("slow").exists():
            time.sleep(0.25)
        logged = metrics.read_text().count("\n") if metrics.exists() else 0
        if step > logged:
            with metrics.open("a") as file:
                file.write(json.dumps({"step": step, "metrics": expected_metrics(cell["rule"], step)}) + "\n")
        if step % EVERY == 0 or step in keep_steps or step == STEPS:
            mark(cell_dir, step)
        if should_stop():
            mark(cell_dir, step)
            return
        hang = Path(f"hang-{cell['model']['name']}-{cell['rule']}")
        if step == 6 and hang.exists():
            hang.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == 6 and Path(f"die-{cell['rule']}").exists():
            if Path(f"die-{cell['rule']}").read_text() == "once":
                Path(f"die-{cell['rule']}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def train_on_workers(
    cell_dir: Path, cell: dict, *, num_workers, cpus_per_worker, gpus_per_worker, node_ids, stop_file, **options
) -> None:
    """A gang as Ray Train makes one: an actor holds a placement group, and gives it back however the training ends."""
    import ray

    root = os.getcwd()

    @ray.remote(num_cpus=0)
    class Controller:
        def run(self) -> None:
            os.chdir(root)
            bundle = {"CPU": cpus_per_worker} | ({"GPU": gpus_per_worker} if gpus_per_worker else {})
            where = [{"ray.io/node-id": node} for node in node_ids]
            group = ray.util.placement_group([bundle] * num_workers, "PACK", bundle_label_selector=where)
            try:
                ray.get(group.ready())
                nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
                (cell_dir / "gang").write_text(" ".join(nodes.values()))
                train(cell_dir, cell, should_stop=stop_file.exists, **options)
            finally:
                ray.util.remove_placement_group(group)

    ray.get(Controller.remote().run.remote())


def evaluate(checkpoint: Path, evaluation: dict, out_dir: Path, *, data_dir=None) -> None:
    print(f"evaluated {checkpoint.name}")
    step = int(checkpoint.name[5:])
    assert (checkpoint / "COMPLETE").exists()
    partial = out_dir / ".summary"
    summary = {"step": step, "metrics": expected_scores(step), "not_run": {"gen_functions": "no sandbox"}}
    partial.write_text(json.dumps(summary))
    partial.replace(out_dir / "summary.json")


def mark(cell_dir: Path, step: int) -> None:
    folder = cell_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "COMPLETE").touch()


def expected_metrics(rule: str, step: int) -> dict[str, float]:
    return {"reward/mean": len(rule) + step / STEPS, "perf/step_s": 0.5}


def expected_scores(step: int) -> dict[str, float]:
    return {"eval/mean": 0.25 + step / 100, "eval/heldout_avg_at_1": 0.5 + step / 100}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment of a Ray cluster of two cores that outlives the commands."""
    environment = {"HOME": str(tmp_path_factory.mktemp("home")), "PYTHONPATH": PYTHONPATH, "RAY_AUTH_MODE": "token"}
    code = (
        "import ray, sys\n"
        "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()"
    )
    head = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env=os.environ | ENVIRONMENT | environment, start_new_session=True,
    )  # fmt: skip
    yield environment | {"RAY_ADDRESS": head.stdout.readline().strip()}
    head.communicate("", timeout=60)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a grid, a model and a home of its own, which Ray writes a token to."""
    home = tmp_path / "home"
    home.mkdir()
    folder = tmp_path / "project"
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "config.json").write_text("{}")
    (folder / "experiments.yaml").write_text(GRID)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    return folder


def join(cluster, monkeypatch) -> None:
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)


def run_options(project: Path) -> dict:
    module = "test_orchestrator_run"
    functions = {name: f"{module}:{name}" for name in ("train", "train_on_workers", "evaluate")}
    return {"root": project, "runs_dir": project / "runs", "data_dir": None} | functions


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(condition, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def steps_trained(project: Path) -> int:
    return sum(file.read_text().count("\n") for file in project.glob("runs/demo/*/metrics.jsonl"))


def own_processes(project: Path) -> list[psutil.Process]:
    """Processes that carry this test's home in their environment, this one left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == os.environ["HOME"] and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def mlflow_points(project: Path) -> dict[tuple[str, str, int], list[float]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project / 'mlruns' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("balagg-demo")
    points: dict[tuple[str, str, int], list[float]] = {}
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status == "FINISHED"
        for key in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, key):
                points.setdefault((run.data.params["rule"], key, point.step), []).append(point.value)
    return points


def expected_points() -> dict[tuple[str, str, int], list[float]]:
    points = {}
    for rule in ("sequence", "token", "balanced"):
        for step in range(1, STEPS + 1):
            points |= {(rule, key, step): [value] for key, value in expected_metrics(rule, step).items()}
        for step in (0, STEPS // 2, STEPS):
            points |= {(rule, key, step): [value] for key, value in expected_scores(step).items()}
    return points


def test_a_killed_grid_goes_on_and_two_commands_share_it(project, monkeypatch):
    (project / "slow").touch()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    killed = start("run", *STAND_INS)
    wait_for(lambda: steps_trained(project) >= 11)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert 11 <= steps_trained(project) < 3 * STEPS
    (project / "slow").unlink()
    assert CliRunner().invoke(app, ["status"]).stdout.count("interrupted while") >= 2

    # At once, and by two commands on the same grid: orphans have to go by themselves.
    commands = [start("run", *STAND_INS), start("run", *STAND_INS)]
    for command in commands:
        out, errors = command.communicate(timeout=180)
        assert command.returncode == 0, out + errors
        assert "3 of 3 cells done" in out
        assert "Traceback" not in errors
    assert mlflow_points(project) == expected_points()
    for log in project.glob("runs/demo/*/log.txt"):
        starts = [line for line in log.read_text().splitlines() if line.startswith("pid")]
        assert all(" threads 1 " in line for line in starts)
        assert len(starts) <= 2
        assert starts[0].endswith("from 0")
        if len(starts) == 2:
            assert starts[1].split()[-1] in ("0", "4", "5", "8")
    wait_for(lambda: not own_processes(project), timeout_s=60)

    # All is done: nothing is started, and the answer is the same table.
    before = {path: path.stat().st_mtime_ns for path in project.glob("runs/**/*")}
    again = start("run", *STAND_INS)
    out, errors = again.communicate(timeout=180)
    assert (again.returncode, errors) == (0, "")
    assert "gen_functions was not run everywhere: no sandbox" in out
    assert "3 of 3 cells done" in out
    row = next(line for line in out.splitlines() if line.startswith("balanced"))
    assert row.split() == ["balanced", "tiny", "gen_chains", "0", "10", "5s", "0.250", "0.350", "0.500", "0.600"]
    assert {path: path.stat().st_mtime_ns for path in project.glob("runs/**/*")} == before


@pytest.mark.slow
def test_failures_cost_their_own_cell_and_an_interrupt_keeps_what_is_done(project, cluster, monkeypatch):
    join(cluster, monkeypatch)
    cells = expand(load_config(project / "experiments.yaml"), "demo")
    runs_dir, options = project / "runs", run_options(project)

    # One cell raises, one is killed and comes back, one finds its state damaged.
    (project / "fail-sequence").touch()
    (project / "die-token").write_text("once")
    damaged = look_up(runs_dir, cells[2]).folder
    damaged.path.mkdir(parents=True)
    damaged.state.write_text("{")
    console = Console(record=True, width=200, file=(project / "out.txt").open("w"))
    outcome = run_grid(cells, console=console, **options)
    text = console.export_text()
    assert outcome.failed == (cells[0].id,)
    assert not outcome.interrupted
    assert "training: ValueError: no such problem" in text
    assert f"{cells[1].id}: training: its worker process died; going on from the checkpoint of step 5" in text
    assert "state.json is damaged" in text
    assert "2 of 3 cells done" in text
    assert "Traceback" not in text
    runs = [look_up(runs_dir, cell) for cell in cells]
    assert [describe(run)[0] for run in runs] == ["failed", "done", "done"]
    assert describe(runs[0])[1] == "training: ValueError: no such problem"
    assert "and more words" in runs[0].folder.log.read_text()
    assert runs[1].tail.steps == {step: expected_metrics("token", step) for step in range(1, STEPS + 1)}
    evaluations = [log.read_text().count("evaluated step-0") for log in runs_dir.glob("demo/*/log.txt")]
    assert sum(evaluations) == 1, "the base model is the same in every cell, and is evaluated once"

    # The cause is gone; Ctrl-C comes in the middle.
    (project / "fail-sequence").unlink()
    (project / "slow").touch()
    command = start("run", "--only", "rule=sequence", *STAND_INS)
    wait_for(lambda: steps_trained(project) >= 2 * STEPS + 5)
    os.killpg(command.pid, signal.SIGINT)
    out, errors = command.communicate(timeout=180)
    assert command.returncode == 130, out + errors
    assert "Go on with:\n  balagg run --only rule=sequence" in out
    assert "Traceback" not in errors
    state, reason = describe(look_up(runs_dir, cells[0]))
    assert state == "cancelled"
    assert reason.startswith("interrupted after step ")
    wait_for(lambda: not is_held(runs[0].folder.training), timeout_s=60)

    # A worker that always dies is given up after the retries.
    (project / "slow").unlink()
    (project / "die-sequence").write_text("always")
    for path in runs[0].folder.path.glob("checkpoints/step-*/COMPLETE"):
        path.unlink()
    outcome = run_grid(cells, console=console, **options)
    assert outcome.failed == (cells[0].id,)
    assert describe(look_up(runs_dir, cells[0])) == ("failed", "training: its worker process died, 2 times")

    (project / "die-sequence").unlink()
    assert run_grid(cells, console=console, **options).failed == ()
    assert mlflow_points(project) == expected_points()


@pytest.mark.slow
def test_each_failure_meets_its_policy_and_gangs_are_placed_whole(project, cluster, monkeypatch):
    join(cluster, monkeypatch)
    cells = expand(load_config(project / "experiments.yaml"), "troubled")
    sequence, token, balanced, gang_sequence, gang_token, gang_balanced = cells
    for name in ("hang-pair-sequence", "memory-token", "nan-balanced"):
        (project / name).touch()
    console = Console(record=True, width=300, file=(project / "out.txt").open("w"))
    outcome = run_grid(cells, console=console, **run_options(project))
    text = console.export_text()
    assert outcome.failed == (balanced.id, gang_balanced.id)
    why = "training: FloatingPointError: the gradient norm is nan at step 1; lower train.learning_rate, or use float32"
    for cell in (balanced, gang_balanced):
        assert describe(look_up(project / "runs", cell)) == ("failed", why)
        assert f"{cell.id}: failed: {why}" in text

    # What a killed gang held comes back to those after it.
    assert f"{gang_sequence.id}: training: no progress for 12 s; going on from the checkpoint of step 4" in text
    for cell in (token, gang_token):
        for attempt, tokens in enumerate((1024, 512), start=1):
            smaller = f"with micro-batches of {tokens} tokens from now on (retry {attempt} of 2)"
            assert any(cell.id in line and smaller in line for line in text.splitlines())
        run = look_up(project / "runs", cell)
        assert ledger.max_tokens_per_micro_batch(cell, run.folder) == 512
        assert "with micro-batches of 512 tokens from now on" in run.folder.log.read_text()
        assert json.loads(run.folder.config.read_text())["train"]["max_tokens_per_micro_batch"] == 2048
    for cell in (sequence, token, gang_sequence, gang_token):
        run = look_up(project / "runs", cell)
        assert describe(run)[0] == "done"
        assert run.tail.steps == {step: expected_metrics(cell.rule, step) for step in range(1, STEPS + 1)}
    for cell in (gang_sequence, gang_token):
        nodes = (project / "runs" / "troubled" / cell.id / "gang").read_text().split()
        assert len(nodes) == 2 and len(set(nodes)) == 1


def test_a_person_stops_one_cell_and_cancels_another_and_a_later_run_goes_on(project, cluster, monkeypatch):
    join(cluster, monkeypatch)
    cells = expand(load_config(project / "experiments.yaml"), "demo")
    (project / "slow").touch()
    command = start("run", *STAND_INS)
    folders = [look_up(project / "runs", cell).folder for cell in cells]
    wait_for(lambda: all(len(ledger.read_metrics(folder)) >= 2 for folder in folders[:2]))
    ledger.request_stop(folders[0])
    ledger.request_cancel(folders[1])
    ledger.request_stop(folders[2])
    out, errors = command.communicate(timeout=180)
    assert "0 of 3 cells done, 3 stopped" in out, out + errors
    stopped, cancelled, never_started = (look_up(project / "runs", cell) for cell in cells)
    assert [describe(run)[0] for run in (stopped, cancelled, never_started)] == ["stopped", "cancelled", "stopped"]
    assert stopped.newest_checkpoint == stopped.trained_steps >= 2
    assert never_started.trained_steps == 0
    (project / "slow").unlink()
    console = Console(file=(project / "out.txt").open("w"))
    outcome = run_grid(cells, console=console, **run_options(project))
    assert (outcome.failed, outcome.halted) == ((), ())
    assert mlflow_points(project) == expected_points()


def test_trouble_with_files_after_the_last_report_still_ends_the_cell(project, cluster, monkeypatch):
    """The store was told of a cell under way; it must hear of the end too, or the command would wait for ever."""
    join(cluster, monkeypatch)
    spoilt, other = expand(load_config(project / "experiments.yaml"), "troubled")[:2]

    whole = schedule.settle

    def settle(run, work):
        if run.cell.id == spoilt.id and work == ledger.Work("evaluate", STEPS):
            raise OSError(errno.EIO, "Input/output error")
        return whole(run, work)

    monkeypatch.setattr(schedule, "settle", settle)
    console = Console(file=(project / "out.txt").open("w"))
    patience = threading.Timer(90, os.kill, (os.getpid(), signal.SIGINT))
    patience.start()
    outcome = run_grid([spoilt, other], console=console, **run_options(project))
    patience.cancel()
    assert (outcome.failed, outcome.interrupted) == ((spoilt.id,), False)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project / 'mlruns' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("balagg-troubled").experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {spoilt.id: "FAILED", other.id: "FINISHED"}


def test_gpus_that_are_not_there_are_refused_before_anything_starts(project, cluster, monkeypatch):
    join(cluster, monkeypatch)
    result = CliRunner().invoke(app, ["run", "--grid", "gpus"])
    assert result.exit_code == 2
    assert "training of big asks for 1 CPU and 8 GPUs on one node" in result.stderr
    assert "The cluster has 1 node, the largest with 2 CPUs and 0 GPUs. Nothing was started." in result.stderr
    assert sorted(path.name for path in project.iterdir()) == ["experiments.yaml", "tiny"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--grid", "dmo"], "unknown grid 'dmo'; did you mean 'demo'?"),
        (["run", "--only", "rule=tken"], "unknown rule 'tken'; did you mean 'token'?"),
        (["run", "--seeds", "a"], "--seeds 'a': give whole numbers"),
        (["run", "--data-dir", "nowhere"], "--data-dir: there is no folder nowhere"),
        (["status", "--config", "absent.yaml"], "cannot read absent.yaml"),
    ],
)
def test_bad_input_is_one_message_and_exit_status_2(project, arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (project / "runs").exists()


def test_the_plan_says_what_a_run_would_do_and_does_nothing(project):
    for arguments in (["plan"], ["run", "--dry-run"]):
        result = CliRunner().invoke(app, [*arguments, "--seeds", "0,1", "--skip", "rule=token"])
        assert result.exit_code == 0
        assert result.stdout.count("train 10 steps, evaluate steps 0, 5, 10") == 4
        assert "4 of 4 cells have work left" in result.stdout
    assert "new" in CliRunner().invoke(app, ["status"]).stdout
    assert not (project / "runs").exists()
