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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.ledger import Busy, CellDir, hold

TRAIN = "trainers.grpo:train"
EVALUATE = "orchestrator.tasks:evaluate_checkpoint"

ORPHAN_WAIT_S = 60.0
"""How long to wait for the lock of a worker whose command was killed and that is about to notice."""


@dataclass(frozen=True)
class Failure:
    """Why a task ended without its result; `retry` when trying again may help."""

    reason: str
    retry: bool = False


@dataclass(frozen=True)
class Setting:
    """Where and how a task runs.

    Attributes:
        cell: the cell's directory.
        root: working directory; relative model paths start here.
        data_dir: local data files, or None.
        cpus: cores that the task was given, and its number of threads.
        gpus: GPUs that the task was given.
        function: `module:function` that does the work.
    """

    cell: CellDir
    root: Path
    data_dir: Path | None
    cpus: int
    gpus: float
    function: str


def train_cell(setting: Setting, config: dict[str, Any], keep_steps: tuple[int, ...]) -> Failure | None:
    """Train a cell to its end. Its lock sees to it that no two processes ever train the same one."""
    with _worker(setting):
        try:
            with hold(setting.cell.training, wait_s=ORPHAN_WAIT_S):
                train = _resolve(setting.function)
                train(setting.cell.path, config, data_dir=setting.data_dir, keep_steps=keep_steps)
        except Busy:
            return Failure("another process is still training this cell", retry=True)
        except Exception as error:
            return _failure(error)
    return None


def evaluate(setting: Setting, step: int, evaluation: dict[str, Any]) -> Failure | None:
    """Evaluate one checkpoint of a cell; the summary in its folder is written last."""
    cell = setting.cell
    with _worker(setting):
        try:
            with hold(cell.evaluation(step) / ".lock", wait_s=ORPHAN_WAIT_S):
                run = _resolve(setting.function)
                run(cell.checkpoint(step), evaluation, cell.evaluation(step), data_dir=setting.data_dir)
        except Busy:
            return Failure("another process is still evaluating this checkpoint", retry=True)
        except Exception as error:
            return _failure(error)
    return None


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


def _failure(error: Exception) -> Failure:
    """Words for the person, with the traceback in the log. Trouble with files or the network may pass."""
    traceback.print_exc()
    lines = str(error).strip().splitlines() or ["no message"]
    passing = isinstance(error, OSError) and not isinstance(error, FileNotFoundError | PermissionError)
    return Failure(f"{type(error).__name__}: {lines[0]}", retry=passing)


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
    sys.stdout.flush()
    sys.stderr.flush()


def _resolve(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
