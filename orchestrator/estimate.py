"""What will the work that is left cost? Device hours from how long cells of the same model took before."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from orchestrator.cells import CellRun
from orchestrator.cluster import evaluation_gang, training_gang
from orchestrator.placement import Gang
from trainers.metric_names import STEP_SECONDS


class Cost(NamedTuple):
    """Hours on GPUs, or on CPU cores for a model that uses no GPU."""

    hours: float
    device: str

    def __str__(self) -> str:
        return f"{self.hours:.1f} {self.device}-hours" if self.hours >= 0.1 else f"{self.hours:.2g} {self.device}-hours"


def cost(run: CellRun, history: Sequence[CellRun]) -> Cost | None:
    """What a cell's work still costs; None when nothing is known about cells of its model.

    Steps are taken to last as long as the cell's own steps did, else as those of the trained cells of its model;
    evaluations as those of its model's cells did on average.

    Args:
        run: the cell.
        history: cells whose files are looked at.
    """
    alike = _by_model(tuple(history)).get(run.cell.model_name, ())
    training, evaluation = training_gang(run.cell), evaluation_gang(run.cell)
    device = "GPU" if training.each.gpus or evaluation.each.gpus else "CPU"
    hours = 0.0
    for kind, gang, known in (
        ("train", training, _step_seconds(run, alike)),
        ("evaluate", evaluation, _evaluation_seconds(alike)),
    ):
        number = sum(work.kind == kind for work in run.left)
        if kind == "train" and number:
            number = run.cell.steps - run.newest_checkpoint
        if number and known is None:
            return None
        hours += number * (known or 0.0) * _devices(gang, device) / 3600
    return Cost(hours, device)


def total(costs: Iterable[Cost | None]) -> str:
    """All costs in words: `3.4 GPU-hours`, or for how many cells nothing is known."""
    costs = list(costs)
    known = [item for item in costs if item]
    parts = [
        str(Cost(sum(item.hours for item in known if item.device == device), device))
        for device in ("GPU", "CPU")
        if any(item.device == device for item in known)
    ]
    if unknown := len(costs) - len(known):
        parts.append(f"unknown for {unknown} cell{'s' * (unknown != 1)} of models that have not been run yet")
    return ", ".join(parts)


def _devices(gang: Gang, device: str) -> float:
    return gang.workers * (gang.each.gpus if device == "GPU" else gang.each.cpus)


@lru_cache
def _by_model(history: tuple[CellRun, ...]) -> dict[str, tuple[CellRun, ...]]:
    names = dict.fromkeys(run.cell.model_name for run in history)
    return {name: tuple(run for run in history if run.cell.model_name == name) for name in names}


def _step_seconds(run: CellRun, alike: tuple[CellRun, ...]) -> float | None:
    return _mean_step_seconds((run,)) or _trained_step_seconds(alike)


@lru_cache
def _trained_step_seconds(alike: tuple[CellRun, ...]) -> float | None:
    return _mean_step_seconds(tuple(other for other in alike if other.cell.steps in other.checkpoints))


def _mean_step_seconds(runs: tuple[CellRun, ...]) -> float | None:
    seconds = sum(other.tail.total(STEP_SECONDS) for other in runs)
    return seconds / sum(other.tail.last_step for other in runs) if seconds else None


@lru_cache
def _evaluation_seconds(alike: tuple[CellRun, ...]) -> float | None:
    """From when an evaluation was asked for, which its settings file was written at, to its summary."""
    seconds = [
        other.folder.summary(step).stat().st_mtime - other.folder.settings(step).stat().st_mtime
        for other in alike
        for step in other.summaries
    ]
    return fmean(seconds) if seconds else None
