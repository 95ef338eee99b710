"""Which process judges an answer that needs algebra, and what happens when it hangs or dies.

Judging runs in worker processes that can be killed: computer algebra on a hostile answer may hang while it holds
the interpreter lock, or eat the memory. Workers are started when first needed, one per caller in flight up to the
limit, and serve any number of threads. They are plain subprocesses rather than a `multiprocessing` pool because
spawned pool workers re-import the parent's main module, and with it torch.
"""

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

MAX_WORKERS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
START_LIMIT_S = 120.0
KILL_GRACE_S = 60.0  # the worker's own timer ends it; this covers one that could not arm it, and loading a library
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class WorkerDied(Exception):
    """The worker ended before it answered; `timed_out` says whether its own timer ended it."""

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Worker:
    """One judging process, spoken to in JSON lines over its standard input and output."""

    def __init__(self) -> None:
        paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evals.grading.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # Ctrl-C in a terminal is the parent's to handle
        )
        self.buffer = b""
        self.receive(START_LIMIT_S)

    def ask(self, request: dict, timeout_s: float) -> dict:
        """The worker's reply. Raises WorkerDied when it ends first and TimeoutError when it outlasts its timer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request | {"timeout_s": timeout_s}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerDied("the worker was gone before it was asked") from error
        return self.receive(timeout_s + KILL_GRACE_S)

    def receive(self, limit_s: float) -> dict:
        assert self.process.stdout is not None
        deadline = time.monotonic() + limit_s
        pipe = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(pipe, 1 << 16)
                if not chunk:
                    code = self.process.wait()
                    raise WorkerDied(f"the worker ended with status {code}", timed_out=code == -signal.SIGALRM)
                self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):  # a request that it never read is still buffered
                    pipe.close()


class WorkerPool:
    """Idle workers and a count of all; a worker is either idle here or held by exactly one thread."""

    def __init__(self, max_workers: int = MAX_WORKERS) -> None:
        self.max_workers = max_workers
        self.num_workers = 0
        self.idle: list[Worker] = []
        self.busy: set[Worker] = set()
        self.changed = threading.Condition()

    def ask(self, request: dict, timeout_s: float) -> dict:
        """A worker's reply, or {"reason": "timeout" | "grader_error"} when it had to be killed or died."""
        worker = self.take()
        healthy = False
        try:
            reply = worker.ask(request, timeout_s)
            healthy = not reply.get("leaving", False)
            return reply
        except TimeoutError:
            return {"reason": "timeout"}
        except WorkerDied as error:
            return {"reason": "timeout" if error.timed_out else "grader_error"}
        finally:
            self.give_back(worker, healthy)

    def take(self) -> Worker:
        with self.changed:
            while True:
                while self.idle:
                    worker = self.idle.pop()
                    if worker.process.poll() is None:
                        self.busy.add(worker)
                        return worker
                    worker.kill()
                    self.num_workers -= 1
                if self.num_workers < self.max_workers:
                    self.num_workers += 1
                    break
                self.changed.wait()
        try:
            worker = Worker()
        except BaseException:
            with self.changed:
                self.num_workers -= 1
                self.changed.notify()
            raise
        with self.changed:
            self.busy.add(worker)
        return worker

    def give_back(self, worker: Worker, healthy: bool) -> None:
        if not healthy:
            worker.kill()
        with self.changed:
            self.busy.discard(worker)
            if healthy:
                self.idle.append(worker)
            else:
                self.num_workers -= 1
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            workers, self.idle = [*self.idle, *self.busy], []
        for worker in workers:
            worker.kill()


pool = WorkerPool()


def _forget_the_parents_workers() -> None:
    """A forked child must not share its parent's pipes: two readers would swap verdicts."""
    global pool
    for worker in (*pool.idle, *pool.busy):
        for pipe in (worker.process.stdin, worker.process.stdout):
            if pipe is not None:
                os.close(pipe.fileno())
                pipe.detach()  # type: ignore[attr-defined]
        worker.process.returncode = 0  # not this process's child to wait for
    pool = WorkerPool()


os.register_at_fork(after_in_child=_forget_the_parents_workers)
atexit.register(lambda: pool.close())
