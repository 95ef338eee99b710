"""Can the cluster ever run what the grid asks for? If not, it is said before anything starts."""

import os
import subprocess
import sys

import pytest

from orchestrator.cluster import ENVIRONMENT, check_demand, evaluation_gang, training_gang
from orchestrator.config import ModelEntry
from orchestrator.errors import UserError
from orchestrator.grid import Cell
from orchestrator.placement import Gang, Resources

NODE = Resources(32, 8)


def cell(name: str, **needs) -> Cell:
    config = {"grid": "g", "rule": "token", "seed": 0, "model": {"name": name}, "train": {"steps": 1}}
    return Cell(f"token-{name}", config, (), {}, ModelEntry(path="m", template="qa", **needs), 1)


def test_what_tasks_ask_for_comes_from_the_model():
    large = cell("large", workers=8, cpus=4, gpus=1, eval_cpus=2, eval_gpus=0.5)
    assert training_gang(large) == Gang(8, Resources(4, 1))
    assert evaluation_gang(large) == Gang(1, Resources(2, 0.5))


def test_a_demand_that_fits_is_let_through():
    cells = [cell("large", workers=8, cpus=4, gpus=1, eval_gpus=1), cell("small")]
    check_demand(cells, {"n0": NODE})
    check_demand([cell("huge", workers=16, cpus=4, gpus=1)], {"n0": NODE, "n1": NODE})


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"gpus": 9}, "training of m asks for 1 CPU and 9 GPUs on one node\nThe cluster has 2 nodes, the largest with"),
        ({"workers": 17, "cpus": 4, "gpus": 1}, "training of m asks for 17 workers with 4 CPUs and 1 GPU each\n"),
        ({"workers": 9, "cpus": 8, "gpus": 1}, "training of m asks for 9 workers with 8 CPUs and 1 GPU each\n"),
        ({"eval_cpus": 64}, "evaluation of m asks for 64 CPUs and 0 GPUs on one node\n"),
    ],
)
def test_what_never_fits_is_named_with_what_there_is(needs, message):
    with pytest.raises(UserError) as caught:
        check_demand([cell("m", **needs), cell("m", **needs)], {"n0": NODE, "n1": NODE})
    assert str(caught.value).startswith(message)
    assert "the largest with 32 CPUs and 8 GPUs. Nothing was started." in str(caught.value)
    assert str(caught.value).count("asks for") == 1


GANG_PROGRAM = """
import os, signal, time
import ray
from ray._private import state
from orchestrator.cluster import release_lost_gangs

ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)

@ray.remote(num_cpus=0)
def fit():
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer
    TorchTrainer(lambda: time.sleep(600), scaling_config=ScalingConfig(num_workers=2)).fit()

def pids(name):
    alive = state.actors(actor_state_name="ALIVE").values()
    return [actor["Pid"] for actor in alive if actor["ActorClassName"] == name]

def wait_for(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)

gang = fit.remote()
wait_for(lambda: len(pids("RayTrainWorker")) == 2)
release_lost_gangs()
assert len(pids("RayTrainWorker")) == 2 and len(pids("PlacementGroupCleaner")) == 1, "a gang that is well was touched"
os.kill(*pids("TrainController"), signal.SIGKILL)
wait_for(lambda: not pids("TrainController"))
release_lost_gangs()
wait_for(lambda: not pids("PlacementGroupCleaner") and not pids("RayTrainWorker"))
wait_for(lambda: ray.available_resources().get("CPU") == 2)
"""


@pytest.mark.slow
def test_a_killed_gang_leaves_neither_reservations_nor_processes(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", GANG_PROGRAM], env=os.environ | ENVIRONMENT | {"HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
