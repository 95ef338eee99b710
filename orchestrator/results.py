"""What came out, and what is there? Tables of cells, from their files alone."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from orchestrator import leases, ledger
from orchestrator.cells import CellRun
from orchestrator.ledger import LedgerError
from orchestrator.listing import Listing
from orchestrator.progress import STYLES, duration, styled
from trainers.metric_names import EVAL_MEAN, HELDOUT, STEP_SECONDS

if TYPE_CHECKING:
    from orchestrator.estimate import Cost

UNDER_WAY = ("training", "evaluating")


def describe(run: CellRun) -> tuple[str, str]:
    """A cell's state and the reason in words, as its files and leases show them now."""
    trained, steps = run.trained_steps, run.cell.steps
    if not run.left:
        return "done", ""
    try:
        recorded = ledger.read_state(run.folder)
    except LedgerError as error:
        return "pending", str(error)
    if recorded and leases.is_held(run.folder.claim):
        ending = " (asked to stop)" if recorded.state in UNDER_WAY and ledger.stop_requested(run.folder) else ""
        return recorded.state, recorded.reason + ending
    if recorded and recorded.state in ("failed", "stopped", "cancelled"):
        return recorded.state, recorded.reason
    if recorded and recorded.state in UNDER_WAY:
        return "pending", f"interrupted while {recorded.state}, after step {trained} of {steps}"
    return "pending", "new" if not trained else f"after step {trained} of {steps}"


def why(run: CellRun) -> str:
    """Why a run would do something for the cell, in words."""
    if not run.left:
        return "done"
    if not any(work.kind == "train" for work in run.left):
        missing = [work.step for work in run.left]
        stale = [step for step in missing if run.folder.summary(step).exists()]
        reason = "is of other settings" if stale == missing else "missing"
        return f"evaluation of {_steps(missing)} {reason}"
    if run.newest_checkpoint:
        return f"resumes from step {run.newest_checkpoint} of {run.cell.steps}"
    return f"starts over: no checkpoint of its {run.trained_steps} steps" if run.trained_steps else "new"


def what(run: CellRun) -> str:
    """What a run would do for the cell."""
    parts = []
    if any(work.kind == "train" for work in run.left):
        saved = run.newest_checkpoint
        parts.append(f"train from step {saved} to {run.cell.steps}" if saved else f"train {run.cell.steps} steps")
    if steps := [work.step for work in run.left if work.kind == "evaluate"]:
        parts.append(f"evaluate {_steps(steps)}")
    return ", ".join(parts) or "nothing"


def plan_table(runs: Sequence[CellRun], costs: Sequence["Cost | None"]) -> Listing:
    """What `run` would do, and what each cell costs."""
    table = Listing("cell", "state", "why", "would do", "estimate")
    for run, cost in zip(runs, costs, strict=True):
        state, _ = describe(run)
        estimate = "" if not run.left else str(cost) if cost else "unknown"
        table.add_row(run.cell.id, styled(state), why(run), what(run), estimate)
    return table


def status_table(runs: Sequence[CellRun], max_rows: int | None = None) -> Listing:
    """Where each cell stands. Where they do not all fit, those under way and failed go before the others."""
    described = [(run, *describe(run)) for run in runs]
    shown = described
    if max_rows is not None and len(runs) > max_rows:
        rank = {"training": 0, "evaluating": 0, "failed": 1, "stopped": 2, "cancelled": 2, "pending": 3, "done": 4}
        first = sorted(range(len(runs)), key=lambda i: rank[described[i][1]])[:max_rows]
        shown = [described[i] for i in sorted(first)]
    table = Listing("cell", "state", "step", "evaluated", "accuracy", "why")
    for run, state, reason in shown:
        table.add_row(
            run.cell.id,
            styled(state),
            f"{run.trained_steps}/{run.cell.steps}",
            f"{len(run.summaries)}/{len(run.cell.evaluate_steps)}",
            _score(run, max(run.summaries, default=0), EVAL_MEAN),
            reason,
        )
    table.caption = state_counts(state for _, state, _ in described)
    return table


def state_counts(states: Iterable[str]) -> str:
    """`12 cells: 3 done, 2 training`"""
    counts = Counter(states)
    number = counts.total()
    listed = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state])
    return f"{number} cell{'s' * (number != 1)}: {listed}"


def final_table(runs: Sequence[CellRun]) -> Listing:
    """What came out: the base model's and the last checkpoint's accuracy, per cell."""
    heldout = f"eval/{HELDOUT}_avg_at_"
    table = Listing("rule", "model", "data set", "seed", "steps", "time")
    for title in ("benchmarks base", "last", "held out base", "last"):
        table.add_column(title, right=True)
    for run in runs:
        cell = run.cell
        seconds = run.tail.total(STEP_SECONDS)
        row = [cell.rule, cell.model_name, cell.dataset_name, str(cell.seed), str(run.trained_steps)]
        row.append(duration(seconds))
        row += [_score(run, step, prefix) for prefix in (EVAL_MEAN, heldout) for step in (0, cell.steps)]
        table.add_row(*row)
    return table


def failure_table(runs: Iterable[CellRun]) -> Listing:
    """Every cell that failed, with the reason and where to read more."""
    table = Listing("failed cell", "why", "log")
    for run in runs:
        if run.error:
            table.add_row(run.cell.id, run.error, str(run.folder.log))
    return table


def not_run(runs: Iterable[CellRun]) -> dict[str, str]:
    """Benchmarks that some evaluation had to leave out, with the reason; they are missing in its mean."""
    return {
        name: reason
        for run in runs
        for summary in run.summaries.values()
        for name, reason in summary.get("not_run", {}).items()
    }


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' * (len(steps) != 1)} {', '.join(map(str, steps))}"


def _score(run: CellRun, step: int, prefix: str) -> str:
    metrics = run.summaries.get(step, {}).get("metrics", {})
    return next((f"{value:.3f}" for key, value in metrics.items() if key.startswith(prefix)), "")
