"""Which tasks start, and where: placement as pure functions, and a whole grid played through in simulated time."""

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest

from orchestrator.placement import Gang, Resources, Running, Waiting, choose, place

GPU = Resources(4, 1)
NODE = Resources(32, 8)
EIGHT, FOUR, ONE = Gang(8, GPU), Gang(4, GPU), Gang(1, GPU)


def nodes(number: int, each: Resources = NODE) -> dict[str, Resources]:
    return {f"n{i}": each for i in range(number)}


def started(waiting, running, total) -> list[tuple[str, tuple[str, ...]]]:
    return [(task.key, places) for task, places in choose(waiting, running, total)]


def test_a_gang_stays_on_one_node_the_one_that_it_fills_best():
    total = nodes(3)
    free = {"n0": NODE, "n1": Resources(16, 4), "n2": Resources(20, 5)}
    assert place(FOUR, free, total) == ("n1",) * 4
    assert place(ONE, free, total) == ("n1",)
    assert place(EIGHT, free, total) == ("n0",) * 8


def test_a_gang_that_would_fit_one_node_is_not_spread_while_all_are_partly_taken():
    total = nodes(2)
    assert place(EIGHT, {"n0": Resources(32, 7), "n1": Resources(32, 7)}, total) is None


def test_a_gang_larger_than_any_node_takes_as_few_nodes_as_it_can():
    total = nodes(3)
    assert place(Gang(12, GPU), total, total) == ("n0",) * 8 + ("n1",) * 4
    assert place(Gang(25, GPU), total, total) is None
    mixed = {"small": Resources(8, 2), "large": NODE}
    assert place(Gang(9, GPU), mixed, mixed) == ("large",) * 8 + ("small",)


def test_tasks_without_gpus_leave_nodes_with_gpus_to_others():
    total = {"gpus": NODE, "cpus": Resources(64, 0)}
    assert place(Gang(1, Resources(2, 0)), total, total) == ("cpus",)


def test_fractions_of_a_gpu_share_it():
    total = {"n0": Resources(8, 1)}
    third = Gang(1, Resources(1, 0.3))
    waiting = [Waiting(str(i), third, math.inf) for i in range(4)]
    assert [key for key, _ in started(waiting, [], total)] == ["0", "1", "2"]


def test_tasks_start_in_order_as_far_as_there_is_room():
    total = nodes(2)
    waiting = [Waiting("a", EIGHT, 100), Waiting("b", FOUR, 100), Waiting("c", FOUR, 100), Waiting("d", ONE, 1)]
    assert started(waiting, [], total) == [("a", ("n0",) * 8), ("b", ("n1",) * 4), ("c", ("n1",) * 4)]


def test_a_gang_that_waits_gets_the_node_that_is_free_the_soonest():
    total = nodes(2)
    running = [Running(FOUR, ("n0",) * 4, 50), Running(ONE, ("n1",), 10)]
    gang = Waiting("gang", EIGHT, 100)
    # n1 is kept for it from second 10 on: only what ends before that may go there.
    assert started([gang, Waiting("short", FOUR, 5)], running, total) == [("short", ("n0",) * 4)]
    assert started([gang, Waiting("long", Gang(6, GPU), 20)], running, total) == []
    assert started([gang, Waiting("short", Gang(6, GPU), 9)], running, total) == [("short", ("n1",) * 6)]


def test_a_node_that_is_gone_is_not_used_and_its_tasks_take_no_room():
    running = [Running(EIGHT, ("gone",) * 8, math.inf)]
    assert started([Waiting("a", EIGHT, 1)], running, nodes(1)) == [("a", ("n0",) * 8)]
    assert started([Waiting("a", EIGHT, 1)], [], {}) == []


def test_what_no_node_can_hold_now_keeps_nothing_from_the_others():
    waiting = [Waiting("large", Gang(1, Resources(64, 8)), 1), Waiting("b", EIGHT, 100)]
    assert started(waiting, [], nodes(1)) == [("b", ("n0",) * 8)]


@dataclass(frozen=True)
class _Job:
    """A cell in simulated time: a training, and evaluations of checkpoints along the way."""

    comparison: int
    number: int
    gang: Gang
    seconds: float
    evaluate_s: float


@pytest.mark.parametrize("num_nodes", [4, 8])
def test_evaluations_neither_starve_nor_hold_up_gangs_and_gpus_stay_busy(num_nodes):
    """60 cells of two models, five checkpoints each: the paper's grid with five seeds, in hours."""
    jobs = []
    for comparison in range(20):
        large = comparison % 4 < 2
        for _ in range(3):
            gang, seconds, evaluate_s = (EIGHT, 17.0, 1.5) if large else (FOUR, 10.0, 0.7)
            jobs.append(_Job(comparison, len(jobs), gang, seconds, evaluate_s))
    log = play(jobs, nodes(num_nodes))
    gpu_hours = sum(gang.workers * (end - start) for _, gang, start, end, _ in log)
    assert gpu_hours == pytest.approx(sum(job.gang.workers * job.seconds + 4 * job.evaluate_s for job in jobs))
    assert len(log) == 60 * 5

    # At least 90 % busy until the last tenth of the work has begun.
    begun, until = 0.0, 0.0
    for _, gang, start, end, _ in sorted(log, key=lambda entry: entry[2]):
        begun += gang.workers * (end - start)
        until = start
        if begun >= 0.9 * gpu_hours:
            break
    busy = sum(gang.workers * (min(end, until) - start) for _, gang, start, end, _ in log if start < until)
    assert busy / (until * 8 * num_nodes) >= 0.9

    # No evaluation waits for longer than a training lasts, and comparisons begin in order.
    assert max(start - ready for kind, _, start, _, ready in log if kind[0] == "evaluate") <= 17.0
    begins = defaultdict(list)
    for kind, _, start, _, _ in log:
        if kind[0] == "train":
            begins[kind[1].comparison].append(start)
    assert max(max(starts) - min(starts) for starts in begins.values()) <= 2 * 17.0
    first = [min(starts) for _, starts in sorted(begins.items())]
    assert all(later >= earlier - 2 * 17.0 for earlier, later in pairwise(first))


def play(jobs: list[_Job], total: dict[str, Resources]) -> list[tuple]:
    """Run the jobs in simulated time; returns (what, gang, start, end, ready since) of each task."""
    waiting = {("train", job, 4): 0.0 for job in jobs}
    running: dict[tuple, tuple[float, tuple[str, ...]]] = {}
    ahead = [(0.0, 0, "look", ())]
    log = []
    number = 0
    while ahead:
        now, _, what, key = heapq.heappop(ahead)
        if what == "end":
            del running[key]
        elif what == "checkpoint":
            waiting[key] = now
        if ahead and ahead[0][0] == now:
            continue
        order = sorted(waiting, key=lambda key: (key[1].comparison, key[0] == "train", key[1].number, key[2]))
        tasks = [Waiting(key, gang_of(key), seconds_of(key)) for key in order]
        under_way = [Running(gang_of(key), places, end - now) for key, (end, places) in running.items()]
        for task, places in choose(tasks, under_way, total):
            key, end = task.key, now + task.seconds
            log.append((key, task.gang, now, end, waiting.pop(key)))
            running[key] = (end, places)
            number += 1
            heapq.heappush(ahead, (end, number, "end", key))
            if key[0] == "train":
                for quarter in range(1, 5):
                    number += 1
                    when = now + task.seconds * quarter / 4
                    heapq.heappush(ahead, (when, number, "checkpoint", ("evaluate", key[1], quarter)))
    assert not waiting
    return log


def gang_of(key) -> Gang:
    return key[1].gang if key[0] == "train" else ONE


def seconds_of(key) -> float:
    return key[1].seconds if key[0] == "train" else key[1].evaluate_s
