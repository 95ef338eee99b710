"""The warm parent of the programs: it has the interpreter loaded, and forks one confined child per program.

The child is forked ahead, and waits with everything in place for a request: its limits, and the descriptors that
become its channel and its standard streams. The zygote never sees a program, an input or an output. It waits for the
child to end, tells how it ended, and forks the next; a message on its own socket has it kill the child, and the end
of that socket makes it end.
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
import struct
import sys
from collections.abc import Callable
from typing import Any

from . import landlock, program, seccomp

REQUESTS, CONTROL = 0, 2
"""The descriptors on which the zygote is given its two sockets."""

LIMITS = struct.Struct("=qqqq")
"""A request: CPU seconds per test and in all, bytes of memory and of a file; with three descriptors."""

KILL = struct.Struct("=q")
"""A message to the zygote: the number of the program to kill, from 1. It may have ended meanwhile."""

ENDING = struct.Struct("=id?")
"""A message from the zygote: exit code, CPU seconds, whether files were left behind."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_STACK_BYTES = 120 << 20  # the kernel leaves the main thread a gap of 128 MiB to grow into
_OPEN_FILES = 128  # for a program, and the zygote has no more either
_is_linux = sys.platform.startswith("linux")


def main() -> None:
    """Serve programs until the parent closes the sockets. The settings are the JSON in `sys.argv[1]`."""
    settings = json.loads(sys.argv[1])
    # Out of the way of the descriptors of a program.
    requests = socket.socket(fileno=os.dup2(REQUESTS, 100, inheritable=False))
    control = socket.socket(fileno=os.dup2(CONTROL, 101, inheritable=False))
    prelude = program.make_prelude() if settings["prelude"] else {}
    channel = program.prepare_interpreter()
    finish_confinement = _confine(settings)
    gc.collect()
    gc.freeze()  # the collector of a child must not touch, and so copy, our pages
    control.sendall(b"ready")
    with open(os.devnull, "r+b", buffering=0) as null:
        os.dup2(null.fileno(), 2)
    number = 0
    while True:
        number += 1
        child = os.fork()
        if child == 0:
            try:
                finish_confinement()
                program.rehearse()
                _take_request(requests)
                program.run(channel, prelude, settings["site_packages"])
            finally:
                os._exit(125)
        status, cpu_s = _wait(child, number, control)
        leftovers = any(os.listdir(directory) for directory in settings["writable"])
        control.sendall(ENDING.pack(os.waitstatus_to_exitcode(status), cpu_s, leftovers))


def _confine(settings: dict[str, Any]) -> Callable[[], None]:
    """Give up what no program may have and the zygote does not need; how a child gives up the rest."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    if not _is_linux:
        return os.setsid
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    install_filter = None
    if settings["confine"]:
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no_new_privs was refused")
        seccomp.drop_capabilities()
        if settings["landlock"]:
            ruleset = landlock.make_ruleset(settings["readable"], [*settings["writable"], os.devnull])
            landlock.restrict(ruleset)
            os.close(ruleset)
        seccomp.prepare(seccomp.make_filter())()
        install_filter = seccomp.prepare(seccomp.make_program_filter())

    def finish() -> None:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if install_filter is not None:
            install_filter()

    return finish


def _take_request(requests: socket.socket) -> None:
    """In the child: wait for a request, take its limits and its descriptors, and close all others."""
    message, descriptors, _, _ = socket.recv_fds(requests, LIMITS.size, 3)
    if not message:
        os._exit(0)
    # The targets are open since the start, so none of the descriptors sent has the number of one.
    for source, target in zip(descriptors, (program.CHANNEL, 0, 1), strict=True):
        os.dup2(source, target)
    os.closerange(program.CHANNEL + 1, _OPEN_FILES)
    cpu_s, total_cpu_s, memory_bytes, file_bytes = LIMITS.unpack(message)
    _limit(resource.RLIMIT_CPU, cpu_s, total_cpu_s + 1)
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    with contextlib.suppress(ValueError):  # macOS refuses it
        _limit(resource.RLIMIT_AS, memory_bytes)


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, or keep the lower one that is in force."""
    ceiling = resource.getrlimit(which)[1]
    hard = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(which, (soft, hard))


def _wait(child: int, number: int, control: socket.socket) -> tuple[int, float]:
    """Wait for the child, killing it on demand, and kill what it left; its wait status and CPU seconds."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    exited = os.pidfd_open(child) if _is_linux else None
    if exited is not None:
        poll.register(exited, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll(None if exited is not None else 5):
            if descriptor == control.fileno():
                message = control.recv(KILL.size)
                if not message or KILL.unpack(message)[0] == number:
                    _kill(child)
                if not message:
                    _kill_leftovers(child)
                    os._exit(0)
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            if exited is not None:
                os.close(exited)
            _kill_leftovers(child)
            return status, usage.ru_utime + usage.ru_stime


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
