"""Which grid `make reproduce` takes."""

import dataclasses
from pathlib import Path

import pytest

from orchestrator.config import load_config
from orchestrator.errors import UserError
from orchestrator.grid import expand
from orchestrator.largest_grid import largest_grid
from orchestrator.memory import cell_footprint
from orchestrator.placement import Resources

GIB = 2**30


@pytest.fixture
def config():
    return load_config(Path("experiments.yaml"))


def no_gpus():
    raise AssertionError("there are none to ask")


@pytest.fixture
def with_vllm(monkeypatch):
    monkeypatch.setattr("orchestrator.largest_grid.importlib.util.find_spec", lambda name: object())


def test_a_laptop_takes_the_laptop_grid(config):
    name, why = largest_grid(config, {"a": Resources(2, 0)}, no_gpus)
    assert name == "laptop"
    assert "paper does not fit: it needs 8 GPUs, there are 0" in why
    assert "single-gpu does not fit: it needs 1 GPUs, there are 0" in why


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("gpus", "gib", "expected"), [(1, 24, "single-gpu"), (1, 12, "laptop"), (8, 80, "paper"), (8, 40, "single-gpu")]
)
def test_number_and_memory_of_gpus_decide(config, gpus, gib, expected):
    name, why = largest_grid(config, {"a": Resources(64, gpus)}, lambda: [gib * GIB] * gpus)
    assert name == expected, why
    if expected != "paper":
        assert "paper does not fit" in why


@pytest.mark.usefixtures("with_vllm")
def test_gpus_without_cores_do_not_help(config):
    name, why = largest_grid(config, {"a": Resources(2, 8)}, lambda: [80 * GIB] * 8)
    assert name == "laptop"
    assert "training of qwen2.5-math-7b asks for" in why


def test_a_missing_engine_is_said(config):
    name, why = largest_grid(config, {"a": Resources(64, 8)}, lambda: [80 * GIB] * 8)
    assert name == "laptop"
    assert "pip install vllm==0.32.0" in why


def test_no_grid_fits(config):
    without = dataclasses.replace(config, grids={"paper": config.grids["paper"]})
    with pytest.raises(UserError, match="paper does not fit"):
        largest_grid(without, {"a": Resources(2, 0)}, no_gpus)


def test_every_grid_on_gpus_has_an_estimate(config):
    for grid in ("paper", "single-gpu"):
        for cell in expand(config, grid):
            found = cell_footprint(cell, Path())
            assert 8 * GIB < found.needed < 80 * GIB
            assert found.tokens_per_step > 10**5
