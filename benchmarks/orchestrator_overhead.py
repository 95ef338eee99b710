"""What does the orchestrator cost per cell? A grid of 1,000 cells that do nothing, beside as many bare Ray tasks.

    python benchmarks/orchestrator_overhead.py

Both run on the same two CPUs of one local Ray cluster, one after the other. Prints the difference per cell, what of it
is MLflow's (in SQL statements too, whose number does not depend on what else the machine does), the growth of the
driver's memory, and how long `balagg plan` and `balagg status` take on the finished grid, imports included.
"""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
NUM_CPUS = 2
GRID = """\
models:
  noop: {{path: noop, template: qa}}
grids:
  many:
    rules: [sequence, token, balanced, constant]
    models: [noop]
    datasets: [gen_chains, gen_stories]
    seeds: [{seeds}]
    train: {{steps: 3}}
    evaluate: {{at: [last], benchmarks: [gen_short]}}
"""


@dataclass(frozen=True)
class Sample:
    """The driver at one moment: cells begun, resident bytes, CPU seconds, and those of the thread for MLflow."""

    cells: int
    memory: int
    cpu_s: float
    mirror_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="balagg-") as scratch:
        measure(Path(scratch), arguments.cells)


def measure(folder: Path, num_cells: int) -> None:
    (folder / "noop").mkdir()
    (folder / "noop" / "config.json").write_text("{}")
    (folder / "experiments.yaml").write_text(GRID.format(seeds=", ".join(map(str, range(num_cells // 8)))))
    os.environ |= {
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_gcs_server_port_wait_time_s": "120",
    }
    import ray
    from ray.cluster_utils import Cluster
    from rich.console import Console

    from orchestrator.config import load_config
    from orchestrator.grid import expand
    from orchestrator.run_grid import run_grid

    head = {"num_cpus": NUM_CPUS, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(log_to_driver=False, logging_level="ERROR")
    cells = expand(load_config(folder / "experiments.yaml"), "many")
    bare = min(bare_tasks(2 * len(cells)) for _ in range(2))
    print(f"{2 * len(cells)} bare Ray tasks: {bare:.1f} s, {1000 * bare / len(cells):.1f} ms for the two of a cell")

    ray.shutdown()

    samples: list[Sample] = []
    ended = threading.Event()
    sampler = threading.Thread(target=watch_driver, args=(folder / "runs" / "many", samples, ended))
    sampler.start()
    statements = count_statements()
    start, begin = time.perf_counter(), time.time()
    with (folder / "output").open("w") as output:
        outcome = run_grid(
            cells, root=folder, runs_dir=folder / "runs", data_dir=None, console=Console(file=output),
            train="orchestrator_noop:train", evaluate="orchestrator_noop:evaluate",
        )  # fmt: skip
    whole = time.perf_counter() - start
    ended.set()
    sampler.join()
    cluster.shutdown()
    assert not outcome.failed, outcome
    on_disk = max(file.stat().st_mtime for file in folder.glob("runs/many/*/evals/*/summary.json")) - begin
    number, last = len(cells), samples[-1]
    print(f"{number} cells: all results on disk after {on_disk:.1f} s, and in MLflow after {whole:.1f} s")
    print(f"beyond the bare tasks: {1000 * (on_disk - bare) / number:.1f} ms per cell until its results are on disk,")
    print(f"  {1000 * (whole - bare) / number:.1f} ms until they are in MLflow")
    print(f"the driver's CPU time: {1000 * (last.cpu_s - last.mirror_s) / number:.1f} ms per cell,")
    print(f"  and {1000 * last.mirror_s / number:.1f} ms in the thread that writes to MLflow")
    print(f"MLflow's SQL: {statements['mirror'] / number:.1f} statements per cell")
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        sample = next(sample for sample in samples if sample.cells >= share * number)
        print(f"driver's memory when {sample.cells} cells had begun: {sample.memory / 2**20:.0f} MiB")
    print(f"driver's memory at the end: {last.memory / 2**20:.0f} MiB")
    for verb in ("plan", "status"):
        seconds = min(time_verb(verb, folder) for _ in range(3))
        print(f"balagg {verb}: {seconds:.2f} s")


def bare_tasks(number: int) -> float:
    """Seconds for that many tasks that do nothing, as many at once as there are CPUs."""
    import ray

    @ray.remote(num_cpus=1, max_retries=0)
    def nothing() -> None: ...

    ray.get([nothing.remote() for _ in range(20)])
    start = time.perf_counter()
    under_way: list = []
    for _ in range(number):
        if len(under_way) >= NUM_CPUS:
            done, under_way = ray.wait(under_way)
            ray.get(done)
        under_way.append(nothing.remote())
    ray.get(under_way)
    return time.perf_counter() - start


def count_statements() -> Counter[str]:
    """By the thread that runs them: what opens the store is not a cell's."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    counts: Counter[str] = Counter()

    @event.listens_for(Engine, "before_cursor_execute")
    def count(*statement: object) -> None:
        counts[threading.current_thread().name] += 1

    return counts


def watch_driver(runs: Path, samples: list[Sample], ended: threading.Event) -> None:
    """Look at this process now and then."""
    process = psutil.Process()
    start = sum(process.cpu_times()[:2])
    while not ended.wait(0.5):
        mirror = {thread.native_id for thread in threading.enumerate() if thread.name == "mirror"}
        mirror_s = sum(thread.user_time + thread.system_time for thread in process.threads() if thread.id in mirror)
        if not mirror and samples:
            continue  # it has ended
        number = len(os.listdir(runs)) if runs.exists() else 0
        samples.append(Sample(number, process.memory_info().rss, sum(process.cpu_times()[:2]) - start, mirror_s))


def time_verb(verb: str, folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "orchestrator", verb], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
