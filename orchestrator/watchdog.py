"""Does a task still get on? Progress is what it adds to its cell's files."""

import time
from pathlib import Path

from orchestrator.ledger import CellDir, Work

LEAST_LIMIT_S = 3600.0
STEPS = 20


class Watch:
    """Looks at the files that one task adds to. The time that it waits for its start does not count.

    Attributes:
        limit_s: the limit that was last asked about.
    """

    def __init__(self, folder: CellDir, work: Work) -> None:
        samples = [] if work.kind == "train" else [folder.evaluation(work.step)]
        self._places = [folder.log, folder.metrics, *samples]
        self._size = self._measure()
        self._since: float | None = None
        self.limit_s = LEAST_LIMIT_S

    def hangs(self, limit_s: float) -> bool:
        """Whether nothing was added for so many seconds."""
        self.limit_s = limit_s
        size = self._measure()
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return self._since is not None and time.monotonic() - self._since > limit_s

    def _measure(self) -> int:
        return sum(_size(place) for place in self._places)


def time_limit(configured: float | None, step_seconds: float | None) -> float:
    """Seconds without progress that are too many: as configured, or a generous number of the cell's own steps."""
    if configured is not None:
        return configured
    return max(LEAST_LIMIT_S, STEPS * (step_seconds or 0.0))


def _size(place: Path) -> int:
    """Bytes of a file, or of the files of a folder; 0 for none."""
    try:
        if not place.is_dir():
            return place.stat().st_size
        return sum(file.stat().st_size for file in place.iterdir() if file.is_file())
    except FileNotFoundError:
        return 0
