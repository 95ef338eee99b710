"""How busy does the scheduler keep 64 GPUs? The paper's grid with five seeds on a cluster that exists in name only.

    python benchmarks/orchestrator_cluster.py --picture docs/images/schedule.png

Starts eight Ray nodes with 8 made-up GPUs each on this machine and runs the grid through `balagg run`'s own code, with
a trainer that only waits; an hour takes `--seconds-per-hour`, and the whole about 20 minutes. Prints the share of GPU
slots that were busy until the last tenth of the queue, as the tasks tell it and as Ray tells it, and draws what ran
where.
"""

import argparse
import dataclasses
import json
import os
import secrets
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_NODES, GPUS, CPUS = 8, 8, 32
SEEDS = range(5)
STEPS = 20
COLOURS = {"qwen2.5-math-7b": "#3b6ea8", "qwen3-1.7b": "#e08a3c", "evaluate": "#7a7a7a"}
RULES = {"sequence": "GRPO", "token": "DAPO", "balanced": "BA"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds-per-hour", type=float, default=10.0)
    parser.add_argument("--picture", type=Path, help="PNG file to draw")
    parser.add_argument("--measured", type=Path, help="draw this earlier measurement instead of running")
    parser.add_argument("--keep", type=Path, help="write the measurement to this file")
    arguments = parser.parse_args()
    if arguments.measured:
        measured = json.loads(arguments.measured.read_text())
    else:
        with tempfile.TemporaryDirectory(prefix="balagg-") as scratch:
            measured = measure(Path(scratch), arguments.seconds_per_hour)
    if arguments.keep:
        arguments.keep.write_text(json.dumps(measured) + "\n")
    report(measured)
    if arguments.picture:
        draw(measured, arguments.picture)


def measure(scratch: Path, seconds_per_hour: float) -> dict:
    """Run the grid; returns the tasks with their times, and how many GPUs Ray saw in use over time."""
    schedule = scratch / "schedule.jsonl"
    os.environ |= {
        "HOME": str(scratch),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
        "NOOP_SECONDS_PER_HOUR": str(seconds_per_hour),
        "NOOP_SCHEDULE": str(schedule),
        "MLFLOW_TRACKING_URI": f"sqlite:///{scratch / 'mlflow.db'}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_gcs_server_port_wait_time_s": "120",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }
    from ray.cluster_utils import Cluster
    from rich.console import Console

    from orchestrator.config import load_config
    from orchestrator.grid import expand
    from orchestrator.run_grid import run_grid

    cells = [
        dataclasses.replace(
            cell,
            config=cell.config | {"train": cell.config["train"] | {"steps": STEPS}},
            evaluate_steps=tuple(range(0, STEPS + 1, STEPS // 4)),
        )
        for cell in expand(load_config(ROOT / "experiments.yaml"), "paper", seeds=list(SEEDS))
    ]
    options = {"include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
    for _ in range(NUM_NODES):
        cluster.add_node(num_cpus=CPUS, num_gpus=GPUS, object_store_memory=80 << 20)
    os.environ["RAY_ADDRESS"] = cluster.address
    seen: list[tuple[float, float]] = []
    ended = threading.Event()
    sampler = threading.Thread(target=sample_gpus, args=(seen, ended))
    sampler.start()
    try:
        outcome = run_grid(
            cells, root=ROOT, runs_dir=scratch / "runs", data_dir=None, console=Console(width=160),
            train="orchestrator_noop:train", train_on_workers="orchestrator_noop:train_on_workers",
            evaluate="orchestrator_noop:evaluate",
        )  # fmt: skip
    finally:
        ended.set()
        sampler.join()
        cluster.shutdown()
    assert not outcome.failed, outcome
    tasks = [json.loads(line) for line in schedule.read_text().splitlines()]
    return {"seconds_per_hour": seconds_per_hour, "tasks": tasks, "seen": seen}


def sample_gpus(seen: list[tuple[float, float]], ended: threading.Event) -> None:
    """Every half second: the time, and the GPUs in use as Ray sees it."""
    import ray

    from orchestrator.cluster import free

    while not ended.wait(0.5):
        if ray.is_initialized():
            try:
                seen.append((time.time(), NUM_NODES * GPUS - sum(has.gpus for has in free().values())))
            except Exception:  # the driver is leaving
                return


def report(measured: dict) -> None:
    """Print the busy share until nine tenths of the work, and of the tasks, have begun."""
    tasks = sorted(measured["tasks"], key=lambda task: task["start"])
    begin, end = tasks[0]["start"], max(task["end"] for task in tasks)
    total = sum(gpu_seconds(task) for task in tasks)
    by_task = tasks[int(0.9 * len(tasks))]["start"]
    begun = 0.0
    for task in tasks:
        begun += gpu_seconds(task)
        if begun >= 0.9 * total:
            by_work = task["start"]
            break
    print(f"{len(tasks)} tasks, {total / measured['seconds_per_hour'] / 3600 * 3600:.0f} GPU-hours")
    for name, until in (("work", by_work), ("tasks", by_task), ("the whole grid", end)):
        told = sum(max(0.0, gpu_seconds(task, until)) for task in tasks) / ((until - begin) * NUM_NODES * GPUS)
        inside = [gpus for when, gpus in measured["seen"] if begin <= when <= until]
        by_ray = sum(inside) / len(inside) / (NUM_NODES * GPUS)
        what = name if until == end else f"the last 10 % of the {name}"
        print(f"until {what} ({(until - begin):.0f} s): busy {told:.1%} by the tasks' own times, {by_ray:.1%} by Ray's")
    waits = [(task["end"] - task["start"]) for task in tasks if task["kind"] == "train"]
    print(f"trainings took {min(waits):.1f} to {max(waits):.1f} s")


def gpu_seconds(task: dict, until: float = float("inf")) -> float:
    return len(task["nodes"]) * task["gpus_each"] * (min(task["end"], until) - task["start"])


def draw(measured: dict, path: Path) -> None:
    """One row per GPU, one box per task, time in the grid's hours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    tasks = sorted(measured["tasks"], key=lambda task: task["start"])
    begin, scale = tasks[0]["start"], measured["seconds_per_hour"]
    names = {node: i for i, node in enumerate(sorted({node for task in tasks for node in task["nodes"]}))}
    free_at: dict[int, list[float]] = defaultdict(lambda: [0.0] * GPUS)
    figure, axes = plt.subplots(figsize=(11, 6.2), layout="constrained")
    for task in tasks:
        start, end = (task["start"] - begin) / scale, (task["end"] - begin) / scale
        node = names[task["nodes"][0]]
        rows = take_rows(free_at[node], len(task["nodes"]), start, end)
        colour = COLOURS[task["model"] if task["kind"] == "train" else "evaluate"]
        for first, height in stretches(rows):
            box = Rectangle(
                (start, node * (GPUS + 1) + first), end - start, height, facecolor=colour, edgecolor="white", lw=0.4
            )
            axes.add_patch(box)
        if task["kind"] == "train":
            first, height = stretches(rows)[0]
            label = f"{RULES[task['rule']]} s{task['seed']}"
            place = ((start + end) / 2, node * (GPUS + 1) + first + height / 2)
            axes.annotate(label, place, ha="center", va="center", color="white", fontsize=6)
    axes.set_xlim(0, (max(task["end"] for task in tasks) - begin) / scale)
    axes.set_ylim(NUM_NODES * (GPUS + 1), -1)
    axes.set_yticks([i * (GPUS + 1) + GPUS / 2 for i in range(NUM_NODES)], [f"node {i + 1}" for i in range(NUM_NODES)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("hours (assumed durations)")
    labels = {**{name: f"training, {name}" for name in COLOURS}, "evaluate": "evaluation of a checkpoint"}
    handles = [Patch(facecolor=colour, label=labels[name]) for name, colour in COLOURS.items()]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def take_rows(free_at: list[float], number: int, start: float, end: float) -> list[int]:
    """Rows of a node that are free at that time; those that follow one another where there are such."""
    slack = 0.05
    rows = [row for row in range(GPUS) if free_at[row] <= start + slack]
    together = [part for i in range(len(rows)) if (part := rows[i : i + number]) == [*range(rows[i], rows[i] + number)]]
    chosen = together[0] if together else sorted(range(GPUS), key=lambda row: free_at[row])[:number]
    for row in chosen:
        free_at[row] = end
    return chosen


def stretches(rows: list[int]) -> list[tuple[int, int]]:
    """(first row, how many) of rows that follow one another."""
    found: list[tuple[int, int]] = []
    for row in sorted(rows):
        if found and sum(found[-1]) == row:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((row, 1))
    return found


if __name__ == "__main__":
    main()
