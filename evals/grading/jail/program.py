"""Run one program in the child that was forked and confined for it; the last thing this process does.

The channel carries one JSON object per line: the job in, then, for a function, one request in and one reply out per
test. Whatever the program does to this code it does to itself: the parent holds the expected outputs, and reads what
comes back as the program's claim about its output, nothing more.
"""

import _sitebuiltins
import atexit
import builtins
import importlib
import json
import math
import os
import resource
import sys
import time
import types
from collections.abc import Callable
from typing import IO, Any, NoReturn

CHANNEL = 3
RECURSION_LIMIT = 50_000

# Modules whose public names LeetCode solutions take for granted, in the order in which they shadow one another.
_STARRED = (
    "typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip


def make_prelude() -> dict[str, Any]:
    """The names a program finds defined when it may assume LeetCode's imports: `from typing import *` and so on."""
    names: dict[str, Any] = {}
    for module in map(importlib.import_module, _STARRED):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names.update({name: getattr(module, name) for name in public})
    names = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    return names | {name: importlib.import_module(name) for name in _STARRED}


def prepare_interpreter() -> IO[bytes]:
    """In the zygote: make the interpreter what a program expects; the reader of the channel.

    The streams are opened on pipes that stand in for those that a child will put under the same descriptors.
    """
    stand_in = os.pipe()
    for descriptor, end in ((0, 0), (1, 1), (CHANNEL, 0)):
        os.dup2(stand_in[end], descriptor)
    for descriptor in stand_in:
        if descriptor != CHANNEL:
            os.close(descriptor)
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = open(descriptor, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for name in ("exit", "quit"):  # the `site` module would have made them
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    sys.argv = ["program.py"]
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(RECURSION_LIMIT)
    return open(CHANNEL, "rb", closefd=False)


def rehearse() -> None:
    """In a child that waits: do once what is to be done, so that its pages are its own before it counts."""
    json.loads('{"a": 1}')
    exec(compile("a = 1", "<program>", "exec", dont_inherit=True), types.ModuleType("rehearsal").__dict__)


def run(channel: IO[bytes], prelude: dict[str, Any], site_packages: list[str]) -> NoReturn:
    """In the child: read the job from the channel, run it and end the process."""
    job = json.loads(channel.readline())
    if job["packages"]:
        sys.path.extend(site_packages)
    is_function = job["fn_name"] is not None
    module = types.ModuleType("solution" if is_function else "__main__")
    sys.modules[module.__name__] = module
    if job["prelude"]:
        module.__dict__.update(prelude)
    try:
        code = compile(job["program"], "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        _reply({"status": "compile_error"})
        os._exit(1)
    if is_function:
        _serve_calls(code, module, job["fn_name"], job["cpu_s"], channel)
    _run_main(code, module, job["any_exit_code"])


def _run_main(code: types.CodeType, module: types.ModuleType, any_exit_code: bool) -> NoReturn:
    """Run as a script: then, as the interpreter does, wait for threads, run exit handlers and flush."""
    exit_code = 0
    try:
        exec(code, module.__dict__)
    except SystemExit as stop:
        exit_code = 0 if any_exit_code else _exit_code(stop)
    except BaseException:
        exit_code = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except BaseException:
        exit_code = exit_code or 120
    os._exit(exit_code)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    return stop.code & 0xFF if isinstance(stop.code, int) else 1


def _serve_calls(code: types.CodeType, module: types.ModuleType, name: str, cpu_s: int, channel: IO[bytes]) -> NoReturn:
    """Load the program, then answer each request, a list of arguments, with what the function returns."""
    is_loaded = False
    for request in channel:
        _allow_cpu(cpu_s)
        try:
            if not is_loaded:
                exec(code, module.__dict__)
                is_loaded = True
            value = _find_function(module, name)(*json.loads(request))
        except BaseException:
            _reply({"status": "runtime_error"})
            break
        try:
            reply = json.dumps({"status": "ok", "value": value, "exact": _is_exact(value)}, default=_as_plain)
        except BaseException:
            reply = json.dumps({"status": "not_plain"})
        _write(reply)
    os._exit(0)


def _allow_cpu(seconds: int) -> None:
    """Start a test's allowance of CPU time. The hard limit, over all tests, was set before the program could run."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(hard, math.ceil(time.process_time()) + seconds), hard))


def _find_function(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """A method of a fresh `Solution`, else a function of the module."""
    solution = getattr(module, "Solution", None)
    owner = solution() if solution is not None and hasattr(solution, name) else module
    return getattr(owner, name)


def _as_plain(value: Any) -> Any:
    """NumPy scalars and arrays as numbers and lists; anything else is not data."""
    if type(value).__module__.partition(".")[0] == "numpy":
        return value.tolist()
    raise TypeError(f"not plain data: {type(value).__name__}")


def _is_exact(value: Any, depth: int = 0) -> bool:
    """Whether JSON keeps the value apart from its likes: no tuples below the top, no keys that are not strings."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_exact(item, depth + 1) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (depth == 0 or isinstance(value, list)) and all(_is_exact(item, depth + 1) for item in value)
    return True


def _reply(message: dict[str, Any]) -> None:
    _write(json.dumps(message))


def _write(line: str) -> None:
    data = memoryview(line.encode() + b"\n")
    while data:
        data = data[os.write(CHANNEL, data) :]
