"""Leases: one holder at a time, whoever dies, hangs, or comes late."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from orchestrator import leases
from orchestrator.leases import Busy

HOLDER = """
import sys, time
from pathlib import Path
from orchestrator import leases
lease = leases.take(Path(sys.argv[1]), wait_s=30)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts processes that hold a lease."""
    started = []

    def start(folder):
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def files(folder) -> list[str]:
    return sorted(os.listdir(folder))


def elsewhere(folder, age_s: float) -> None:
    """Make the lease look like that of a process on another host that was last heard of so long ago."""
    number = max(map(int, files(folder)))
    file = folder / str(number)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "another"}))
    os.utime(file, (time.time() - age_s,) * 2)


def test_a_lease_has_one_holder_and_ends_with_its_process(tmp_path, holder):
    folder = tmp_path / "lease"
    assert not leases.is_held(folder)
    process = holder(folder)
    assert process.stdout.readline() == "held\n"
    assert leases.is_held(folder)
    assert leases.holder(folder).pid == process.pid
    with pytest.raises(Busy, match=f"pid={process.pid}"), leases.hold(folder, wait_s=0.2):
        pass
    process.kill()
    process.wait()
    assert not leases.is_held(folder), "the kernel knows that its holder is gone"
    with leases.hold(folder):
        assert leases.is_held(folder)
        assert leases.holder(folder).pid == os.getpid()
        assert files(folder) == ["2"], "what came before is cleared away"
    assert not leases.is_held(folder)
    with leases.hold(folder):
        assert files(folder) == ["3"], "a number is not used twice"


def test_the_lease_of_another_host_expires_by_itself(tmp_path):
    folder = tmp_path / "lease"
    leases.take(folder).close()
    elsewhere(folder, age_s=leases.LEASE_S / 2)
    assert leases.is_held(folder)
    with pytest.raises(Busy):
        leases.take(folder)
    elsewhere(folder, age_s=leases.LEASE_S + 5)
    assert not leases.is_held(folder)
    with leases.hold(folder):
        assert leases.is_held(folder)


def test_a_holder_that_is_alive_is_heard_of(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.05)
    folder = tmp_path / "lease"
    heart = leases._Heart()
    monkeypatch.setattr(leases, "_heart", heart)
    with leases.hold(folder):
        elsewhere(folder, age_s=leases.LEASE_S + 5)
        wait_for(lambda: leases.is_held(folder))


def test_a_holder_that_was_taken_for_dead_finds_out_and_leaves_the_new_one_alone(tmp_path):
    folder = tmp_path / "lease"
    told = []
    late = leases.take(folder, on_lost=lambda: told.append(True))
    elsewhere(folder, age_s=leases.LEASE_S + 5)
    with leases.hold(folder):
        before = os.stat(folder / "2").st_mtime_ns
        late.beat()
        assert (late.lost, told) == (True, [True])
        late.close()
        assert os.stat(folder / "2").st_mtime_ns == before
        assert leases.is_held(folder)


def test_of_many_that_find_a_stale_lease_one_gets_it(tmp_path):
    folder = tmp_path / "lease"
    for turn in range(20):
        leases.take(folder).close()
        got, refused = [], []
        barrier = threading.Barrier(8)

        def grab(barrier=barrier, got=got, refused=refused) -> None:
            barrier.wait()
            try:
                got.append(leases.take(folder))
            except Busy:
                refused.append(True)

        threads = [threading.Thread(target=grab) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(got), len(refused)) == (1, 7), turn
        assert leases.is_held(folder)
        got[0].close()


def test_one_that_looked_long_ago_does_not_get_a_number_that_was_in_use(tmp_path, monkeypatch):
    folder = tmp_path / "lease"
    leases.take(folder).close()
    link, current = os.link, []

    def others_come_first(source, target) -> None:
        if not current:  # two others take the lease while this one is between its look and its link
            monkeypatch.setattr(os, "link", link)
            leases.take(folder).close()
            current.append(leases.take(folder))
        link(source, target)

    monkeypatch.setattr(os, "link", others_come_first)
    with pytest.raises(Busy):
        leases.take(folder)
    assert files(folder) == ["3"]
    assert leases.is_held(folder)
    current[0].close()


def test_a_holder_that_hangs_can_be_killed(tmp_path, holder):
    folder = tmp_path / "lease"
    process = holder(folder)
    process.stdout.readline()
    process.send_signal(19)  # SIGSTOP: nothing short of SIGKILL ends it now
    assert leases.kill_holder(folder)
    assert process.wait(timeout=10) == -9
    assert not leases.is_held(folder)


def test_a_process_of_another_host_is_not_killed_here(tmp_path, holder):
    folder = tmp_path / "lease"
    process = holder(folder)
    process.stdout.readline()
    elsewhere(folder, age_s=0)
    assert not leases.kill_holder(folder)
    assert process.poll() is None


def test_a_holder_whose_file_is_damaged_is_believed_for_its_heartbeat(tmp_path):
    folder = tmp_path / "lease"
    lease = leases.take(folder)
    (folder / "1").write_text("{")
    assert leases.holder(folder) is None
    assert leases.is_held(folder)
    lease.close()
    assert not leases.is_held(folder)


def wait_for(condition, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
