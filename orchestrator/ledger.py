"""What do a cell's files show? State, metrics, whole checkpoints, finished evaluations, and the work left.

The directory is the truth. Success is a result file; state.json only says, in words, what was last going on.
"""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Container
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from orchestrator.grid import Cell, canonical_json

StateName = Literal["pending", "training", "evaluating", "done", "failed", "stopped", "cancelled"]

SMALLEST_MICRO_BATCH_TOKENS = 256
"""A micro-batch holds at least one response, so that a smaller budget would save nothing."""

KEPT_STEPS = 5
"""Steps of a finished cell that a running command remembers."""

SETTINGS, SUMMARY = "settings.json", "summary.json"

COMPLETE = "COMPLETE"
"""Marker file that a checkpoint gets last."""


class LedgerError(Exception):
    """A cell's own files are damaged, which concerns that cell alone. The message names file and remedy."""


@dataclass(frozen=True)
class State:
    """What state.json says. Times are ISO 8601, UTC."""

    state: StateName
    reason: str
    since: str
    created: str


@dataclass(frozen=True)
class Work:
    """One thing left to do for a cell: train to the end, or evaluate one checkpoint."""

    kind: Literal["train", "evaluate"]
    step: int
    """The step that training ends at, or the checkpoint to evaluate."""


@dataclass(frozen=True)
class CellDir:
    """Paths of one cell."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def provenance(self) -> Path:
        """On what and where the cell was trained; written by the trainer."""
        return self.path / "provenance.json"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def claim(self) -> Path:
        """Leased by the command that looks after the cell: it alone writes its state and its MLflow run."""
        return self.path / ".claim"

    @property
    def training(self) -> Path:
        """Leased by the process that trains the cell."""
        return self.path / ".training"

    @property
    def stop_request(self) -> Path:
        """There while the training is asked to finish its step, write a checkpoint and end."""
        return self.path / ".stop"

    @property
    def cancel_request(self) -> Path:
        """There while the cell's tasks are to be ended at once."""
        return self.path / ".cancel"

    @property
    def memory(self) -> Path:
        """What training without running out of memory takes, where it once did run out."""
        return self.path / "memory.json"

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoints/step-{step}"

    def evaluation(self, step: int) -> Path:
        return self.path / f"evals/step-{step}"

    def evaluating(self, step: int) -> Path:
        """Leased by the process that evaluates this checkpoint."""
        return self.evaluation(step) / ".evaluating"

    def summary(self, step: int) -> Path:
        return self.evaluation(step) / SUMMARY

    def settings(self, step: int) -> Path:
        """What the evaluation in this folder was asked for; written before it starts."""
        return self.evaluation(step) / SETTINGS


def cell_dir(runs_dir: Path, cell: Cell) -> CellDir:
    """`runs/<grid>/<cell id>`"""
    return CellDir(runs_dir / f"{cell.grid}/{cell.id}")


def write_atomic(path: Path, text: str, durable: bool = True) -> None:
    """Write a file that readers see either whole or not at all; if `durable`, also after the machine has crashed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def open_cell(runs_dir: Path, cell: Cell) -> CellDir:
    """Create the cell's directory with its config.json and a pending state, unless they are there.

    A config.json that cannot be read is written anew: the directory's name says what it was.

    Raises:
        LedgerError: config.json is not this cell's.
    """
    folder = cell_dir(runs_dir, cell)
    try:
        found = _read_json(folder.config)
    except (FileNotFoundError, LedgerError):
        write_atomic(folder.config, json.dumps(cell.config, indent=2) + "\n", durable=False)
    else:
        if found != cell.config:
            raise LedgerError(f"{folder.config} was changed; delete {folder.path} to start this cell over")
    if not folder.state.exists():
        write_state(folder, "pending", "new")
    return folder


def damaged(folder: CellDir) -> list[str]:
    """What to say about the cell's own files that cannot be read; each is written anew."""
    messages = []
    for read in (lambda: _read_json(folder.config), lambda: read_state(folder)):
        try:
            read()
        except FileNotFoundError:
            continue
        except LedgerError as error:
            messages.append(f"{error}; it is written anew")
    return messages


def read_state(folder: CellDir) -> State | None:
    """The recorded state, or None when there is none yet.

    Raises:
        LedgerError: the file is damaged.
    """
    if not folder.state.exists():
        return None
    data = _read_json(folder.state)
    try:
        state = State(**data)
        if state.state not in get_args(StateName):
            raise ValueError(f"unknown state {state.state!r}")
    except (TypeError, ValueError) as error:
        raise _damaged(folder.state, error) from None
    return state


def write_state(folder: CellDir, state: StateName, reason: str) -> None:
    """Record a state with its reason in words. A damaged old file is replaced."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        old = read_state(folder)
    except LedgerError:
        old = None
    new = State(state, reason, old.since if old and old.state == state else now, old.created if old else now)
    if new != old:
        write_atomic(folder.state, json.dumps(asdict(new), indent=2) + "\n", durable=False)


def request_stop(folder: CellDir) -> None:
    """Ask the running command to end the cell after its present step, with a checkpoint."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.stop_request.touch()


def request_cancel(folder: CellDir) -> None:
    """Ask the running command to end the cell's tasks at once; their work since the last checkpoint is lost."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.cancel_request.touch()


def stop_requested(folder: CellDir) -> bool:
    """Whether the cell is to end after its present step."""
    return folder.stop_request.exists()


def cancel_requested(folder: CellDir) -> bool:
    """Whether the cell is to end at once."""
    return folder.cancel_request.exists()


def clear_requests(folder: CellDir) -> None:
    """Forget them: a command that was started later goes on with the cell."""
    folder.stop_request.unlink(missing_ok=True)
    folder.cancel_request.unlink(missing_ok=True)


def max_tokens_per_micro_batch(cell: Cell, folder: CellDir) -> int:
    """The micro-batch budget to train with: the recipe's, or less where that did not fit into memory."""
    configured = cell.config["train"]["max_tokens_per_micro_batch"]
    try:
        return min(configured, int(_read_json(folder.memory)["max_tokens_per_micro_batch"]))
    except (FileNotFoundError, LedgerError, KeyError, TypeError, ValueError):
        return configured


def reduce_max_tokens_per_micro_batch(cell: Cell, folder: CellDir) -> int | None:
    """Halve the budget from now on, also for later commands. The gradient does not depend on it.

    Returns:
        the new budget; None when it is as small as it gets.
    """
    half = max_tokens_per_micro_batch(cell, folder) // 2
    if half < SMALLEST_MICRO_BATCH_TOKENS:
        return None
    write_atomic(folder.memory, json.dumps({"max_tokens_per_micro_batch": half}) + "\n")
    return half


class MetricsTail:
    """Reads metrics.jsonl as it grows; only whole lines count, and the last one of a step stands.

    Attributes:
        steps: metrics by step, from 1.
        non_finite: names of the metrics that the trainer left out as NaN or infinite, by step.
        times: when each step was recorded, in seconds since 1970; steps that do not say so are left out.
    """

    def __init__(self, folder: CellDir) -> None:
        self._path = str(folder.metrics)
        self._offset = 0
        self._inode = 0
        self.steps: dict[int, dict[str, float]] = {}
        self.non_finite: dict[int, list[str]] = {}
        self.times: dict[int, float] = {}
        self._forgotten: Counter[str] = Counter()

    def read(self) -> None:
        """Take in what was added; start over when the file was cut back or replaced."""
        try:
            with open(self._path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_size < self._offset or stat.st_ino != self._inode:
                    self._offset, self._inode = 0, stat.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                record = json.loads(line)
                self.steps[int(record["step"])] = dict(record["metrics"])
                self.non_finite[int(record["step"])] = record.get("non_finite", [])
                if "time" in record:
                    self.times[int(record["step"])] = float(record["time"])
            except (ValueError, KeyError, TypeError):
                continue  # a line torn by a kill; the resumed training writes the step again

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    def recent(self, name: str, number: int) -> list[float]:
        """A metric at the last so many steps, where they have it."""
        last = sorted(self.steps)[-number:]
        return [self.steps[step][name] for step in last if name in self.steps[step]]

    def total(self, name: str) -> float:
        """Sum of a metric over all steps."""
        return self._forgotten[name] + sum(metrics.get(name, 0.0) for metrics in self.steps.values())

    def forget(self) -> None:
        """Keep of a finished cell the last steps and the totals alone: a grid may have thousands of cells."""
        for step in sorted(self.steps)[:-KEPT_STEPS]:
            self._forgotten.update(self.steps.pop(step))
            self.non_finite.pop(step, None)
            self.times.pop(step, None)


def read_metrics(folder: CellDir) -> dict[int, dict[str, float]]:
    """Metrics by step, as far as the file holds whole lines."""
    tail = MetricsTail(folder)
    tail.read()
    return tail.steps


def complete_checkpoints(folder: CellDir) -> list[int]:
    """Steps whose checkpoint is whole, ascending."""
    # Asked of thousands of cells at once, and pathlib's glob takes several times as long.
    try:
        with os.scandir(folder.path / "checkpoints") as entries:
            steps = {e.name.removeprefix("step-"): e.path for e in entries if e.name.startswith("step-")}
    except (FileNotFoundError, NotADirectoryError):
        return []
    whole = (step for step, path in steps.items() if os.path.exists(f"{path}/{COMPLETE}"))
    return sorted(int(step) for step in whole if step.isdecimal())


def discard_checkpoints(folder: CellDir, first: int) -> None:
    """Count the checkpoints from this step on as not there, so that the training makes them again."""
    for step in complete_checkpoints(folder):
        if step >= first:
            (folder.checkpoint(step) / COMPLETE).unlink(missing_ok=True)


def damage(checkpoint: Path) -> str:
    """Why a checkpoint that counts as whole cannot be read; empty if it can. Looks at headers and sizes alone."""
    from safetensors import SafetensorError, safe_open

    try:
        for file in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(file, framework="numpy"):
                pass
        for file in sorted(checkpoint.glob("*.json")):
            json.loads(file.read_text(encoding="utf-8"))
    except (SafetensorError, OSError, ValueError) as error:
        return f"{file.name}: {error}"
    return ""


def read_summary(cell: Cell, folder: CellDir, step: int) -> dict[str, Any] | None:
    """The result of evaluating a checkpoint; None when it is missing, damaged or of other settings."""
    # As text: thousands are asked for at once, and joining and opening paths takes twice as long.
    evaluation = str(folder.evaluation(step))
    try:
        if _read_json(f"{evaluation}/{SETTINGS}") != cell.evaluation:
            return None
        summary = _read_json(f"{evaluation}/{SUMMARY}")
    except (FileNotFoundError, LedgerError):
        return None
    return summary if isinstance(summary, dict) and isinstance(summary.get("metrics"), dict) else None


def prepare_evaluation(cell: Cell, folder: CellDir, step: int) -> None:
    """Note what is asked for. A summary of other settings goes first: it must not pass for this one's."""
    folder.summary(step).unlink(missing_ok=True)
    write_atomic(folder.settings(step), canonical_json(cell.evaluation), durable=False)


def copy_evaluation(source: CellDir, target: CellDir, step: int) -> None:
    """Take over another cell's evaluation of the same model under the same settings."""
    goal = target.evaluation(step)
    goal.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=goal.parent, prefix=f".{goal.name}."))
    shutil.copytree(source.evaluation(step), staging, dirs_exist_ok=True)
    shutil.rmtree(goal, ignore_errors=True)
    os.replace(staging, goal)


def work_left(cell: Cell, checkpoints: Container[int], evaluated: Container[int]) -> list[Work]:
    """What the grid asks of a cell minus the whole checkpoints and finished evaluations that it has, by step."""
    evaluations = [Work("evaluate", step) for step in cell.evaluate_steps if step not in evaluated]
    return evaluations if cell.steps in checkpoints else [Work("train", cell.steps), *evaluations]


def _read_json(path: Path | str) -> Any:
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path | str, error: Exception) -> LedgerError:
    return LedgerError(f"{path} is damaged ({error})")
