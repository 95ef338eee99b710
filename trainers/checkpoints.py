"""Checkpoints of a training run: written whole or not at all, resumed from the newest one that is whole."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals.engines.models import BASE_MODEL_FILE

log = logging.getLogger(__name__)

MARKER = "COMPLETE"
"""Written last into a checkpoint; a folder without it is not a checkpoint."""
STATE_FILE = "trainer.pt"


def checkpoint_dir(cell_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lives."""
    return cell_dir / "checkpoints" / f"step-{step}"


def complete_steps(cell_dir: Path) -> list[int]:
    """Steps that have a whole checkpoint, ascending; step 0 is the base model."""
    markers = (cell_dir / "checkpoints").glob(f"step-*/{MARKER}")
    return sorted(int(marker.parent.name.removeprefix("step-")) for marker in markers)


def save_base(cell_dir: Path, model_spec: dict[str, Any]) -> None:
    """Record the untouched base model as step 0, by reference."""
    _write(checkpoint_dir(cell_dir, 0), lambda folder: _write_json(folder / BASE_MODEL_FILE, model_spec))


def save_checkpoint(
    cell_dir: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Save weights, tokenizer and optimizer after `step` steps, loadable like any Hugging Face model.

    Prompt order, sampling and learning rate are pure functions of seed and step, so the step is all that
    the data cursor, the random state and the schedule need.
    """

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, folder / STATE_FILE)

    _write(checkpoint_dir(cell_dir, step), fill)


def load_latest(cell_dir: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest whole checkpoint into model and optimizer; returns its step, 0 for none.

    One that cannot be read is skipped with a warning, and the one before it is used.
    """
    from safetensors.torch import load_model as load_weights

    for step in reversed([step for step in complete_steps(cell_dir) if step > 0]):
        folder = checkpoint_dir(cell_dir, step)
        try:
            state = torch.load(folder / STATE_FILE, weights_only=True)
            load_weights(model, folder / "model.safetensors")
        except Exception as error:  # any damage has the same answer: use an older one
            log.warning("checkpoint %s is damaged (%s); using the one before it", folder, error)
            continue
        optimizer.load_state_dict(state["optimizer"])
        return step
    return 0


def remove_old(cell_dir: Path, keep_steps: set[int]) -> None:
    """Delete checkpoints that are neither in `keep_steps`, nor among the newest two, nor the base model."""
    steps = [step for step in complete_steps(cell_dir) if step > 0]
    for step in steps[:-2]:
        if step not in keep_steps:
            folder = checkpoint_dir(cell_dir, step)
            (folder / MARKER).unlink()
            shutil.rmtree(folder)


def _write(folder: Path, fill) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fill(partial)
    for file in partial.iterdir():
        _sync(file)
    (partial / MARKER).touch()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    _sync(folder.parent)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
