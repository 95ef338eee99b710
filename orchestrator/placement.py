"""Which waiting tasks start now, and on which nodes? Pure functions of what waits, what runs and what the nodes have.

Tasks start in order. The first that finds no room gets a reservation: the place that is the soonest to be free for it.
Later ones may go before it, but on the reserved nodes only if they end before it can start (backfilling, as batch
schedulers do). So short evaluations fill gaps, and a gang that needs a whole node gets one in the end.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")

EPSILON = 1e-6
"""Fractions of GPUs add up with rounding."""


@dataclass(frozen=True)
class Resources:
    """CPU cores and GPUs."""

    cpus: float
    gpus: float

    def fits(self, free: "Resources") -> bool:
        """Whether `free` has room for this."""
        return self.cpus <= free.cpus + EPSILON and self.gpus <= free.gpus + EPSILON

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(self.cpus + other.cpus, self.gpus + other.gpus)

    def __sub__(self, other: "Resources") -> "Resources":
        return Resources(self.cpus - other.cpus, self.gpus - other.gpus)

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU{'s' * (self.cpus != 1)} and {self.gpus:g} GPU{'s' * (self.gpus != 1)}"


@dataclass(frozen=True)
class Gang:
    """Processes that start together or not at all, each with its own resources."""

    workers: int
    each: Resources

    def __str__(self) -> str:
        return str(self.each) if self.workers == 1 else f"{self.workers} workers with {self.each} each"


Nodes = Mapping[str, Resources]
"""What nodes have, or have free, by node id."""


@dataclass(frozen=True)
class Waiting(Generic[Key]):
    """A task that could start now.

    Attributes:
        key: names the task.
        seconds: how long it is expected to run; infinite when nobody knows.
    """

    key: Key
    gang: Gang
    seconds: float


@dataclass(frozen=True)
class Running:
    """A task under way: the node of each of its workers, and in how many seconds it is expected to end."""

    gang: Gang
    nodes: tuple[str, ...]
    seconds: float


def choose(
    waiting: Iterable[Waiting[Key]], running: Iterable[Running], total: Nodes
) -> list[tuple[Waiting[Key], tuple[str, ...]]]:
    """The tasks to start now, each with the node of each of its workers.

    Args:
        waiting: in the order in which they should start.
        running: on these nodes.
        total: what each node has.
    """
    running = list(running)
    free = free_room(running, total)
    starts: list[tuple[Waiting[Key], tuple[str, ...]]] = []
    reserved: frozenset[str] = frozenset()
    until: float | None = None
    no_room: set[tuple[Gang, bool]] = set()
    for task in waiting:
        anywhere = until is None or task.seconds < until
        if (task.gang, anywhere) in no_room:
            continue
        room = free if anywhere else {node: has for node, has in free.items() if node not in reserved}
        nodes = place(task.gang, room, total)
        if nodes is not None:
            starts.append((task, nodes))
            running.append(Running(task.gang, nodes, task.seconds))
            for node in nodes:
                free[node] -= task.gang.each
            if not any(has.cpus > EPSILON for has in free.values()):
                break  # every task needs some
            continue
        no_room.add((task.gang, anywhere))
        if until is None:
            reserved, until = _reserve(task.gang, free, running, total)
    return starts


def place(gang: Gang, free: Nodes, total: Nodes) -> tuple[str, ...] | None:
    """The node of each worker, or None while there is no room.

    A gang that some node can hold whole stays on one node, the one that it fills best; a larger one takes as few nodes
    as it can.
    """
    whole = Resources(gang.each.cpus * gang.workers, gang.each.gpus * gang.workers)
    if any(whole.fits(has) for has in total.values()):
        fitting = [(has.gpus, has.cpus, node) for node, has in free.items() if whole.fits(has)]
        return (min(fitting)[2],) * gang.workers if fitting else None
    nodes: list[str] = []
    for node in sorted(free, key=lambda node: (-_copies(gang.each, free[node]), node)):
        nodes += [node] * min(_copies(gang.each, free[node]), gang.workers - len(nodes))
    return tuple(nodes) if len(nodes) == gang.workers else None


def free_room(running: Iterable[Running], total: Nodes) -> dict[str, Resources]:
    """What the running tasks leave; tasks on nodes that are gone count no more."""
    free = dict(total)
    for task in running:
        for node in task.nodes:
            if node in free:
                free[node] -= task.gang.each
    return free


def _reserve(
    gang: Gang, free: Nodes, running: Iterable[Running], total: Nodes
) -> tuple[frozenset[str], float]:  # fmt: skip
    """Where the gang can start the soonest, and in how many seconds; nowhere when it fits no empty cluster."""
    room = dict(free)
    for task in sorted(running, key=lambda task: task.seconds):
        for node in task.nodes:
            if node in room:
                room[node] += task.gang.each
        nodes = place(gang, room, total)
        if nodes is not None:
            return frozenset(nodes), task.seconds
    return frozenset(), 0.0


def _copies(each: Resources, free: Resources) -> int:
    """How many such processes a node has room for."""
    counts = [(has + EPSILON) / needs for needs, has in ((each.cpus, free.cpus), (each.gpus, free.gpus)) if needs > 0]
    return max(0, math.floor(min(counts))) if counts else 0
