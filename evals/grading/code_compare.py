"""Is the output the expected one? Plain text against text, or JSON value against JSON value, in two modes.

`strict` is ours: numbers written with a decimal point or exponent match within 1e-6, absolute or relative, and
everything else exactly. `official` does as LiveCodeBench's checker does, with decimals that must be equal.
"""

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

TOLERANCE = 1.000001e-6
"""1e-6, and room for what binary makes of two decimals that differ by exactly that, as 0.333333 and 0.333334 do."""

# Possessive, so that a hostile token of megabytes is read once.
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_DIGITS_OF_INT = 4000  # Python refuses to parse longer ones by default, and its time to is quadratic


def same_text(output: str, expected: str, mode: str) -> bool:
    """Compare line by line, blank space around lines and around the whole left aside."""
    lines, expected_lines = output.strip().split("\n"), expected.strip().split("\n")
    same_line = _same_line_strict if mode == "strict" else _same_line_official
    return len(lines) == len(expected_lines) and all(
        a.strip() == b.strip() or same_line(a, b) for a, b in zip(lines, expected_lines, strict=True)
    )


def _same_line_strict(output: str, expected: str) -> bool:
    tokens, expected_tokens = output.split(), expected.split()
    return len(tokens) == len(expected_tokens) and all(map(_same_token, tokens, expected_tokens))


def _same_token(token: str, expected: str) -> bool:
    if token == expected:
        return True
    if not (_NUMBER.fullmatch(token) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(expected):
        try:
            return Decimal(token) == Decimal(expected)
        except InvalidOperation:  # an exponent of twenty digits
            return False
    return _close(float(token), float(expected))


def _same_line_official(output: str, expected: str) -> bool:
    try:
        return [Decimal(token) for token in output.split()] == [Decimal(token) for token in expected.split()]
    except InvalidOperation:
        return False


def read_json(text: str | bytes) -> Any:
    """A JSON value. Integers of thousands of digits stay text, which is as good for telling whether they are equal.

    Raises:
        ValueError: it is not JSON, or nested too deep to be read.
    """
    try:
        return json.loads(text, parse_int=_read_int)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None


def _read_int(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _DIGITS_OF_INT else Decimal(digits)


def same_value(value: Any, expected: Any, mode: str) -> bool:
    """Compare two JSON values. Strictly, `true` is not 1; officially it is, as Python has it."""
    if mode == "official":
        return bool(value == expected)
    if isinstance(expected, list) and isinstance(value, list):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(same_value(a, b, mode) for a, b in pairs)
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(same_value(value[k], expected[k], mode) for k in expected)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(expected, float) and isinstance(value, int | float):
        return _close(value, expected)
    return bool(value == expected)


def _close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond every float
        return False
