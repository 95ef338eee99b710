"""Starting several workers for one cell with Ray Train: each runs `trainers.grpo.train`, connected over torch."""

import logging
import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def train_on_workers(
    cell_dir: Path,
    cell: dict[str, Any],
    *,
    num_workers: int,
    cpus_per_worker: int = 1,
    gpus_per_worker: float = 0,
    data_dir: Path | None = None,
    keep_steps: Collection[int] = (),
    stop_file: Path | None = None,
    node_ids: Sequence[str] | None = None,
) -> None:
    """Train a cell on a gang of workers and return when it has ended; call it where Ray is connected.

    Ray places the workers together or not at all, on as few nodes as it can (a packed placement group). They meet over
    gloo on CPUs and nccl on GPUs. `cell_dir` must be a folder that all nodes share. A lost worker ends the whole gang:
    calling this again goes on from the last checkpoint, on any number of workers.

    Args:
        cell, data_dir, keep_steps: see `trainers.grpo.train`.
        stop_file: training ends after the step in which this file appears.
        node_ids: the Ray node of each worker; by default Ray chooses.

    Raises:
        Exception: what a worker raised, or Ray's error when one was lost.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchConfig, TorchTrainer
    from torch.distributed import is_nccl_available

    settings = {
        "root": os.getcwd(),
        "cell_dir": str(cell_dir.resolve()),
        "cell": cell,
        "data_dir": str(data_dir.resolve()) if data_dir else None,
        "keep_steps": sorted(keep_steps),
        "stop_file": str(stop_file.resolve()) if stop_file else None,
        "threads": cpus_per_worker,
    }
    with tempfile.TemporaryDirectory(prefix="balagg-") as scratch:
        trainer = TorchTrainer(
            _work,
            train_loop_config=settings,
            # A cluster's GPUs may be made up, to rehearse a grid where there are none.
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if gpus_per_worker and is_nccl_available() else "gloo"
            ),
            scaling_config=ScalingConfig(  # type: ignore[call-arg]  # the checker sees the older class of that name
                num_workers=num_workers,
                use_gpu=gpus_per_worker > 0,
                resources_per_worker={"CPU": cpus_per_worker} | ({"GPU": gpus_per_worker} if gpus_per_worker else {}),
                placement_strategy="PACK",
                label_selector=[{"ray.io/node-id": node} for node in node_ids] if node_ids else None,
            ),
            # What Ray keeps about a run is not used: checkpoints are ours, and so is the decision to try again.
            run_config=RunConfig(name="cell", storage_path=scratch, failure_config=FailureConfig(max_failures=0)),
        )
        try:
            trainer.fit()
        except WorkerGroupError as error:
            causes = list(error.worker_failures.values())
            raise causes[0] if causes else error from error


def _work(settings: dict[str, Any]) -> None:
    """One worker."""
    import torch

    os.chdir(settings["root"])
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    torch.set_num_threads(settings["threads"])
    from trainers.grpo import train
    from trainers.parallel import World

    if World.current().is_first:
        _log_to(Path(settings["cell_dir"]) / "log.txt")
    stop_file = Path(settings["stop_file"]) if settings["stop_file"] else None
    train(
        Path(settings["cell_dir"]),
        settings["cell"],
        data_dir=Path(settings["data_dir"]) if settings["data_dir"] else None,
        keep_steps=settings["keep_steps"],
        should_stop=lambda: stop_file is not None and stop_file.exists(),
    )


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
