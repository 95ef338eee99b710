"""What kind of answer is it: one value, a list, a tuple, an interval, a set, a matrix, a relation?

`read_answer` splits normalised text at its brackets, separators and relation signs and stops at the single values
(`Leaf`), which it leaves as text.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

from evals.grading.math_text import ROW, closing, compact, is_one_bracket, outside_brackets

MAX_DEPTH = 12
MAX_ITEMS = 400


@dataclass(frozen=True)
class Leaf:
    """One value, as normalised text."""

    text: str


@dataclass(frozen=True)
class Group:
    """Several parts. `kind` is the bracket pair (`()`, `[]`, `[)`, `(]`, `{}`), or `list`, `or`, `union`, `minus`."""

    kind: str
    items: "tuple[Node, ...]"


@dataclass(frozen=True)
class Matrix:
    rows: "tuple[tuple[Node, ...], ...]"


@dataclass(frozen=True)
class Relation:
    """`sides[0] signs[0] sides[1] signs[1] ...`, the sides as normalised text."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]

    @property
    def is_equation(self) -> bool:
        return all(sign in "=≈≡" for sign in self.signs)

    @property
    def is_membership(self) -> bool:
        return self.signs == ("∈",)

    def value(self) -> str:
        """What the left side is said to be: the last exact side of a chain of equations."""
        exact = self.signs.index("≈") if "≈" in self.signs else len(self.signs)
        return self.sides[exact or 1]


Node = Leaf | Group | Matrix | Relation

_MATRIX = re.compile(
    r"[\[(|]?\s*\\begin\{(?P<name>[pbBvV]?matrix|smallmatrix|array|cases)\}(?:\s*\{[lcr|\s]*\})?(?P<body>.*)\\end\{(?P=name)\}"
    r"\s*[\])|]?\s*(?P<transposed>\^\s*\{?\s*(?:T|\\top|\\intercal)\s*\}?)?",
    re.DOTALL,
)
_TRANSPOSED = re.compile(r"(\(.*\)|\[.*\]|⟨.*⟩)\s*\^\s*\{?\s*(?:T|\\top|\\intercal)\s*\}?")
_FACING_OUT = re.compile(r"([\[\]])([^\[\]{},;]+(?:\{[^\[\],;]*)?)[,;]([^\[\],;]+)([\[\]])")
_SET_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:∈\s*\\R\s*)?[|:]\s*(.+)\\\}", re.DOTALL)
_FOR_ALL = re.compile(r"[,(]?\s*(?:\\text\{\s*)?(?:for (?:all|any|every|each)\b|\\forall).*$", re.DOTALL)
_WHOLE_NUMBERS = re.compile(r"\s*(?:\\text\{)?\s*(?:where\s*)?\}?\s*[A-Za-z]\s*∈\s*\\[ZN]\b.*", re.DOTALL)
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SIGNS = "=<>≤≥≠∈≈≡"


def read_answer(text: str, depth: int = 0) -> Node:
    text = _FOR_ALL.sub("", text).strip() or text.strip()
    if depth > MAX_DEPTH:
        return Leaf(text)
    if re.fullmatch(r"\\\{\s*\\\}", text):
        return Leaf("∅")
    return (
        _read_matrix(text, depth)
        or _read_outward(text, depth)
        or _read_list(text, depth)
        or _read_brackets(text, depth)
        or _read_union(text, depth)
        or _read_relation(text)
        or _read_plus_minus(text, depth)
        or Leaf(text)
    )


def readings(text: str) -> list[Node]:
    """Every sensible reading: `100,200` may be one number or two; a set's braces may have lost their backslashes."""
    found = [read_answer(text)]
    if _GROUPED_NUMBER.fullmatch(text) and "." not in text:
        found = [Leaf(text), Group("list", tuple(Leaf(part) for part in text.split(",")))]
    elif text.startswith("{") and closing(text, 0) == len(text) - 1:
        found.append(read_answer(rf"\{{{text[1:-1]}\}}"))
    return found


def flat_list(nodes: list[Node]) -> Node:
    """One list of all the items, for golds that come in several strings."""
    items: list[Node] = []
    for node in nodes:
        items.extend(node.items if isinstance(node, Group) and node.kind in ("list", "or") else [node])
    return items[0] if len(items) == 1 else Group("list", tuple(items))


def is_infinite(node: Node) -> bool:
    return isinstance(node, Leaf) and compact(node.text) in ("∞", "+∞", "-∞")


def _read_matrix(text: str, depth: int) -> Node | None:
    match = _MATRIX.fullmatch(text)
    if match and "\\begin" not in match["body"] and match["name"] != "cases" and match["name"][0] not in "vV":
        rows = [row for row in match["body"].split(ROW) if row.strip()]
        cells = tuple(tuple(read_answer(cell, depth + 1) for cell in row.split("&")) for row in rows)
        if match["transposed"] and len({len(row) for row in cells}) == 1:
            cells = tuple(zip(*cells, strict=True))
        return Matrix(cells)
    transposed = _TRANSPOSED.fullmatch(text)
    return read_answer(transposed[1], depth + 1) if transposed else None


def _read_list(text: str, depth: int) -> Node | None:
    if _GROUPED_NUMBER.fullmatch(text):
        return None
    parts, joints = _split(text)
    if len(parts) < 2 or len(parts) > MAX_ITEMS:
        return None
    if not any("∈" in part for part in parts[:1]):
        parts = [part for i, part in enumerate(parts) if i == 0 or not _WHOLE_NUMBERS.fullmatch(part)]
    items: list[Node] = []
    for part in parts:
        node = read_answer(part, depth + 1)
        items.extend(node.items if isinstance(node, Group) and node.kind in ("list", "or") else [node])
    if len(items) == 1:
        return items[0]
    return Group("or" if joints == {"or"} else "list", tuple(items))


def _split(text: str) -> tuple[list[str], set[str]]:
    """The parts between top-level commas, semicolons and the words `and` and `or`, and which of these there were."""
    outside = outside_brackets(text)
    spaced = ", " in text or ";" in text
    parts, joints, start, i = [], set(), 0, 0
    while i < len(text):
        joint = 0
        if outside[i]:
            if text[i] in ",;" and not (spaced and _groups_digits(text, i)):
                joint = 1
            elif text.startswith((" and ", " or "), i):
                joint = text.index(" ", i + 1) - i
        if joint:
            parts.append(text[start:i])
            joints.add(text[i : i + joint].strip())
            start = i + joint
            i = start
        else:
            i += 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()], joints


def _groups_digits(text: str, comma: int) -> bool:
    before, after = text[max(0, comma - 4) : comma], text[comma : comma + 5]
    return bool(re.match(r",\d{3}(?!\d)", after) and re.search(r"(?<!\d)\d{1,3}$", before))


def _read_outward(text: str, depth: int) -> Node | None:
    """Open ends written with brackets that face outward: `]0, 1]`."""
    facing_out = _FACING_OUT.fullmatch(text) if text[:1] in "[]" and text[-1:] in "[]" else None
    if facing_out and (facing_out[1] == "]" or facing_out[4] == "["):
        left, right = "[" if facing_out[1] == "[" else "(", "]" if facing_out[4] == "]" else ")"
        items = (read_answer(facing_out[2], depth + 1), read_answer(facing_out[3], depth + 1))
        return Group(left + right, items)
    return None


def _read_brackets(text: str, depth: int) -> Node | None:
    builder = _SET_BUILDER.fullmatch(text)
    if builder and _closes_at_end(text):
        return read_answer(builder[2], depth + 1)
    if not _closes_at_end(text):
        return None
    width = 2 if text.startswith("\\{") else 1
    inside = text[width:-width]
    if text[0] == "(" and ("±" in inside or "∓" in inside):
        return _read_plus_minus(text, depth)
    parts, joints = _split(inside)
    kind = {"\\{": "{}", "⟨": "()"}.get(text[:width], text[0] + text[-1])
    if kind == "{}":
        items = flat_list([read_answer(part, depth + 1) for part in parts]) if parts else Group("list", ())
        return Group("{}", items.items if isinstance(items, Group) and items.kind == "list" else (items,))
    if len(parts) < 2 or joints & {"and", "or"}:
        opens = kind == "()" and inside.strip() and not _needs_brackets(inside)
        return read_answer(inside, depth + 1) if opens else None
    return Group(kind, tuple(read_answer(part, depth + 1) for part in parts))


def _needs_brackets(inside: str) -> bool:
    """A bracketed single value stays a leaf, so that its unit or base is read with it."""
    return not any(sign in inside for sign in _SIGNS + "∪") and not inside.strip().startswith(("(", "[", "\\{"))


def _closes_at_end(text: str) -> bool:
    if not (text.startswith(("(", "[", "\\{", "⟨")) and text.endswith((")", "]", "\\}", "⟩"))):
        return False
    return is_one_bracket(text)


def _read_union(text: str, depth: int) -> Node | None:
    outside = outside_brackets(text)
    for sign, kind in (("∪", "union"), ("∖", "minus")):
        cuts = [i for i, char in enumerate(text) if char == sign and outside[i]]
        if not cuts:
            continue
        edges = [-1, *cuts, len(text)]
        parts = [text[a + 1 : b].strip() for a, b in pairwise(edges)]
        if any(sign in part for part in parts for sign in _SIGNS) and kind == "union":
            head = _read_relation(text)
            if head is not None:
                return head
        if all(parts):
            return Group(kind, tuple(read_answer(part, depth + 1) for part in parts))
    return None


def _read_relation(text: str) -> Relation | None:
    outside = outside_brackets(text)
    cuts = [i for i, char in enumerate(text) if char in _SIGNS and outside[i]]
    if not cuts:
        return None
    edges = [-1, *cuts, len(text)]
    sides = tuple(text[a + 1 : b].strip() for a, b in pairwise(edges))
    return Relation(sides, tuple(text[i] for i in cuts)) if all(sides) and len(sides) <= 8 else None


def _read_plus_minus(text: str, depth: int) -> Node | None:
    if "±" not in text and "∓" not in text:
        return None
    upper = text.replace("±", "+").replace("∓", "-")
    lower = text.replace("±", "-").replace("∓", "+")
    return Group("list", (read_answer(upper, depth + 1), read_answer(lower, depth + 1)))
