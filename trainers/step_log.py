"""The append-only record of a run's metrics: one JSON line per step."""

import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from trainers import metric_names as names


class StepLog:
    """Appends `{"step": n, "time": s, "metrics": {...}}` lines, s in seconds since 1970.

    A step that is already there is never written again: a resumed run recomputes the steps since its checkpoint, and
    their first record stays. Values that are not finite cannot stand in JSON: they are left out and their names listed
    under "non_finite".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_step = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._cut_torn_line()
        for row in read_steps(path):
            self.last_step = max(self.last_step, row["step"])

    def append(self, step: int, metrics: dict[str, float]) -> None:
        """Record a step durably, unless it already is."""
        if step <= self.last_step:
            return
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3), "metrics": finite}
        if len(finite) < len(metrics):
            row["non_finite"] = sorted(metrics.keys() - finite.keys())
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.last_step = step

    def _cut_torn_line(self) -> None:
        """Drop what a killed writer left behind the last complete line."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            os.truncate(self.path, complete)


def read_steps(path: Path) -> list[dict]:
    """The complete rows of a step log, oldest first; none where the file does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def best_checkpoint(cell_dir: Path, steps: Sequence[int]) -> int | None:
    """The checkpoint step whose own stretch, the steps since the one before it, had the highest mean reward."""
    reward = {row["step"]: row["metrics"][names.REWARD_MEAN] for row in read_steps(cell_dir / "metrics.jsonl")}
    best, highest = None, -math.inf
    for before, step in itertools.pairwise(sorted({0, *steps})):
        stretch = [reward[s] for s in range(before + 1, step + 1) if s in reward]
        if stretch and (mean := math.fsum(stretch) / len(stretch)) > highest:
            best, highest = step, mean
    return best
