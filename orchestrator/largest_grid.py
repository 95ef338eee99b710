"""Which of the grids made for reproducing is the largest that this machine or cluster can hold, and why that one?"""

import importlib.util
import os
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from orchestrator.config import Config, load_config
from orchestrator.errors import UserError
from orchestrator.grid import Cell, expand
from orchestrator.options import EXPERIMENTS, ConfigFile
from trainers.recipe import Recipe

if TYPE_CHECKING:
    from orchestrator.placement import Resources

REPRODUCE = ("paper", "single-gpu", "laptop")
"""Grids that answer the paper's question, the largest first."""
QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def largest_grid(config: Config, nodes: dict[str, "Resources"], gpu_bytes: Callable[[], list[int]]) -> tuple[str, str]:
    """The first grid of `REPRODUCE` that fits, and the choice in words.

    Args:
        nodes: what each node has.
        gpu_bytes: asks for the memory of the GPUs, one number a GPU; called when there are any.

    Raises:
        UserError: none fits.
    """
    reasons = []
    for name in REPRODUCE:
        if name not in config.grids:
            continue
        if why := _too_large(config, expand(config, name), nodes, gpu_bytes):
            reasons.append(f"{name} does not fit: {why}")
            continue
        return name, "; ".join([f"grid {name}", *reasons])
    raise UserError("\n".join(reasons) or f"{config.source.path} has none of the grids {', '.join(REPRODUCE)}")


def _too_large(
    config: Config, cells: list[Cell], nodes: dict[str, "Resources"], gpu_bytes: Callable[[], list[int]]
) -> str:
    """Why a grid cannot run here, in a few words; empty if it can."""
    from orchestrator.cluster import check_demand
    from orchestrator.memory import GIB, cell_footprint

    wanted = max((cell.model.workers * cell.model.gpus for cell in cells), default=0)
    had = sum(node.gpus for node in nodes.values())
    if wanted > had:
        return f"it needs {wanted:g} GPUs, there are {had:g}"
    try:
        check_demand(cells, nodes)
    except UserError as error:
        return str(error).splitlines()[0]
    needed = [found.needed for cell in cells if not isinstance(found := cell_footprint(cell, config.root), str)]
    if wanted and needed and max(needed) > min(gpu_bytes(), default=0):
        return f"it needs about {max(needed) / GIB:.0f} GiB a GPU, there are {min(gpu_bytes(), default=0) / GIB:.0f}"
    engines = {Recipe(**cell.config["train"]).rollout_engine for cell in cells}
    if "vllm" in engines and importlib.util.find_spec("vllm") is None:
        return "it samples with vLLM, which is not installed: pip install vllm==0.32.0"
    return ""


def _local_gpu_bytes() -> list[int]:
    """Memory of this machine's GPUs; none without a driver."""
    try:
        told = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) << 20 for line in told.split() if line.isdecimal()]


def _cluster_gpu_bytes() -> list[int]:
    """Memory of the GPUs of all nodes of the cluster."""
    import ray

    with_gpus = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    ask = ray.remote(num_cpus=0)(_local_gpu_bytes)
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = [ask.options(scheduling_strategy=strategy(node, soft=False)).remote() for node in with_gpus]
    return [size for sizes in ray.get(asked) for size in sizes]


def register(app: typer.Typer) -> None:
    """Register the command."""

    @app.command("largest-grid")
    def command(config: ConfigFile = EXPERIMENTS) -> None:
        """Print the largest grid of the study that this machine, or the cluster at RAY_ADDRESS, can hold."""
        from orchestrator.cluster import connect
        from orchestrator.placement import Resources

        loaded = load_config(config)
        if os.environ.get("RAY_ADDRESS"):
            chosen, why = largest_grid(loaded, connect(), _cluster_gpu_bytes)
        else:
            gpus = len(_local_gpu_bytes())
            here = {"here": Resources(os.cpu_count() or 1, gpus)}
            chosen, why = largest_grid(loaded, here, _local_gpu_bytes)
        typer.echo(f"{why}. Choose another with GRID=NAME.", err=True)
        typer.echo(chosen)
