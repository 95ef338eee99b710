"""What runs in a Ray worker: one cell's training, or the evaluation of one checkpoint.

Nothing heavy is imported here. The functions that do the work are named by `module:function` and imported when a
task starts, so that tests can give their own.
"""

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator import leases
from orchestrator.failures import Failure, Kind, classify
from orchestrator.ledger import CellDir, damage, stop_requested

TRAIN = "trainers.grpo:train"
TRAIN_ON_WORKERS = "trainers.workers:train_on_workers"
EVALUATE = "orchestrator.tasks:evaluate_checkpoint"

ORPHAN_WAIT_S = 60.0
"""How long to wait for the lease of a worker whose command was killed and that is about to notice."""


@dataclass(frozen=True)
class Functions:
    """What does the work, as `module:function` each.

    Attributes:
        train: trains a cell in the task's own process.
        train_on_workers: trains a cell on a gang of processes that it starts.
        evaluate: evaluates a checkpoint.
    """

    train: str = TRAIN
    train_on_workers: str = TRAIN_ON_WORKERS
    evaluate: str = EVALUATE


@dataclass(frozen=True)
class Setting:
    """Where and how a task runs.

    Attributes:
        cell: the cell's directory.
        root: working directory; relative model paths start here.
        data_dir: local data files, or None.
        cpus, gpus: what each worker was given; the cores are also its number of threads.
        nodes: the node id of each worker of the task.
        function: `module:function` that does the work.
    """

    cell: CellDir
    root: Path
    data_dir: Path | None
    cpus: int
    gpus: float
    nodes: tuple[str, ...]
    function: str


def train_cell(setting: Setting, config: dict[str, Any], keep_steps: tuple[int, ...]) -> Failure | None:
    """Train a cell to its end, or to where it is asked to stop.

    Its lease sees to it that no two processes ever train the same cell.
    """
    cell = setting.cell
    options: dict[str, Any] = {"data_dir": setting.data_dir, "keep_steps": keep_steps}
    if len(setting.nodes) == 1:
        options["should_stop"] = partial(stop_requested, cell)
    else:
        options |= {
            "num_workers": len(setting.nodes),
            "cpus_per_worker": setting.cpus,
            "gpus_per_worker": setting.gpus,
            "node_ids": setting.nodes,
            "stop_file": cell.stop_request,
        }
    return _work(setting, cell.training, lambda train: train(cell.path, config, **options))


def evaluate(setting: Setting, step: int, evaluation: dict[str, Any]) -> Failure | None:
    """Evaluate one checkpoint of a cell; the summary in its folder is written last."""
    cell = setting.cell
    checkpoint, out = cell.checkpoint(step), cell.evaluation(step)
    failure = _work(
        setting,
        cell.evaluating(step),
        lambda run: run(checkpoint, evaluation, out, data_dir=setting.data_dir),
    )
    if failure is not None and (why := damage(checkpoint)):
        return Failure(Kind.DAMAGED, f"the checkpoint cannot be read ({why})")
    return failure


def post_mortem(lease: Path) -> bool:
    """See to it that the holder of a task's lease on this host is dead; whether memory ran out since it began."""
    found = leases.holder(lease)
    if found is None or found.host != leases.this_host():
        return False
    leases.kill_holder(lease)
    return leases.oom_kills() > found.oom_kills


def evaluate_checkpoint(
    checkpoint: Path, evaluation: dict[str, Any], out_dir: Path, *, data_dir: Path | None = None
) -> None:
    """Hand an evaluation, as the grid describes it, to `evals.evaluate`."""
    from evals import evaluate as evals_evaluate

    evals_evaluate.evaluate_checkpoint(
        checkpoint,
        [evals_evaluate.BenchmarkSettings(**settings) for settings in evaluation["benchmarks"]],
        out_dir,
        data_dir=data_dir,
        engine=evaluation["engine"],
        template=evaluation["template"],
        seed=evaluation["seed"],
    )


def _work(setting: Setting, lease: Path, do: Callable[[Callable[..., Any]], Any]) -> Failure | None:
    """Do the work under its lease. A failure is returned in words, with the traceback in the log."""
    with _worker(setting):
        try:
            with leases.hold(lease, wait_s=ORPHAN_WAIT_S, on_lost=_end_process):
                print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {setting.function}, process {os.getpid()}")
                _flush()
                do(_resolve(setting.function))
        except leases.Busy:
            return Failure(Kind.IN_USE, "another process is still at it")
        except Exception as error:
            with suppress(OSError):  # the disk may be full
                traceback.print_exc()
            return classify(error)
    return None


def _end_process() -> None:
    """Another process has taken over, since this one was not heard of: two must not go on."""
    os._exit(1)


@contextmanager
def _worker(setting: Setting) -> Iterator[None]:
    """Send everything the task prints to the cell's log, and settle what the task sees of the machine."""
    os.chdir(setting.root)
    _use_threads(setting.cpus)
    if not setting.gpus:
        # Ray leaves GPUs visible to tasks that asked for none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    setting.cell.path.mkdir(parents=True, exist_ok=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    level = root.level
    with setting.cell.log.open("a") as log:
        _flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        try:
            yield
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            _flush()
            for descriptor, number in zip(kept, (1, 2), strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


def _use_threads(number: int) -> None:
    """Also in a worker that has imported torch for an earlier task."""
    os.environ["OMP_NUM_THREADS"] = str(number)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the log's disk may be full
            stream.flush()


def _resolve(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
