"""Trainer and evaluator that do no work, for benchmarks of the orchestrator.

They keep the contract of the real ones (append metrics, write whole checkpoints, write the summary last) and take as
long as `hours` says, at NOOP_SECONDS_PER_HOUR seconds for an hour. With NOOP_SCHEDULE, the file of that name gets one
line per task: what ran where, and when it held its GPUs.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

HOURS = {"qwen2.5-math-7b": (17.0, 1.5), "qwen3-1.7b": (10.0, 0.7)}
"""Assumed hours of a training and of one evaluation; models that are not named take no time."""


def train(cell_dir: Path, cell: dict, *, data_dir=None, keep_steps=(), should_stop=lambda: False) -> None:
    """All steps, in even intervals."""
    steps = cell["train"]["steps"]
    step_s = seconds(cell)[0] / steps
    checkpoint(cell_dir, 0)
    done = max(int(marker.parent.name[5:]) for marker in cell_dir.glob("checkpoints/step-*/COMPLETE"))
    for step in range(done + 1, steps + 1):
        time.sleep(step_s)
        with (cell_dir / "metrics.jsonl").open("a") as file:
            metrics = {"reward/mean": step / steps, "perf/step_s": step_s}
            file.write(json.dumps({"step": step, "metrics": metrics, "time": time.time()}) + "\n")
        if step in keep_steps or step == steps:
            checkpoint(cell_dir, step)


def train_on_workers(
    cell_dir: Path, cell: dict, *, num_workers, cpus_per_worker, gpus_per_worker, node_ids, stop_file, **options: Any
) -> None:
    """Hold a placement group, as Ray Train does, but start no processes in it."""
    import ray

    bundle = {"CPU": cpus_per_worker, "GPU": gpus_per_worker}
    where = [{"ray.io/node-id": node} for node in node_ids]
    group = ray.util.placement_group([bundle] * num_workers, "PACK", bundle_label_selector=where)
    ray.get(group.ready())
    start = time.time()
    train(cell_dir, cell, should_stop=stop_file.exists, **options)
    note("train", cell, node_ids, gpus_per_worker, start)
    ray.util.remove_placement_group(group)


def evaluate(folder: Path, evaluation: dict, out_dir: Path, *, data_dir=None) -> None:
    """A summary with one score."""
    import ray

    start = time.time()
    cell = json.loads((out_dir.parent.parent / "config.json").read_text())
    time.sleep(seconds(cell)[1])
    partial = out_dir / ".summary"
    step = int(folder.name[5:])
    partial.write_text(json.dumps({"step": step, "metrics": {"eval/mean": 0.5}, "not_run": {}}))
    partial.replace(out_dir / "summary.json")
    note("evaluate", cell, [ray.get_runtime_context().get_node_id()], len(ray.get_gpu_ids()), start)


def seconds(cell: dict) -> tuple[float, float]:
    """How long a training and an evaluation of this cell take here."""
    hours = HOURS.get(cell["model"]["name"], (0.0, 0.0))
    scale = float(os.environ.get("NOOP_SECONDS_PER_HOUR", "0"))
    return hours[0] * scale, hours[1] * scale


def checkpoint(cell_dir: Path, step: int) -> None:
    """An empty one, marked as whole."""
    folder = cell_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "COMPLETE").touch()


def note(kind: str, cell: dict, nodes: Any, gpus_each: float, start: float) -> None:
    """One line for a task that has just ended."""
    if path := os.environ.get("NOOP_SCHEDULE"):
        row = {
            "kind": kind, "model": cell["model"]["name"], "rule": cell["rule"], "dataset": cell["dataset"]["name"],
            "seed": cell["seed"], "nodes": list(nodes), "gpus_each": gpus_each, "start": start, "end": time.time(),
        }  # fmt: skip
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
