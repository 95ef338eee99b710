"""One worker, two workers, other micro-batches: the same run."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest

from evals.engines import load_model
from tests import distributed_cases
from trainers import checkpoints
from trainers.step_log import read_steps

KILLS = int(os.environ.get("BALAGG_KILLS", "2"))
"""Kills of the resume test; set it to 20 for a longer look."""


def metrics(cell_dir):
    rows = read_steps(cell_dir / "metrics.jsonl")
    return [{k: v for k, v in row["metrics"].items() if not k.startswith("perf/")} for row in rows]


def parameters(cell_dir, step=10):
    model, _ = load_model(checkpoints.checkpoint_dir(cell_dir, step))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    distributed_cases.record(folder / "cell", distributed_cases.cell(), folder / "said.pickle")
    return folder


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"max_tokens_per_micro_batch": 150}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(1, {"max_tokens_per_micro_batch": 100}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
    ],
)
def test_workers_and_micro_batches_change_nothing_but_rounding(recorded, tmp_path, size, changes):
    distributed_cases.run(tmp_path / "cell", distributed_cases.cell(**changes), size, recorded / "said.pickle")
    ours, theirs = metrics(tmp_path / "cell"), metrics(recorded / "cell")
    assert len(ours) == len(theirs) == 10
    for mine, other in zip(ours, theirs, strict=True):
        # Sums of cancelling terms, such as the loss, are known to float32's rounding of the terms.
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    reference, start = parameters(recorded / "cell"), parameters(recorded / "cell", step=0)
    assert all(float((parameter - start[name]).abs().max()) > 1e-4 for name, parameter in reference.items())
    for name, parameter in parameters(tmp_path / "cell").items():
        assert float((parameter - reference[name]).abs().max()) <= 1e-5, name


def test_workers_count_clipped_tokens_alike(recorded, tmp_path):
    cell = distributed_cases.cell(steps=3, clip_low=1e-3, clip_high=1e-3)
    for size in (1, 2):
        distributed_cases.run(tmp_path / str(size), cell, size, recorded / "said.pickle")
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert all(max(row[name] for row in one) > 0.01 for name in ("policy/clip_low", "policy/clip_high"))
    for mine, other in zip(two, one, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)


def kill_and_resume(cell_dir, cell, sizes, kills, seed):
    """Start over and over, kill all workers at random moments, then run to the end; returns the steps seen at kills."""
    moments = random.Random(seed)
    reached = []
    for number in range(kills):
        before = checkpoints.complete_steps(cell_dir)
        for cut in cell_dir.glob("checkpoints/*.partial"):
            shutil.rmtree(cut)  # or it would pass for one of the next start's
        processes = distributed_cases.start(cell_dir, cell, sizes[number % len(sizes)])
        # Training begins when imports are over; the first kill comes after a whole checkpoint, later ones at any time.
        deadline = time.monotonic() + 120
        while (
            not progressed(cell_dir, before, ended=number == 0)
            and time.monotonic() < deadline
            and processes[0].poll() is None
        ):
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.8))
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        reached.append(max(checkpoints.complete_steps(cell_dir), default=0))
    distributed_cases.run(cell_dir, cell, sizes[kills % len(sizes)])
    return reached


def progressed(cell_dir, before, ended):
    """Whether a checkpoint after a step was ended, or at least begun, since."""
    new = {*checkpoints.complete_steps(cell_dir)} - {*before, 0}
    return new or (not ended and any(path.name != "step-0.partial" for path in cell_dir.glob("checkpoints/*.partial")))


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize("size", [1, 2])
def test_killed_at_random_moments_workers_end_with_the_same_bits(tmp_path, size):
    cell = distributed_cases.cell(checkpoint_every=1, steps=8)
    distributed_cases.run(tmp_path / "whole", cell, size)
    reached = kill_and_resume(tmp_path / "killed", cell, [size], KILLS, seed=size)
    assert max(reached) > 0
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    reference = parameters(tmp_path / "whole", step=8)
    for name, parameter in parameters(tmp_path / "killed", step=8).items():
        assert parameter.equal(reference[name]), name


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_workers(recorded, tmp_path):
    recording = recorded / "said.pickle"
    half = distributed_cases.cell(checkpoint_every=5, keep_last=9)
    distributed_cases.run(tmp_path / "cell", half, 2, recording)
    shutil.rmtree(checkpoints.checkpoint_dir(tmp_path / "cell", 10))
    distributed_cases.run(tmp_path / "cell", half, 1, recording)
    reference = parameters(recorded / "cell")
    for name, parameter in parameters(tmp_path / "cell").items():
        assert float((parameter - reference[name]).abs().max()) <= 1e-5, name


RAY_PROGRAM = """
import json, sys
from pathlib import Path
import ray
from trainers.workers import train_on_workers

folder, cell, bad = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)

@ray.remote(num_cpus=0)
def train(cell, name):
    train_on_workers(folder / name, cell, num_workers=2, stop_file=folder / "stop")

ray.get(train.remote(cell, "cell"))
(folder / "stop").touch()
ray.get(train.remote(cell | {"seed": 1}, "stopped"))
try:
    train_on_workers(folder / "bad", bad, num_workers=2)
except ValueError as error:
    print(error)
print(ray.available_resources()["CPU"])
"""


@pytest.mark.slow
def test_ray_train_starts_the_workers_and_reports_what_they_raise(tmp_path):
    cell = distributed_cases.cell(steps=2)
    bad = cell | {"dataset": {"name": "x"}}
    told = subprocess.run(
        [sys.executable, "-c", RAY_PROGRAM, str(tmp_path), json.dumps(cell), json.dumps(bad)],
        env=os.environ | {"HOME": str(tmp_path), "PYTHONPATH": ".", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    assert "unknown training set 'x'" in told.stdout
    assert told.stdout.split()[-1] == "2.0"
    distributed_cases.run(tmp_path / "reference", cell, 2)
    assert metrics(tmp_path / "cell") == metrics(tmp_path / "reference")
    assert [row["step"] for row in read_steps(tmp_path / "stopped" / "metrics.jsonl")] == [1]
    assert checkpoints.complete_steps(tmp_path / "stopped") == [0, 1]
    assert "step 2/2" in (tmp_path / "cell" / "log.txt").read_text()
