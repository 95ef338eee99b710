"""What came out, and what is there? Tables of cells, from their files alone."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from orchestrator import ledger
from orchestrator.ledger import LedgerError
from orchestrator.progress import duration, styled
from orchestrator.schedule import CellRun
from trainers.metric_names import EVAL_MEAN, HELDOUT, STEP_SECONDS


def describe(run: CellRun) -> tuple[str, str]:
    """A cell's state and the reason in words, as its files and locks show them now."""
    trained, steps = run.trained_steps, run.cell.steps
    if not run.left:
        return "done", ""
    try:
        recorded = ledger.read_state(run.folder)
    except LedgerError as error:
        return "pending", str(error)
    if ledger.is_held(run.folder.claim) and recorded:
        return recorded.state, recorded.reason
    if recorded and recorded.state in ("failed", "cancelled"):
        return recorded.state, recorded.reason
    if recorded and recorded.state in ("training", "evaluating"):
        return "pending", f"interrupted while {recorded.state}, after step {trained} of {steps}"
    return "pending", "new" if not trained else f"after step {trained} of {steps}"


def why(run: CellRun) -> str:
    """What a run would do for the cell, and why."""
    if not run.left:
        return "nothing: all results are there"
    parts = []
    if any(work.kind == "train" for work in run.left):
        saved = max(ledger.complete_checkpoints(run.folder), default=0)
        parts.append(f"train from step {saved} to {run.cell.steps}" if saved else f"train {run.cell.steps} steps")
    steps = [str(work.step) for work in run.left if work.kind == "evaluate"]
    if steps:
        parts.append(f"evaluate step{'s' * (len(steps) > 1)} {', '.join(steps)}")
    return ", ".join(parts)


def plan_table(runs: Sequence[CellRun]) -> Table:
    """What `run` would do."""
    table = _table("cell", "state", "would do")
    for run in runs:
        state, _ = describe(run)
        table.add_row(run.cell.id, styled(state), why(run))
    return table


def status_table(runs: Sequence[CellRun]) -> Table:
    """Where each cell stands."""
    table = _table("cell", "state", "step", "evaluated", "accuracy", "why")
    for run in runs:
        state, reason = describe(run)
        table.add_row(
            run.cell.id,
            styled(state),
            f"{run.trained_steps}/{run.cell.steps}",
            f"{len(run.summaries)}/{len(run.cell.evaluate_steps)}",
            _score(run, max(run.summaries, default=0), EVAL_MEAN),
            reason,
        )
    return table


def final_table(runs: Sequence[CellRun]) -> Table:
    """What came out: the base model's and the last checkpoint's accuracy, per cell."""
    heldout = f"eval/{HELDOUT}_avg_at_"
    table = _table("rule", "model", "data set", "seed", "steps", "time")
    for title in ("benchmarks base", "last", "held out base", "last"):
        table.add_column(title, justify="right")
    for run in runs:
        cell = run.cell
        seconds = sum(metrics.get(STEP_SECONDS, 0.0) for metrics in run.tail.steps.values())
        row = [cell.rule, cell.model_name, cell.dataset_name, str(cell.seed), str(run.trained_steps)]
        row.append(duration(seconds))
        row += [_score(run, step, prefix) for prefix in (EVAL_MEAN, heldout) for step in (0, cell.steps)]
        table.add_row(*row)
    return table


def failure_table(runs: Iterable[CellRun]) -> Table:
    """Every cell that failed, with the reason and where to read more."""
    table = _table("failed cell", "why", "log")
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


def _score(run: CellRun, step: int, prefix: str) -> str:
    metrics = run.summaries.get(step, {}).get("metrics", {})
    return next((f"{value:.3f}" for key, value in metrics.items() if key.startswith(prefix)), "")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
