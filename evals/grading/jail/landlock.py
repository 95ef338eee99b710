"""Landlock through its three system calls: a process gives up file access for itself and its children.

Numbers and layouts: the kernel's `include/uapi/linux/landlock.h`; the system calls have the same number on every
architecture. No privilege is needed, only `no_new_privs`.
"""

import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_TRUNCATE = 1 << 14
_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
"""The rights that the kernel accepts in a rule on something other than a directory."""

_FS_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
_FS_RIGHTS_SINCE_5 = 16
_NET_RIGHTS, _SCOPES = 0b11, 0b11  # bind and connect over TCP; abstract sockets and signals

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """The Landlock version of the running kernel, 0 where it has none or has it switched off."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, version)


def make_ruleset(readable: Iterable[str], writable: Iterable[str]) -> int:
    """A ruleset that allows only this: reading beneath `readable`, reading and writing beneath `writable`.

    Paths that do not exist are left out. Executing, connecting over TCP, and signals or abstract sockets to processes
    outside are never allowed, as far as the kernel's version knows them.

    Returns:
        A file descriptor for `restrict`.
    """
    version = abi()
    handled = (1 << _FS_RIGHTS_BY_ABI.get(version, _FS_RIGHTS_SINCE_5)) - 1
    # Older kernels refuse a structure with fields they do not know unless those are zero.
    net = _NET_RIGHTS if version >= 4 else 0
    scopes = _SCOPES if version >= 6 else 0
    attributes = struct.pack("=QQQ", handled, net, scopes)
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(24), ctypes.c_uint32(0)))
    for paths, rights in ((readable, _READ), (writable, _WRITE)):
        for path in paths:
            _allow(ruleset, path, rights & handled)
    return ruleset


def restrict(ruleset: int) -> None:
    """Bind this thread, and whatever it starts, to the ruleset for good."""
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)))


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= _OF_FILES
    rule = struct.pack("=Qi", rights, descriptor)
    try:
        _checked(_libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, ctypes.c_uint32(0)))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
