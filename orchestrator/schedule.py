"""What happens to a grid from its first task to its last? The loop that drives cells to their end on Ray.

Each cell is one training task, and each checkpoint that the grid names is one evaluation task, started as soon as the
checkpoint is whole. A task's success is its result file. What becomes of a failure is in `orchestrator.failures`, and
which task goes where in `orchestrator.placement`.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from orchestrator import cluster, leases, ledger, tasks
from orchestrator.cells import CellRun, look_again, refresh, settle, step_seconds
from orchestrator.cluster import evaluation_gang, training_gang
from orchestrator.failures import Failure, Kind, classify, wait_before_retry
from orchestrator.grid import canonical_json
from orchestrator.ledger import LedgerError, Work
from orchestrator.mirror import PATIENCE_S, Mirror
from orchestrator.placement import Gang, Resources, Running, Waiting, choose, free_room
from orchestrator.tasks import Functions
from orchestrator.watchdog import Watch, time_limit

BASE_EVALUATION = Work("evaluate", 0)
TICK_S = 0.5
ELSEWHERE_POLL_S = 2.0
CLUSTER_POLL_S = 5.0
AVOID_S = 30.0
"""How long a node that a task was lost with is left alone; Ray takes a while to notice that a node is gone."""


class Watcher(Protocol):
    """Whoever shows the progress."""

    def say(self, message: str) -> None:
        """One event in words."""

    def update(self, runs: Sequence[CellRun]) -> None:
        """The present state of all cells."""


@dataclass
class _Task:
    """A Ray task under way.

    Attributes:
        ending: why it is being ended by this command; empty while it may go on.
    """

    run: CellRun
    work: Work
    gang: Gang
    nodes: tuple[str, ...]
    started: float
    watch: Watch
    ending: Literal["", "hung", "again", "stopped", "cancelled"] = ""


@dataclass
class _Room:
    """The cluster's nodes, as last looked at.

    Attributes:
        total: what each node has.
        others: what other users of the cluster occupy.
        avoid: nodes that were lost a moment ago, and until when they are left alone.
        next_look: when to look again.
    """

    total: dict[str, Resources]
    others: list[Running] = field(default_factory=list)
    avoid: dict[str, float] = field(default_factory=dict)
    next_look: float = 0.0


@dataclass
class _Base:
    """What cells share that have the same base model and evaluation: the result of step 0, once a cell has it.

    Attributes:
        source: a cell that has it.
        busy: a task is making it now.
    """

    source: CellRun | None = None
    busy: bool = False


class Scheduler:
    """Drives cells to their end."""

    def __init__(
        self,
        runs: Sequence[CellRun],
        nodes: Mapping[str, Resources],
        mirror: Mirror,
        watcher: Watcher,
        *,
        root: Path,
        runs_dir: Path,
        data_dir: Path | None,
        functions: Functions,
    ) -> None:
        """
        Args:
            runs: the cells, in the order in which they are to be started; closed ones only lend their results.
            nodes: what each node of the cluster has, by node id.
            mirror: is told about the cells' files.
            watcher: is told what happens.
            root: working directory of the tasks.
            runs_dir: folder of all cells.
            data_dir: local data files.
            functions: what does the work.
        """
        self._runs = list(runs)
        open_runs = [run for run in runs if not run.closed]
        self._has_gangs = any(training_gang(run.cell).workers > 1 for run in open_runs)
        self._comparisons = [list(group) for _, group in groupby(open_runs, key=lambda run: run.cell.comparison)]
        self._room = _Room(dict(nodes))
        self._mirror, self._watcher = mirror, watcher
        self._root, self._runs_dir, self._data_dir = root, runs_dir, data_dir
        self._functions = functions
        self._tasks: dict[Any, _Task] = {}
        self._active: dict[str, CellRun] = {}
        self._told: dict[str, tuple[Any, ...]] = {}
        self._noted: dict[str, tuple[str, str]] = {}
        self._bases = _shared_bases(self._runs)
        self._step_seconds: dict[str, float] = {}
        self._evaluation_seconds: dict[str, float] = {}
        self._stop = False
        self._changed = -math.inf  # when a task last started or ended
        self._next_follow = 0.0

    def run(self) -> bool:
        """Run until every cell is done, failed or halted; False when it was interrupted before that."""
        with _on_interrupt(self._request_stop):
            while not self._stop and not all(run.closed for run in self._runs):
                self._start_what_fits()
                self._collect()
                if time.monotonic() >= self._next_follow:
                    self._follow()
                    self._next_follow = time.monotonic() + TICK_S
                if self._mirror.refused_for > PATIENCE_S and not self._work_is_left():
                    break
        if self._stop:
            self._abandon()
        if self._has_gangs:
            cluster.release_lost_gangs()
        self._close_sent()
        return not self._stop

    def not_recorded(self) -> list[CellRun]:
        """Cells that came to their end while the store did not take their results."""
        return [run for run in self._active.values() if _has_ended(run)]

    # Starting tasks.

    def _start_what_fits(self) -> None:
        """Start tasks until nothing more fits. A cell that cannot be claimed leaves its room to the next one."""
        self._look_at_cluster()
        tried = True
        while tried and not self._stop:
            running = [self._running(task) for task in self._tasks.values()] + self._room.others
            if not any(has.cpus >= 1 for has in free_room(running, self._room.total).values()):
                return
            starts = choose(self._waiting(), running, self._room.total)
            tried = False
            for task, nodes in starts:
                run, work = task.key
                with self._disk_trouble(run, work):
                    tried = not self._start(run, work, task.gang, nodes) or tried

    def _waiting(self) -> Iterator[Waiting[tuple[CellRun, Work]]]:
        """What could start now, in order: comparison by comparison, its evaluations before its trainings."""
        now = time.monotonic()
        at_once = {task.run.cell.id for task in self._tasks.values()}
        for runs in self._comparisons:
            for kind in ("evaluate", "train"):
                for run in runs:
                    if run.error or run.halted or run.closed or now < run.next_claim:
                        continue
                    limit = run.cell.max_cells
                    if limit is not None and len(at_once) >= limit and run.cell.id not in at_once:
                        continue
                    for work in run.left:
                        if work.kind == kind and self._is_ready(run, work, now):
                            at_once.add(run.cell.id)
                            yield self._as_waiting(run, work)

    def _is_ready(self, run: CellRun, work: Work, now: float) -> bool:
        if work in run.busy or now < run.retry_at.get(work, 0.0):
            return False
        if work.kind == "train":
            return True
        if work.step == 0 and self._bases[run.cell.id].busy:
            return False
        return work.step in run.checkpoints

    def _as_waiting(self, run: CellRun, work: Work) -> Waiting[tuple[CellRun, Work]]:
        gang = training_gang(run.cell) if work.kind == "train" else evaluation_gang(run.cell)
        return Waiting((run, work), gang, self._seconds(run, work))

    def _running(self, task: _Task) -> Running:
        seconds = self._seconds(task.run, task.work)
        if task.work.kind == "evaluate":
            seconds = max(0.0, seconds - (time.monotonic() - task.started))
        return Running(task.gang, task.nodes, seconds)

    def _seconds(self, run: CellRun, work: Work) -> float:
        """How long the work takes from here on: from the cell's last steps, else from those of its model's cells.

        Nothing is known of a model's first evaluations; they are taken to be short.
        """
        model = run.cell.model_name
        if work.kind == "evaluate":
            return self._evaluation_seconds.get(model, 0.0)
        each = step_seconds([run]) or self._step_seconds.get(model, math.inf)
        return each * (run.cell.steps - run.trained_steps)

    def _learn_durations(self) -> None:
        """Per model, from the cells under way; models that have none keep what was known."""
        by_model: dict[str, list[CellRun]] = {}
        for run in self._active.values():
            by_model.setdefault(run.cell.model_name, []).append(run)
        for model, runs in by_model.items():
            if seconds := step_seconds(runs):
                self._step_seconds[model] = seconds
            if known := [seconds for run in runs for seconds in run.evaluation_seconds]:
                self._evaluation_seconds[model] = fmean(known)

    def _start(self, run: CellRun, work: Work, gang: Gang, nodes: tuple[str, ...]) -> bool:
        """Start a task; False when it turns out that there is nothing to start for the cell now."""
        if not self._claim(run) or work not in run.left or self._heed_requests(run):
            return False
        if work == BASE_EVALUATION and self._take_over_base(run):
            return False
        if work.kind == "evaluate":
            ledger.prepare_evaluation(run.cell, run.folder, work.step)
        self._tasks[self._submit(run, work, gang, nodes)] = _Task(
            run, work, gang, nodes, time.monotonic(), Watch(run.folder, work)
        )
        run.busy.add(work)
        if work == BASE_EVALUATION:
            self._bases[run.cell.id].busy = True
        self._changed = time.monotonic()
        self._note(run)
        return True

    def _submit(self, run: CellRun, work: Work, gang: Gang, nodes: tuple[str, ...]) -> Any:
        function = {"train": self._functions.train, "evaluate": self._functions.evaluate}[work.kind]
        needs = gang.each
        if gang.workers > 1:
            # The gang's own processes hold its resources; this task only starts them and waits.
            function, needs = self._functions.train_on_workers, Resources(0, 0)
        setting = tasks.Setting(
            run.folder, self._root, self._data_dir, int(gang.each.cpus), gang.each.gpus, nodes, function
        )
        options = {
            "name": f"{work.kind}:{run.cell.id}",
            "num_cpus": needs.cpus,
            "num_gpus": needs.gpus,
            "max_retries": 0,
            "scheduling_strategy": _on(nodes[0]),
        }
        if work.kind == "evaluate":
            return _remote(tasks.evaluate).options(**options).remote(setting, work.step, run.cell.evaluation)
        tokens = ledger.max_tokens_per_micro_batch(run.cell, run.folder)
        recipe = run.cell.config["train"] | {"max_tokens_per_micro_batch": tokens}
        config = run.cell.config | {"train": recipe}
        # The process that started a gang ends with its task, and with it all that it owns: no gang outlives a failure.
        train = _remote(tasks.train_cell, max_calls=0 if gang.workers == 1 else 1)
        return train.options(**options).remote(setting, config, run.cell.evaluate_steps)

    def _claim(self, run: CellRun) -> bool:
        """Become the one that looks after the cell. Another command that does so now is waited for."""
        if run.claim is not None:
            return True
        try:
            run.claim = leases.take(run.folder.claim)
        except leases.Busy:
            run.elsewhere = True
            run.next_claim = time.monotonic() + ELSEWHERE_POLL_S
            return False
        run.elsewhere = False
        self._active[run.cell.id] = run
        try:
            for message in ledger.damaged(run.folder):
                self._watcher.say(f"{run.cell.id}: {message}")
            ledger.open_cell(self._runs_dir, run.cell)
        except LedgerError as error:
            self._fail(run, str(error))
            return False
        # Another command may have worked on it since we looked.
        look_again(run)
        if gone := _lost_checkpoints(run):
            steps = ", ".join(map(str, gone))
            folder = run.folder.path / "checkpoints"
            self._fail(
                run,
                f"the checkpoint of step {steps} is to be evaluated and was not kept; leave it out of evaluate.at, or "
                f"delete {folder} to train the cell again",
            )
            return False
        return True

    def _take_over_base(self, run: CellRun) -> bool:
        """The base model under the same settings gives the same samples in every cell: evaluate it once."""
        source = self._bases[run.cell.id].source
        if source is None:
            return False
        ledger.copy_evaluation(source.folder, run.folder, 0)
        return settle(run, BASE_EVALUATION)

    def _look_at_cluster(self) -> None:
        """Nodes come and go, and others use them too. Ray's view of what is free lags, so look when all is quiet."""
        now = time.monotonic()
        if now < self._room.next_look:
            return
        self._room.next_look = now + CLUSTER_POLL_S
        if self._has_gangs:
            cluster.release_lost_gangs()
        self._room.total = {node: has for node, has in cluster.nodes().items() if self._room.avoid.get(node, 0.0) < now}
        if now - self._changed < CLUSTER_POLL_S:
            return
        ours = free_room([self._running(task) for task in self._tasks.values()], self._room.total)
        seen = cluster.free()
        self._room.others = [
            Running(Gang(1, Resources(max(0.0, used.cpus), max(0.0, used.gpus))), (node,), math.inf)
            for node, has in ours.items()
            if node in seen
            for used in [has - seen[node]]
            if used.cpus > 0 or used.gpus > 0
        ]

    # Judging tasks that have ended.

    def _collect(self) -> None:
        """Wait a moment for tasks to end, and judge each by its result file."""
        wait_s = max(0.0, min(TICK_S, self._next_follow - time.monotonic()))
        if not self._tasks:
            time.sleep(wait_s)
            return
        import ray

        ended, others = ray.wait(list(self._tasks), timeout=wait_s)
        if ended and others:
            ended += ray.wait(others, num_returns=len(others), timeout=0)[0]
        for reference in ended:
            task = self._tasks.pop(reference)
            task.run.busy.discard(task.work)
            if task.work == BASE_EVALUATION:
                self._bases[task.run.cell.id].busy = False
            self._changed = time.monotonic()
            try:
                failure = ray.get(reference)
            except ray.exceptions.RayError as error:
                failure = classify(error)
            with self._disk_trouble(task.run, task.work):
                self._judge(task, failure)

    def _judge(self, task: _Task, failure: Failure | None) -> None:
        run, work = task.run, task.work
        if settle(run, work):
            if work.kind == "evaluate":
                run.evaluation_seconds.append(time.monotonic() - task.started)
            if work == BASE_EVALUATION:
                self._bases[run.cell.id].source = run
            run.failures.pop(work, None)
            self._news_of(run)
            return
        if task.ending == "again":
            return
        if task.ending == "hung":
            failure = Failure(Kind.HUNG, f"no progress for {task.watch.limit_s:.0f} s")
        elif task.ending:
            run.halted = task.ending
        elif failure is None and work.kind == "train" and ledger.stop_requested(run.folder):
            run.halted = "stopped"
        if not run.halted:
            if failure is not None and failure.kind == Kind.WORKER_KILLED and self._see_to_its_end(task):
                failure = Failure(Kind.HOST_MEMORY, "the kernel killed its process for lack of memory")
            if failure is not None and failure.kind in (Kind.NODE_LOST, Kind.PREEMPTED):
                self._avoid(task.nodes)
            self._handle(run, work, failure or Failure(Kind.NO_RESULT, "it ended without its result"))
        self._news_of(run)

    def _avoid(self, nodes: Sequence[str]) -> None:
        """Start nothing on these nodes for a while."""
        for node in nodes:
            self._room.avoid[node] = time.monotonic() + AVOID_S
            self._room.total.pop(node, None)

    def _handle(self, run: CellRun, work: Work, failure: Failure) -> None:
        """Try again where that may help and has not been in vain too often; else the cell fails."""
        policy = failure.policy
        number = run.failures[work] = run.failures.get(work, 0) + 1
        what = "training" if work.kind == "train" else f"evaluation of step {work.step}"
        reason = failure.reason + (f", {number} times" if number > 1 else "")
        remedy = f"; {policy.remedy}" if policy.remedy else ""
        if not policy.retry or number > run.cell.retries:
            self._fail(run, f"{what}: {reason}{remedy}")
            return
        if failure.kind == Kind.DAMAGED:
            self._train_again(run, work.step)
        smaller = ""
        if policy.halve and work.kind == "train":
            tokens = ledger.reduce_max_tokens_per_micro_batch(run.cell, run.folder)
            if tokens is None:
                self._fail(run, f"{what}: {reason}, with the smallest micro-batch{remedy}")
                return
            smaller = f", with micro-batches of {tokens} tokens from now on"
        wait_s = wait_before_retry(run.cell.retry_wait_s, number)
        run.retry_at[work] = time.monotonic() + wait_s
        place = f"from the checkpoint of step {run.newest_checkpoint}" if work.kind == "train" else "where it stopped"
        message = (
            f"{what}: {failure.reason}; going on {place} in {wait_s:.0f} s{smaller} "
            f"(retry {number} of {run.cell.retries})"
        )
        self._watcher.say(f"{run.cell.id}: {message}")
        with suppress(OSError), run.folder.log.open("a") as log:
            log.write(f"balagg: {message}\n")

    def _train_again(self, run: CellRun, step: int) -> None:
        """Go back to the checkpoint before this one. A training that is beyond it would not make it again."""
        for reference, task in self._tasks.items():
            if task.run is run and task.work.kind == "train" and not task.ending:
                self._end(reference, task, "again")
        ledger.discard_checkpoints(run.folder, step)
        look_again(run)

    def _fail(self, run: CellRun, error: str) -> None:
        run.error = error
        self._watcher.say(f"{run.cell.id}: failed: {run.error} (log: {run.folder.log})")

    @contextmanager
    def _disk_trouble(self, run: CellRun, work: Work) -> Iterator[None]:
        """Trouble with a cell's files is that cell's failure, and no other's."""
        try:
            yield
        except OSError as error:
            self._handle(run, work, classify(error))

    # Following cells under way.

    def _follow(self) -> None:
        """Bring states, the tracking store and the display up to date with the files of the cells under way."""
        for run in list(self._active.values()):
            if run.claim is not None and run.claim.lost:
                self._give_up(run)
                continue
            if _has_ended(run) and self._told.get(run.cell.id, (run.state, False))[1]:
                continue  # the mirror knows; it only waits for the store, which may be far behind
            before = run.newest_checkpoint
            with suppress(OSError):
                refresh(run)
            if run.newest_checkpoint > before:
                run.failures.clear()  # it got further: what failed before was passing
            self._heed_requests(run)
            self._news_of(run)
        for reference, task in list(self._tasks.items()):
            limit_s = time_limit(task.run.cell.hang_after_s, step_seconds([task.run]))
            if not task.ending and task.watch.hangs(limit_s):
                self._end(reference, task, "hung")
        self._learn_durations()
        self._close_sent()
        for run in self._runs:
            # Trouble before the cell was ours, or a request to stop it.
            run.closed = run.closed or (run.claim is None and bool(run.error or run.halted))
        self._watcher.update(self._runs)

    def _news_of(self, run: CellRun) -> None:
        """Note the state, and tell the mirror if anything is new."""
        self._note(run)
        ended = _has_ended(run)
        news = (run.state, ended, run.tail.last_step, len(run.summaries))
        if self._told.get(run.cell.id) != news:
            self._told[run.cell.id] = news
            self._mirror.tell(run, ended)

    def _close_sent(self) -> None:
        for run in self._mirror.sent():
            if not run.error and not run.halted:
                self._watcher.say(f"{run.cell.id}: done")
            self._let_go(run)

    def _let_go(self, run: CellRun) -> None:
        run.closed = True
        if run.claim is not None:
            run.claim.close()
            run.claim = None
        self._active.pop(run.cell.id, None)
        self._told.pop(run.cell.id, None)
        self._noted.pop(run.cell.id, None)
        run.tail.forget()
        for group in self._comparisons:
            if run in group:
                group.remove(run)
                break
        self._comparisons = [group for group in self._comparisons if group]

    def _give_up(self, run: CellRun) -> None:
        """Another command has taken the cell over, since this one was not heard of for too long."""
        self._watcher.say(f"{run.cell.id}: another command looks after it now")
        for reference, task in self._tasks.items():
            if task.run is run and not task.ending:
                self._end(reference, task, "cancelled")
        run.elsewhere, run.claim = True, None
        run.next_claim = time.monotonic() + ELSEWHERE_POLL_S
        self._active.pop(run.cell.id, None)
        self._noted.pop(run.cell.id, None)  # the other command writes the state now

    def _heed_requests(self, run: CellRun) -> bool:
        """End the cell if a person has asked for it; whether that is so."""
        ending: Literal["stopped", "cancelled"]
        if ledger.cancel_requested(run.folder):
            ending = "cancelled"
        elif ledger.stop_requested(run.folder):
            ending = "stopped"
        else:
            return False
        for reference, task in self._tasks.items():
            # A training that is asked to stop does so by itself, after its step.
            asked = ending == "stopped" and task.work.kind == "train"
            if task.run is run and not task.ending and not asked:
                self._end(reference, task, ending)
        run.halted = ending
        return True

    def _end(self, reference: Any, task: _Task, why: Literal["hung", "again", "stopped", "cancelled"]) -> None:
        """End a task's process, whatever it is doing."""
        import ray

        task.ending = why
        ray.cancel(reference, force=True)
        self._see_to_its_end(task)

    def _see_to_its_end(self, task: _Task) -> bool:
        """On the task's node: make sure that its process is gone, and ask whether memory ran out there."""
        import ray

        run, work = task.run, task.work
        lease = run.folder.training if work.kind == "train" else run.folder.evaluating(work.step)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": _on(task.nodes[0])}
        try:
            return ray.get(_remote(tasks.post_mortem).options(**options).remote(lease), timeout=cluster.ERRAND_S)
        except (ray.exceptions.RayError, TimeoutError):
            return False  # the node is gone too

    def _note(self, run: CellRun) -> None:
        """Keep state.json in step, in words. What cannot be written now is written the next time."""
        state, step = run.state, run.trained_steps
        if state == "training":
            reason = f"from step {run.newest_checkpoint}"
        elif state == "evaluating":
            reason = "steps " + ", ".join(str(work.step) for work in sorted(run.busy, key=lambda w: w.step))
        else:
            reason = run.error or ("all results are there" if state == "done" else f"after step {step}")
        if self._noted.get(run.cell.id) == (state, reason):
            return
        with suppress(OSError):
            ledger.write_state(run.folder, state, reason)
            self._noted[run.cell.id] = state, reason

    # The end.

    def _work_is_left(self) -> bool:
        """Whether some cell still has a task, or can get one."""
        return any(not run.closed and not _has_ended(run) for run in self._runs)

    def _request_stop(self) -> None:
        self._stop = True
        self._watcher.say("stopping; what is done is kept")

    def _abandon(self) -> None:
        """Stop all tasks and say in every cell's state where it stands."""
        import ray

        for reference in self._tasks:
            ray.cancel(reference, force=True)
        for run in self._active.values():
            refresh(run)
            run.busy.clear()
            if not _has_ended(run):
                run.halted = "cancelled"
                with suppress(OSError):
                    ledger.write_state(run.folder, "cancelled", f"interrupted after step {run.trained_steps}")
            self._mirror.tell(run, ended=True)
        if not self._mirror.wait(cluster.ERRAND_S):
            self._watcher.say("not all is in MLflow yet; the next run sends it")


def clear_old_requests(runs: Sequence[CellRun]) -> None:
    """A request to stop holds for the commands that were running when it was made."""
    for run in runs:
        if not leases.is_held(run.folder.claim):
            ledger.clear_requests(run.folder)


def _lost_checkpoints(run: CellRun) -> list[int]:
    """Steps that are to be evaluated, and that neither have a checkpoint nor will get one."""
    will_train = any(work.kind == "train" for work in run.left)
    return [] if will_train else [work.step for work in run.left if work.step not in run.checkpoints]


def _has_ended(run: CellRun) -> bool:
    return not run.busy and bool(run.error or run.halted or not run.left)


def _shared_bases(runs: Sequence[CellRun]) -> dict[str, _Base]:
    """By cell id; one object for all cells whose base model and evaluation are the same."""
    by_content: dict[str, _Base] = {}
    by_cell = {}
    for run in runs:
        content = canonical_json([run.cell.config["model"], run.cell.evaluation])
        base = by_cell[run.cell.id] = by_content.setdefault(content, _Base())
        if 0 in run.summaries:
            base.source = run
    return by_cell


@cache
def _remote(function: Callable[..., Any], **options: Any) -> Any:
    """A function as Ray runs it; made once, since Ray sends each one to the cluster."""
    import ray

    return ray.remote(**options)(function) if options else ray.remote(function)


def _on(node: str) -> Any:
    """Ray's way to say: on this node, and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


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
