"""How does `balagg run` go from cells to results? Look at the files, check the cluster, drive the grid, report."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from orchestrator import ledger, tasks
from orchestrator.cluster import check_demand, connect
from orchestrator.grid import Cell
from orchestrator.progress import Progress
from orchestrator.results import failure_table, final_table, not_run
from orchestrator.schedule import CellRun, Scheduler, look_up, open_all
from orchestrator.tracking import Recorder, tracking_uri


@dataclass(frozen=True)
class Outcome:
    """How the grid ended: `failed` cells by id, and whether it was interrupted."""

    failed: tuple[str, ...]
    interrupted: bool


def run_grid(
    cells: Sequence[Cell],
    *,
    root: Path,
    runs_dir: Path,
    data_dir: Path | None,
    console: Console,
    train: str = tasks.TRAIN,
    evaluate: str = tasks.EVALUATE,
) -> Outcome:
    """Do all work that is left, mirror everything to MLflow, and print what came out.

    When nothing is left, Ray is not started, and MLflow only gets what it lacks.

    Raises:
        UserError: the cluster can never run some task, or the MLflow store cannot be used; nothing was started.
    """
    runs = [look_up(runs_dir, cell) for cell in cells]
    todo = [run for run in runs if run.left]
    if todo:
        nodes = connect()
    try:
        if todo:
            check_demand([run.cell for run in todo], nodes)
        recorder = Recorder(tracking_uri(root), cells[0].grid, root)
        recorder.open(cells)
        _mirror_finished([run for run in runs if not run.left], recorder)
        finished = True
        if todo:
            console.print(f"{len(todo)} of {len(runs)} cells have work left; results go to {runs_dir}", soft_wrap=True)
            with Progress(console) as progress:
                open_all(todo, runs_dir, progress)
                scheduler = Scheduler(
                    todo, nodes, recorder, progress,
                    root=root, data_dir=data_dir, train=train, evaluate=evaluate,
                )  # fmt: skip
                finished = scheduler.run()
    finally:
        if todo:
            import ray

            ray.shutdown()
    return _report(runs, finished, console)


def _mirror_finished(runs: Sequence[CellRun], recorder: Recorder) -> None:
    """Send what a command that was killed between a result and its record left out."""
    for run in runs:
        if recorder.is_synced(run.cell, run.folder):
            continue
        try:
            with ledger.hold(run.folder.claim):
                recorder.close(run.cell, run.folder, run.tail, run.state)
                ledger.write_state(run.folder, "done", "all results are there")
        except ledger.Busy:
            logging.getLogger(__name__).info("%s: another command is recording it", run.cell.id)


def _report(runs: Sequence[CellRun], finished: bool, console: Console) -> Outcome:
    failed = [run for run in runs if run.error]
    if finished:
        console.print(final_table(runs))
    if failed:
        console.print(failure_table(failed))
    for name, reason in not_run(runs).items():
        console.print(f"{name} was not run everywhere: {reason}", soft_wrap=True, markup=False)
    done = sum(not run.left and not run.error for run in runs)
    console.print(f"{done} of {len(runs)} cells done")
    return Outcome(tuple(run.cell.id for run in failed), interrupted=not finished)
