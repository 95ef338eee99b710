"""Does a grid survive whatever happens to it? Faults at random moments; Ray cluster and MLflow server are real ones.

    python tests/faults/campaign.py --faults 100

Each round runs one grid with `balagg run`, spoils it several times, runs the same command again where it was killed,
and then compares everything with a grid that nothing happened to: metrics, scores, what MLflow holds, processes that
are left, resources that Ray has free, the ledger. A table of the faults comes at the end.
"""

import argparse
import io
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import campaign_work
import psutil

from orchestrator import leases, ledger
from orchestrator.cells import CellRun, look_up
from orchestrator.cluster import ENVIRONMENT, START_WAIT_S
from orchestrator.config import load_config
from orchestrator.grid import Cell, expand
from orchestrator.results import describe
from trainers.metric_names import NON_FINITE

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_NODES = 3
ROUND_LIMIT_S = 900.0
QUICK = """\
  {name}:
    rules: [sequence, token, balanced]
    models: [quick]
    datasets: [gen_chains]
    seeds: [0, 1]
    train: {{steps: 80, checkpoint_every: 10}}
    evaluate: {{at: [first, middle, last], benchmarks: [gen_short]}}
    retries: 6
    retry_wait_s: 0.2
    hang_after_s: 4
"""
REAL = """\
  {name}:
    rules: [balanced]
    models: [tiny-qwen2, pair-qwen2]
    datasets: [gen_chains]
    train:
      {{steps: 8, checkpoint_every: 2, prompts_per_step: 4, group_size: 4, max_prompt_tokens: 128,
        max_response_tokens: 32, learning_rate: 1.0e-3, warmup_steps: 1, rollout_log_every: 4}}
    evaluate: {{at: [middle, last], benchmarks: [gen_short], limit: 16, heldout: null}}
    retries: 6
    retry_wait_s: 0.2
"""
MODELS = """\
models:
  quick: {{path: {quick}, template: qa, gpus: 1, eval_gpus: 1}}
  tiny-qwen2: {{path: {root}/models/tiny-qwen2, template: qa, gpus: 1, eval_gpus: 1}}
  pair-qwen2: {{path: {root}/models/tiny-qwen2, template: qa, workers: 2, gpus: 1, eval_gpus: 1}}
grids:
"""
RAYS_OWN = "ray::_AutoscalingCoordinatorActor"
"""Ray Train starts one, which lives as long as the cluster and holds nothing."""
STAND_INS = ("--train", "campaign_work:train", "--evaluate", "campaign_work:evaluate")


Outcome = dict[tuple[str, str, int], tuple[dict[int, Any], dict[int, Any]]]
"""Metrics by step, without times, and scores by step: of each cell, by its rule, model and seed."""


class Broken(AssertionError):
    """The grid did not survive; the message says what is wrong."""


@dataclass
class World:
    """A Ray cluster, an MLflow server and a small disk, all on this machine.

    Attributes:
        folder: scratch, which is also the home of every process started here.
        disk: a file system of a few megabytes for the cells; an ordinary folder where none can be mounted.
        small: whether it could be mounted.
        random: draws the faults and their moments.
    """

    folder: Path
    disk: Path
    small: bool
    random: random.Random
    port: int
    cluster: Any = None
    server: subprocess.Popen[bytes] | None = None
    injected: Counter[str] = field(default_factory=Counter)


@dataclass
class Round:
    """One grid and the command that runs it."""

    world: World
    name: str
    real: bool
    cells: list[Cell]
    driver: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def runs(self) -> list[CellRun]:
        return [look_up(self.world.disk, cell) for cell in self.cells]

    @property
    def output(self) -> Path:
        return self.world.folder / f"{self.name}.log"


# The world.


@contextmanager
def make_world(seed: int, disk_mib: int = 64) -> Iterator[World]:
    """Start everything, and leave nothing behind."""
    folder = Path(tempfile.mkdtemp(prefix="balagg-faults-"))
    disk = folder / "disk"
    for path in (disk, folder / "quick"):
        path.mkdir()
    (folder / "quick" / "config.json").write_text("{}")
    small = mount(disk, disk_mib)
    world = World(folder, disk, small, random.Random(seed), free_port())
    os.environ |= {
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "faults")]),
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{world.port}",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_gcs_server_port_wait_time_s": START_WAIT_S,
    } | ENVIRONMENT
    try:
        start_server(world)
        start_cluster(world)
        yield world
    finally:
        stop_cluster(world)
        stop_server(world)
        if small:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def mount(disk: Path, mib: int) -> bool:
    """A file system in memory that is soon full; False where this is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(disk)]
    return subprocess.run(command, capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_cluster(world: World) -> None:
    """A head that runs no tasks, and nodes with one CPU and one made-up GPU each; a death is noticed in seconds."""
    import ray
    from ray.cluster_utils import Cluster

    health = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 20}
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20, "_system_config": health}
    world.cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(NUM_NODES):
        add_node(world)
    os.environ["RAY_ADDRESS"] = world.cluster.address
    ray.init(address=world.cluster.address, log_to_driver=False, logging_level="ERROR")


def add_node(world: World) -> None:
    world.cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 << 20)


def stop_cluster(world: World) -> None:
    import ray

    ray.shutdown()
    if world.cluster is not None:
        world.cluster.shutdown()


def start_server(world: World) -> None:
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(world.port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{world.folder / 'mlflow.db'}",
        "--artifacts-destination", str(world.folder / "artifacts"),
    ]  # fmt: skip
    with (world.folder / "server.log").open("a") as log:
        world.server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    wait_for(lambda: answers(world), 300, "the MLflow server does not start")


def answers(world: World) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{world.port}/health", timeout=10) as reply:
            return reply.status == 200
    except OSError:
        return False


def stop_server(world: World) -> None:
    if world.server is not None:
        with suppress(ProcessLookupError):
            os.killpg(world.server.pid, signal.SIGKILL)
        world.server.wait()


# Grids.


def new_round(world: World, name: str, real: bool) -> Round:
    """A grid of its own, and its experiments file."""
    text = MODELS.format(quick=world.folder / "quick", root=ROOT) + (REAL if real else QUICK).format(name=name)
    path = world.folder / f"{name}.yaml"
    path.write_text(text)
    return Round(world, name, real, expand(load_config(path), name))


def start_driver(this: Round) -> None:
    """`balagg run`, as a person would start it again."""
    command = [
        sys.executable, "-m", "orchestrator", "run", "--config", str(this.world.folder / f"{this.name}.yaml"),
        "--runs-dir", str(this.world.disk), *(() if this.real else STAND_INS),
    ]  # fmt: skip
    this.starts += 1
    with this.output.open("a") as log:
        this.driver = subprocess.Popen(command, stdout=log, stderr=log, cwd=this.world.folder, start_new_session=True)


def is_running(this: Round) -> bool:
    return this.driver is not None and this.driver.poll() is None


def finish(this: Round) -> None:
    """Start the command again until it has nothing left to do."""
    deadline = time.monotonic() + ROUND_LIMIT_S
    while time.monotonic() < deadline:
        if is_running(this):
            time.sleep(0.2)
        elif this.driver is not None and this.driver.returncode == 0:
            return
        else:
            start_driver(this)
    raise Broken(f"{this.name} is not complete after {ROUND_LIMIT_S:.0f} s:\n{this.output.read_text()[-3000:]}")


# Faults. Each returns whether it found something to spoil.


def active(this: Round) -> list[tuple[CellRun, Path]]:
    """The leases of tasks that work now."""
    found = []
    for run in this.runs:
        places = [run.folder.training, *(run.folder.evaluating(step) for step in run.cell.evaluate_steps)]
        found += [(run, place) for place in places if leases.is_held(place)]
    return found


def signal_worker(this: Round, number: signal.Signals) -> bool:
    tasks = active(this)
    if not tasks:
        return False
    _, lease = this.world.random.choice(tasks)
    holder = leases.holder(lease)
    if holder is None:
        return False
    try:
        os.kill(holder.pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_worker(this: Round) -> bool:
    """SIGKILL of the process of a task."""
    return signal_worker(this, signal.SIGKILL)


def hang_worker(this: Round) -> bool:
    """SIGSTOP of the process of a task: it neither works nor answers."""
    return signal_worker(this, signal.SIGSTOP)


def kill_node(this: Round) -> bool:
    """SIGKILL of a whole node; another one joins."""
    world = this.world
    node = world.random.choice(sorted(world.cluster.worker_nodes, key=lambda node: node.unique_id))
    world.cluster.remove_node(node, allow_graceful=False)
    time.sleep(world.random.uniform(0, 1))
    add_node(world)
    return True


def kill_driver(this: Round) -> bool:
    """SIGKILL of the command; a person starts it again."""
    if this.driver is None or not is_running(this):
        return False
    this.driver.kill()
    this.driver.wait()
    time.sleep(this.world.random.uniform(0, 1))
    start_driver(this)
    return True


def kill_server(this: Round) -> bool:
    """SIGKILL of the MLflow server; it is started again a while later."""
    stop_server(this.world)
    time.sleep(this.world.random.uniform(0, 3))
    start_server(this.world)
    return True


def fill_disk(this: Round) -> bool:
    """Not a byte is left for a while where the cells write."""
    if not this.world.small:
        return False
    filler = this.world.disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        size = 1 << 20
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2
    time.sleep(this.world.random.uniform(0.5, 2))
    filler.unlink()
    return True


def corrupt_state(this: Round) -> bool:
    """A state file that no longer can be read."""
    files = [run.folder.state for run in this.runs if run.left and run.folder.state.exists()]
    if not files:
        return False
    this.world.random.choice(files).write_bytes(this.world.random.choice([b"", b"{", b'{"state": 3}', b"\x00\xff"]))
    return True


def truncate_checkpoint(this: Round) -> bool:
    """The newest checkpoint of a cell loses half of its largest file, and its task is killed, so that it is read."""
    runs = [run for run in this.runs if run.left and run.newest_checkpoint > 0]
    if not runs:
        return False
    run = this.world.random.choice(runs)
    folder = run.folder.checkpoint(run.newest_checkpoint)
    try:
        file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size // 2)
    except FileNotFoundError:
        return False  # it was just removed
    holder = leases.holder(run.folder.training)
    if holder is not None and leases.is_held(run.folder.training):
        with suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGKILL)
    return True


FAULTS: dict[str, Callable[[Round], bool]] = {
    "worker killed": kill_worker,
    "node killed": kill_node,
    "command killed": kill_driver,
    "MLflow server killed": kill_server,
    "disk full": fill_disk,
    "worker hangs": hang_worker,
    "state file corrupt": corrupt_state,
    "checkpoint truncated": truncate_checkpoint,
}

# What must be true afterwards.


def outcome(this: Round) -> Outcome:
    """What came out of each cell."""
    found: Outcome = {}
    for run in this.runs:
        metrics = {
            step: {name: value for name, value in values.items() if not name.startswith("perf/")}
            for step, values in run.tail.steps.items()
        }
        scores = {step: summary["metrics"] for step, summary in run.summaries.items()}
        found[(run.cell.rule, run.cell.model_name, run.cell.seed)] = metrics, scores
    return found


def check(this: Round, undisturbed: Outcome) -> None:
    """Everything is there, once, and nothing else is.

    Raises:
        Broken: says what is not so.
    """
    for run in this.runs:
        require(not run.left, f"{run.cell.id} has work left: {run.left}")
        state = ledger.read_state(run.folder)
        require(state is not None and state.state == "done", f"{run.cell.id} is recorded as {state}")
        require(describe(run)[0] == "done", f"{run.cell.id} is described as {describe(run)}")
        rows = [json.loads(line)["step"] for line in run.folder.metrics.read_text().splitlines()]
        require(rows == list(range(1, run.cell.steps + 1)), f"{run.cell.id} has steps {rows}")
        for place in (run.folder.claim, run.folder.training):
            require(not leases.is_held(place), f"{place} is still held")
    for cell, found in outcome(this).items():
        for what, have, expect in zip(("metrics", "scores"), found, undisturbed[cell], strict=True):
            wrong = [step for step in {**have, **expect} if have.get(step) != expect.get(step)]
            require(not wrong, f"{cell}: {what} differ at steps {wrong}: {[have.get(s) for s in wrong[:2]]}")
    check_mlflow(this)
    wait_for(lambda: not left_over(this.world), 60, lambda: f"processes are left: {left_over(this.world)}")
    wait_for(lambda: all_free(this.world), 60, "Ray has resources in use, and nothing runs")


def check_mlflow(this: Round) -> None:
    """One run a cell, each point once."""
    from mlflow import MlflowClient

    client = MlflowClient(f"http://127.0.0.1:{this.world.port}")
    experiment = client.get_experiment_by_name(f"balagg-{this.name}")
    runs = client.search_runs([experiment.experiment_id])
    require(len(runs) == len(this.cells), f"MLflow has {len(runs)} runs for {len(this.cells)} cells")
    by_cell = {run.data.tags["balagg.cell"]: run for run in runs}
    for run in this.runs:
        held = by_cell[run.cell.id]
        require(held.info.status == "FINISHED", f"{run.cell.id} is {held.info.status} in MLflow")
        expected: dict[tuple[str, int], float] = {}
        for step, metrics in run.tail.steps.items():
            expected |= {(name, step): value for name, value in metrics.items()}
        for step, bad in run.tail.non_finite.items():
            expected |= {(NON_FINITE, step): len(bad)} if bad else {}
        for step, summary in run.summaries.items():
            expected |= {(name, step): value for name, value in summary["metrics"].items()}
        points = [
            ((name, point.step), point.value)
            for name in held.data.metrics
            for point in client.get_metric_history(held.info.run_id, name)
        ]
        twice = [key for key, count in Counter(key for key, _ in points).items() if count > 1]
        require(not twice, f"{run.cell.id}: MLflow has points twice: {twice[:5]}")
        wrong = {key: (dict(points).get(key), expected.get(key)) for key, _ in set(points) ^ set(expected.items())}
        require(not wrong, f"{run.cell.id}: MLflow and the files differ: {dict(list(wrong.items())[:5])}")


def left_over(world: World) -> list[str]:
    """Workers and commands of this world that are alive."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        with suppress(psutil.Error):
            if process.info["status"] == psutil.STATUS_ZOMBIE or process.environ().get("HOME") != str(world.folder):
                continue
            if RAYS_OWN in command:
                continue
            if command.startswith("ray::") or "-m orchestrator " in command:
                found.append(f"{process.pid} {command[:80]}")
    return found


def all_free(world: World) -> bool:
    from orchestrator.cluster import free, nodes

    total = nodes()
    return len(total) == NUM_NODES + 1 and free() == total


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Broken(message)


def wait_for(condition: Callable[[], bool], timeout_s: float, message: str | Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(message if isinstance(message, str) else message())
        time.sleep(0.1)


# The campaign.


def undisturbed(world: World, real: bool) -> Outcome:
    """What comes out where nothing happens: of the real trainer from a grid, of the small one from calls, no Ray."""
    this = new_round(world, f"undisturbed-{'real' if real else 'quick'}", real)
    if real:
        start_driver(this)
        finish(this)
        require(this.starts == 1, "the undisturbed grid needed a second start")
        found = outcome(this)
        check(this, found)
    else:
        for cell in this.cells:
            folder = ledger.open_cell(world.disk, cell)
            with redirect_stdout(io.StringIO()):
                campaign_work.train(folder.path, cell.config, keep_steps=cell.evaluate_steps, step_s=0)
            for step in cell.evaluate_steps:
                ledger.prepare_evaluation(cell, folder, step)
                campaign_work.evaluate(folder.checkpoint(step), cell.evaluation, folder.evaluation(step), sample_s=0)
        found = outcome(this)
    shutil.rmtree(world.disk / this.name)
    return found


def play(world: World, name: str, real: bool, faults: list[str], expected: Outcome, say: Callable[[str], None]) -> None:
    """One grid and its faults, in this order, at random moments; then the checks."""
    this = new_round(world, name, real)
    begin = time.monotonic()
    start_driver(this)
    wait_for(lambda: bool(active(this)) or not is_running(this), 300, "no task has started")
    done: Counter[str] = Counter()
    for fault in faults:
        if not is_running(this) and this.driver is not None and this.driver.returncode == 0:
            break  # the grid was faster
        time.sleep(world.random.uniform(0.2, 2.0 if not real else 5.0))
        if not is_running(this):
            start_driver(this)
        if FAULTS[fault](this):
            done[fault] += 1
    finish(this)
    check(this, expected)
    world.injected += done
    seconds = time.monotonic() - begin
    say(f"{name}: {done.total()} faults, {this.starts} starts, {seconds:.0f} s: complete and equal")
    shutil.rmtree(world.disk / this.name)


def draw(world: World, names: list[str], number: int) -> list[str]:
    """So many faults in a random order, the rarest so far among them, so that all come about equally often."""
    planned = Counter(world.injected)
    chosen = []
    for _ in range(number):
        chosen.append(min(names, key=lambda name: (planned[name], world.random.random())))
        planned[chosen[-1]] += 1
    world.random.shuffle(chosen)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-round", type=int, default=14)
    parser.add_argument("--real-every", type=int, default=4, help="how often the real trainer has a round; 0: never")
    arguments = parser.parse_args()

    def say(message: str) -> None:
        print(message, flush=True)

    begin = time.monotonic()
    with make_world(arguments.seed) as world:
        if not world.small:
            say("no file system can be mounted here: disk full is left out")
        expected = {real: undisturbed(world, real) for real in ([False, True] if arguments.real_every else [False])}
        say(f"undisturbed grids: {time.monotonic() - begin:.0f} s")
        number = 0
        while (missing := arguments.faults - world.injected.total()) > 0:
            number += 1
            real = arguments.real_every > 0 and number % arguments.real_every == 0
            names = [name for name in FAULTS if world.small or name != "disk full"]
            if real:
                names.remove("worker hangs")  # its imports take longer than the watchdog's patience here
            chosen = draw(world, names, min(arguments.per_round, missing))
            play(world, f"round-{number}", real, chosen, expected[real], say)
        say(f"\n{'fault':24}{'injected':>9}")
        for name in FAULTS:
            say(f"{name:24}{world.injected[name]:>9}")
        say(f"{'all':24}{world.injected.total():>9}")
        say(f"{number} grids, each complete and equal to the undisturbed one; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
