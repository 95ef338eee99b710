"""Comparison of values that are not literals: by probing (`math_probing`), then by Math-Verify.

Runs only inside a worker (`math_worker`), under its time and memory limits.
"""

import logging
import operator
import re
import signal
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from types import ModuleType

import mpmath  # type: ignore[import-untyped]

from evals.grading.math_expressions import (
    DIGITS,
    Expression,
    OutOfRange,
    Point,
    Undefined,
    Unreadable,
    read_expression,
    rename,
)
from evals.grading.math_judge import judge
from evals.grading.math_probing import constant_ratio, same_equation, same_value
from evals.grading.math_structure import Group, Leaf, Node, Relation, is_infinite, read_answer
from evals.grading.math_text import ROW

GRID = [Fraction(k, 8) + Fraction(1, 1009) for k in range(-96, 97)]
_TO_LATEX = str.maketrans(
    {
        "*": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "°": r"^\circ ", "±": r"\pm ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "%": r"\%", "…": r"\ldots ", ROW: r"\\",
    }
)  # fmt: skip
_RELATIONS = {
    "<": operator.lt, ">": operator.gt, "≤": operator.le, "≥": operator.ge, "=": operator.eq, "≠": operator.ne,
}  # fmt: skip
_BEYOND_THE_READER = re.compile(r"\\(?:sum|prod|int|iint|iiint|oint|lim|det|begin|bmod|pmod|mod)(?![a-z])")
_SYMPY_LITERAL = re.compile(r"\s*(Integer|Float)\s*\(\s*'?([\d.eE+-]+)'?\s*\)\s*")


def judge_with_algebra(answer: str, golds: Sequence[str], rel_tolerance: float) -> str:
    """Like `math_judge.judge`, with algebra; `timeout` stands for a value too large to compute with."""
    try:
        return judge(answer, golds, rel_tolerance, ProbingAlgebra())
    except OutOfRange:
        return "timeout"


class ProbingAlgebra:
    """`math_judge.Algebra` by evaluation at random points; `unreadable` records that some part was not understood."""

    def __init__(self) -> None:
        self.unreadable = False

    def same_value(self, gold: str, answer: str, rel_tolerance: float) -> bool:
        ours, theirs = _read(gold), _read(answer)
        if ours is None or theirs is None:
            if theirs is None and ours is not None and not _BEYOND_THE_READER.search(answer):
                self.unreadable = True
                return False
            return self.by_math_verify(gold, answer)
        try:
            return same_value(ours, theirs, rel_tolerance)
        except Undefined:
            return False

    def by_math_verify(self, gold: str, answer: str) -> bool:
        """Math-Verify's verdict on what the reader above does not know: sums, integrals, limits, congruences."""
        ours, theirs = _parsed(gold), _parsed(answer)
        if not theirs:
            self.unreadable = True
        if not ours or not theirs:
            return False
        return _math_verify().verify(ours, theirs, timeout_seconds=None)

    def same_equation(self, gold: Relation, answer: Relation) -> bool:
        try:
            return same_equation(_difference(gold), _difference(answer))
        except (Unreadable, Undefined):
            return False

    def same_inequality(self, gold: Relation, answer: Relation) -> bool:
        """Inequalities in any number of variables: a positive multiple of one another, with the same strictness."""
        if len(gold.signs) != 1 or len(answer.signs) != 1:
            return False
        kinds = {"<": "<", ">": "<", "≤": "≤", "≥": "≤", "≠": "≠"}
        strict = [kinds.get(relation.signs[0]) for relation in (gold, answer)]
        if strict[0] is None or strict[0] != strict[1]:
            return False
        try:
            ratio = constant_ratio(_difference(gold), _difference(answer))
        except (Unreadable, Undefined):
            return False
        if ratio is None or isinstance(ratio, mpmath.mpc):
            return False
        same_direction = (gold.signs[0] in "<≤") == (answer.signs[0] in "<≤")
        return strict[0] == "≠" or (ratio > 0) == same_direction

    def same_reals(self, gold: Node, answer: Node) -> bool:
        """Sets of real numbers: the same members among all end points, between them, beyond them and on a grid."""
        try:
            with mpmath.workdps(DIGITS):
                ours, theirs = _real_sets(gold), _real_sets(answer)
                return any(_same_members(mine, other) for mine in ours for other in theirs)
        except (Unreadable, Undefined):
            return False

    def rename(self, text: str, old: str, new: str) -> str:
        try:
            return rename(text, old, new)
        except Unreadable:
            return text


def _read(text: str) -> Expression | None:
    try:
        return read_expression(text)
    except Unreadable:
        return None


def _parsed(text: str) -> list:
    """Math-Verify's reading of one LaTeX expression, by its grammar alone: its other reader runs text as code."""
    library = _math_verify()
    latex = rf"\boxed{{{text.translate(_TO_LATEX)}}}"
    return library.parse(latex, [library.LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)


@cache
def _math_verify() -> ModuleType:
    """The library, loaded when first needed; loading it (a second) is not part of an answer's time."""
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    import math_verify
    import sympy
    from sympy.parsing import sympy_parser

    def read_literal(code: str, *_: object) -> sympy.Number:
        """What stands in for SymPy's `eval` of text: its LaTeX reader needs no more than number literals."""
        literal = _SYMPY_LITERAL.fullmatch(code)
        if not literal:
            raise ValueError(f"text must not be evaluated as code: {code[:80]!r}")
        return sympy.Integer(int(literal[2])) if literal[1] == "Integer" else sympy.Float(literal[2])

    sympy_parser.eval_expr = read_literal
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for sample in (r"\int_0^1 x dx", r"\sum_{k=1}^{n} \frac{1}{k^2}", r"\lim_{x \to 0} \sin x"):
        math_verify.parse(rf"\boxed{{{sample}}}", parsing_timeout=None)  # its parser builds its tables on the way
    signal.setitimer(signal.ITIMER_REAL, remaining)
    return math_verify


def _difference(relation: Relation) -> Expression:
    return read_expression(f"({relation.sides[0]})-({relation.sides[-1]})")


RealSet = tuple[Callable[[Fraction], bool], list[Fraction]]  # membership, and the end points that matter


def _same_members(ours: RealSet, theirs: RealSet) -> bool:
    ends = sorted({*ours[1], *theirs[1]})
    between = [(low + high) / 2 for low, high in pairwise(ends)]
    beyond = [ends[0] - 1, ends[-1] + 1] if ends else []
    return all(ours[0](x) == theirs[0](x) for x in [*ends, *between, *beyond, *GRID])


def _real_sets(node: Node) -> list[RealSet]:
    """The sets of reals that a node may stand for; a list of inequalities may mean all of them or any of them."""
    if isinstance(node, Group) and node.kind in ("list", "or"):
        parts = [_real_set(item) for item in node.items]
        both = [_combined(parts, any)]
        return both if node.kind == "or" else [*both, _combined(parts, all)]
    return [_real_set(node)]


def _real_set(node: Node) -> RealSet:
    if isinstance(node, Relation):
        return _solutions(node)
    if isinstance(node, Leaf):
        if node.text.strip() in ("\\R", "R"):
            return (lambda x: True), []
        if node.text.strip() == "∅":
            return (lambda x: False), []
        return _points([_number(node)])
    if isinstance(node, Group):
        if node.kind == "{}":
            return _points([_number(item) for item in node.items])
        if node.kind == "minus":
            first, *others = [_real_set(item) for item in node.items]
            removed = _combined(others, any)
            return (lambda x: first[0](x) and not removed[0](x)), first[1] + removed[1]
        if node.kind in ("union", "list", "or"):
            return _combined([_real_set(item) for item in node.items], any)
        if len(node.items) == 2 and len(node.kind) == 2:
            return _interval(node)
    raise Unreadable("not a set of real numbers")


def _combined(parts: list[RealSet], how: Callable) -> RealSet:
    return (lambda x: how(part[0](x) for part in parts)), [end for part in parts for end in part[1]]


def _points(values: Sequence[Fraction | None]) -> RealSet:
    finite = [value for value in values if value is not None]
    if len(finite) != len(values):
        raise Unreadable("infinity is not a member")
    return (lambda x: x in finite), finite


def _interval(node: Group) -> RealSet:
    low, high = (_number(item) for item in node.items)
    closed_low, closed_high = node.kind[0] == "[", node.kind[1] == "]"

    def member(x: Fraction) -> bool:
        above = low is None or x > low or (closed_low and x == low)
        return above and (high is None or x < high or (closed_high and x == high))

    return member, [end for end in (low, high) if end is not None]


def _number(node: Node) -> Fraction | None:
    """The value of a constant, None for an infinity. Irrational values are cut at 30 digits, alike on both sides."""
    if is_infinite(node):
        return None
    if not isinstance(node, Leaf):
        raise Unreadable("not a number")
    return _value(read_expression(node.text), {})


def _value(expression: Expression, symbols: dict[str, Fraction]) -> Fraction:
    if not expression.symbols <= symbols.keys():
        raise Unreadable("not a constant")
    value = expression.value(Point(symbols))
    if isinstance(value, mpmath.mpc):
        raise Undefined("not real")
    return value if isinstance(value, Fraction) else Fraction(mpmath.nstr(value, 30, min_fixed=-40, max_fixed=40))


def _solutions(relation: Relation) -> RealSet:
    """The values of the one variable for which the chain of relations holds."""
    if relation.is_membership:
        return _real_set(read_answer(relation.sides[1]))
    sides = [_side(text) for text in relation.sides]
    unknowns = {name for side in sides if side is not None for name in side.symbols}
    if len(unknowns) != 1:
        raise Unreadable("not one variable")
    (unknown,) = unknowns

    def member(x: Fraction) -> bool:
        try:
            values = [None if side is None else _value(side, {unknown: x}) for side in sides]
        except Undefined:
            return False
        return all(_holds(*pair, sign) for pair, sign in zip(pairwise(values), relation.signs, strict=True))

    ends = [_value(side, {}) for side in sides if side is not None and not side.symbols]
    return member, [*ends, *(-end for end in ends)]


def _side(text: str) -> Expression | None:
    return None if is_infinite(Leaf(text)) else read_expression(text)


def _holds(left: Fraction | None, right: Fraction | None, sign: str) -> bool:
    if left is None or right is None:
        return True
    return _RELATIONS[sign](left, right)
