"""Which number, in which unit? Literals are read exactly, as fractions; nothing is evaluated."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from evals.grading.math_text import compact

MAX_EXPONENT = 5000
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_GROUPED = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?)"
_LITERAL = rf"(?:{_GROUPED}|{_DECIMAL})"
_PLAIN = re.compile(rf"({_LITERAL})(?:[eE]([-+]?\d+))?")
_SCIENTIFIC = re.compile(rf"(?:({_LITERAL})\*)?10\^(?:\{{([-+]?\d+)\}}|\(([-+]?\d+)\)|([-+]?\d+))")
_FRACTION = re.compile(
    rf"(?:(\d+)[ +]?)?"
    rf"(?:\\frac\{{([-+]?)({_LITERAL})\}}\{{({_DECIMAL}|{_GROUPED})\}}|(?<![\d}}])({_LITERAL})/({_LITERAL}))"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?")


@dataclass(frozen=True)
class Number:
    """An exact value; `is_decimal` says that it was written with a decimal point or a power of ten."""

    value: Fraction
    is_decimal: bool


def read_number(text: str) -> Number | None:
    """The number that a normalised text is a literal for, None when it is anything else."""
    if len(text) > 2000:
        return None
    return _read_number(text)


@lru_cache(maxsize=8192)
def _read_number(text: str) -> Number | None:
    text = compact(text)
    negative = False
    while text and (text[0] in "+-" or _is_wrapped(text)):
        if text[0] in "+-":
            negative ^= text[0] == "-"
            text = text[1:]
        else:
            text = text[1:-1]
    if not text or text[0] not in "0123456789.\\":
        return None
    number = _plain(text) or _scientific(text) or _fraction(text) or _repeating(text)
    return Number(-number.value, number.is_decimal) if number and negative else number


def _is_wrapped(text: str) -> bool:
    pair = text[0] + text[-1]
    return pair in ("()", "{}") and not any(char in "(){}," for char in text[1:-1])


def _literal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip(".") or "0")


def _power_of_ten(exponent: int) -> Fraction | None:
    return Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None


def _plain(text: str) -> Number | None:
    match = _PLAIN.fullmatch(text)
    if not match:
        return None
    digits, exponent = match.groups()
    if exponent is None:
        return Number(_literal(digits), "." in digits.rstrip("."))
    power = _power_of_ten(int(exponent)) if len(exponent) < 8 else None
    return None if power is None else Number(_literal(digits) * power, True)


def _scientific(text: str) -> Number | None:
    match = _SCIENTIFIC.fullmatch(text)
    if not match:
        return None
    exponent = next(group for group in match.groups()[1:] if group is not None)
    power = _power_of_ten(int(exponent)) if len(exponent) < 8 else None
    if power is None:
        return None
    digits = match.group(1)
    return Number(_literal(digits or "1") * power, digits is not None)


def _fraction(text: str) -> Number | None:
    match = _FRACTION.fullmatch(text)
    if not match:
        return None
    whole, sign, over, under, plain_over, plain_under = match.groups()
    over, under = over or plain_over, under or plain_under
    numerator, denominator = _literal(over), _literal(under)
    if denominator == 0:
        return None
    value = numerator / denominator
    if whole is not None:
        if sign or "." in over + under or value >= 1:  # 3\frac{5}{4} is a product
            return None
        value += int(whole)
    return Number(-value if sign == "-" else value, False)


def _repeating(text: str) -> Number | None:
    match = _REPEATING.fullmatch(text)
    if not match:
        return None
    whole, fixed, repeated = match.groups()
    scale = 10 ** len(fixed)
    value = Fraction(int(whole or "0")) + Fraction(int(fixed or "0"), scale)
    return Number(value + Fraction(int(repeated), scale * (10 ** len(repeated) - 1)), False)


def agree(gold: Number, value: Fraction, rel_tolerance: float) -> bool:
    """Exactly equal, or within the relative tolerance where the gold is a decimal."""
    if value == gold.value:
        return True
    if not gold.is_decimal:
        return False
    return abs(value - gold.value) <= Fraction(rel_tolerance) * max(abs(value), abs(gold.value))
