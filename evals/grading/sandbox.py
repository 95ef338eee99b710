"""Run programs nobody trusts: in a sandbox, under limits, one isolated process per program.

Three rungs. `bubblewrap`: namespaces of its own (files, processes, network, users), a read-only interpreter and a
private `/tmp`, with the next rung's filters inside. `landlock`: the running kernel's Landlock and seccomp, for which
no privilege and no installed tool is needed; nothing can be written anywhere. `none`: resource limits alone, never
chosen unless named.

On each rung a bare interpreter, the zygote, is started once and forks one child per program (`jail`). The child
cannot start processes, send signals, open sockets or see another process; it gets its own pipes and its own limits,
and dies with everything it holds before the next program starts. If it leaves a file behind, the zygote is replaced.
The parent only ever talks to the child through pipes that it polls, so neither can block the other.
"""

import atexit
import functools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.grading.jail import landlock, seccomp, zygote

RUNGS = ("bubblewrap", "landlock", "none")

_JAIL = Path(__file__).with_name("jail")
_START_S = 30.0
_TICK_S = 0.025
_PIPE_BYTES = 1 << 16
_TMPFS_BYTES = 64 << 20
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program gets the same verdict every time
    "PYTHONDONTWRITEBYTECODE": "1",
    # One thread per library: a second would be lost in the fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_BOOT = "import sys; sys.path.append(sys.argv.pop()); from jail import zygote; sys.path.pop(); zygote.main()"


class SandboxUnavailable(RuntimeError):
    """No sandbox can be had here: programs are not run, and the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use.

    Attributes:
        cpu_s: CPU seconds per test, rounded up to whole seconds.
        wall_s: seconds per test by the clock, for programs that sleep; None for twice `cpu_s` and two more. Time spent
            waiting for a processor is not counted: a machine busy with other things must not change a verdict.
        memory_bytes: address space.
        output_bytes: length of the output of one test.
        file_bytes: length of a file.
        threads: threads at a time. Counted every 25 ms, so a burst can get beyond it for that long.
    """

    cpu_s: float = 6.0
    wall_s: float | None = None
    memory_bytes: int = 2 << 30
    output_bytes: int = 16 << 20
    file_bytes: int = 16 << 20
    threads: int = 64

    @property
    def whole_cpu_s(self) -> int:
        return max(1, -int(-self.cpu_s // 1))

    @property
    def clock_s(self) -> float:
        return 2 * self.cpu_s + 2 if self.wall_s is None else self.wall_s


@dataclass(frozen=True)
class Ending:
    """How a program ended.

    Attributes:
        reason: `exited`, `timeout`, `output_limit`, `process_limit` or, for a fault of the sandbox, `lost`.
        exit_code: as `subprocess` has it: negative for a signal; None when lost.
    """

    reason: str
    exit_code: int | None = None


@dataclass(frozen=True)
class RungStatus:
    """Whether a rung works here; if not, why, and what would change it."""

    name: str
    usable: bool
    reason: str
    remedy: str


def available_rung() -> str | None:
    """The best rung that works here, found by running a program in it once per process; None when there is none."""
    return next((rung for rung in ("bubblewrap", "landlock") if _fault(rung) is None), None)


def choose_rung(rung: str | None = None) -> str:
    """The rung to use: the one named, else the best.

    Raises:
        ValueError: unknown name.
        SandboxUnavailable: it does not work here. `none` is accepted only by name.
    """
    if rung is not None and rung not in RUNGS:
        raise ValueError(f"unknown sandbox rung {rung!r}; known: {', '.join(RUNGS)}")
    chosen = rung or available_rung()
    if chosen is None:
        faults = "; ".join(f"{status.name}: {status.reason}" for status in rung_report() if not status.usable)
        raise SandboxUnavailable(f"no sandbox to run programs in ({faults}). {_remedy('bubblewrap')}")
    fault = _fault(chosen)
    if fault is not None:
        raise SandboxUnavailable(f"the sandbox rung {chosen!r} does not work here: {fault}. {_remedy(chosen)}")
    return chosen


def rung_report() -> list[RungStatus]:
    """Every rung with whether it works here, the reason and the remedy, best first."""
    faults = {rung: _fault(rung) for rung in ("bubblewrap", "landlock")}
    report = [
        RungStatus(rung, fault is None, fault or "works", "" if fault is None else _remedy(rung))
        for rung, fault in faults.items()
    ]
    return [*report, RungStatus("none", False, "no isolation: used only when the config names it", "")]


class Running:
    """One program in its sandbox, the parent's side of it. Made by `start_program`."""

    def __init__(self, parent: "_Zygote", job: dict[str, Any], stdin: bytes, limits: Limits, num_tests: int) -> None:
        self.ending: Ending | None = None
        self.stdout = bytearray()
        self._zygote = parent
        self._limits = limits
        self._lines = bytearray()
        if job["fn_name"] is None:
            (stdin_read, self._stdin), (self._stdout, stdout_write) = os.pipe(), os.pipe()
        else:  # what a function prints is nobody's business
            stdin_read, self._stdin = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
            self._stdout, stdout_write = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
        channel, theirs = socket.socketpair()
        self._channel = channel.detach()
        self._readers = {self._channel: self._lines, self._stdout: self.stdout}
        self._writers = {self._channel: memoryview(_json_line(job)), self._stdin: memoryview(stdin)}
        for descriptor in (self._channel, self._stdin, self._stdout):
            os.set_blocking(descriptor, False)
        request = zygote.LIMITS.pack(job["cpu_s"], job["cpu_s"] * num_tests, limits.memory_bytes, limits.file_bytes)
        if not parent.send(request, [theirs.fileno(), stdin_read, stdout_write]):
            self.ending = Ending("lost")
        theirs.close()
        os.close(stdin_read)
        os.close(stdout_write)
        for descriptor in list(self._writers):
            self._write(descriptor)

    def call(self, arguments: bytes) -> bytes | None:
        """Have the program's function called with a JSON list of arguments; its reply, None if the program ended."""
        unsent = bytes(self._writers.get(self._channel, b""))
        self._writers[self._channel] = memoryview(unsent + arguments + b"\n")
        self._write(self._channel)
        self._work(until_line=True)
        return self.message()

    def message(self) -> bytes | None:
        """The next line that the program's process has sent over the channel, if there is one."""
        end = self._lines.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._lines[:end])
        del self._lines[: end + 1]
        return line

    def wait(self) -> Ending:
        """Run the program to its end or its limits; afterwards `stdout` is whole."""
        self._work(until_line=False)
        assert self.ending is not None
        return self.ending

    def close(self) -> None:
        """Kill the program if it still runs, and let go of its pipes."""
        if self.ending is None:
            self._kill("exited")
        for descriptor in {self._channel, self._stdout, *self._writers}:
            os.close(descriptor)

    def _work(self, until_line: bool) -> None:
        """Move bytes until the program has sent a line or ended; end it at a limit."""
        now = started = time.monotonic()
        deadline, next_count = now + self._limits.clock_s, now + _TICK_S
        while self.ending is None and not (until_line and b"\n" in self._lines):
            now = time.monotonic()
            if now >= deadline:
                deadline = started + self._limits.clock_s + self._zygote.waited_s()
                if now >= deadline:
                    self._kill("timeout")
            elif now >= next_count:
                next_count = now + _TICK_S
                if self._zygote.num_threads() > self._limits.threads:
                    self._kill("process_limit")
            else:
                self._move_bytes(min(deadline, next_count) - now)

    def _move_bytes(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._zygote.control, select.POLLIN)
        for descriptor in self._readers.keys() | self._writers.keys():
            poll.register(
                descriptor,
                select.POLLIN * (descriptor in self._readers) | select.POLLOUT * (descriptor in self._writers),
            )
        for descriptor, events in poll.poll(1000 * timeout_s + 1):
            if descriptor == self._zygote.control.fileno():
                self._end("exited")
                return
            if descriptor in self._writers and events & ~select.POLLIN:
                self._write(descriptor)
            if descriptor in self._readers and events & ~select.POLLOUT:
                self._read(descriptor)
        if self._is_over_output():
            self._kill("output_limit")

    def _write(self, descriptor: int) -> None:
        """Write what the pipe takes now. The program may have closed its end, which is its own affair."""
        unsent = self._writers.pop(descriptor)
        try:
            unsent = unsent[os.write(descriptor, unsent) :] if unsent else unsent
        except BlockingIOError:
            pass
        except OSError:
            unsent = unsent[:0]
        if unsent:
            self._writers[descriptor] = unsent
        elif descriptor == self._stdin:
            os.close(descriptor)

    def _read(self, descriptor: int) -> bool:
        """Take what the pipe has now; whether there may be more."""
        try:
            chunk = os.read(descriptor, _PIPE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        self._readers[descriptor] += chunk
        if not chunk:
            del self._readers[descriptor]
        return bool(chunk)

    def _is_over_output(self) -> bool:
        return max(len(self.stdout), len(self._lines)) > self._limits.output_bytes

    def _kill(self, reason: str) -> None:
        self._zygote.kill_program()
        self._end(reason)

    def _end(self, reason: str) -> None:
        """Take the zygote's word on how the program ended, and what is still in the pipes."""
        told = self._zygote.receive()
        for descriptor in list(self._readers):
            while self._read(descriptor) and not self._is_over_output():
                pass
        if told is None:
            self.ending = Ending("lost")
            return
        exit_code, cpu_s = told
        if reason == "exited" and self._is_over_output():
            reason = "output_limit"
        # SIGXCPU at the soft limit; SIGKILL a second later for a program that handles that.
        elif reason == "exited" and (exit_code == -24 or (exit_code == -9 and cpu_s >= self._limits.whole_cpu_s)):
            reason = "timeout"
        self.ending = Ending(reason, exit_code)


@contextmanager
def start_program(
    program: str,
    *,
    fn_name: str | None = None,
    stdin: bytes = b"",
    num_tests: int = 1,
    limits: Limits | None = None,
    rung: str,
    packages: bool = False,
    prelude: bool = False,
    any_exit_code: bool = False,
) -> Iterator[Running]:
    """Start a program in its own isolated process, as a script or, with `fn_name`, to have its function called.

    The process is dead when the block is left.

    Args:
        program: the source text.
        fn_name: function, or method of `class Solution`, for `Running.call`.
        stdin: standard input of a script.
        num_tests: calls to come; the process may use that many times the CPU limit.
        rung: from `choose_rung`.
        packages: whether installed packages can be imported.
        prelude: whether the names LeetCode solutions assume are defined.
        any_exit_code: whether `sys.exit` with any code ends the program normally.
    """
    limits = limits or Limits()
    job = {
        "program": program,
        "fn_name": fn_name,
        "cpu_s": limits.whole_cpu_s,
        "packages": packages,
        "prelude": prelude,
        "any_exit_code": any_exit_code,
    }
    parent = _take_zygote((rung, packages, prelude))
    try:
        running = Running(parent, job, stdin, limits, num_tests)
        try:
            yield running
        finally:
            running.close()
    except BaseException:
        parent.close()
        raise
    _give_back(parent)


_Key = tuple[str, bool, bool]
"""What a zygote is started for: the rung, whether with packages, whether with the prelude."""


class _Zygote:
    """A warm interpreter in a sandbox, one program at a time; `jail.zygote` is its other half.

    Raises:
        SandboxUnavailable: it did not start.
    """

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.healthy = True
        self._num_programs = 0
        self._requests, their_requests = socket.socketpair()
        self.control, their_control = socket.socketpair()
        self.control.settimeout(_START_S)
        # What goes wrong at the start is written to descriptor 2, and so comes to us.
        streams = {zygote.REQUESTS: their_requests.fileno(), zygote.CONTROL: their_control.fileno()}
        self._process = subprocess.Popen(
            _command(*key),
            stdin=streams[0],
            stdout=subprocess.DEVNULL,
            stderr=streams[2],
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the parent
        )
        their_requests.close()
        their_control.close()
        message = b""
        with suppress(TimeoutError):
            while not message.endswith(b"ready") and (chunk := self.control.recv(4096)):
                message += chunk
        if not message.endswith(b"ready"):
            self._process.kill()
            self.close()
            lines = message.decode(errors="replace").strip().splitlines()
            raise SandboxUnavailable(f"the sandbox did not start: {lines[-1] if lines else 'no message'}")
        children = _children(self._process.pid)
        self._pid = children[0] if key[0] == "bubblewrap" and children else self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, request: bytes, descriptors: list[int]) -> bool:
        """Have a program started with these limits and descriptors; whether there was someone to take them."""
        self._num_programs += 1
        try:
            socket.send_fds(self._requests, [request], descriptors)
        except OSError:
            self.healthy = False
        return self.healthy

    def kill_program(self) -> None:
        with suppress(OSError):
            self.control.sendall(zygote.KILL.pack(self._num_programs))

    def receive(self) -> tuple[int, float] | None:
        """Exit code and CPU seconds of the program; None, and an unhealthy zygote, when no word comes."""
        try:
            reply = self.control.recv(zygote.ENDING.size)
        except OSError:
            reply = b""
        if len(reply) != zygote.ENDING.size:
            self.healthy = False
            return None
        exit_code, cpu_s, leftovers = zygote.ENDING.unpack(reply)
        self.healthy = self.healthy and not leftovers
        return exit_code, cpu_s

    def num_threads(self) -> int:
        """Threads of the program that runs now; 0 where `/proc` does not tell."""
        try:
            return sum(len(os.listdir(f"/proc/{child}/task")) for child in _children(self._pid))
        except OSError:
            return 0

    def waited_s(self) -> float:
        """Seconds for which the program that runs now was ready and had no processor; 0 where `/proc` is silent."""
        try:
            paths = [Path(f"/proc/{child}/schedstat") for child in _children(self._pid)]
            return sum(int(path.read_text().split()[1]) for path in paths) / 1e9
        except (OSError, IndexError):
            return 0.0

    def close(self) -> None:
        """The zygote ends, and its program with it, when the sockets close."""
        self.healthy = False
        self.forget()
        try:
            self._process.wait(_START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Let go of the sockets without waiting."""
        self._requests.close()
        self.control.close()


_idle: dict[_Key, list[_Zygote]] = {}
_idle_lock = threading.Lock()


def _take_zygote(key: _Key) -> _Zygote:
    """The zygote that has rested longest, so that its next child is ready.

    There is one more than programs at a time: it warms up while the other's program runs.
    """
    with _idle_lock:
        waiting = _idle.get(key, [])
        dead = [parent for parent in waiting if not parent.is_alive()]
        for parent in dead:
            waiting.remove(parent)
        rested = waiting.pop(0) if len(waiting) > 1 else None
    for parent in dead:
        parent.close()
    return rested or _Zygote(key)


def _give_back(parent: _Zygote) -> None:
    if not parent.healthy:
        parent.close()
        return
    with _idle_lock:
        _idle.setdefault(parent.key, []).append(parent)


def close_idle() -> None:
    """End the warm interpreters that wait for a program; the next program starts a new one."""
    with _idle_lock:
        parents = [parent for waiting in _idle.values() for parent in waiting]
        _idle.clear()
    for parent in parents:
        parent.close()


def _forget_after_fork() -> None:
    # Two processes talking to one zygote would get each other's endings.
    global _idle_lock
    _idle_lock = threading.Lock()
    for waiting in _idle.values():
        for parent in waiting:
            parent.forget()
            parent._process.returncode = 0  # not ours to wait for
    _idle.clear()


atexit.register(close_idle)
os.register_at_fork(after_in_child=_forget_after_fork)


def _command(rung: str, packages: bool, prelude: bool) -> list[str]:
    """The command line of a zygote."""
    # Host path -> path in the sandbox. What may lie anywhere, under `/tmp` too, gets a place of its own.
    in_bubblewrap = rung == "bubblewrap"
    jail = {str(_JAIL): "/sandbox/jail" if in_bubblewrap else str(_JAIL)}
    site_packages = {
        path: f"/sandbox/packages/{i}" if in_bubblewrap else path
        for i, path in enumerate(_site_packages() if packages else [])
    }
    prefix = os.path.realpath(sys.base_prefix)
    visible = {path: path for path in (prefix, *_LIBRARIES, *_DEVICES)} | jail | site_packages
    settings = {
        "confine": rung != "none",
        "landlock": rung != "none" and landlock.abi() > 0,
        "readable": list(visible.values()),
        "writable": ["/tmp"] if in_bubblewrap else [],
        "site_packages": list(site_packages.values()),
        "prelude": prelude,
    }
    executable = os.path.realpath(sys.executable)
    boot_path = os.path.dirname(jail[str(_JAIL)])
    python = [executable, "-S", "-s", "-P", "-c", _BOOT, json.dumps(settings), boot_path]
    return [*_bubblewrap(visible), *python] if in_bubblewrap else python


def _bubblewrap(visible: dict[str, str]) -> list[str]:
    """Namespaces of every kind, no privilege, nothing to be seen but the interpreter, and a small private `/tmp`."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--cap-drop", "ALL", "--as-pid-1", "--chdir", "/tmp"]
    command += ["--hostname", "sandbox", "--size", str(_TMPFS_BYTES), "--tmpfs", "/tmp"]
    for source, target in visible.items():
        if source in _DEVICES:
            command += ["--dev-bind-try", source, target]
        elif source in _LIBRARIES and os.path.islink(source):
            command += ["--symlink", os.readlink(source), target]
        else:
            command += ["--ro-bind-try", source, target]
    return [*command, "--remount-ro", "/", "--"]


def _site_packages() -> list[str]:
    """Where this interpreter finds installed packages."""
    paths = [os.path.realpath(path) for path in sys.path]
    return [path for path in dict.fromkeys(paths) if os.path.basename(path) in ("site-packages", "dist-packages")]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _json_line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


_PROBE = """
import os
def refused(action):
    try:
        action()
    except OSError:
        return True
    return False
print([refused(lambda: open("/etc/passwd")), refused(os.fork), refused(lambda: open("/sandbox-probe", "w"))])
"""


@functools.cache
def _fault(rung: str) -> str | None:
    """Why a rung cannot be used here, None when a program ran in it and could do no harm."""
    if rung == "none":
        return None if os.name == "posix" else "needs a POSIX system"
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    if not seccomp.supported():
        return "needs a 64-bit x86 or ARM processor"
    if rung == "bubblewrap" and shutil.which("bwrap") is None:
        return "the program `bwrap` is not installed"
    if rung == "landlock" and landlock.abi() == 0:
        return "the kernel has no Landlock, or it is switched off"
    try:
        with start_program(_PROBE, rung=rung) as running:
            ending = running.wait()
            output = running.stdout.decode(errors="replace").strip()
    except SandboxUnavailable as fault:
        return str(fault)
    if ending.reason != "exited" or ending.exit_code != 0:
        return f"a trial program did not run ({ending.reason}, exit code {ending.exit_code})"
    return None if output == "[True, True, True]" else "a trial program was not held back"


def _remedy(rung: str) -> str:
    if rung == "landlock":
        return (
            "Landlock needs Linux 5.13 or later with `landlock` among the security modules "
            "(boot parameter `lsm=landlock,...`)."
        )
    return (
        "Install bubblewrap 0.8 or later (Debian and Ubuntu: `apt install bubblewrap`) and allow user namespaces "
        "(Ubuntu 24.04: an AppArmor profile for bwrap), or use Linux 5.13 or later with Landlock. "
        "On other systems run inside a Linux container or virtual machine."
    )
