"""Checkpoints of a training run: written whole or not at all, resumed from the newest one that is whole.

    checkpoints/step-N/   trainer/        trainable weights and optimizer, in the workers' shards
                          *.safetensors   the model like any Hugging Face one, adapters merged
                          COMPLETE        written last: what else goes on from here, and the size of every file

Prompt order, sampling and learning rate are pure functions of the seed and of counters, so the counters in COMPLETE are
all that data cursor, random state and schedule need. A checkpoint lies between two steps, where no rollout is waiting.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import PreTrainedTokenizerBase

from evals.engines.models import BASE_MODEL_FILE
from trainers.adapters import merged_weights
from trainers.update import Learner

log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one worker needs none

MARKER = "COMPLETE"
"""Written last into a checkpoint; a folder without it is not a checkpoint."""
TRAINER_STATE = "trainer"

_OPTIONS = StateDictOptions(ignore_frozen_params=True)


def checkpoint_dir(cell_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lives."""
    return cell_dir / "checkpoints" / f"step-{step}"


def complete_steps(cell_dir: Path) -> list[int]:
    """Steps that have a whole checkpoint, ascending; step 0 is the base model."""
    markers = (cell_dir / "checkpoints").glob(f"step-*/{MARKER}")
    names = (marker.parent.name.removeprefix("step-") for marker in markers)
    return sorted(int(name) for name in names if name.isdecimal())


def save_base(cell_dir: Path, model_spec: dict[str, Any]) -> None:
    """Record the untouched base model as step 0, by reference."""
    partial = _partial(cell_dir, 0)
    (partial / BASE_MODEL_FILE).write_text(json.dumps(model_spec, indent=2) + "\n")
    _publish(partial, {})


class Writer:
    """Writes the checkpoints of one run, in the background; at most one is under way."""

    def __init__(self, cell_dir: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
        self._cell_dir = cell_dir
        self._learner = learner
        self._tokenizer = tokenizer
        # A group of its own: the background thread must not meet the training's collectives.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._pending: tuple[Future[Any], Path, dict[str, Any]] | None = None

    def save(self, step: int, counters: dict[str, int]) -> None:
        """Begin the checkpoint after `step` steps. All workers must call it.

        Args:
            counters: what training goes on counting from.
        """
        self.finish()
        world = self._learner.world
        partial = _partial(self._cell_dir, step) if world.is_first else None
        partial = world.first(partial)
        self._export(partial)
        weights, optimizer = get_state_dict(self._learner.policy, self._learner.optimizer, options=_OPTIONS)
        future: Any = dcp.async_save(
            {"weights": weights, "optimizer": optimizer},
            checkpoint_id=partial / TRAINER_STATE,
            process_group=self._group,
            no_dist=self._group is None,
        )
        self._pending = future, partial, {"step": step, **counters}

    def poll(self) -> None:
        """Publish a checkpoint that has been written by now."""
        if self._pending and self._pending[0].done():
            self._publish_pending()

    def finish(self) -> None:
        """Wait for the checkpoint under way. All workers must call it."""
        if self._pending:
            self._publish_pending()
        self._learner.world.wait()

    def _publish_pending(self) -> None:
        assert self._pending is not None
        future, partial, counters = self._pending
        future.result()
        # The first worker's part ends last: it writes the index of all parts.
        if self._learner.world.is_first:
            _publish(partial, counters)
        self._pending = None

    def _export(self, folder: Path) -> None:
        model = self._learner.policy.model
        dtype = getattr(torch, self._learner.recipe.dtype)
        whole = {}
        for name, weight in merged_weights(model):
            if self._learner.world.is_first:
                whole[name] = weight.to("cpu", dtype, copy=True)
        if self._learner.world.is_first:
            model.save_pretrained(folder, state_dict=whole)
            self._tokenizer.save_pretrained(folder)


def load_latest(cell_dir: Path, learner: Learner) -> tuple[int, dict[str, int]]:
    """Load the newest whole checkpoint into policy and optimizer; returns its step, 0 for none, and its counters.

    One that was cut off or cannot be read is passed over with a warning, and the one before it is used. The number of
    workers need not be that of the workers who wrote it. All workers must call it.
    """
    for cut in sorted((cell_dir / "checkpoints").glob("step-*.partial")):
        log.warning("checkpoint %s was cut off while it was written; it is not used", cut)
    for step in reversed([step for step in complete_steps(cell_dir) if step > 0]):
        folder = checkpoint_dir(cell_dir, step)
        try:
            counters = learner.world.first(_check(folder) if learner.world.is_first else None)
            if counters is None:
                continue
            weights, optimizer = get_state_dict(learner.policy, learner.optimizer, options=_OPTIONS)
            state: dict[str, Any] = {"weights": weights, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=folder / TRAINER_STATE, no_dist=learner.world.size == 1)
        except Exception as error:  # any damage has the same answer: use an older one
            log.warning("checkpoint %s is damaged (%s); using the one before it", folder, error)
            continue
        set_state_dict(
            learner.policy,
            learner.optimizer,
            model_state_dict=state["weights"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
        return step, counters
    return 0, {}


def remove_old(cell_dir: Path, keep_steps: Collection[int], keep_last: int, best: int | None = None) -> None:
    """Make room: what training goes on from stays in the newest checkpoints and the best, the model in kept steps.

    Args:
        keep_steps: steps that are to be evaluated; of the older ones only the model's own files stay.
        best: one more step to keep.
    """
    steps = [step for step in complete_steps(cell_dir) if step > 0]
    for step in steps[:-keep_last]:
        if step == best:
            continue
        folder = checkpoint_dir(cell_dir, step)
        if step not in keep_steps:
            (folder / MARKER).unlink()
            shutil.rmtree(folder)
        elif (folder / TRAINER_STATE).exists():
            shutil.rmtree(folder / TRAINER_STATE)


def _check(folder: Path) -> dict[str, int] | None:
    """The counters of a checkpoint that training can go on from; None, with a warning, where one cannot."""
    try:
        told = json.loads((folder / MARKER).read_text())
        sizes = told.pop("files")
        if not any(name.startswith(TRAINER_STATE) for name in sizes) or not (folder / TRAINER_STATE).exists():
            return None
        for name, size in sizes.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes, not {size}")
    except (OSError, ValueError, KeyError) as error:
        log.warning("checkpoint %s is damaged (%s); using the one before it", folder, error)
        return None
    return told


def _partial(cell_dir: Path, step: int) -> Path:
    """An empty folder for a checkpoint under way."""
    folder = checkpoint_dir(cell_dir, step)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _publish(partial: Path, counters: dict[str, Any]) -> None:
    """Give a folder that has been filled its marker and its name."""
    files = [file for file in sorted(partial.rglob("*")) if file.is_file()]
    for file in files:
        _sync(file)
    sizes = {str(file.relative_to(partial)): file.stat().st_size for file in files}
    marker = partial / MARKER
    marker.write_text(json.dumps({**counters, "files": sizes}, indent=1) + "\n")
    _sync(marker)
    folder = partial.with_name(partial.name.removesuffix(".partial"))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
