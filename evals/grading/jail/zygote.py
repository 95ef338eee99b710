"""The warm parent of the programs: it has the interpreter loaded, and forks one confined child per program.

It never reads a program, an input or an output: it receives descriptors, hands them to the child, waits, and tells
how the child ended. Requests come one at a time over a socket on descriptor 0; when that socket closes, or says
`kill`, the child is killed.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from . import landlock, program, seccomp

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_STACK_BYTES = 120 << 20  # the kernel leaves the main thread a gap of 128 MiB to grow into
_OPEN_FILES = 128
_PARKED, _DESCRIPTORS_END = 200, 256  # the zygote itself has a dozen descriptors open, all of low number


def main() -> None:
    """Serve programs until the parent closes the socket. The settings are the JSON in `sys.argv[1]`."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    confine = _make_confinement(settings)
    prelude = program.make_prelude()
    wakeup = _wake_on_child_exit()
    gc.collect()
    gc.freeze()  # the collector of a child must not touch, and so copy, our pages
    control.sendall(b"ready\n")
    with open(os.devnull, "r+b", buffering=0) as null:
        os.dup2(null.fileno(), 2)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 3)
        if not message:
            return
        message = message.removeprefix(b"kill\n")  # one that came after its child's end
        if not message:
            continue
        child = os.fork()
        if child == 0:
            _become_program(descriptors, json.loads(message), confine, prelude, settings["site_packages"])
        for descriptor in descriptors:
            os.close(descriptor)
        status, cpu_s = _wait(child, control, wakeup)
        leftovers = any(os.listdir(directory) for directory in settings["writable"])
        reply = {"exit_code": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s, "leftovers": leftovers}
        control.sendall(json.dumps(reply).encode() + b"\n")


def _make_confinement(settings: dict[str, Any]) -> Callable[[], None]:
    """What a child does to itself before it reads its program, prepared once."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not settings["confine"]:
        return lambda: None
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    bpf = seccomp.make_filter()
    devices = ["/dev/null"]
    ruleset = (
        landlock.make_ruleset(settings["readable"], settings["writable"] + devices) if settings["landlock"] else None
    )

    def confine() -> None:
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no_new_privs was refused")
        seccomp.drop_capabilities()
        if ruleset is not None:
            landlock.restrict(ruleset)
            os.close(ruleset)
        seccomp.install(bpf)

    return confine


def _become_program(
    descriptors: list[int],
    request: dict[str, Any],
    confine: Callable[[], None],
    prelude: dict[str, Any],
    site_packages: list[str],
) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        # Out of the way first: a descriptor may have arrived under a number that another is to get.
        channel, stdin, stdout = (os.dup2(descriptor, _PARKED + i) for i, descriptor in enumerate(descriptors))
        for source, target in ((stdin, 0), (stdout, 1), (channel, program.CHANNEL)):
            os.dup2(source, target)
        _set_limits(request)
        confine()
        os.closerange(program.CHANNEL + 1, _DESCRIPTORS_END)
        program.run(prelude, site_packages)
    finally:
        os._exit(125)


def _set_limits(request: dict[str, Any]) -> None:
    def limit(which: int, soft: int, hard: int | None = None) -> None:
        _, ceiling = resource.getrlimit(which)
        cap = [value if ceiling == resource.RLIM_INFINITY else min(value, ceiling) for value in (soft, hard or soft)]
        resource.setrlimit(which, (cap[0], cap[1]))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, request["cpu_s"], request["total_cpu_s"] + 1)
    limit(resource.RLIMIT_FSIZE, request["file_bytes"])
    limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    limit(resource.RLIMIT_STACK, _STACK_BYTES)
    with contextlib.suppress(ValueError):  # macOS refuses it
        limit(resource.RLIMIT_AS, request["memory_bytes"])


def _wake_on_child_exit() -> int:
    """A descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _wait(child: int, control: socket.socket, wakeup: int) -> tuple[int, float]:
    """Wait for the child, killing it on demand, and kill what it left; its wait status and CPU seconds."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            _kill_leftovers(child)
            return status, usage.ru_utime + usage.ru_stime
        for descriptor, _ in poll.poll():
            if descriptor == wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
            else:
                orphaned = not control.recv(64)
                _kill(child)
                if orphaned:
                    _kill_leftovers(child)
                    os._exit(0)


def _kill_leftovers(child: int) -> None:
    """End what outlived its program. We are the reaper of orphans, so that they turn up here as children of ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for orphan in children.read().split():
                    _kill(int(orphan))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
