"""Who looks after this now? Leases between processes, on one host or on several that share a directory.

A lease is a folder of numbered files, and the highest number is in force. It is taken by creating the next number,
which only one process can do; it is given back by setting its time to 0, never by deleting it, so that a number is not
used twice. It ends by itself when its holder has not touched it for `LEASE_S`. Times are those of the file system, so
hosts need no common clock. On the holder's own host the kernel says at once that the holder has died: it keeps a lock
on its file for as long as it lives.
"""

import fcntl
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

LEASE_S = 60.0
"""A holder that was not heard of for so many seconds has lost its lease."""

HEARTBEAT_S = 10.0
POLL_S = 0.1


class Busy(Exception):
    """Another process holds the lease."""


@dataclass(frozen=True)
class Holder:
    """Who took a lease.

    Attributes:
        host: name of the host, with what tells its boots and process namespaces apart.
        pid: process id on that host.
        oom_kills: how often that host's kernel had killed for lack of memory by then.
    """

    host: str
    pid: int
    oom_kills: int


class Lease:
    """A lease that this process holds; `close` gives it back.

    Attributes:
        lost: another process took it over, because this one was not heard of for too long.
    """

    def __init__(self, path: Path, file: IO[str], on_lost: Callable[[], None] | None) -> None:
        self._path, self._file, self._on_lost = path, file, on_lost
        self.lost = False

    def close(self) -> None:
        """Give it back."""
        _heart.forget(self)
        if not self.lost:
            with suppress(FileNotFoundError):
                os.utime(self._path, (0, 0))
        self._file.close()

    def beat(self) -> None:
        """Stay the holder for another `LEASE_S`, or find out that it is too late."""
        if _highest(self._path.parent) == int(self._path.name):
            with suppress(OSError):  # a file server that is away for a moment costs a heartbeat, not the lease
                os.utime(self._path)
        else:
            self.lost = True
            _heart.forget(self)
            if self._on_lost is not None:
                self._on_lost()


def take(folder: Path, wait_s: float = 0.0, on_lost: Callable[[], None] | None = None) -> Lease:
    """Take a lease and keep it alive until it is closed or this process ends.

    Args:
        folder: stands for what is leased; made if needed.
        wait_s: seconds to wait for another holder.
        on_lost: called in the heartbeat's thread when another process has taken the lease over.

    Raises:
        Busy: it is still held after that time; says by whom.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            lease = _try(folder, on_lost)
        except Busy:
            if time.monotonic() >= deadline:
                raise
            time.sleep(POLL_S)
        else:
            _heart.keep(lease)
            return lease


@contextmanager
def hold(folder: Path, wait_s: float = 0.0, on_lost: Callable[[], None] | None = None) -> Iterator[None]:
    """`take` for the length of a block."""
    lease = take(folder, wait_s, on_lost)
    try:
        yield
    finally:
        lease.close()


def is_held(folder: Path) -> bool:
    """Whether some process holds the lease now."""
    number = _highest(folder)
    return number > 0 and _in_force(folder / str(number), time.time())


def holder(folder: Path) -> Holder | None:
    """Who took the lease last; None when nobody did or the file cannot be read."""
    return _read(folder / str(_highest(folder)))


def kill_holder(folder: Path, wait_s: float = 10.0) -> bool:
    """End the process that holds the lease, if it runs on this host; whether it is gone afterwards.

    SIGKILL, since a hung process answers to nothing else.
    """
    file = folder / str(_highest(folder))
    found = _read(file)
    if found is None or found.host != this_host():
        return False
    deadline = time.monotonic() + wait_s
    while not _is_unlocked(file) and time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.kill(found.pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return _is_unlocked(file)


@cache
def this_host() -> str:
    """A name that processes share only if they see the same process ids."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def oom_kills() -> int:
    """How many processes this host's kernel has killed for lack of memory, of the host's or of a control group."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _try(folder: Path, on_lost: Callable[[], None] | None) -> Lease:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".")
    file = os.fdopen(descriptor, "w", encoding="utf-8")
    try:
        json.dump(asdict(Holder(this_host(), os.getpid(), oom_kills())), file)
        file.flush()
        with suppress(OSError):  # a file system without locks: the heartbeat alone has to do
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        last = _highest(folder)
        if last and _in_force(folder / str(last), os.fstat(descriptor).st_mtime):
            raise Busy(f"{folder} is held by {_read(folder / str(last))}")
        mine = folder / str(last + 1)
        try:
            os.link(name, mine)
        except FileExistsError:
            raise Busy(f"{folder} was just taken") from None
        # Whoever looked long ago may have created a number that was in use and removed since.
        if _highest(folder) != last + 1:
            mine.unlink()
            raise Busy(f"{folder} was just taken")
    except BaseException:
        file.close()
        raise
    finally:
        os.unlink(name)
    for number in _numbers(folder):
        if number <= last:
            (folder / str(number)).unlink(missing_ok=True)
    return Lease(mine, file, on_lost)


def _in_force(file: Path, now: float) -> bool:
    try:
        touched = file.stat().st_mtime
    except FileNotFoundError:
        return True  # it was there a moment ago: somebody took the next number
    if not touched or now - touched > LEASE_S:
        return False
    found = _read(file)
    return not (found is not None and found.host == this_host() and _is_unlocked(file))


def _is_unlocked(file: Path) -> bool:
    try:
        with file.open("r") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(file: Path) -> Holder | None:
    try:
        return Holder(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _highest(folder: Path) -> int:
    return max(_numbers(folder), default=0)


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    except (FileNotFoundError, NotADirectoryError):
        return []


class _Heart:
    """The one thread of a process that touches its leases."""

    def __init__(self) -> None:
        self._leases: set[Lease] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease) -> None:
        with self._lock:
            self._leases.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                self._thread.start()

    def forget(self, lease: Lease) -> None:
        with self._lock:
            self._leases.discard(lease)

    def _run(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            with self._lock:
                leases = list(self._leases)
            for lease in leases:
                lease.beat()


_heart = _Heart()
