"""Grade a program by its tests, in a sandbox, by comparing its outputs here, where it cannot reach.

The program's process is given inputs and nothing else. What it sends back is read as data, so the only way to pass is
to produce the expected output. Each test of a script runs in a process of its own; the tests of a function share one,
as on LeetCode, and each sees its input only when the one before it has been answered.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evals.grading.code_compare import read_json, same_text, same_value
from evals.grading.code_extract import extract_program
from evals.grading.sandbox import Ending, Limits, Running, choose_rung, close_idle, start_program
from evals.grading.verdict import Grade, TestResult

__all__ = ["MODES", "REASONS", "extract_program", "grade_program"]

MODES = ("strict", "official")
REASONS = (
    "passed", "wrong_answer", "runtime_error", "timeout", "output_limit", "compile_error", "no_tests", "sandbox_error",
)  # fmt: skip

_ATTEMPTS = 2


def grade_program(
    program: str | None,
    tests: Sequence[Mapping[str, str]],
    *,
    fn_name: str | None = None,
    time_limit_s: float = 6.0,
    mode: str = "strict",
    packages: bool = False,
    rung: str | None = None,
    limits: Limits | None = None,
) -> Grade:
    """Run a program on its tests, up to the first that it does not pass.

    Args:
        program: source text; None, for a completion without one, is a compile error.
        tests: `{"input": ..., "output": ...}` each: standard input and output, or, with `fn_name`, one JSON argument
            per line and a JSON value.
        fn_name: name of a method of `class Solution`, or of a function.
        time_limit_s: CPU seconds per test, rounded up to whole seconds; twice as much and two more for one that sleeps.
        mode: `strict`, or `official` for the verdicts of LiveCodeBench's own checker: decimals must be equal, nested
            tuples are not lists, any code of `sys.exit` will do, and LeetCode's imports are always there.
        packages: whether installed packages, and the names LeetCode solutions assume, may be used.
        rung: sandbox rung by name; the best that works here by default.
        limits: the other limits; `time_limit_s` replaces its CPU limit.

    Returns:
        A grade whose reason is one of `REASONS`. `no_tests` and `sandbox_error` say nothing about the program.

    Raises:
        ValueError: unknown mode or rung; a test of a function that is not JSON.
        SandboxUnavailable: there is no sandbox here.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r} of grading code; known: {', '.join(MODES)}")
    if not tests:
        return Grade(correct=False, reason="no_tests")
    if program is None:
        return Grade(correct=False, reason="compile_error")
    sandbox: dict[str, Any] = {
        "limits": replace(limits or Limits(), cpu_s=time_limit_s),
        "rung": choose_rung(rung),
        "packages": packages,
        "prelude": packages or mode == "official",
        "any_exit_code": mode == "official",
    }
    results = [TestResult(False, "sandbox_error", 0.0)]
    for _ in range(_ATTEMPTS):
        if fn_name is None:
            results = list(_run_script(program, tests, mode, sandbox))
        else:
            results = list(_run_function(program, tests, fn_name, mode, sandbox))
        if results[-1].reason != "sandbox_error":
            break
        close_idle()  # what ended one sandbox may have ended those that wait
    correct = len(results) == len(tests) and results[-1].passed
    return Grade(correct, results[-1].reason, per_test=tuple(results))


def _run_script(
    program: str, tests: Sequence[Mapping[str, str]], mode: str, sandbox: dict[str, Any]
) -> Iterator[TestResult]:
    for test in tests:
        started = time.monotonic()
        with start_program(program, stdin=test["input"].encode(errors="surrogatepass"), **sandbox) as running:
            reason = _reason(running.wait(), running)
            output = running.stdout.decode(errors="replace")
        if reason is None:
            reason = "passed" if same_text(output, test["output"], mode) else "wrong_answer"
        yield TestResult(reason == "passed", reason, time.monotonic() - started)
        if reason != "passed":
            return


def _run_function(
    program: str, tests: Sequence[Mapping[str, str]], fn_name: str, mode: str, sandbox: dict[str, Any]
) -> Iterator[TestResult]:
    calls = [_parse_call(i, test) for i, test in enumerate(tests)]
    with start_program(program, fn_name=fn_name, num_tests=len(calls), **sandbox) as running:
        for arguments, expected in calls:
            started = time.monotonic()
            reply = running.call(arguments)
            ending = running.ending
            if reply is not None and (ending is None or ending.reason == "exited"):
                reason = _judge_reply(reply, expected, mode)
            else:
                reason = (_reason(ending, running) if ending is not None else None) or "runtime_error"
            yield TestResult(reason == "passed", reason, time.monotonic() - started)
            if reason != "passed":
                return


def _reason(ending: Ending, running: Running) -> str | None:
    """The verdict on a program that ended without fault of the comparison; None when its output is to be compared."""
    if ending.reason in ("timeout", "output_limit"):
        return ending.reason
    if ending.reason == "lost":
        return "sandbox_error"
    if ending.reason == "exited" and ending.exit_code == 0:
        return None
    # The process says so itself; that a program may claim it too only makes it fail under another name.
    return "compile_error" if running.message() == b'{"status": "compile_error"}' else "runtime_error"


def _parse_call(index: int, test: Mapping[str, str]) -> tuple[bytes, Any]:
    """The JSON list of arguments, one per line of the input, and the value expected."""
    lines = [line for line in test["input"].split("\n") if line.strip()]
    try:
        for line in lines:
            read_json(line)
        return f"[{', '.join(lines)}]".encode(), read_json(test["output"])
    except ValueError as error:
        raise ValueError(f"test {index} of a function is not JSON: {error}") from None


def _judge_reply(reply: bytes, expected: Any, mode: str) -> str:
    """Read what the process says its function returned. Anything that is not the expected value fails."""
    try:
        message = read_json(reply)
    except ValueError:
        return "runtime_error"
    if not isinstance(message, dict):
        return "runtime_error"
    status = message.get("status")
    if status == "ok":
        exact = mode == "strict" or message.get("exact") is True
        return "passed" if exact and same_value(message.get("value"), expected, mode) else "wrong_answer"
    return {"not_plain": "wrong_answer", "compile_error": "compile_error"}.get(str(status), "runtime_error")
