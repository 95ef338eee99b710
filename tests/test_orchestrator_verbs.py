"""What people ask of cells: stop, cancel, retry, logs, watch, detach, evaluate later; on files, with real commands."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import leases, ledger
from orchestrator.cells import look_up
from orchestrator.cli import app
from orchestrator.config import load_config
from orchestrator.grid import expand
from orchestrator.results import describe

ROOT = Path(__file__).resolve().parent.parent
GRID = """\
models:
  tiny: {path: tiny, template: qa}
  large: {path: tiny, template: qa, workers: 2, cpus: 3, gpus: 4, eval_gpus: 1}
grids:
  demo:
    rules: [sequence, token, balanced]
    models: [tiny, large]
    datasets: [gen_chains]
    train: {steps: 10}
    evaluate: {benchmarks: [gen_short]}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "config.json").write_text("{}")
    (folder / "experiments.yaml").write_text(GRID)
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def cells(project):
    return expand(load_config(project / "experiments.yaml"), "demo")


def balagg(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def opened(project: Path, cell, steps: int = 0, checkpoints: tuple[int, ...] = (), evaluated: tuple[int, ...] = ()):
    """A cell's folder as a command leaves it: steps of 2 s, evaluations of 60 s."""
    ledger.open_cell(project / "runs", cell)
    folder = ledger.cell_dir(project / "runs", cell)
    lines = [{"step": n, "metrics": {"reward/mean": n / 10, "perf/step_s": 2.0}} for n in range(1, steps + 1)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in checkpoints:
        folder.checkpoint(step).mkdir(parents=True)
        (folder.checkpoint(step) / ledger.COMPLETE).touch()
    for step in evaluated:
        ledger.prepare_evaluation(cell, folder, step)
        folder.summary(step).write_text(json.dumps({"metrics": {"eval/mean": 0.5 + step / 100}}))
        asked = folder.settings(step).stat().st_mtime
        os.utime(folder.summary(step), (asked + 60, asked + 60))
    return folder


def row(output: str, cell) -> str:
    """A cell's line of a table, with one space between words."""
    return " ".join(next(line for line in output.splitlines() if line.startswith(cell.id)).split())


def test_the_plan_says_why_and_what_it_costs(project, cells):
    done, evaluating, resuming, new, other, third = cells
    opened(project, done, 10, (0, 10), (0, 5, 10))
    folder = opened(project, evaluating, 10, (0, 5, 10), (0, 5))
    opened(project, resuming, 7, (0, 4))
    output = balagg("plan").stdout
    assert row(output, done) == f"{done.id} done done nothing"
    assert "evaluation of step 10 missing" in row(output, evaluating)
    assert row(output, evaluating).endswith("evaluate step 10 0.017 CPU-hours")
    assert "resumes from step 4 of 10" in row(output, resuming)
    # 6 steps of 2 s and 3 evaluations of 60 s on one core.
    assert row(output, resuming).endswith("train from step 4 to 10, evaluate steps 0, 5, 10 0.053 CPU-hours")
    assert new.model_name == other.model_name == "large"
    assert " new " in row(output, new)
    assert row(output, new).endswith("unknown")
    assert "5 of 6 cells have work left; estimate: 0.07 CPU-hours, unknown for 3 cells of models that" in output

    # What cells outside the filter took is known as well, and eight GPUs for a step count eight times.
    opened(project, other, 10, (0, 10), (0, 5, 10))
    output = balagg(
        "plan", "--only", "model=large", "--only", "rule=sequence,balanced", "--skip", "rule=sequence"
    ).stdout
    assert [cell.id for cell in cells if f"\n{cell.id} " in output] == [third.id]
    assert row(output, third).endswith("0.094 GPU-hours")
    assert round((10 * 2.0 * 8 + 3 * 60 * 1) / 3600, 3) == 0.094

    folder.settings(0).write_text("other settings")
    opened(project, resuming)
    output = balagg("plan", "--only", "model=tiny").stdout
    assert "evaluation of steps 0, 10 missing" in row(output, evaluating)
    (folder.evaluation(10)).mkdir()
    folder.summary(10).write_text("{}")
    folder.settings(10).write_text("other settings")
    assert "evaluation of steps 0, 10 is of other settings" in balagg("plan").stdout


def test_status_counts_steps_by_checkpoints_and_metrics(project, cells):
    done, resuming = cells[:2]
    folder = opened(project, done, 10, (0, 10), (0, 5, 10))
    folder.metrics.unlink()  # a trained cell's are not looked at
    opened(project, resuming, 7, (0, 4))
    output = balagg("status").stdout
    assert row(output, done) == f"{done.id} done 10/10 3/3 0.600"
    assert row(output, resuming).startswith(f"{resuming.id} pending 7/10 0/3")


def test_status_tells_who_was_asked_to_stop(project, cells):
    folder = opened(project, cells[0], 3, (0,))
    ledger.write_state(folder, "training", "from step 0")
    assert "interrupted while training, after step 3 of 10" in row(balagg("status").stdout, cells[0])
    with leases.hold(folder.claim):
        assert "from step 0" in row(balagg("status").stdout, cells[0])
        result = balagg("stop", "sequence-tiny")
        assert (result.exit_code, result.stdout) == (0, f"{cells[0].id}: stops after its present step\n")
        assert ledger.stop_requested(folder)
        assert "from step 0 (asked to stop)" in row(balagg("status").stdout, cells[0])
        everything = balagg("stop", "--only", "model=tiny").stdout.splitlines()
        assert everything[1:] == [f"{cell.id}: stopped before it starts" for cell in cells[1:3]]
        assert ledger.stop_requested(ledger.cell_dir(project / "runs", cells[1]))
        assert balagg("cancel", cells[0].id).stdout == f"{cells[0].id}: is ended now\n"
        assert ledger.cancel_requested(folder)
    assert balagg("status").stdout.rstrip().endswith("6 cells: 6 pending")


def test_there_must_be_a_command_to_stop(project, cells):
    opened(project, cells[0], 3)
    for verb in ("stop", "cancel"):
        result = balagg(verb)
        assert result.exit_code == 2
        assert result.stderr.startswith("no command is running any of these cells")
    assert not ledger.stop_requested(ledger.cell_dir(project / "runs", cells[0]))


def test_retry_makes_cells_pending_again(project, cells):
    folder = opened(project, cells[1], 4, (0, 2))
    ledger.write_state(folder, "failed", "training: out of luck")
    ledger.request_stop(folder)
    result = balagg("retry")
    assert result.exit_code == 0
    assert f"{cells[1].id}: pending; was failed: training: out of luck" in result.stdout
    assert "1 of 6 cells are pending again" in result.stdout
    assert not ledger.stop_requested(folder)
    assert describe(look_up(project / "runs", cells[1])) == ("pending", "after step 4 of 10")
    ledger.write_state(folder, "cancelled", "by hand")
    with leases.hold(folder.claim):
        result = balagg("retry", cells[1].id)
    assert (result.exit_code, "is still looked after by a running command" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["logs", "balnced-tiny"], "no cell of this grid is, or begins with, 'balnced-tiny'; near it: balanced-"),
        (["logs", "token"], "'token' is the beginning of 2 cells: token-tiny-gen_chains-s0-"),
        (["logs", "token-tiny"], "has no log yet"),
        (["stop", "zzz"], "no cell of this grid is, or begins with, 'zzz'; there are: sequence-tiny-gen_chains"),
        (["stop", "--only", "size=1"], "unknown axis 'size'"),
        (["export"], "none of these cells has been started"),
        (["export", "--from", "mlflow"], "There is no MLflow database"),
        (["evaluate-checkpoints"], "--steps all: these cells have no such checkpoint"),
        (["evaluate-checkpoints", "--steps", "x"], "--steps 'x': give all, or whole numbers"),
        (["evaluate-checkpoints", "--benchmarks", "gen_short"], "the grid evaluates gen_short itself"),
        (["evaluate-checkpoints", "--benchmarks", "gen_lng"], "unknown benchmark 'gen_lng'; did you mean 'gen_long'?"),
        (["evaluate-checkpoints", "--limit", "3"], "--samples, --limit and --max-tokens go with --benchmarks"),
        (["run", "--detach", "--data-dir", "nowhere"], "--data-dir: there is no folder nowhere"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_exit_status_2(project, arguments, message):
    result = balagg(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_logs_are_printed_and_followed(project, cells):
    folder = opened(project, cells[2])
    folder.log.write_text("first line\n")
    assert balagg("logs", "balanced-tiny").stdout == "first line\n"
    # Where tests run in the background Ctrl-C may be ignored, which children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    follower = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "logs", "-f", "balanced-tiny"], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert follower.stdout.readline() == "first line\n"
    with folder.log.open("a") as log:
        log.write("second line\n")
    assert follower.stdout.readline() == "second line\n"
    follower.send_signal(signal.SIGINT)
    assert follower.communicate(timeout=30)[0] == ""
    assert follower.returncode == 130


def test_watching_ends_when_nothing_is_left_to_wait_for(project, cells):
    for cell in cells[:5]:
        opened(project, cell, 10, (0, 10), (0, 5, 10))
    failed = opened(project, cells[5], 2)
    ledger.write_state(failed, "failed", "training: out of luck")
    result = balagg("status", "--watch")
    assert (result.exit_code, result.stdout) == (0, "6 cells: 5 done, 1 failed\n")


def test_light_verbs_import_nothing_heavy(project):
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom orchestrator.cli import app\n"
        "for verb in ('plan', 'status', 'stop', 'logs'):\n    CliRunner().invoke(app, [verb])\n"
        "print([name for name in ('torch', 'ray', 'mlflow', 'pandas', 'transformers') if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert ended.stdout == "[]\n"
