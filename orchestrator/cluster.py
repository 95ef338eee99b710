"""Is there a cluster, and can it ever run what the grid asks for?"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import UserError
from orchestrator.grid import Cell

OBJECT_STORE_BYTES = 100 << 20
"""Tasks exchange files, so Ray's own store stays small."""


ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Ray's own switches, where the environment does not say otherwise."""

START_WAIT_S = "120"
"""Ray gives up on its own start after 30 s, which a busy machine with a cold disk can need."""


@dataclass(frozen=True)
class Resources:
    """CPU cores and GPUs."""

    cpus: float
    gpus: float

    def fits(self, free: "Resources") -> bool:
        """Whether `free` has room for this."""
        return self.cpus <= free.cpus and self.gpus <= free.gpus

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(self.cpus + other.cpus, self.gpus + other.gpus)

    def __sub__(self, other: "Resources") -> "Resources":
        return Resources(self.cpus - other.cpus, self.gpus - other.gpus)

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU{'s' * (self.cpus != 1)} and {self.gpus:g} GPU{'s' * (self.gpus != 1)}"


def training_needs(cell: Cell) -> Resources:
    """What the training task of a cell occupies."""
    return Resources(cell.model.cpus, cell.model.gpus)


def evaluation_needs(cell: Cell) -> Resources:
    """What one evaluation task of a cell occupies."""
    return Resources(cell.model.eval_cpus, cell.model.eval_gpus)


def connect() -> list[Resources]:
    """Join the cluster at RAY_ADDRESS, or start one on this machine; returns what each node has.

    Raises:
        UserError: there is no such cluster, or Ray does not start here.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", START_WAIT_S)
    try:
        ray.init(**options)
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).strip().splitlines()[0]
        if address:
            hint = "Is it running? If it asks for a token, set RAY_AUTH_MODE=token."
            raise UserError(f"cannot join the Ray cluster at RAY_ADDRESS={address}: {reason}\n{hint}") from error
        logs = "Its logs are in /tmp/ray/session_latest/logs."
        raise UserError(f"Ray does not start on this machine: {reason}\n{logs}") from error
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Resources(node.get("CPU", 0), node.get("GPU", 0)) for node in alive]


def check_demand(cells: Iterable[Cell], nodes: list[Resources]) -> None:
    """Make sure that each task fits some node: Ray lets a request that never fits wait for ever, in silence.

    Raises:
        UserError: says which model asks for what, what is missing and what to do.
    """
    mistakes = {}
    for cell in cells:
        for what, needs in (("training", training_needs(cell)), ("evaluation", evaluation_needs(cell))):
            if not any(needs.fits(node) for node in nodes):
                mistakes[(cell.model_name, what)] = needs
    if mistakes:
        largest = max(nodes, key=lambda node: (node.gpus, node.cpus), default=Resources(0, 0))
        lines = [f"{what} of {model} asks for {needs} on one node" for (model, what), needs in mistakes.items()]
        raise UserError(
            "\n".join(lines)
            + f"\nThe cluster has {len(nodes)} node{'s' * (len(nodes) != 1)}, the largest with {largest}. "
            "Nothing was started. Join a larger cluster with RAY_ADDRESS, or lower the model's "
            "cpus, gpus, eval_cpus or eval_gpus in the experiments file."
        )
