"""What people see while a grid runs."""

import io

import pytest
from rich.console import Console

from orchestrator.config import ModelEntry
from orchestrator.grid import Cell
from orchestrator.ledger import CellDir, MetricsTail, Work
from orchestrator.progress import (
    Progress,
    duration,
    grid_seconds_left,
    live_table,
    plain_line,
    training_seconds_left,
)
from orchestrator.schedule import CellRun

STEPS = 20


@pytest.fixture
def make(tmp_path):
    def make_run(rule: str, model: str = "m", steps: int = 0, step_s: float = 2.0, done: bool = False) -> CellRun:
        config = {
            "grid": "g", "rule": rule, "seed": 0, "model": {"name": model}, "dataset": {"name": "d"},
            "train": {"steps": STEPS},
        }  # fmt: skip
        cell = Cell(f"{rule}-{model}", config, (0, STEPS), {}, ModelEntry(path="m", template="qa"), 1)
        folder = CellDir(tmp_path / cell.id)
        left = [] if done else [Work("train", STEPS), Work("evaluate", 0), Work("evaluate", STEPS)]
        run = CellRun(cell, folder, left, MetricsTail(folder))
        run.tail.steps = {step: {"reward/mean": step / 100, "perf/step_s": step_s} for step in range(1, steps + 1)}
        return run

    return make_run


def test_the_time_left_comes_from_the_cell_then_its_model_then_all(make):
    runs = [make("token", steps=5), make("balanced"), make("token", model="n", done=True, steps=STEPS)]
    assert training_seconds_left(runs) == {"token-m": 30.0, "balanced-m": 40.0, "token-n": 0.0}
    runs[2].tail.steps = {STEPS: {"perf/step_s": 8.0}}
    runs.append(make("token", model="other"))
    assert training_seconds_left(runs)["token-other"] == 20 * (5 * 2.0 + 8.0) / 6


def test_only_the_last_steps_count_for_the_time_left(make):
    run = make("token", steps=10)
    for step in range(1, 6):
        run.tail.steps[step]["perf/step_s"] = 100.0
    assert training_seconds_left([run]) == {"token-m": 20.0}


def test_the_grid_is_as_fast_as_its_tasks_at_once_and_its_longest_cell(make):
    runs = [make("token", steps=10), make("balanced", steps=10)]
    runs[0].evaluation_seconds = [3.0, 5.0]
    assert grid_seconds_left(runs) == 2 * (10 * 2.0 + 2 * 4.0)
    for run in runs:
        run.busy = {run.left[0]}
    assert grid_seconds_left(runs) == 28.0
    runs[0].error = "broken"
    assert grid_seconds_left(runs) == 28.0
    assert grid_seconds_left([make("token")]) is None


def test_one_line_says_how_far_the_grid_is(make):
    runs = [make("token", steps=5), make("balanced"), make("sequence", done=True, steps=STEPS)]
    runs[0].busy = {runs[0].left[0]}
    runs[1].error = "broken"
    assert plain_line(runs) == "3 cells: 1 done, 1 failed, 1 training  [token/m/d/s0 5/20]  ETA 30s"


def test_the_table_has_a_line_a_cell_and_keeps_those_under_way_when_they_do_not_all_fit(make):
    runs = [make("sequence", done=True, steps=STEPS), make("token", steps=5), make("balanced")]
    runs[1].busy = {runs[1].left[0]}
    runs[1].summaries = {0: {"metrics": {"eval/mean": 0.125}}}

    def lines(max_rows: int) -> list[list[str]]:
        console = Console(file=io.StringIO(), width=100)
        console.print(live_table(runs, max_rows))
        return [line.split() for line in console.file.getvalue().splitlines()]

    head, *rows = lines(10)
    assert head == ["cell", "state", "step", "reward", "accuracy", "ETA"]
    assert rows[1] == ["token-m", "training", "5/20", "0.050", "0.125", "30s"]
    assert [row[0] for row in rows] == ["sequence-m", "token-m", "balanced-m"]
    assert [row[0] for row in lines(1)[1:]] == ["token-m"]


def test_without_a_terminal_lines_come_now_and_then_and_events_at_once(make):
    console = Console(file=io.StringIO(), width=100)
    with Progress(console) as progress:
        for _ in range(5):
            progress.update([make("token", steps=5)])
        progress.say("[token] is done")
    lines = [line.split(" ", 1)[1] for line in console.file.getvalue().splitlines()]
    assert lines == ["1 cell: 1 pending  ETA 30s", "[token] is done"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0.4, "0s"), (59.6, "1m00s"), (61, "1m01s"), (3700, "1h01m")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
