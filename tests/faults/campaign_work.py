"""A trainer and an evaluator for the fault campaign, small enough to be killed a hundred times in minutes.

What they keep of the real ones is what faults can spoil: a state that each step makes from the one before, so that a
step that is lost, repeated or resumed from a wrong place changes every later metric; checkpoints that are written
whole or not at all; the real step log; samples before the summary.
"""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

from trainers.step_log import StepLog

STEP_S = 0.1
SAMPLE_S = 0.1
PADDING = "." * 50_000


def train(
    cell_dir: Path, cell: dict, *, data_dir=None, keep_steps=(), should_stop=lambda: False, step_s: float = STEP_S
) -> None:
    """Go on from the newest checkpoint that can be read."""
    steps, every = cell["train"]["steps"], cell["train"]["checkpoint_every"]
    log = StepLog(cell_dir / "metrics.jsonl")
    done, value = 0, hashlib.sha256(b"the base model, the same in every cell").hexdigest()
    if not (folder := cell_dir / "checkpoints" / "step-0").exists():
        save(folder, 0, value)
    for marker in sorted(cell_dir.glob("checkpoints/step-*/COMPLETE"), key=lambda path: -int(path.parent.name[5:])):
        try:
            found = load(marker.parent)
        except ValueError as error:
            print(f"{marker.parent.name} is damaged: {error}")
            continue
        done, value = found["step"], found["value"]
        break
    print(f"going on from step {done}")
    for step in range(done + 1, steps + 1):
        time.sleep(step_s)
        value = hashlib.sha256(f"{value} {cell['rule']} {cell['seed']} {step}".encode()).hexdigest()
        log.append(step, {"reward/mean": score(value), "perf/step_s": step_s})
        print(f"step {step}", flush=True)
        if step % every == 0 or step in keep_steps or step == steps:
            save(cell_dir / "checkpoints" / f"step-{step}", step, value)
        if should_stop():
            return


def evaluate(checkpoint: Path, evaluation: dict, out_dir: Path, *, data_dir=None, sample_s: float = SAMPLE_S) -> None:
    """The score is the checkpoint's state."""
    found = load(checkpoint)
    with (out_dir / "gen_short.jsonl").open("w") as samples:
        for i in range(4):
            time.sleep(sample_s)
            samples.write(json.dumps({"sample": i}) + "\n")
            samples.flush()
    partial = out_dir / ".summary"
    summary = {"step": found["step"], "metrics": {"eval/mean": score(found["value"])}, "not_run": {}}
    partial.write_text(json.dumps(summary))
    partial.replace(out_dir / "summary.json")


def score(value: str) -> float:
    return int(value[:12], 16) / 16**12


def save(folder: Path, step: int, value: str) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "model.json").open("w") as file:
        json.dump({"step": step, "value": value, "padding": PADDING}, file)
        file.flush()
        os.fsync(file.fileno())
    (partial / "COMPLETE").touch()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load(folder: Path) -> dict:
    return json.loads((folder / "model.json").read_text())
