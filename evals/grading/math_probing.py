"""Are two expressions the same function, two equations the same condition? They are probed at random points.

Two expressions are equal when they agree at random points, at a precision that a second, finer evaluation confirms (an
identity's difference shrinks with the precision, a small true difference does not). Variables take positive values, as
the variables of these problems do; where an absolute value shows that signs matter they take negative values too, and
where floors, factorials or alternating signs show that they are whole numbers, whole values are tried before two
expressions are called different.
"""

import random
from collections.abc import Callable, Mapping
from fractions import Fraction

import mpmath  # type: ignore[import-untyped]

from evals.grading.math_expressions import DIGITS, Expression, Point, Undefined, Value, divide, real, subtract

NUM_POINTS = 6
_WHOLE_NUMBER_LETTERS = set("nmkijlpqrdNMK")


def same_value(gold: Expression, answer: Expression, rel_tolerance: float = 0.0) -> bool:
    """Whether two expressions agree wherever both are defined.

    `rel_tolerance` applies to constants only. Raises OutOfRange, and Undefined when no probing point is usable.
    """
    aliases = _matching_names(gold.symbols, answer.symbols)
    if aliases is None:
        aliases = {}
    symbols = gold.symbols | {aliases.get(name, name) for name in answer.symbols}
    if not symbols:
        return _agree_at({}, {}, gold, answer, rel_tolerance)
    is_discrete = gold.is_discrete or answer.is_discrete
    may_be_whole = is_discrete and all(name[0] in _WHOLE_NUMBER_LETTERS for name in symbols)
    try:
        if _agree_everywhere(gold, answer, symbols, aliases, _positive):
            return not (gold.has_absolute_value or answer.has_absolute_value) or _agree_everywhere(
                gold, answer, symbols, aliases, _of_either_sign
            )
    except Undefined:
        if not may_be_whole:
            raise
    return may_be_whole and _agree_everywhere(gold, answer, symbols, aliases, _whole, num_points=14)


def same_equation(gold: Expression, answer: Expression) -> bool:
    """Whether `gold = 0` and `answer = 0` have the same solutions.

    They do when one is a constant multiple of the other, or when both are of first degree in some variable and give
    it the same value, provided that no factor was lost: where a variable is zero, both hold or neither does.
    """
    aliases = _matching_names(gold.symbols, answer.symbols) or {}
    symbols = gold.symbols | {aliases.get(name, name) for name in answer.symbols}

    def values(point: Mapping[str, Fraction]) -> tuple[Value, Value]:
        return gold.value(Point(point)), answer.value(Point(_aliased(answer, point, aliases)))

    with mpmath.workdps(DIGITS):
        if constant_ratio(gold, answer) is not None:
            return True
        for unknown in sorted(symbols & gold.symbols):
            if _same_root(values, symbols, unknown):
                return all(_vanish_together(values, symbols, name) for name in symbols)
    return False


def constant_ratio(gold: Expression, answer: Expression) -> Value | None:
    """The constant that `gold / answer` is everywhere, None when it varies or is zero."""
    aliases = _matching_names(gold.symbols, answer.symbols) or {}
    symbols = gold.symbols | {aliases.get(name, name) for name in answer.symbols}
    ratios: list[Value] = []
    with mpmath.workdps(DIGITS):
        for trial in range(4 * NUM_POINTS):
            point = {name: _positive(name, trial) for name in symbols}
            try:
                ratio = divide(gold.value(Point(point)), answer.value(Point(_aliased(answer, point, aliases))))
            except Undefined:
                continue
            if not _close(ratio, ratios[0] if ratios else ratio) or abs(ratio) < 1e-40:
                return None
            ratios.append(ratio)
            if len(ratios) == NUM_POINTS:
                return ratio
    return None


def _close(x: Value, y: Value) -> bool:
    return real(abs(subtract(x, y))) <= 1e-25 * max(real(abs(x)), real(abs(y)))


def _same_root(values: Callable, symbols: frozenset[str], unknown: str) -> bool:
    usable = 0
    for trial in range(2 * NUM_POINTS):
        point = {name: _positive(name, trial) for name in symbols}
        try:
            at_0, at_1, at_2 = (values(point | {unknown: Fraction(x)}) for x in (3, 4, 5))
            roots = []
            for first, second, third in zip(at_0, at_1, at_2, strict=True):
                slope = subtract(second, first)
                if abs(slope) < 1e-40 or not _close(subtract(third, second), slope):
                    return False
                roots.append(subtract(Fraction(3), divide(first, slope)))
        except Undefined:
            continue
        if not _close(*roots) or abs(roots[0]) < 1e-40:  # a common factor vanishes at zero, which says nothing
            return False
        usable += 1
    return usable >= 3


def _vanish_together(values: Callable, symbols: frozenset[str], name: str) -> bool:
    point = {other: _positive(other, 0) for other in symbols} | {name: Fraction(0)}
    try:
        left, right = values(point)
    except Undefined:
        return True
    return (abs(left) < 1e-40) == (abs(right) < 1e-40)


def _matching_names(gold: frozenset[str], answer: frozenset[str]) -> dict[str, str] | None:
    """Names that differ only in case or notation (`C` and `c`, `x'` and `dx/dt`), where nothing else could be meant."""
    missing, extra = gold - answer, answer - gold
    if len(missing) != len(extra) or not missing:
        return {} if not missing and not extra else None
    folded = {name.casefold(): name for name in missing}
    aliases = {name: folded[name.casefold()] for name in extra if name.casefold() in folded}
    return aliases if len(folded) == len(missing) == len(aliases) == len(set(aliases.values())) else None


def _aliased(answer: Expression, point: Mapping[str, Fraction], aliases: dict[str, str]) -> dict[str, Fraction]:
    return {name: point[aliases.get(name, name)] for name in answer.symbols}


def _positive(name: str, trial: int) -> Fraction:
    return Fraction(random.Random(f"{name} {trial}").randrange(30_000, 270_000), 100_003)


def _of_either_sign(name: str, trial: int) -> Fraction:
    draw = random.Random(f"sign of {name} {trial}")
    return _positive(name, trial) * draw.choice((-1, 1))


def _whole(name: str, trial: int) -> Fraction:
    """Whole numbers, mostly growing with the trial so that small coincidences are seen through."""
    return Fraction(random.Random(f"whole {name} {trial}").randrange(1, 6 + 2 * trial))


def _agree_everywhere(
    gold: Expression,
    answer: Expression,
    symbols: frozenset[str],
    aliases: dict[str, str],
    draw: Callable[[str, int], Fraction],
    num_points: int = NUM_POINTS,
) -> bool:
    usable = 0
    for trial in range(4 * num_points):
        point = {name: draw(name, trial) for name in symbols}
        try:
            if not _agree_at(point, _aliased(answer, point, aliases), gold, answer, 0.0, draw is _of_either_sign):
                return False
        except Undefined:
            continue
        usable += 1
        if usable == num_points:
            return True
    if usable < 3:
        raise Undefined("no usable point")
    return True


def _agree_at(
    gold_point: Mapping[str, Fraction],
    answer_point: Mapping[str, Fraction],
    gold: Expression,
    answer: Expression,
    rel_tolerance: float,
    real_only: bool = False,
) -> bool:
    with mpmath.workdps(DIGITS):
        points = Point(gold_point), Point(answer_point)
        x, y = gold.value(points[0]), answer.value(points[1])
        if isinstance(x, Fraction) and isinstance(y, Fraction) and (x == y or not rel_tolerance):
            return x == y
        if real_only and (isinstance(x, mpmath.mpc) or isinstance(y, mpmath.mpc)):
            raise Undefined("not real")
        difference, size = abs(real(x) - real(y)), max(abs(real(x)), abs(real(y)))
        if rel_tolerance and difference <= rel_tolerance * size:
            return True
        if difference > 1e-3 * size and size > 1e-20:
            return False
    digits = 2 * DIGITS + int(0.7 * max(point.peak_bits for point in points))
    with mpmath.workdps(digits):
        x, y = gold.value(Point(gold_point)), answer.value(Point(answer_point))
        finer, size = abs(real(x) - real(y)), max(abs(real(x)), abs(real(y)))
        # Rounding noise follows the precision down; a true difference stays what it was.
        shrunk = mpmath.mpf(10) ** (DIGITS - digits + 20)
        return finer <= shrunk * difference or finer <= mpmath.mpf(10) ** (30 - digits) * size
