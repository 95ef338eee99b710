"""How does `balagg status --watch` keep up? It looks at the files again and again, whoever runs the grid."""

import time
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.live import Live

from orchestrator import leases
from orchestrator.cells import CellRun, look_again
from orchestrator.results import describe, state_counts, status_table

REFRESH_S = 2.0
PLAIN_EVERY_S = 15.0
ROWS_BESIDE = 4
"""Lines of the terminal that are no cells."""


def watch_status(runs: Sequence[CellRun], console: Console) -> None:
    """Show the cells until none has work left, or Ctrl-C. Elsewhere than on a terminal: a line now and then."""
    try:
        if console.is_terminal:
            _watch_table(runs, console)
        else:
            _watch_lines(runs, console)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _watch_table(runs: Sequence[CellRun], console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(status_table(runs, max_rows=max(4, console.height - ROWS_BESIDE)), refresh=True)
            if _is_over(runs):
                return
            time.sleep(REFRESH_S)
            _look_again(runs)


def _watch_lines(runs: Sequence[CellRun], console: Console) -> None:
    while True:
        console.print(state_counts([describe(run)[0] for run in runs]))
        if _is_over(runs):
            return
        time.sleep(PLAIN_EVERY_S)
        _look_again(runs)


def _look_again(runs: Sequence[CellRun]) -> None:
    for run in runs:
        if run.left:
            look_again(run, trained_metrics=False)


def _is_over(runs: Sequence[CellRun]) -> bool:
    """Whether all is done, or what is left will not be done: failed, stopped or cancelled, and looked after by none."""
    return all(
        not run.left
        or (describe(run)[0] in ("failed", "stopped", "cancelled") and not leases.is_held(run.folder.claim))
        for run in runs
    )
