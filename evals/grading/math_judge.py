"""Do two answers mean the same?

`Judge.same` walks the structure of both answers and compares the single values at its leaves: as strings, as numbers,
and, where `algebra` is allowed, as expressions. Without algebra it raises `Undecided` where algebra would be needed,
so that plain answers are judged in the calling process and only the rest goes to a worker.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Protocol

from evals.grading.math_numbers import agree, read_number
from evals.grading.math_structure import (
    Group,
    Leaf,
    Matrix,
    Node,
    Relation,
    flat_list,
    is_infinite,
    read_answer,
    readings,
)
from evals.grading.math_text import compact, normalise
from evals.grading.math_units import Unit, conversion, split_unit

MAX_ANSWER_CHARS = 6000


class Undecided(Exception):
    """Deciding needs algebra, which this judge was not given."""


class Algebra(Protocol):
    """Comparison of values that are not literals, see `math_algebra`."""

    unreadable: bool

    def same_value(self, gold: str, answer: str, rel_tolerance: float) -> bool: ...
    def same_equation(self, gold: Relation, answer: Relation) -> bool: ...
    def same_inequality(self, gold: Relation, answer: Relation) -> bool: ...
    def same_reals(self, gold: Node, answer: Node) -> bool: ...
    def rename(self, text: str, old: str, new: str) -> str: ...


def judge(answer: str, golds: Sequence[str], rel_tolerance: float, algebra: Algebra | None = None) -> str:
    """`correct`, `wrong`, `unparsed` or `no_answer`. Raises Undecided when it needs algebra and has none."""
    if max(map(len, (answer, *golds))) > MAX_ANSWER_CHARS:
        return _judge_long(answer, golds)
    answer = normalise(answer)
    if not answer:
        return "no_answer"
    golds = [normalise(gold) for gold in golds]
    if len(golds) == 1 and compact(golds[0]) == compact(answer):
        return "correct"
    referee = Judge(rel_tolerance, algebra)
    gold_readings = readings(golds[0]) if len(golds) == 1 else [flat_list([read_answer(gold) for gold in golds])]
    if any(referee.same(gold, found) for gold in gold_readings for found in readings(answer)):
        return "correct"
    return "unparsed" if algebra is not None and algebra.unreadable else "wrong"


def _judge_long(answer: str, golds: Sequence[str]) -> str:
    """Answers of thousands of characters are compared as strings: there is nothing sensible to compute with."""
    if len(golds) == 1 and answer.strip() == golds[0].strip():
        return "correct"
    return "wrong" if re.fullmatch(r"\s*[-+]?[\d,.\s]+", answer) else "unparsed"


_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}|[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|rho|sigma|omega|ell|tau|angle|triangle|Delta|Omega|"
    r"min|max|vec|mathbf|bar|hat|overline|overrightarrow)(?![A-Za-z])|\\operatorname)[\sA-Za-z0-9_{}'\\,|]*(?:\([^()=]*\))?"
)
_NAMED_TUPLE = re.compile(r"\(\s*[A-Za-z](?:_\{?\w+\}?)?(?:\s*,\s*[A-Za-z](?:_\{?\w+\}?)?)+\s*\)")
_FUNCTION = re.compile(r"([A-Za-z]+)\s*\(\s*([A-Za-z])\s*\)")
_WITH_BASE = re.compile(
    r"\(?([0-9A-Za-z]*\d[0-9A-Za-z]*)\)?\s*_\s*(?:\{?\s*\(?\s*(\d+|\\text\{\w+\})\s*\)?\s*\}?)|"
    r"\(?([0-9A-Z]*\d[0-9A-Z]*)\)?\s*\(?\\text\{\(?base[ -]?(\d+|\w+)\)?\}\s*(\d*)\)?"
)
_BASES = [
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen",
]  # fmt: skip
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*([aApP])?\.?\s*(?:[mM]\.?)?")
_CHOICE = re.compile(r"\(?([A-Z])(?:\)|\.|:|\s|$).*", re.DOTALL)
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z][a-z]{3,}(?![A-Za-z])")
_NO_WORDS = re.compile(r"\\(?:text|begin|end)\{[^{}]*\}")
_FORMULA_WORDS = {
    "sqrt", "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "coth", "asin", "acos", "atan", "floor",
    "ceil", "theta", "alpha", "beta", "gamma", "delta", "lambda", "omega", "sigma", "cbrt",
}  # fmt: skip
_NOTHING = {
    "∅", "none", "empty set", "no solution", "no solutions", "no real solution", "no real solutions",
}  # fmt: skip


@dataclass
class Judge:
    rel_tolerance: float
    algebra: Algebra | None = None

    def same(self, gold: Node, answer: Node) -> bool:
        """Whether the answer means what the gold means."""
        if isinstance(gold, Leaf) and isinstance(answer, Leaf):
            return self.same_leaf(gold.text, answer.text)
        if self.same_structure(gold, answer):
            return True
        if _is_real_set(gold) or _is_real_set(answer):
            return self.needed_algebra().same_reals(gold, answer)
        return False

    def needed_algebra(self) -> Algebra:
        if self.algebra is None:
            raise Undecided
        return self.algebra

    def same_structure(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self.same_relation(gold, answer)
        if isinstance(gold, Matrix) or isinstance(answer, Matrix):
            return self.same_matrix(gold, answer)
        if isinstance(gold, Group) and isinstance(answer, Group):
            return self.same_group(gold, answer)
        group = gold if isinstance(gold, Group) else answer
        if isinstance(group, Group) and group.kind == "{}" and len(group.items) == 1:
            return self.same(group.items[0], answer) if gold is group else self.same(gold, group.items[0])
        return False

    # Relations

    def same_relation(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self.same_two_relations(gold, answer)
        relation = gold if isinstance(gold, Relation) else answer
        assert isinstance(relation, Relation)
        if not (relation.is_equation or relation.is_membership):
            return False
        rounded = relation.signs[-1] == "≈"
        if not (_is_name(relation.sides[0]) or rounded or self.holds(relation)):
            return False
        values = [read_answer(relation.value())]
        if rounded:
            values.append(read_answer(relation.sides[-1]))
            if not _is_name(relation.sides[0]):
                values.append(read_answer(relation.sides[0]))
        if relation is gold:
            return any(self.same(value, answer) for value in values)
        return any(self.same(gold, value) for value in values)

    def holds(self, relation: Relation) -> bool:
        """Whether a chain such as `2^{10} = 1024` is true, so that it counts as its last side."""
        if not relation.is_equation or "0" in relation.sides:
            return False
        return self.same_leaf(relation.sides[0], relation.value())

    def same_two_relations(self, gold: Relation, answer: Relation) -> bool:
        if gold.signs == answer.signs and all(map(_same_text, gold.sides, answer.sides)):
            return True
        assigns = all(r.is_equation or r.is_membership for r in (gold, answer))
        if assigns and _is_name(gold.sides[0]) and _is_name(answer.sides[0]):
            verdict = self.same_assignment(gold, answer)
            if verdict:
                return True
        if gold.is_equation and answer.is_equation:
            return self.needed_algebra().same_equation(gold, answer)
        if not assigns:
            return self.needed_algebra().same_inequality(gold, answer)
        return False

    def same_assignment(self, gold: Relation, answer: Relation) -> bool:
        ours, theirs = gold.sides[0], answer.sides[0]
        value = answer.value()
        functions = _FUNCTION.fullmatch(ours), _FUNCTION.fullmatch(theirs)
        if functions[0] and functions[1] and functions[0][1] == functions[1][1] and functions[0][2] != functions[1][2]:
            value = self.needed_algebra().rename(value, functions[1][2], functions[0][2])
        elif _clash(ours, theirs):
            return False
        return self.same(read_answer(gold.value()), read_answer(value))

    # Groups

    def same_matrix(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Matrix) and isinstance(answer, Matrix):
            if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
                return False
            return all(
                self.same(*cells)
                for rows in zip(gold.rows, answer.rows, strict=True)
                for cells in zip(*rows, strict=True)
            )
        matrix, other = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
        assert isinstance(matrix, Matrix)
        vector = _as_vector(matrix)
        if vector is None or not (isinstance(other, Group) and other.kind in ("()", "[]", "list")):
            return False
        return self.in_order(vector, other.items) if matrix is gold else self.in_order(other.items, vector)

    def same_group(self, gold: Group, answer: Group) -> bool:
        if _has_ellipsis(gold) or _has_ellipsis(answer):
            return _same_brackets(gold, answer) and self.same_sequence(gold.items, answer.items)
        unordered = {"list", "or", "{}", "union"}
        if gold.kind in unordered and answer.kind in unordered:
            if (gold.kind == "union") != (answer.kind == "union"):
                return False
            return self.in_any_order(gold.items, answer.items)
        if gold.kind == "list" and answer.kind == "[]":
            return self.in_any_order(gold.items, answer.items)
        if not _same_brackets(gold, answer):
            return False
        return self.in_order(gold.items, answer.items)

    def in_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        return len(gold) == len(answer) and all(map(self.same, gold, answer))

    def in_any_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        """As sets; a value that the gold repeats on purpose must be repeated as often."""
        if len(answer) < len(gold):
            return False
        rest = list(answer)
        for item in gold:
            match = next((i for i, found in enumerate(rest) if self.same(item, found)), None)
            if match is None:
                return False
            del rest[match]
        return all(any(self.same(item, extra) for item in gold) for extra in rest)

    def same_sequence(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        """Lists with an ellipsis: the same, or one spells out more terms of the same progression."""
        if len(gold) == len(answer):
            return self.in_order(gold, answer)
        cuts = [[i for i, item in enumerate(items) if item == Leaf("…")] for items in (gold, answer)]
        if any(len(cut) != 1 for cut in cuts):
            return False
        heads = gold[: cuts[0][0]], answer[: cuts[1][0]]
        tails = gold[cuts[0][0] + 1 :], answer[cuts[1][0] + 1 :]
        shorter = min(map(len, heads))
        return (
            shorter >= 2
            and self.in_order(heads[0][:shorter], heads[1][:shorter])
            and self.in_order(*tails)
            and all(_is_progression(head) for head in heads)
        )

    # Single values

    def same_leaf(self, gold: str, answer: str) -> bool:
        if _same_text(gold, answer):
            return True
        if "_" in gold + answer or "base" in gold + answer:
            verdict = _same_with_base(gold, answer)
            if verdict is not None:
                return verdict
        if ":" in gold or ":" in answer:
            return self.same_clock_or_ratio(gold, answer)
        if _is_words(gold) or _is_words(answer):
            if _same_words(gold, answer):
                return True
            if _is_words(gold) and not _ends_with_unit(answer):
                return False
        return self.same_quantity(gold, answer)

    def same_quantity(self, gold: str, answer: str) -> bool:
        gold_value, gold_unit = split_unit(gold)
        answer_value, answer_unit = split_unit(answer)
        if gold_unit is not None and not gold_unit.is_known and answer_unit is None and not _has_digit(gold_value):
            gold_value, gold_unit = gold, None
        factor = conversion(gold_unit, answer_unit)
        if factor is None:
            return False
        if factor == 1 and _same_text(gold_value, answer_value):
            return True
        factors = _factors(gold_unit, answer_unit, factor)
        gold_number, answer_number = read_number(gold_value), read_number(answer_value)
        if gold_number is not None and answer_number is not None:
            return any(agree(gold_number, answer_number.value * scale, self.rel_tolerance) for scale in factors)
        if _is_words(answer_value) or _is_words(gold_value):
            return False
        tolerance = self.rel_tolerance if gold_number is not None and gold_number.is_decimal else 0.0
        algebra = self.needed_algebra()
        scaled = [answer_value if scale == 1 else f"({answer_value})*{scale}" for scale in factors]
        in_degrees = [unit is not None and unit.is_a("angle") for unit in (gold_unit, answer_unit)]
        if in_degrees == [True, False]:
            scaled.append(f"({answer_value})*180/\\pi")
        elif in_degrees == [False, True]:
            scaled.append(f"({answer_value})*\\pi/180")
        return any(algebra.same_value(gold_value, value, tolerance) for value in scaled)

    def same_clock_or_ratio(self, gold: str, answer: str) -> bool:
        clocks = [_CLOCK.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1", text).strip()) for text in (gold, answer)]
        if clocks[0] and clocks[1]:
            times = [[int(part or 0) for part in clock.groups()[:3]] for clock in clocks if clock]
            halves = {clock[4].lower() for clock in clocks if clock and clock[4]}
            return times[0] == times[1] and len(halves) < 2
        ratios = [text.split(":") for text in (gold, answer)]
        if len(ratios[0]) == 1 or len(ratios[1]) == 1:
            whole, ratio = (gold, ratios[1]) if len(ratios[0]) == 1 else (answer, ratios[0])
            if len(ratio) != 2 or not all(ratio) or not _has_digit(whole):
                return False
            return self.same_leaf(whole, f"({ratio[0]})/({ratio[1]})")
        if len(ratios[0]) != len(ratios[1]) or not all(ratios[0] + ratios[1]):
            return False
        if all(map(_same_text, *ratios)):
            return True
        first, other = ratios[0][0].strip(), ratios[1][0].strip()
        return all(
            self.same_leaf(f"({x.strip()})/({first})", f"({y.strip()})/({other})")
            for x, y in zip(ratios[0][1:], ratios[1][1:], strict=True)
        )


def _same_text(gold: str, answer: str) -> bool:
    return compact(gold) == compact(answer)


def _has_digit(text: str) -> bool:
    return any(char.isdigit() for char in text)


def _factors(gold: Unit | None, answer: Unit | None, factor: Fraction) -> list[Fraction]:
    """The scales under which the answer's number may be read: a percent sign on one side only may be value or habit."""
    shares = [unit is not None and unit.is_a("share") for unit in (gold, answer)]
    if shares == [True, False]:
        return [factor, Fraction(100)]
    if shares == [False, True]:
        return [factor, Fraction(1, 100)]
    return [factor]


def _is_real_set(node: Node) -> bool:
    if isinstance(node, Relation):
        return not node.is_equation
    if not isinstance(node, Group):
        return False
    if node.kind in ("union", "minus", "[)", "(]"):
        return True
    if node.kind in ("list", "or"):
        return any(_is_real_set(item) and not isinstance(item, Group) for item in node.items)
    return node.kind in ("()", "[]") and any(map(is_infinite, node.items))


def _same_brackets(gold: Group, answer: Group) -> bool:
    """Whether the brackets say the same; those at an infinite end, and around three and more values, say nothing."""
    if gold.kind == answer.kind or ("list" in (gold.kind, answer.kind) and "{}" not in (gold.kind, answer.kind)):
        return True
    if len(gold.kind) != 2 or len(answer.kind) != 2 or "{}" in (gold.kind, answer.kind) or len(gold.items) != 2:
        return {gold.kind, answer.kind} == {"()", "[]"} and len(gold.items) > 2
    return all(
        ours == theirs or is_infinite(item)
        for ours, theirs, item in zip(gold.kind, answer.kind, gold.items, strict=True)
    )


def _as_vector(matrix: Matrix) -> tuple[Node, ...] | None:
    if all(len(row) == 1 for row in matrix.rows):
        return tuple(row[0] for row in matrix.rows)
    return matrix.rows[0] if len(matrix.rows) == 1 else None


def _has_ellipsis(group: Group) -> bool:
    return any(isinstance(item, Leaf) and "…" in item.text for item in group.items)


def _is_progression(items: Sequence[Node]) -> bool:
    numbers = [read_number(item.text) if isinstance(item, Leaf) else None for item in items]
    values = [number.value for number in numbers if number is not None]
    steps = {second - first for first, second in pairwise(values)}
    return len(values) == len(items) and len(steps) == 1


def _is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text) or _NAMED_TUPLE.fullmatch(text))


def _clash(gold: str, answer: str) -> bool:
    """Whether two names are those of different things: `x` and `y`, `f(x)` and `g(x)`, `x_1` and `x_2`."""
    keys = []
    for name in (gold, answer):
        if _is_words(name):
            return False
        base, _, index = compact(name).partition("(")[0].partition("_")
        keys.append((base.casefold(), index))
    (ours, index), (theirs, other) = keys
    return ours != theirs or bool(index and other and index != other)


def _same_with_base(gold: str, answer: str) -> bool | None:
    """Numerals with a base. One without its base is another number, and a converted one is not what was asked for."""
    ours, theirs = _numeral(gold), _numeral(answer)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        return ours == theirs
    if ours is not None:
        return False
    assert theirs is not None
    digits, base = theirs
    number = read_number(gold)
    if number is None or base > 36:
        return False
    try:
        return number.value == int(digits, base)
    except ValueError:
        return False


def _numeral(text: str) -> tuple[str, int] | None:
    match = _WITH_BASE.fullmatch(text.strip())
    if not match:
        return None
    digits, base = match[1] or match[3], match[2] or match[5] or match[4]
    base = base.removeprefix("\\text{").removesuffix("}")
    value = int(base) if base.isdigit() else _BASES.index(base.lower()) + 2 if base.lower() in _BASES else None
    return (digits.lstrip("0").upper() or "0", value) if value is not None and 2 <= value <= 100 else None


def _is_words(text: str) -> bool:
    if re.fullmatch(r"(?:\s*\\text\{[^{}]*[A-Za-z][^{}]*\}\s*)+", text):
        return True
    return any(word.lower() not in _FORMULA_WORDS for word in _WORD.findall(_NO_WORDS.sub("", text)))


def _ends_with_unit(text: str) -> bool:
    return split_unit(text)[1] is not None


def _same_words(gold: str, answer: str) -> bool:
    keys = [_words(text) for text in (gold, answer)]
    if keys[0] == keys[1] or all(key in _NOTHING for key in keys):
        return True
    choice = re.fullmatch(r"\(?([A-Z])\)?", re.sub(r"\\text\{([^{}]*)\}", r"\1", gold).strip())
    if choice:
        chosen = _CHOICE.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", answer).strip())
        return bool(chosen and chosen[1] == choice[1])
    return False


def _words(text: str) -> str:
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"[.,;:!?()\"'`*]", " ", text)
    words = [word for word in text.split() if word.lower() not in ("the", "a", "an")] or text.split()
    return words[0] if len(words) == 1 and len(words[0]) == 1 else " ".join(words).casefold()
