"""What do a cell's files show? State, metrics, whole checkpoints, finished evaluations, and the work left.

The directory is the truth. Success is a result file; state.json only says, in words, what was last going on.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal, get_args

from orchestrator.grid import Cell, canonical_json

StateName = Literal["pending", "training", "evaluating", "done", "failed", "cancelled"]

COMPLETE = "COMPLETE"
"""Marker file that a checkpoint gets last."""


class LedgerError(Exception):
    """A cell's own files are damaged, which concerns that cell alone. The message names file and remedy."""


class Busy(Exception):
    """Another process holds the lock."""


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
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def claim(self) -> Path:
        """Locked by the command that looks after the cell: it alone writes its state and its MLflow run."""
        return self.path / ".claim.lock"

    @property
    def training(self) -> Path:
        """Locked by the process that trains the cell."""
        return self.path / ".train.lock"

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step}"

    def evaluation(self, step: int) -> Path:
        return self.path / "evals" / f"step-{step}"

    def summary(self, step: int) -> Path:
        return self.evaluation(step) / "summary.json"

    def settings(self, step: int) -> Path:
        """What the evaluation in this folder was asked for; written before it starts."""
        return self.evaluation(step) / "settings.json"


def cell_dir(runs_dir: Path, cell: Cell) -> CellDir:
    """`runs/<grid>/<cell id>`"""
    return CellDir(runs_dir / cell.grid / cell.id)


def write_atomic(path: Path, text: str) -> None:
    """Write a file that readers see either whole or not at all, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def open_cell(runs_dir: Path, cell: Cell) -> CellDir:
    """Create the cell's directory with its config.json and a pending state, unless they are there.

    Raises:
        LedgerError: config.json is damaged or is not this cell's.
    """
    folder = cell_dir(runs_dir, cell)
    if folder.config.exists():
        found = _read_json(folder.config)
        if found != cell.config:
            raise LedgerError(f"{folder.config} was changed; delete {folder.path} to start this cell over")
    else:
        write_atomic(folder.config, json.dumps(cell.config, indent=2) + "\n")
    if not folder.state.exists():
        write_state(folder, "pending", "new")
    return folder


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
        write_atomic(folder.state, json.dumps(asdict(new), indent=2) + "\n")


class MetricsTail:
    """Reads metrics.jsonl as it grows; only whole lines count, and the last one of a step stands.

    Attributes:
        steps: metrics by step, from 1.
        non_finite: names of the metrics that the trainer left out as NaN or infinite, by step.
        times: when each step was recorded, in seconds since 1970; steps that do not say so are left out.
    """

    def __init__(self, folder: CellDir) -> None:
        self._path = folder.metrics
        self._offset = 0
        self._inode = 0
        self.steps: dict[int, dict[str, float]] = {}
        self.non_finite: dict[int, list[str]] = {}
        self.times: dict[int, float] = {}

    def read(self) -> None:
        """Take in what was added; start over when the file was cut back or replaced."""
        try:
            with self._path.open("rb") as file:
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


def read_metrics(folder: CellDir) -> dict[int, dict[str, float]]:
    """Metrics by step, as far as the file holds whole lines."""
    tail = MetricsTail(folder)
    tail.read()
    return tail.steps


def complete_checkpoints(folder: CellDir) -> list[int]:
    """Steps whose checkpoint is whole, ascending."""
    markers = (folder.path / "checkpoints").glob(f"step-*/{COMPLETE}")
    names = (marker.parent.name.removeprefix("step-") for marker in markers)
    return sorted(int(name) for name in names if name.isdecimal())


def is_trained(cell: Cell, folder: CellDir) -> bool:
    """Whether the last checkpoint is whole."""
    return (folder.checkpoint(cell.steps) / COMPLETE).exists()


def read_summary(cell: Cell, folder: CellDir, step: int) -> dict[str, Any] | None:
    """The result of evaluating a checkpoint; None when it is missing, damaged or of other settings."""
    try:
        if folder.settings(step).read_text() != canonical_json(cell.evaluation):
            return None
        summary = _read_json(folder.summary(step))
    except (FileNotFoundError, LedgerError):
        return None
    return summary if isinstance(summary, dict) and isinstance(summary.get("metrics"), dict) else None


def prepare_evaluation(cell: Cell, folder: CellDir, step: int) -> None:
    """Note what is asked for. A summary of other settings goes first: it must not pass for this one's."""
    folder.summary(step).unlink(missing_ok=True)
    write_atomic(folder.settings(step), canonical_json(cell.evaluation))


def copy_evaluation(source: CellDir, target: CellDir, step: int) -> None:
    """Take over another cell's evaluation of the same model under the same settings."""
    goal = target.evaluation(step)
    goal.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=goal.parent, prefix=f".{goal.name}."))
    shutil.copytree(source.evaluation(step), staging, dirs_exist_ok=True)
    shutil.rmtree(goal, ignore_errors=True)
    os.replace(staging, goal)


def work_left(cell: Cell, folder: CellDir) -> list[Work]:
    """What the grid asks of this cell minus what its files show."""
    missing = [step for step in cell.evaluate_steps if read_summary(cell, folder, step) is None]
    evaluations = [Work("evaluate", step) for step in missing]
    return evaluations if is_trained(cell, folder) else [Work("train", cell.steps), *evaluations]


@contextmanager
def hold(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold an advisory lock on a file. The kernel drops it when the process ends, however it ends.

    Args:
        path: the lock file, made if needed.
        wait_s: seconds to wait for another holder.

    Raises:
        Busy: it is still held after that time.
    """
    lock = take(path, wait_s)
    try:
        yield
    finally:
        lock.close()


def take(path: Path, wait_s: float = 0.0) -> IO[str]:
    """Like `hold`, for a lock that outlives a block: closing the returned file gives it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            file.close()
            raise Busy(str(path)) from None
        return file


def is_held(path: Path) -> bool:
    """Whether some process holds the lock now."""
    if not path.exists():
        return False
    try:
        take(path).close()
    except Busy:
        return True
    return False


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> LedgerError:
    return LedgerError(f"{path} is damaged ({error}); delete it, the other files hold the truth")
