"""How far is the grid? One line a cell on a terminal, kept up to date; a plain line now and then elsewhere."""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from statistics import fmean
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.cells import RECENT_STEPS, CellRun
from trainers.metric_names import EVAL_MEAN, REWARD_MEAN, STEP_SECONDS

PLAIN_EVERY_S = 15.0
STYLES = {
    "done": "green", "failed": "red", "training": "cyan", "evaluating": "magenta", "stopped": "yellow",
    "cancelled": "yellow", "pending": "dim",
}  # fmt: skip


class Progress:
    """Shows a running grid; a context manager. On a terminal the table stays below what is said."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_plain = 0.0

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, message: str) -> None:
        """Print one event."""
        self._console.print(f"{datetime.now():%H:%M:%S} {message}", markup=False, highlight=False, soft_wrap=True)

    def update(self, runs: Sequence[CellRun]) -> None:
        """Show the present state."""
        if self._live:
            table = live_table(runs, max_rows=max(4, self._console.height - 6))
            self._live.update(Group(table, Text(plain_line(runs))), refresh=True)
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + PLAIN_EVERY_S
            self.say(plain_line(runs))


def live_table(runs: Sequence[CellRun], max_rows: int) -> Table:
    """The cells as a table. Where they do not all fit, those under way and failed go before the others."""
    rank = {"training": 0, "evaluating": 0, "failed": 1, "stopped": 2, "cancelled": 2, "pending": 3, "done": 4}
    shown = sorted(runs, key=lambda run: rank[run.state])[:max_rows] if len(runs) > max_rows else runs
    table = Table(box=None, pad_edge=False)
    table.add_column("cell", no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True)
    for column in ("step", "reward", "accuracy", "ETA"):
        table.add_column(column, justify="right", no_wrap=True)
    left = training_seconds_left(runs)
    for run in runs:
        if run in shown:
            state = "elsewhere" if run.elsewhere else run.state
            table.add_row(
                run.cell.id,
                styled(state),
                f"{run.trained_steps}/{run.cell.steps}",
                _number(latest_reward(run)),
                _number(latest_accuracy(run)),
                duration(left[run.cell.id]) if run.left and not run.error else "",
            )
    return table


def plain_line(runs: Sequence[CellRun]) -> str:
    """The whole grid in one line."""
    counts = Counter(str(run.state) for run in runs)
    states = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state])
    under_way = [
        f"{run.cell.rule}/{run.cell.model_name}/{run.cell.dataset_name}/s{run.cell.seed} "
        f"{run.trained_steps}/{run.cell.steps}"
        for run in runs
        if run.state == "training"
    ]
    going_on = any(run.left and not run.error for run in runs)
    eta = f"  ETA {duration(grid_seconds_left(runs))}" if going_on else ""
    steps = f"  [{'; '.join(under_way[:4])}{'; ...' if len(under_way) > 4 else ''}]" if under_way else ""
    return f"{len(runs)} cell{'s' * (len(runs) != 1)}: {states}{steps}{eta}"


def styled(state: str) -> Text:
    """A state's name in its colour."""
    return Text(state, style=STYLES.get(state, "dim"))


def latest_reward(run: CellRun) -> float | None:
    """Mean reward of the newest step."""
    return run.tail.steps[run.tail.last_step].get(REWARD_MEAN) if run.tail.steps else None


def latest_accuracy(run: CellRun) -> float | None:
    """Mean over the benchmarks of the newest evaluated checkpoint."""
    return run.summaries[max(run.summaries)]["metrics"].get(EVAL_MEAN) if run.summaries else None


def training_seconds_left(runs: Sequence[CellRun]) -> dict[str, float | None]:
    """Training time left by cell id, from the cell's last steps, else its model's, else all; None: no idea yet."""
    own = {run.cell.id: run.tail.recent(STEP_SECONDS, RECENT_STEPS) for run in runs}
    by_model: dict[str, list[float]] = {}
    for run in runs:
        by_model.setdefault(run.cell.model_name, []).extend(own[run.cell.id])
    everything = [seconds for listed in by_model.values() for seconds in listed]
    left: dict[str, float | None] = {}
    for run in runs:
        known = own[run.cell.id] or by_model[run.cell.model_name] or everything
        steps = run.cell.steps - run.trained_steps
        left[run.cell.id] = steps * fmean(known) if known else None if steps else 0.0
    return left


def grid_seconds_left(runs: Sequence[CellRun]) -> float | None:
    """Time left for the whole grid, with as many tasks at once as now; None: no idea yet."""
    training = training_seconds_left(runs)
    timed = [seconds for run in runs for seconds in run.evaluation_seconds]
    per_evaluation = fmean(timed) if timed else 0.0
    cells = []
    for run in runs:
        if run.left and not run.error:
            seconds = training[run.cell.id]
            if seconds is None:
                return None
            cells.append(seconds + per_evaluation * sum(work.kind == "evaluate" for work in run.left))
    at_once = max(1, sum(len(run.busy) for run in runs))
    return max([sum(cells) / at_once, *cells], default=0.0)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """`1h05m`, `4m30s`, `12s`, or `?`."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
