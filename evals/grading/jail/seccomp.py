"""The list of system calls that a program may make, as a seccomp filter, and the capabilities it gives up.

Everything absent from the list fails with ENOSYS, which libraries take for an old kernel. Absent on purpose: starting
processes or programs, signals, tracing, sockets, changing file modes or times, mounts, limits of other processes.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Callable

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# name: (number on x86_64, number on aarch64); None where the architecture has no such call
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # descriptors
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "close": (3, 57), "close_range": (436, 436),
    "lseek": (8, 62), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "sendfile": (40, 71), "ftruncate": (77, 46), "fsync": (74, 82), "fdatasync": (75, 83), "fadvise64": (221, 223),
    "sendto": (44, 206), "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210),
    # files: which of them, is Landlock's or the namespace's business
    "open": (2, None), "openat": (257, 56), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "readlink": (89, None), "readlinkat": (267, 78), "mkdir": (83, None), "mkdirat": (258, 34),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "umask": (95, 166),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "mincore": (27, 232), "msync": (26, 227),
    # threads and time
    "futex": (202, 98), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "rseq": (334, 293),
    "set_tid_address": (218, 96), "membarrier": (324, 283), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "getcpu": (309, 168),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "alarm": (37, None), "setitimer": (38, 103),
    "getitimer": (36, 102), "pause": (34, None), "times": (100, 153),
    # signals to itself alone
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # the process
    "exit": (60, 93), "exit_group": (231, 94), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156),
    "getpriority": (140, 141), "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "sysinfo": (99, 179), "uname": (63, 160), "wait4": (61, 260), "arch_prctl": (158, None), "getrandom": (318, 278),
}  # fmt: skip

_ZYGOTE_ONLY: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "kill": (62, 129), "setsid": (112, 157), "prctl": (157, 167),
    "pidfd_open": (434, 434),
}  # fmt: skip

# (numbers as above, conditions that must all hold: (argument, mask, values allowed))
_Conditional = tuple[tuple[int, int], tuple[tuple[int, int, tuple[int, ...]], ...]]

_CLONE_NEW = 0x7E020000
_THREAD = 0x10000 | 0x800 | 0x100  # CLONE_THREAD, CLONE_SIGHAND, CLONE_VM
_CLONE: _Conditional = ((56, 220), ((0, _CLONE_NEW | _THREAD, (_THREAD,)),))

_CONDITIONAL: dict[str, _Conditional] = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ; F_SETOWN sends signals
    "fcntl": ((72, 25), ((1, 0xFFFFFFFF, (0, 1, 2, 3, 4, 1030, 1031, 1032)),)),
    # TCGETS, FIONREAD, FIONBIO, FIOCLEX, TIOCGWINSZ
    "ioctl": ((16, 29), ((1, 0xFFFFFFFF, (0x5401, 0x541B, 0x5421, 0x5451, 0x5413)),)),
    # Only its own limits, which it cannot raise.
    "prlimit64": ((302, 261), ((0, 0xFFFFFFFF, (0,)),)),
    # AF_UNIX and SOCK_STREAM: what an event loop wakes itself with; a datagram socket could be addressed elsewhere.
    "socketpair": ((53, 199), ((0, 0xFFFFFFFF, (1,)), (1, 0xF, (1,)))),
}

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_X32_BIT = 0x40000000

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def supported() -> bool:
    """Whether the list covers this machine's architecture."""
    return platform.machine() in _MACHINES and struct.calcsize("P") == 8


def make_filter() -> bytes:
    """The filter of the zygote: what programs may do, and what forking them takes. Classic BPF for this machine."""
    column, audit_arch = _MACHINES[platform.machine()]
    instructions = [_op(_LOAD, 4), _op(_JUMP_EQUAL, audit_arch, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
    instructions += [_op(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1), _op(_RETURN, _ERRNO | _ENOSYS)]
    for numbers in (*_ALLOWED.values(), *_ZYGOTE_ONLY.values(), _CLONE[0]):
        instructions += _for_number(numbers[column], [_op(_RETURN, _ALLOW)])
    for numbers, conditions in _CONDITIONAL.values():
        instructions += _for_number(numbers[column], _require(conditions))
    return b"".join([*instructions, _op(_RETURN, _ERRNO | _ENOSYS)])


def make_program_filter() -> bytes:
    """The filter that a child adds to the zygote's: short, for it is installed once per program."""
    column, _ = _MACHINES[platform.machine()]
    instructions = [_op(_LOAD, 0)]
    for numbers in _ZYGOTE_ONLY.values():
        instructions += _for_number(numbers[column], [_op(_RETURN, _ERRNO | _ENOSYS)])
    numbers, conditions = _CLONE
    instructions += _for_number(numbers[column], _require(conditions))
    return b"".join([*instructions, _op(_RETURN, _ALLOW)])


def prepare(bpf: bytes) -> Callable[[], None]:
    """A function that puts the filter on this thread and whatever it starts; needs `no_new_privs`."""
    buffer = ctypes.create_string_buffer(bpf, len(bpf))
    fprog = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(bpf) // 8, ctypes.addressof(buffer)))
    prctl, address = _libc.prctl, ctypes.c_void_p(ctypes.addressof(fprog))

    def install(keep_alive: tuple[object, ...] = (buffer, fprog)) -> None:
        if prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address, 0, 0):
            raise OSError(ctypes.get_errno(), "seccomp: the filter was refused")

    return install


def drop_capabilities() -> None:
    """Give up every capability, so that root is an ordinary user who cannot raise its limits again."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def _for_number(number: int | None, body: list[bytes]) -> list[bytes]:
    """Run `body`, which must return, for this system call alone."""
    return [] if number is None else [_op(_JUMP_EQUAL, number, 0, len(body)), *body]


def _require(conditions: tuple[tuple[int, int, tuple[int, ...]], ...]) -> list[bytes]:
    """Allow the call when the low half of each argument, masked, is among its values; else it fails with EPERM."""
    instructions = []
    for argument, mask, values in conditions:
        tests = [_op(_JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
        instructions += [_op(_LOAD, 16 + 8 * argument), _op(_AND, mask), *tests, _op(_RETURN, _ERRNO | _EPERM)]
    return [*instructions, _op(_RETURN, _ALLOW)]


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)
