"""What is known about a cell while a grid runs, or is looked at?"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from orchestrator import ledger
from orchestrator.grid import Cell
from orchestrator.leases import Lease
from orchestrator.ledger import CellDir, MetricsTail, StateName, Work
from trainers.metric_names import STEP_SECONDS

RECENT_STEPS = 5


@dataclass(eq=False)
class CellRun:
    """A cell, its files, and what a running command does for it.

    Attributes:
        left: work that has no result file yet.
        tail: the metrics so far; none of a trained cell that was looked up without.
        busy: work that a task is doing now.
        summaries: evaluation results by step.
        checkpoints: steps that have a whole checkpoint.
        failures: how often in a row that work has failed without getting any further.
        retry_at: when that work may start again, in seconds of the monotonic clock.
        evaluation_seconds: how long this command's evaluations of the cell took.
        error: why the cell cannot go on; empty while it can.
        halted: a person has stopped or cancelled it.
        elsewhere: another command looks after the cell.
        closed: nothing more is done for it by this command.
        claim: this command's lease on the cell.
        next_claim: when to ask for the lease again.
    """

    cell: Cell
    folder: CellDir
    left: list[Work]
    tail: MetricsTail
    busy: set[Work] = field(default_factory=set)
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)
    checkpoints: set[int] = field(default_factory=set)
    failures: dict[Work, int] = field(default_factory=dict)
    retry_at: dict[Work, float] = field(default_factory=dict)
    evaluation_seconds: list[float] = field(default_factory=list)
    error: str = ""
    halted: Literal["", "stopped", "cancelled"] = ""
    elsewhere: bool = False
    closed: bool = False
    claim: Lease | None = None
    next_claim: float = 0.0

    @property
    def state(self) -> StateName:
        if self.error:
            return "failed"
        if not self.left:
            return "done"
        if any(work.kind == "train" for work in self.busy):
            return "training"
        if self.busy:
            return "evaluating"
        return self.halted or "pending"

    @property
    def trained_steps(self) -> int:
        return self.cell.steps if self.cell.steps in self.checkpoints else min(self.tail.last_step, self.cell.steps)

    @property
    def newest_checkpoint(self) -> int:
        return max(self.checkpoints, default=0)


def look_up(runs_dir: Path, cell: Cell, trained_metrics: bool = True) -> CellRun:
    """A cell as its files show it; changes nothing.

    Args:
        trained_metrics: read the metrics of training that has ended, too, which take most of the time.
    """
    folder = ledger.cell_dir(runs_dir, cell)
    run = CellRun(cell, folder, [], MetricsTail(folder))
    look_again(run, trained_metrics)
    return run


def look_again(run: CellRun, trained_metrics: bool = True) -> None:
    """Find out anew what is left, whatever was known before."""
    run.summaries.clear()
    refresh(run, trained_metrics)
    run.left = ledger.work_left(run.cell, run.checkpoints, run.summaries)


def refresh(run: CellRun, trained_metrics: bool = True) -> None:
    """Take in what the cell's files show by now."""
    run.checkpoints = set(ledger.complete_checkpoints(run.folder))
    if trained_metrics or run.cell.steps not in run.checkpoints:
        run.tail.read()
    for step in run.cell.evaluate_steps:
        if step not in run.summaries and (summary := ledger.read_summary(run.cell, run.folder, step)):
            run.summaries[step] = summary


def settle(run: CellRun, work: Work) -> bool:
    """Strike work off if its result file is there; whether it is."""
    refresh(run)
    done = work.step in (run.checkpoints if work.kind == "train" else run.summaries)
    if done and work in run.left:
        run.left.remove(work)
    return done


def step_seconds(runs: Iterable[CellRun]) -> float | None:
    """Mean duration of the last steps of these cells; None when they have none."""
    recent = [seconds for run in runs for seconds in run.tail.recent(STEP_SECONDS, RECENT_STEPS)]
    return fmean(recent) if recent else None
