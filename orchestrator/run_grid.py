"""How does `balagg run` go from cells to results? Look at the files, check the cluster, drive the grid, report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from orchestrator.cells import CellRun, look_up
from orchestrator.cluster import check_demand, connect
from orchestrator.grid import Cell
from orchestrator.mirror import Mirror, not_recorded, record_finished
from orchestrator.progress import Progress
from orchestrator.results import failure_table, final_table, not_run
from orchestrator.schedule import Scheduler, clear_old_requests
from orchestrator.tasks import EVALUATE, TRAIN, TRAIN_ON_WORKERS, Functions
from orchestrator.tracking import Recorder, tracking_uri


@dataclass(frozen=True)
class Outcome:
    """How the grid ended.

    Attributes:
        failed: cells that failed, by id.
        halted: cells that a person stopped or cancelled.
        unrecorded: cells whose results the tracking store did not take.
        interrupted: the command was asked to end before the grid did.
    """

    failed: tuple[str, ...]
    halted: tuple[str, ...]
    unrecorded: tuple[str, ...]
    interrupted: bool


def run_grid(
    cells: Sequence[Cell],
    *,
    root: Path,
    runs_dir: Path,
    data_dir: Path | None,
    console: Console,
    train: str = TRAIN,
    train_on_workers: str = TRAIN_ON_WORKERS,
    evaluate: str = EVALUATE,
) -> Outcome:
    """Do all work that is left, mirror everything to MLflow, and print what came out.

    When nothing is left, Ray is not started, and MLflow only gets what it lacks.

    Args:
        root: working directory of the tasks, and the folder whose git commit is recorded.
        runs_dir: folder of all cells.
        data_dir: local data files.
        train, train_on_workers, evaluate: see `orchestrator.tasks.Functions`.

    Raises:
        UserError: the cluster can never run some task, or the MLflow store cannot be used; nothing was started.
    """
    runs = [look_up(runs_dir, cell) for cell in cells]
    todo = [run for run in runs if run.left]
    nodes = connect() if todo else {}
    try:
        check_demand([run.cell for run in todo], nodes)
        recorder = Recorder(tracking_uri(root), cells[0].grid, root)
        recorder.open(cells)
        if todo:
            console.print(f"{len(todo)} of {len(runs)} cells have work left; results go to {runs_dir}", soft_wrap=True)
        with Progress(console) as progress, Mirror(recorder, progress.say) as mirror:
            finished = [run for run in runs if not run.left and not recorder.is_synced(run.cell, run.folder)]
            unrecorded = record_finished(finished, mirror)
            for run in runs:
                run.closed = not run.left
            interrupted = False
            if todo:
                clear_old_requests(todo)
                functions = Functions(train, train_on_workers, evaluate)
                scheduler = Scheduler(
                    runs, nodes, mirror, progress,
                    root=root, runs_dir=runs_dir, data_dir=data_dir, functions=functions,
                )  # fmt: skip
                interrupted = not scheduler.run()
                unrecorded += [] if interrupted else scheduler.not_recorded()
    finally:
        if todo:
            import ray

            ray.shutdown()
    return _report(runs, unrecorded, interrupted, console)


def _report(runs: Sequence[CellRun], unrecorded: Sequence[CellRun], interrupted: bool, console: Console) -> Outcome:
    failed = [run for run in runs if run.error]
    halted = [run for run in runs if run.halted and run.left and not run.error]
    if not interrupted:
        console.print(final_table(runs))
    if failed:
        console.print(failure_table(failed))
    for name, reason in not_run(runs).items():
        console.print(f"{name} was not run everywhere: {reason}", soft_wrap=True, markup=False)
    if unrecorded:
        console.print(not_recorded(unrecorded), soft_wrap=True, markup=False)
    done = sum(not run.left and not run.error for run in runs)
    stopped = f", {len(halted)} stopped" if halted and not interrupted else ""
    console.print(f"{done} of {len(runs)} cells done{stopped}")
    return Outcome(
        failed=tuple(run.cell.id for run in failed),
        halted=tuple(run.cell.id for run in halted),
        unrecorded=tuple(run.cell.id for run in unrecorded),
        interrupted=interrupted,
    )
