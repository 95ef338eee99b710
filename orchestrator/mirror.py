"""How do results reach the tracking store without holding up the grid? A thread of its own mirrors the cells' files.

While the store does not answer, cells go on; the thread tries again until the store has everything.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator import leases, ledger
from orchestrator.cells import CellRun
from orchestrator.failures import POLICIES, Kind
from orchestrator.ledger import MetricsTail
from orchestrator.tracking import Recorder

RETRY_S = 1.0
PATIENCE_S = 600.0
"""How long a command whose cells have all ended waits for a store that does not answer."""


@dataclass(frozen=True)
class _News:
    run: CellRun
    state: str
    ended: bool


class Mirror:
    """Sends cells to the tracking store, the ones that ended last of all; use it as a context manager."""

    def __init__(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        """
        Args:
            recorder: knows how; used by the thread alone from now on.
            say: is told in words when the store goes away and when it is back.
        """
        self._recorder, self._say = recorder, say
        self._news: dict[str, _News] = {}
        self._tails: dict[str, MetricsTail] = {}
        self._sent: list[CellRun] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._refused: dict[str, float] = {}  # cell id: since when
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def tell(self, run: CellRun, ended: bool = False) -> None:
        """The cell's files have news. With `ended` they are the last ones: `sent` then names the cell."""
        with self._changed:
            if self._crash:
                raise self._crash
            self._news[run.cell.id] = _News(run, run.state, ended)
            self._changed.notify_all()

    def sent(self) -> list[CellRun]:
        """The ended cells that the store has taken whole since the last call."""
        with self._changed:
            if self._crash:
                raise self._crash
            sent, self._sent = self._sent, []
            return sent

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is left to send; whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._news or self._crash is not None, seconds)

    @property
    def refused_for(self) -> float:
        """Seconds for which the store has not taken some cell; 0 while it takes all."""
        return time.monotonic() - min(self._refused.values()) if self._refused else 0.0

    def _run(self) -> None:
        try:
            while (news := self._next()) is not None:
                taken = self._send(news)
                with self._changed:
                    self._settle(news, taken)
                    if not taken and self._news.keys() <= self._refused.keys():
                        self._changed.wait_for(lambda: self._stopped, RETRY_S)
        except BaseException as error:  # a fault of ours: it shows itself in the thread that drives the grid
            with self._changed:
                self._crash = error
                self._changed.notify_all()

    def _next(self) -> _News | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._news)
            return None if self._stopped else next(iter(self._news.values()))

    def _send(self, news: _News) -> bool:
        run = news.run
        tail = self._tails.setdefault(run.cell.id, MetricsTail(run.folder))
        try:
            tail.read()
            send = self._recorder.close if news.ended else self._recorder.sync
            send(run.cell, run.folder, tail, news.state)
        except self._recorder.errors as error:
            if not self._refused:
                self._say(f"MLflow does not take the results ({error}); trying again")
            self._refused.setdefault(run.cell.id, time.monotonic())
            return False
        if self._refused.pop(run.cell.id, None) and not self._refused:
            self._say("MLflow takes results again")
        return True

    def _settle(self, news: _News, taken: bool) -> None:
        """Strike it off, or put it or what is newer at the end of the line, so that every cell has its turn."""
        latest = self._news.pop(news.run.cell.id)
        if not taken or latest is not news:
            self._news[news.run.cell.id] = latest
        elif news.ended:
            self._sent.append(news.run)
            self._tails.pop(news.run.cell.id, None)
        self._changed.notify_all()


def record_finished(runs: Sequence[CellRun], mirror: Mirror) -> list[CellRun]:
    """Send what a command that was killed between a result and its record left out.

    Returns:
        the cells that could not be sent, because the store does not answer.
    """
    claims = {}
    for run in runs:
        try:
            claims[run.cell.id] = leases.take(run.folder.claim)
        except leases.Busy:
            continue  # another command is recording it
        mirror.tell(run, ended=True)
    wait_for_store(mirror)
    sent = {run.cell.id for run in mirror.sent()}
    for run in runs:
        if run.cell.id in sent:
            ledger.write_state(run.folder, "done", "all results are there")
    for claim in claims.values():
        claim.close()
    return [run for run in runs if run.cell.id in claims and run.cell.id not in sent]


def wait_for_store(mirror: Mirror) -> None:
    """Wait until the store has everything, or has refused some of it for `PATIENCE_S`."""
    while not mirror.wait(RETRY_S) and mirror.refused_for < PATIENCE_S:
        pass


def not_recorded(runs: Sequence[CellRun]) -> str:
    """What to say about cells whose results the store lacks."""
    cells = f"{len(runs)} cell{'s' * (len(runs) != 1)}"
    return f"MLflow lacks results of {cells}: {POLICIES[Kind.TRACKING].remedy}; nothing is trained again"
