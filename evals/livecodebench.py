"""LiveCodeBench: releases, date windows and hidden tests.

A release holds all contest problems up to its month; papers score windows of contest dates inside one. Every score
states both. Hidden tests are JSON, or base64 of zlib of a pickled JSON text; the pickle is read with every class
refused.
"""

import base64
import binascii
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

from evals.problems import Problem
from evals.sources import RowError, Source, column, text

RELEASE_ENDS = {  # last month of contests in each release; all of them begin in May 2023
    "v1": (2024, 3),
    "v2": (2024, 5),
    "v3": (2024, 7),
    "v4": (2024, 9),
    "v5": (2025, 1),
    "v6": (2025, 4),
}
TIME_LIMIT_S = 6.0  # per test, as upstream
MAX_TEST_BYTES = 1 << 30  # decompressed hidden tests of one problem; the largest known are below 200 MB

Window = tuple[date, date]


def source(release: str) -> Source:
    """Where a release is read from: one file, the upstream increments, a sample, or the hub's parquet copy.

    Raises:
        ValueError: unknown release.
    """
    if release not in RELEASE_ENDS:
        raise ValueError(f"unknown LiveCodeBench release {release!r}; known: {', '.join(RELEASE_ENDS)}")
    increments = range(1, int(release[1:]) + 1)
    return Source(
        hub_id="lighteval/code_generation_lite",
        config=f"release_{release}",
        split="test",
        files=("livecodebench", "livecodebench_sample"),
        parts=tuple(f"livecodebench/test{'' if i == 1 else i}" for i in increments),
        stream=True,
    )


def parse_window(window: str) -> Window:
    """Read `2408-2502` (first days of both months) or `2024-08-01..2025-02-01`; both ends are included.

    Raises:
        ValueError: another form, no such date, or an end before the start.
    """
    if match := re.fullmatch(r"(\d\d)(\d\d)-(\d\d)(\d\d)", window):
        year, month, last_year, last_month = map(int, match.groups())
        days = (f"20{year:02}-{month:02}-01", f"20{last_year:02}-{last_month:02}-01")
    else:
        days = tuple(window.split(".."))  # type: ignore[assignment]
    try:
        start, end = map(date.fromisoformat, days)
    except ValueError as error:
        raise ValueError(f"window {window!r} is neither like 2408-2502 nor like 2024-08-01..2025-02-01") from error
    if end < start:
        raise ValueError(f"window {window!r} ends before it starts")
    return start, end


def row_parser(release: str, window: str | None = None) -> Callable[[dict[str, Any], str], Problem | None]:
    """A function from a row to a problem, or to None where the contest is outside the release or the window."""
    end_of_release = RELEASE_ENDS[release]
    span = parse_window(window) if window else None

    def parse(row: dict[str, Any], fallback_id: str) -> Problem | None:
        day = contest_date(row)
        if (day.year, day.month) > end_of_release or (span and not span[0] <= day <= span[1]):
            return None
        metadata = _json_object(row.get("metadata") or "{}", "metadata")
        fn_name = metadata.get("func_name")
        return Problem(
            id=text(row, "question_id"),
            question=text(row, "question_content"),
            tests=decode_tests(row),
            fn_name=fn_name if isinstance(fn_name, str) and fn_name else None,
            time_limit_s=TIME_LIMIT_S,
            packages=True,
            starter_code=str(row.get("starter_code") or ""),
            metadata={
                "kind": "code",
                "contest_date": day.isoformat(),
                "difficulty": row.get("difficulty"),
                "platform": row.get("platform"),
            },
        )

    return parse


def contest_date(row: dict[str, Any]) -> date:
    """The day of the contest.

    Raises:
        RowError: no date, or not an ISO one.
    """
    value = column(row, "contest_date")
    if isinstance(value, datetime):
        return value.date()
    try:
        return datetime.fromisoformat(str(value)).date()
    except ValueError as error:
        raise RowError(f"contest_date {value!r} is no ISO date") from error


def decode_tests(row: dict[str, Any]) -> tuple[dict[str, str], ...]:
    """The public and then the hidden tests of a row, as `{"input", "output"}` texts.

    Raises:
        RowError: a column is missing or cannot be decoded, or there is no test at all.
    """
    public = _test_list(column(row, "public_test_cases"), "public_test_cases")
    hidden = _test_list(decode_hidden(column(row, "private_test_cases")), "private_test_cases")
    tests = tuple({"input": test["input"], "output": test["output"]} for test in [*public, *hidden])
    if not tests:
        raise RowError("neither public nor private tests")
    return tests


def decode_hidden(encoded: Any) -> Any:
    """Hidden tests from JSON, or from base64 of zlib of a pickled JSON text.

    Raises:
        RowError: damaged, too large, or a pickle of anything but a text.
    """
    if not isinstance(encoded, str):
        return encoded
    try:
        return json.loads(encoded)
    except ValueError:
        pass
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(encoded, validate=True), MAX_TEST_BYTES)
        if inflate.unconsumed_tail:
            raise RowError(f"private_test_cases decompress to more than {MAX_TEST_BYTES} bytes")
        decoded = _PlainUnpickler(io.BytesIO(data)).load()
        return json.loads(decoded) if isinstance(decoded, str | bytes) else decoded
    except RowError:
        raise
    # A damaged pickle raises whatever the broken opcode stumbles on, such as an IndexError.
    except (binascii.Error, zlib.error, pickle.UnpicklingError, ValueError, EOFError, LookupError, TypeError,
            AttributeError, OverflowError, MemoryError) as error:  # fmt: skip
        raise RowError(f"private_test_cases cannot be decoded ({type(error).__name__}: {error})") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads texts, numbers and containers; refuses every class and function, so that nothing can run."""

    def find_class(self, module: str, name: str) -> Any:
        raise RowError(f"private_test_cases name {module}.{name} in their pickle: refused")

    def persistent_load(self, pid: Any) -> Any:
        raise RowError("private_test_cases refer to an object outside their pickle: refused")


def _test_list(value: Any, name: str) -> list[dict[str, str]]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise RowError(f"{name} is not JSON ({error})") from error
    if not isinstance(value, list):
        raise RowError(f"{name} holds a {type(value).__name__}, not a list of tests")
    for test in value:
        if not isinstance(test, dict) or not all(isinstance(test.get(k), str) for k in ("input", "output")):
            raise RowError(f"{name} holds a test without texts 'input' and 'output'")
    return value


def _json_object(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"{name} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise RowError(f"{name} holds a {type(value).__name__}, not an object")
    return value
