"""Is there a cluster, and can it ever run what the grid asks for?"""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError
from orchestrator.grid import Cell
from orchestrator.placement import Gang, Nodes, Resources, place

OBJECT_STORE_BYTES = 100 << 20
"""Tasks exchange files, so Ray's own store stays small."""


ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Ray's own switches, where the environment does not say otherwise."""

WATCHER = "PlacementGroupCleaner"
"""What Ray Train calls the actor that watches over a gang."""
ERRAND_S = 30.0
"""Longest wait for a small task on a node."""

START_WAIT_S = "120"
"""Ray gives up on its own start after 30 s, which a busy machine with a cold disk can need."""


def training_gang(cell: Cell) -> Gang:
    """The processes of a cell's training task."""
    return Gang(cell.model.workers, Resources(cell.model.cpus, cell.model.gpus))


def evaluation_gang(cell: Cell) -> Gang:
    """The one process of an evaluation task of a cell."""
    return Gang(1, Resources(cell.model.eval_cpus, cell.model.eval_gpus))


def connect() -> dict[str, Resources]:
    """Join the cluster at RAY_ADDRESS, or start one on this machine; returns what each node has, by node id.

    Raises:
        UserError: there is no such cluster, or Ray does not start here.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        # Left to itself, Ray would join any cluster that somebody has started on this machine.
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
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
    return nodes()


def nodes() -> dict[str, Resources]:
    """What each node of the cluster has now, by node id."""
    import ray

    return {node["NodeID"]: _resources(node["Resources"]) for node in ray.nodes() if node["Alive"]}


def free() -> dict[str, Resources]:
    """What is free on each node, as Ray sees it: a second late, and after the use of all that share the cluster."""
    from ray._private.state import available_resources_per_node

    return {node: _resources(found) for node, found in available_resources_per_node().items()}


def release_lost_gangs() -> None:
    """Give back what gangs of this command hold whose controller was killed, and end what watches over such gangs.

    Ray keeps an actor's placement group until the whole job ends. Ray Train's own clean-up needs the dashboard: without
    it the process that is to do it, one a gang, waits for ever.
    """
    import ray
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]  # made at run time
    from ray.util.placement_group import PlacementGroup

    job = bytes.fromhex(ray.get_runtime_context().get_job_id())
    found = map(PlacementGroupTableData.FromString, state._connect_and_get_accessor().get_placement_group_table())
    lost = [
        group.placement_group_id
        for group in found
        if group.creator_job_id == job and group.creator_actor_id.strip(b"\xff") and group.creator_actor_dead
        and group.state != PlacementGroupTableData.REMOVED
    ]  # fmt: skip
    for group_id in lost:
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(group_id)))
    _end_watchers_of_lost_gangs(job.hex())


def _end_watchers_of_lost_gangs(job: str) -> None:
    """Also those that commands before this one have left."""
    import ray
    from ray._private import state
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = state.actors(actor_state_name="ALIVE")
    controllers = [actor["Address"] for actor in alive.values() if actor["ActorClassName"] == "TrainController"]
    running = {other["JobID"] for other in state.jobs() if not other["IsDead"]} - {job}
    for actor in alive.values():
        if actor["ActorClassName"] != WATCHER or actor["JobID"] in running:
            continue
        if actor["OwnerAddress"] in controllers:
            continue
        # Only who holds an actor's handle can have Ray kill it.
        there = NodeAffinitySchedulingStrategy(actor["Address"]["NodeID"], soft=False)
        errand = ray.remote(_end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        with suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(errand.remote(actor["Pid"], WATCHER), timeout=ERRAND_S)


def _end_process(pid: int, title: str) -> None:
    """End a process that still is the one with this title; elsewhere than on Linux it is left alone."""
    with suppress(OSError):
        if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _resources(found: dict[str, float]) -> Resources:
    return Resources(found.get("CPU", 0.0), found.get("GPU", 0.0))


def check_demand(cells: Iterable[Cell], total: Nodes) -> None:
    """Make sure that the empty cluster has room for each task: Ray lets one that never fits wait for ever, in silence.

    Raises:
        UserError: says which model asks for what, what is missing and what to do.
    """
    mistakes = {}
    for cell in cells:
        for what, gang in (("training", training_gang(cell)), ("evaluation", evaluation_gang(cell))):
            if (cell.model_name, what) not in mistakes and place(gang, total, total) is None:
                mistakes[(cell.model_name, what)] = gang
    if mistakes:
        largest = max(total.values(), key=lambda has: (has.gpus, has.cpus), default=Resources(0, 0))
        lines = [
            f"{what} of {model} asks for {gang}{' on one node' if gang.workers == 1 else ''}"
            for (model, what), gang in mistakes.items()
        ]
        raise UserError(
            "\n".join(lines)
            + f"\nThe cluster has {len(total)} node{'s' * (len(total) != 1)}, the largest with {largest}. "
            "Nothing was started. Join a larger cluster with RAY_ADDRESS, or lower the model's "
            "workers, cpus, gpus, eval_cpus or eval_gpus in the experiments file."
        )
