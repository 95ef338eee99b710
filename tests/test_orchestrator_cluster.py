"""Can the cluster ever run what the grid asks for? If not, it is said before anything starts."""

import pytest

from orchestrator.cluster import check_demand, evaluation_gang, training_gang
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
