"""In which unit is the answer, and do two units measure the same thing?"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from evals.grading.math_numbers import read_number

# name variants -> (dimension, size in the dimension's first unit)
_TABLE: dict[str, tuple[str, Fraction]] = {}
for _dimension, _units in {
    "length": {
        "m meter metre": "1", "cm centimeter centimetre": "0.01", "mm millimeter millimetre": "0.001",
        "km kilometer kilometre": "1000", "nm nanometer": "1e-9", "in inch inche": "0.0254", "ft foot feet": "0.3048",
        "yd yard": "0.9144", "mi mile": "1609.344",
    },
    "mass": {"kg kilogram": "1", "g gram": "0.001", "mg milligram": "0.000001", "lb pound": "0.45359237"},
    "time": {"s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800"},
    "money": {"dollar buck": "1", "cent": "0.01"},
    "angle": {"° degree": "1", "deg": "1"},
    "share": {"%": "0.01"},
    "volume": {"liter litre l L": "0.001", "ml mL milliliter millilitre": "0.000001"},
    "energy": {"J joule": "1", "kJ kilojoule": "1000", "eV": "1.602176634e-19", "erg": "1e-7"},
    "force": {"N newton": "1"},
    "power": {"W watt": "1", "kW kilowatt": "1000"},
    "speed": {"mph": "0.44704", "kmh kph": "0.2777777777777777777777777778"},
    "voltage": {"V volt": "1"},
    "temperature": {"K kelvin": "1"},
    "frequency": {"Hz hertz": "1"},
}.items():  # fmt: skip
    for _names, _size in _units.items():
        for _name in _names.split():
            _TABLE[_name] = (_dimension, Fraction(_size))
_COMPOSED = {"volume": ("length", 3)}
_LONG_NAMES = "|".join(sorted((re.escape(name) for name in _TABLE if len(name) > 1), key=len, reverse=True))
_PLAIN_WORD = rf"(?:(?:square|sq\.?|cubic|cu\.?)\s+)?(?:{_LONG_NAMES}|units?)s?(?:\s+(?:squared|cubed))?"
_WORD = rf"(?:\\text\{{[^{{}}]*\}}|(?<![A-Za-z\\]){_PLAIN_WORD}(?![A-Za-z]))"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_SINGLE_LETTER = r"(?:(?<=[\d})]) [msghNJWVKL](?![A-Za-z]))"
_NEXT = rf"(?:\s*(?:\*|/|per|\s)\s*(?:{_WORD}|(?<=/)\s*[a-zA-Z](?![A-Za-z])){_POWER})"
_UNIT = re.compile(rf"\s*(?:[%°]|(?:{_WORD}|{_SINGLE_LETTER}){_POWER}{_NEXT}*)\s*$")
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_COUNTED = re.compile(r"(?:\s+[A-Za-z]{2,}){1,4}$")
_NOT_UNITS = frozenset([
    "or", "and", "not", "more", "less", "fewer", "than", "least", "most", "if", "when", "only", "wrong",
    "incorrect", "to", "from", "million", "thousand", "billion", "hundred", "trillion", "dozen", "mod", "modulo",
    "choose", "over", "plus", "minus", "times", "divided", "squared", "cubed", "factorial",
])  # fmt: skip
_PART = re.compile(
    r"\s*(?P<joint>/|\bper\b)?\s*(?P<shape>square|sq\.?|cubic|cu\.?)?\s*(?P<name>[A-Za-z°%]+)"
    r"(?:\s*\^\s*\{?\s*(?P<power>-?\d)\s*\}?|\s+(?P<after>squared|cubed))?"
)


@dataclass(frozen=True)
class Unit:
    """A product of powers of dimensions with its size; `is_known` is False when a word is not in the table."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction
    is_known: bool

    def is_a(self, dimension: str) -> bool:
        return self.dimensions == ((dimension, 1),)


def split_unit(text: str) -> tuple[str, Unit | None]:
    """The answer without its unit, and the unit; the text as it was and None when no unit ends it.

    Words count as a unit only after something else: `\\text{even}` alone is an answer, not a unit.
    """
    match = _UNIT.search(text)
    if match is None and read_number(_COUNTED.sub("", text)) is not None:
        match = _COUNTED.search(text)  # `12 red apples`
    if match is None or match.end() - match.start() > 80:
        return text, None
    if match.group().strip() == "°" and _TRIGONOMETRY.search(text):
        return text, None  # the degrees belong to the function's argument
    if _NOT_UNITS & set(re.findall(r"[a-z]+", match.group().lower())):
        return text, None
    rest = text[: match.start()].rstrip(" *~")
    if not rest or rest[-1] in "+-/^_=<>(,":
        return text, None
    return rest, read_unit(match.group())


@lru_cache(maxsize=2048)
def read_unit(text: str) -> Unit:
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).replace("~", " ")
    powers: dict[str, int] = {}
    size, is_known, inverse = Fraction(1), True, False
    for part in _PART.finditer(text):
        if part["joint"]:
            inverse = True
        entry = _entry(part["name"])
        if entry is None:
            is_known = False
            continue
        power = int(part["power"] or {"squared": 2, "cubed": 3}.get(part["after"] or "", 1))
        power *= {"s": 2, "c": 3}.get((part["shape"] or " ")[0], 1)
        power = -power if inverse else power
        dimension, unit_size = entry
        base, exponent = _COMPOSED.get(dimension, (dimension, 1))
        powers[base] = powers.get(base, 0) + exponent * power
        size *= unit_size**power
    dimensions = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Unit(dimensions, size, is_known and bool(dimensions))


def _entry(name: str) -> tuple[str, Fraction] | None:
    for spelling in (name, name.rstrip("s"), name.lower(), name.lower().rstrip("s")):
        if spelling in _TABLE:
            return _TABLE[spelling]
    return None


def conversion(gold: Unit | None, answer: Unit | None) -> Fraction | None:
    """The factor that brings the answer's number to the gold's unit; 1 where a unit was left out; None for a clash."""
    if gold is None or answer is None or not (gold.is_known and answer.is_known):
        return Fraction(1)
    if gold.dimensions != answer.dimensions:
        return None
    return answer.size / gold.size
