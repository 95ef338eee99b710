"""Which task runs next, and what happens when it ends? The loop that drives a grid to its end on Ray.

Each cell is one training task, and each checkpoint that the grid names is one evaluation task, started as soon as the
checkpoint is whole. A task's success is its result file. A lost worker is started again from the last checkpoint.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from orchestrator import ledger, tasks
from orchestrator.cluster import Resources, evaluation_needs, training_needs
from orchestrator.grid import Cell, canonical_json
from orchestrator.ledger import Busy, CellDir, LedgerError, MetricsTail, StateName, Work
from orchestrator.tracking import Recorder

TICK_S = 0.5
ELSEWHERE_POLL_S = 2.0


@dataclass(eq=False)
class CellRun:
    """A cell while the grid runs.

    Attributes:
        left: work that has no result file yet.
        busy: work that a task is doing now.
        tail: the metrics so far.
        summaries: evaluation results by step.
        lost: how often a task of that work was lost.
        evaluation_seconds: how long this command's evaluations of the cell took.
        error: why the cell cannot go on; empty while it can.
        elsewhere: another command looks after the cell.
    """

    cell: Cell
    folder: CellDir
    left: list[Work]
    tail: MetricsTail
    busy: set[Work] = field(default_factory=set)
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost: dict[Work, int] = field(default_factory=dict)
    evaluation_seconds: list[float] = field(default_factory=list)
    error: str = ""
    elsewhere: bool = False
    closed: bool = False
    claim: IO[str] | None = None
    next_claim: float = 0.0

    @property
    def state(self) -> StateName:
        if self.error:
            return "failed"
        if not self.left:
            return "done"
        if any(work.kind == "train" for work in self.busy):
            return "training"
        return "evaluating" if self.busy else "pending"

    @property
    def trained_steps(self) -> int:
        return min(self.tail.last_step, self.cell.steps)


def look_up(runs_dir: Path, cell: Cell) -> CellRun:
    """A cell as its files show it; changes nothing."""
    folder = ledger.cell_dir(runs_dir, cell)
    run = CellRun(cell, folder, ledger.work_left(cell, folder), MetricsTail(folder))
    refresh(run)
    return run


def refresh(run: CellRun) -> None:
    """Take in what the cell's files show by now."""
    run.tail.read()
    for step in run.cell.evaluate_steps:
        if step not in run.summaries and (summary := ledger.read_summary(run.cell, run.folder, step)):
            run.summaries[step] = summary


class Watcher(Protocol):
    """Whoever shows the progress."""

    def say(self, message: str) -> None:
        """One event in words."""

    def update(self, runs: Sequence[CellRun]) -> None:
        """The present state of all cells."""


@dataclass(frozen=True)
class _InFlight:
    run: CellRun
    work: Work
    needs: Resources
    started: float


class Scheduler:
    """Drives cells to their end."""

    def __init__(
        self,
        runs: Sequence[CellRun],
        nodes: Sequence[Resources],
        recorder: Recorder,
        watcher: Watcher,
        *,
        root: Path,
        data_dir: Path | None,
        train: str = tasks.TRAIN,
        evaluate: str = tasks.EVALUATE,
    ) -> None:
        """
        Args:
            runs: the cells, in the order in which they are to be started.
            nodes: what each node of the cluster has.
            recorder: mirrors the cells' files.
            watcher: is told what happens.
            root: working directory of the tasks.
            data_dir: local data files.
            train, evaluate: `module:function` of the work; see `orchestrator.tasks`.
        """
        self._runs = list(runs)
        self._free = sum(nodes, Resources(0, 0))
        self._recorder = recorder
        self._watcher = watcher
        self._root, self._data_dir = root, data_dir
        self._functions = {"train": train, "evaluate": evaluate}
        self._in_flight: dict[Any, _InFlight] = {}
        self._same_base: dict[str, list[CellRun]] = {}
        self._stop = False
        self._store_down = False
        for run in self._runs:
            self._same_base.setdefault(_base_key(run), []).append(run)

    def run(self) -> bool:
        """Run until every cell is done or failed; False when it was interrupted before that."""
        with _on_interrupt(self._request_stop):
            while not self._stop and any(not run.closed for run in self._runs):
                self._start_what_fits()
                self._collect()
                self._follow()
        if self._stop:
            self._abandon()
        return not self._stop

    def _start_what_fits(self) -> None:
        """Evaluations first: they are short and fill gaps. Then training, strictly in order."""
        for run in self._runs:
            for work in list(run.left):
                if work.kind == "evaluate" and self._may_start(run, work):
                    self._start(run, work, evaluation_needs(run.cell))
        for run in self._runs:
            for work in list(run.left):
                if work.kind == "train" and self._may_start(run, work):
                    if not training_needs(run.cell).fits(self._free):
                        return
                    self._start(run, work, training_needs(run.cell))

    def _may_start(self, run: CellRun, work: Work) -> bool:
        if run.error or run.closed or work in run.busy or time.monotonic() < run.next_claim:
            return False
        if work.kind == "train":
            return True
        if work.step == 0:
            twins = self._same_base[_base_key(run)]
            if any(0 in twin.summaries for twin in twins):
                return True
            if any(work in twin.busy for twin in twins):
                return False
        whole = (run.folder.checkpoint(work.step) / ledger.COMPLETE).exists()
        return whole and evaluation_needs(run.cell).fits(self._free)

    def _start(self, run: CellRun, work: Work, needs: Resources) -> None:
        if not self._claim(run) or work not in run.left:
            return
        if work.kind == "evaluate" and work.step == 0 and self._take_over_base(run):
            return
        import ray

        function = self._functions[work.kind]
        setting = tasks.Setting(run.folder, self._root, self._data_dir, int(needs.cpus), needs.gpus, function)
        name = f"{work.kind}:{run.cell.id}"
        options = {"name": name, "num_cpus": needs.cpus, "num_gpus": needs.gpus, "max_retries": 0}
        if work.kind == "train":
            reference = (
                ray.remote(tasks.train_cell)
                .options(**options)
                .remote(setting, run.cell.config, run.cell.evaluate_steps)
            )
        else:
            ledger.prepare_evaluation(run.cell, run.folder, work.step)
            reference = ray.remote(tasks.evaluate).options(**options).remote(setting, work.step, run.cell.evaluation)
        self._in_flight[reference] = _InFlight(run, work, needs, time.monotonic())
        self._free -= needs
        run.busy.add(work)
        self._note(run)

    def _claim(self, run: CellRun) -> bool:
        """Become the one that looks after the cell. Another command that does so now is waited for."""
        if run.claim is not None:
            return True
        try:
            run.claim = ledger.take(run.folder.claim)
        except Busy:
            run.elsewhere = True
            run.next_claim = time.monotonic() + ELSEWHERE_POLL_S
            return False
        run.elsewhere = False
        # Another command may have worked on it since we looked.
        run.left = ledger.work_left(run.cell, run.folder)
        refresh(run)
        return True

    def _take_over_base(self, run: CellRun) -> bool:
        """The base model under the same settings gives the same samples in every cell: evaluate it once."""
        source = next((twin for twin in self._same_base[_base_key(run)] if 0 in twin.summaries), None)
        if source is None:
            return False
        ledger.copy_evaluation(source.folder, run.folder, 0)
        self._settle(run, Work("evaluate", 0))
        return True

    def _collect(self) -> None:
        """Wait a moment for tasks to end, and judge each by its result file."""
        if not self._in_flight:
            time.sleep(TICK_S)
            return
        import ray

        ended, _ = ray.wait(list(self._in_flight), timeout=TICK_S)
        for reference in ended:
            task = self._in_flight.pop(reference)
            self._free += task.needs
            task.run.busy.discard(task.work)
            try:
                failure = ray.get(reference)
            except ray.exceptions.RayError as error:
                failure = tasks.Failure(_in_words(error), retry=True)
            if not self._settle(task.run, task.work):
                self._handle(task, failure or tasks.Failure("it ended without its result"))
            elif task.work.kind == "evaluate":
                task.run.evaluation_seconds.append(time.monotonic() - task.started)

    def _settle(self, run: CellRun, work: Work) -> bool:
        """Strike work off if its result file is there."""
        refresh(run)
        trained = work.kind == "train" and ledger.is_trained(run.cell, run.folder)
        done = trained or (work.kind == "evaluate" and work.step in run.summaries)
        if done and work in run.left:
            run.left.remove(work)
        return done

    def _handle(self, task: _InFlight, failure: tasks.Failure) -> None:
        run, work = task.run, task.work
        what = "training" if work.kind == "train" else f"evaluation of step {work.step}"
        run.lost[work] = run.lost.get(work, 0) + 1
        if failure.retry and run.lost[work] <= run.cell.retries:
            saved = max(ledger.complete_checkpoints(run.folder), default=0)
            place = f"from the checkpoint of step {saved}" if work.kind == "train" else "where it stopped"
            self._watcher.say(
                f"{run.cell.id}: {what}: {failure.reason}; going on {place} "
                f"(retry {run.lost[work]} of {run.cell.retries})"
            )
        else:
            times = f", {run.lost[work]} times" if run.lost[work] > 1 else ""
            run.error = f"{what}: {failure.reason}{times}"
            self._watcher.say(f"{run.cell.id}: failed: {run.error} (log: {run.folder.log})")

    def _follow(self) -> None:
        """Bring states, MLflow and the display up to date with the files of the cells under way."""
        for run in self._runs:
            if run.claim is None:
                # Only trouble at the start, or another command's success, ends a cell that was never ours.
                run.closed = run.closed or bool(run.error)
                continue
            refresh(run)
            self._note(run)
            ended = not run.busy and (run.error or not run.left)
            if self._mirror(run, ended=bool(ended)) and ended:
                self._close(run)
        self._watcher.update(self._runs)

    def _mirror(self, run: CellRun, ended: bool) -> bool:
        """Send news to MLflow. While it does not answer the cells go on, and are sent in full once it does."""
        try:
            if ended:
                self._recorder.close(run.cell, run.folder, run.tail, run.state)
            else:
                self._recorder.sync(run.cell, run.folder, run.tail, run.state)
        except self._recorder.errors as error:
            if not self._store_down:
                self._watcher.say(f"MLflow does not take the results ({error}); trying again")
            self._store_down = True
            return False
        self._store_down = False
        return True

    def _close(self, run: CellRun) -> None:
        run.closed = True
        if run.claim is not None:
            run.claim.close()
            run.claim = None
        if not run.error:
            self._watcher.say(f"{run.cell.id}: done")

    def _note(self, run: CellRun) -> None:
        """Keep state.json in step, in words."""
        state, step = run.state, run.trained_steps
        if state == "training":
            reason = f"from step {max(ledger.complete_checkpoints(run.folder), default=0)}"
        elif state == "evaluating":
            reason = "steps " + ", ".join(str(work.step) for work in sorted(run.busy, key=lambda w: w.step))
        else:
            reason = run.error or ("all results are there" if state == "done" else f"after step {step}")
        ledger.write_state(run.folder, state, reason)

    def _request_stop(self) -> None:
        self._stop = True
        self._watcher.say("stopping; what is done is kept")

    def _abandon(self) -> None:
        """Stop all tasks and say in every cell's state where it stands."""
        import ray

        for reference in self._in_flight:
            ray.cancel(reference, force=True)
        for run in self._runs:
            if run.claim is None or run.closed:
                continue
            refresh(run)
            ledger.write_state(run.folder, "cancelled", f"interrupted after step {run.trained_steps}")
            try:
                self._recorder.close(run.cell, run.folder, run.tail, "cancelled")
            except self._recorder.errors as error:
                self._watcher.say(f"{run.cell.id}: not all is in MLflow yet ({error}); the next run sends it")


def _base_key(run: CellRun) -> str:
    """Equal for cells whose base model and evaluation are the same."""
    return canonical_json([run.cell.config["model"], run.cell.evaluation])


def _in_words(error: Exception) -> str:
    """Why Ray lost a task."""
    name = type(error).__name__
    known = {
        "WorkerCrashedError": "its worker process died",
        "OutOfMemoryError": "its worker was stopped because memory ran out",
        "NodeDiedError": "its node was lost",
        "LocalRayletDiedError": "Ray's node process died",
        "TaskCancelledError": "it was cancelled",
    }
    return known.get(name) or f"{name}: {(str(error).strip().splitlines() or [''])[0]}"


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into a call; the second one has its usual effect."""

    def handle(number: int, frame: object) -> None:
        for known, old in before.items():
            signal.signal(known, old)
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def open_all(runs: Sequence[CellRun], runs_dir: Path, watcher: Watcher) -> None:
    """Create the directories of cells with work left. Damaged files fail their own cell, or are replaced."""
    for run in runs:
        try:
            ledger.open_cell(runs_dir, run.cell)
        except LedgerError as error:
            run.error = str(error)
            watcher.say(f"{run.cell.id}: failed: {error}")
            continue
        try:
            ledger.read_state(run.folder)
        except LedgerError as error:
            watcher.say(f"{run.cell.id}: {error}; it is written anew")
