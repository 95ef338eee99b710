"""`balagg logs`, `stop`, `cancel` and `retry`: what a person asks of cells while a command runs them, or afterwards.

`register(app)` adds them to the command line. Requests are files in the cells' folders, so that they reach a command on
any machine that shares the folder.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Annotated

import typer

from orchestrator import leases, ledger
from orchestrator.cells import CellRun, look_up
from orchestrator.errors import UserError
from orchestrator.options import EXPERIMENTS, CellNames, ConfigFile, GridName, Only, RunsDir, Seeds, Skip, choose, pick
from orchestrator.results import UNDER_WAY, describe

FOLLOW_POLL_S = 0.3
BLOCK = 1 << 20

Answer = tuple[str, str]
"""What was done about a cell: its id, and words."""


def register(app: typer.Typer) -> None:
    """Add the commands to a typer app."""
    for command in (logs, stop, cancel, retry):
        app.command()(command)


def logs(
    cell: Annotated[str, typer.Argument(help="Id of a cell, or how it alone begins.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the log grows; end with Ctrl-C.")] = False,
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
) -> None:
    """Print what a cell's training and evaluations have said."""
    chosen = choose(config, grid, seeds=seeds, runs_dir=runs_dir)
    found = pick(chosen.cells, [cell])[0]
    log = ledger.cell_dir(chosen.runs_dir, found).log
    if not log.exists() and not follow:
        raise UserError(f"{found.id} has no log yet: {log} does not exist; start it with balagg run, or wait with -f")
    try:
        _print_log(log, follow)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stop(
    cells: CellNames = None,
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
) -> None:
    """End cells after their present step, with a checkpoint. A later `run` goes on with them."""
    runs = _look_up(cells, config, grid, only, skip, seeds, runs_dir)
    _ask(runs, ledger.request_stop, "stops after its present step", "stopped before it starts")


def cancel(
    cells: CellNames = None,
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
) -> None:
    """End cells at once; what they did since their last checkpoint is lost. A later `run` goes on with them."""
    runs = _look_up(cells, config, grid, only, skip, seeds, runs_dir)
    _ask(runs, ledger.request_cancel, "is ended now", "cancelled before it starts")


def retry(
    cells: CellNames = None,
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
) -> None:
    """Make failed, stopped and cancelled cells pending again, for the next `run`."""
    runs = _look_up(cells, config, grid, only, skip, seeds, runs_dir)
    answers = []
    for run in runs:
        state, reason = describe(run)
        if state not in ("failed", "stopped", "cancelled"):
            continue
        try:
            with leases.hold(run.folder.claim):
                ledger.clear_requests(run.folder)
                ledger.write_state(run.folder, "pending", f"to be tried again; was {state}: {reason}")
        except leases.Busy:
            message = f"{run.cell.id} is still looked after by a running command; try again when that has ended"
            raise UserError(message) from None
        answers.append((run.cell.id, f"pending; was {state}: {reason}"))
    _tell(answers)
    typer.echo(f"{len(answers)} of {len(runs)} cells are pending again; balagg run goes on with them")


def _ask(runs: Sequence[CellRun], request: Callable[[ledger.CellDir], None], under_way: str, waiting: str) -> None:
    """Leave a request in every cell that a running command has, or may come to."""
    left = [run for run in runs if run.left]
    if not any(leases.is_held(run.folder.claim) for run in left):
        raise UserError("no command is running any of these cells; balagg status shows where they stand")
    answers = []
    for run in left:
        state, _ = describe(run)
        if state in ("failed", "stopped", "cancelled"):
            continue
        request(run.folder)
        answers.append((run.cell.id, under_way if state in UNDER_WAY else waiting))
    _tell(answers)


def _print_log(log: Path, follow: bool) -> None:
    while follow and not log.exists():
        time.sleep(FOLLOW_POLL_S)
    with log.open("r", encoding="utf-8", errors="replace") as file:
        _copy(file)
        while follow:
            time.sleep(FOLLOW_POLL_S)
            _copy(file)


def _copy(file: IO[str]) -> None:
    while text := file.read(BLOCK):
        sys.stdout.write(text)
    sys.stdout.flush()


def _tell(answers: Sequence[Answer]) -> None:
    for cell_id, words in answers:
        typer.echo(f"{cell_id}: {words}")


def _look_up(
    names: list[str] | None,
    config: Path,
    grid: str | None,
    only: list[str] | None,
    skip: list[str] | None,
    seeds: str | None,
    runs_dir: Path | None,
) -> list[CellRun]:
    chosen = choose(config, grid, only, skip, seeds, runs_dir)
    return [look_up(chosen.runs_dir, cell, trained_metrics=False) for cell in pick(chosen.cells, names)]
