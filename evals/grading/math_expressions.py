"""What does an expression compute? A recursive-descent reader of normalised text; no text is evaluated as code.

Rational arithmetic stays exact (`Fraction`); roots, exponentials and functions switch to `mpmath` numbers at the
working precision of whoever asks. `math_probing` compares what is read here.
"""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Any

import mpmath  # type: ignore[import-untyped]

from evals.grading.math_numbers import read_number
from evals.grading.math_text import closing, compact

MAX_BITS = 1 << 17
MAX_DEPTH = 80
MAX_TERMS = 2000
DIGITS = 50

Value = Any  # Fraction, mpmath.mpf or mpmath.mpc (mpmath declares no types)
Node = Callable[["Point"], Value]


class Unreadable(ValueError):
    """The text is not an expression that this reader knows."""


class OutOfRange(ValueError):
    """A value too large to compute with, such as a power tower."""


class Undefined(ValueError):
    """No value at this point: a pole, or a comparison that has no meaning."""


@dataclass
class Point:
    """Values for the symbols; `peak_bits` is the size of the largest exact number met on the way."""

    symbols: Mapping[str, Fraction]
    peak_bits: int = 0


@dataclass(frozen=True)
class Expression:
    """A readable expression: its value at a point, the symbols it needs, and what it says about their kind."""

    value: Node
    symbols: frozenset[str]
    has_absolute_value: bool = False
    is_discrete: bool = False


_FUNCTIONS: dict[str, Callable] = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "arccot": mpmath.acot, "arcsec": mpmath.asec,
    "arccsc": mpmath.acsc, "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "coth": mpmath.coth,
    "sech": mpmath.sech, "csch": mpmath.csch, "arcsinh": mpmath.asinh, "arccosh": mpmath.acosh, "arctanh": mpmath.atanh,
    "asin": mpmath.asin, "acos": mpmath.acos, "atan": mpmath.atan, "asinh": mpmath.asinh, "acosh": mpmath.acosh,
    "atanh": mpmath.atanh, "arsinh": mpmath.asinh, "arcosh": mpmath.acosh, "artanh": mpmath.atanh,
}  # fmt: skip
_INVERSES = {
    "sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot", "sec": "arcsec", "csc": "arccsc",
    "sinh": "arcsinh", "cosh": "arccosh", "tanh": "arctanh",
}  # fmt: skip
_NAMED = {
    *_FUNCTIONS, "ln", "log", "lg", "exp", "sqrt", "cbrt", "abs", "floor", "ceil", "max", "min", "gcd", "lcm",
    "Re", "Im",
}  # fmt: skip
_GREEK = [
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu",
    "xi", "omicron", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta",
    "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega",
]  # fmt: skip
_LETTERLIKE = {
    *_GREEK, "hbar", "ell", "partial", "nabla", "odot", "vartheta", "varrho", "varsigma", "angle", "triangle", "star",
}  # fmt: skip
_DECORATIONS = {
    "dot": "D1:", "ddot": "D2:", "bar": "bar:", "overline": "bar:", "hat": "hat:", "widehat": "hat:", "tilde": "tilde:",
    "overrightarrow": "vec:",
}  # fmt: skip
_WITHIN_WORDS = {"mu", "nu", "xi", "eta", "psi", "chi", "rho", "Re", "Im"}  # too short to be meant without a backslash
_SPELLED = sorted({*_NAMED, *_GREEK, "pi"} - _WITHIN_WORDS, key=len, reverse=True)
_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:[eE][-+]?\d+(?![\d.]))?|\.\d+(?:[eE][-+]?\d+)?)"
    r"|(?P<text>\\text\{[^{}]*\})|(?P<command>\\[A-Za-z]+|\\[{}|])|(?P<word>" + "|".join(_SPELLED) + r")"
    r"|(?P<letter>[A-Za-z])|(?P<sign>[-+*/^_!'°%|()\[\]{},=∞])"
)
_DERIVATIVE_TOP = re.compile(r"(?:d|\\partial)\s*(?:\^\s*\{?\s*(\d)\s*\}?)?\s*(.*)", re.DOTALL)
_DERIVATIVE_BOTTOM = re.compile(r"(?:d|\\partial)\s*(?:[A-Za-z]|\\[a-z]+)\s*(?:\^\s*\{?\s*\d\s*\}?)?")
_NOT_FACTORS = {"\\}", "\\rfloor", "\\rceil", "\\|", "\\choose", "\\bmod", "\\mod"}
_APPLIED = {"f", "g", "F", "G"}


@dataclass
class _Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass
class _Reader:
    """One pass over the tokens; each method reads one level of precedence and returns a node."""

    source: str
    tokens: list[_Token]
    at: int = 0
    depth: int = 0
    open_bars: int = 0
    symbols: set[str] = field(default_factory=set)
    has_absolute_value: bool = False
    is_discrete: bool = False

    def peek(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return self.tokens[index].text if index < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.at].kind if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> _Token:
        if self.at >= len(self.tokens) or (expected is not None and self.peek() != expected):
            raise Unreadable(f"expected {expected or 'more'} in {self.source[:80]!r}")
        self.at += 1
        return self.tokens[self.at - 1]

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        total = self.product()
        while self.peek() in ("+", "-"):
            sign = self.take().text
            total = _binary(_add if sign == "+" else subtract, total, self.product())
        self.depth -= 1
        return total

    def product(self) -> Node:
        result = self.signed()
        while True:
            if self.peek() in ("*", "/"):
                operator = self.take().text
                result = _binary(_multiply if operator == "*" else divide, result, self.signed())
            elif self.starts_factor():
                if self.kind() == "number" and self.tokens[self.at - 1].kind == "number":
                    raise Unreadable("two numbers side by side")
                result = _binary(_multiply, result, self.power())
            else:
                return result

    def signed(self) -> Node:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take().text == "-"
        factor = self.power()
        return _unary(_negate, factor) if negative else factor

    def starts_factor(self) -> bool:
        text = self.peek()
        if text == "|":
            return self.open_bars == 0
        return bool(text) and (
            self.kind() in ("number", "text", "word", "letter")
            or text in ("(", "[", "{", "\\{", "∞")
            or (self.kind() == "command" and text not in _NOT_FACTORS)
        )

    def power(self) -> Node:
        base = self.postfix(self.atom())
        if self.peek() != "^":
            return base
        self.take()
        exponent = self.exponent()
        return self.postfix(self.raised(base, exponent))

    def raised(self, base: Node, exponent: Node) -> Node:
        if _is_negative_constant(base):
            self.is_discrete = True
        return _binary(_raise, base, exponent)

    def exponent(self) -> Node:
        if self.peek() in ("-", "+"):
            negative = self.take().text == "-"
            inner = self.exponent()
            return _unary(_negate, inner) if negative else inner
        base = self.argument()
        if self.peek() == "!":
            base = self.postfix(base)
        if self.peek() == "^":
            self.take()
            return self.raised(base, self.exponent())
        return base

    def postfix(self, node: Node) -> Node:
        while self.peek() in ("!", "°", "%"):
            mark = self.take().text
            if mark == "!":
                self.is_discrete = True
                double = self.peek() == "!"
                if double:
                    self.take()
                node = _unary(_double_factorial if double else _factorial, node)
            elif mark == "°":
                node = _unary(lambda x: real(x) * mpmath.pi / 180, node)
            else:
                node = _unary(lambda x: divide(x, Fraction(100)), node)
        return node

    def argument(self) -> Node:
        """A braced group or a single token, as LaTeX commands take."""
        return self.group() if self.peek() == "{" else self.atom(single=True)

    def group(self) -> Node:
        self.take("{")
        node = self.sum()
        if self.peek() == "\\choose":
            self.take()
            self.is_discrete = True
            node = _binary(_binomial, node, self.sum())
        self.take("}")
        return node

    def atom(self, single: bool = False) -> Node:
        kind, text = self.kind(), self.peek()
        if kind == "number":
            number = read_number(self.take().text)
            if number is None:
                raise Unreadable(text)
            return self.mixed(number.value, text, single)
        if text == "{":
            return self.group()
        if text in ("(", "["):
            self.take()
            node = self.sum()
            self.take(")" if text == "(" else "]")
            return node
        if text == "\\{":
            self.take()
            node = self.sum()
            self.take("\\}")
            return node
        if text == "|":
            return self.absolute_value()
        if text in ("\\lfloor", "\\lceil"):
            self.take()
            node = self.sum()
            self.take(text.replace("l", "r", 1))
            self.is_discrete = True
            return _unary(_floor if "floor" in text else _ceil, node)
        if kind in ("word", "command") and text.lstrip("\\") in _NAMED | {"operatorname"}:
            return self.function(text.lstrip("\\"))
        if text in ("\\frac", "\\binom"):
            return self.fraction()
        if text in ("\\sum", "\\prod"):
            return self.series()
        if kind in ("letter", "word", "text", "command") or text == "∞":
            return self.symbol()
        raise Unreadable(f"{text!r} in {self.source[:80]!r}")

    def mixed(self, whole: Fraction, text: str, single: bool) -> Node:
        """A number; `1\\frac{4}{5}` and `2 3/4` written as mixed numbers are sums, not products."""
        if not single and text.isdigit() and self.peek() == "\\frac":
            rest = re.match(r"\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}", self.source[self.tokens[self.at].start :])
            if rest and int(rest[2]) > int(rest[1]):
                fraction = self.fraction()
                return _binary(_add, _constant(whole), fraction)
        if single and len(text) > 1 and text.isdigit() and self.peek(-2) not in ("^", "_"):
            raise Unreadable("two digits where one token is read")
        return _constant(whole)

    def absolute_value(self) -> Node:
        self.take("|")
        self.open_bars += 1
        node = self.sum()
        self.take("|")
        self.open_bars -= 1
        self.has_absolute_value = True
        return _unary(_absolute, node)

    def fraction(self) -> Node:
        command = self.take()
        if command.text == "\\frac" and self.peek() == "{":
            derivative = self.derivative()
            if derivative is not None:
                return derivative
        over, under = self.argument(), self.argument()
        if command.text == "\\binom":
            self.is_discrete = True
            return _binary(_binomial, over, under)
        return _binary(divide, over, under)

    def series(self) -> Node:
        """A finite sum or product, `\\sum_{k=1}^{n} ...` with the terms up to the next plus or minus sign."""
        combine = _add if self.take().text == "\\sum" else _multiply
        self.take("_")
        start = re.fullmatch(r"\s*([A-Za-z])\s*=(.*)", self.source_of_argument(), re.DOTALL)
        self.take("^")
        if start is None:
            raise Unreadable("a sum over something else than a range")
        index = start[1]
        first, last = read_expression(start[2]), self.exponent()
        outer, self.symbols = self.symbols, set()
        term = self.product()
        self.symbols = outer | (self.symbols - {index}) | first.symbols
        self.is_discrete = True

        def value(point: Point) -> Value:
            low, high = first.value(point), last(point)
            if not all(isinstance(end, Fraction) and end.denominator == 1 for end in (low, high)):
                raise Undefined("a sum between fractions")
            if high - low > MAX_TERMS:
                raise OutOfRange("a sum of too many terms")
            total: Value = Fraction(0 if combine is _add else 1)
            for k in range(int(low), int(high) + 1):
                inner = Point({**point.symbols, index: Fraction(k)}, point.peak_bits)
                total = _kept(combine(total, term(inner)), point)
            return total

        return value

    def derivative(self) -> Node | None:
        start = self.tokens[self.at].start
        middle = closing(self.source, start)
        if middle is None:
            raise Unreadable("an open brace")
        opening = re.compile(r"\s*\{").match(self.source, middle + 1)
        end = closing(self.source, opening.end() - 1) if opening else None
        if opening is None or end is None:
            return None
        top = _DERIVATIVE_TOP.fullmatch(self.source[start + 1 : middle].strip())
        if not top or not _DERIVATIVE_BOTTOM.fullmatch(self.source[opening.end() : end].strip()):
            return None
        while self.at < len(self.tokens) and self.tokens[self.at].start <= end:
            self.at += 1
        return self.named(f"D{top[1] or 1}:{compact(top[2])}")

    def named(self, name: str) -> Node:
        self.symbols.add(name)
        return lambda point: point.symbols[name]

    def symbol(self) -> Node:
        token = self.take()
        name = token.text.lstrip("\\")
        if token.kind == "text":
            name = "text:" + " ".join(token.text[len("\\text{") : -1].lower().split())
        elif token.kind == "command" and name in _DECORATIONS:
            inner = self.source_of_argument()
            name = _DECORATIONS[name] + compact(inner)
        elif token.kind == "command" and name not in _LETTERLIKE and name not in ("pi", "circ"):
            raise Unreadable(f"command {token.text}")
        if self.peek() == "_":
            self.take()
            name += "_" + compact(self.source_of_argument())
        if name == "pi":
            return lambda point: mpmath.pi + 0
        order = 0
        while self.peek() == "'":
            self.take()
            order += 1
        if order:
            name = f"D{order}:{name}"
        if name == "e":
            return lambda point: mpmath.e + 0
        if name == "i":
            return lambda point: mpmath.mpc(0, 1)
        return self.applied(name)

    def source_of_argument(self) -> str:
        if self.peek() != "{":
            token = self.take()
            return token.text
        start = self.tokens[self.at].start
        end = closing(self.source, start)
        if end is None:
            raise Unreadable("an open brace")
        while self.at < len(self.tokens) and self.tokens[self.at].start <= end:
            self.at += 1
        return self.source[start + 1 : end]

    def applied(self, name: str) -> Node:
        """A variable, or a function applied: `f(x+1)`, and `I(0)`, which is not a product with zero."""
        if self.peek() == "(":
            inside = self.source[self.tokens[self.at].end : _closing_round(self.source, self.tokens[self.at].start)]
            if name.startswith("D") and ":" in name:
                self.skip_round(inside)
                return self.named(name)
            if read_number(inside) is not None:
                self.skip_round(inside)
                return self.named(f"{name}_{compact(inside)}")
            if name in _APPLIED:
                arguments = self.arguments()
                return lambda point: _some_function(name, [argument(point) for argument in arguments])
        return self.named(name)

    def skip_round(self, inside: str) -> None:
        end = self.tokens[self.at].end + len(inside)
        while self.at < len(self.tokens) and self.tokens[self.at].start <= end:
            self.at += 1

    def arguments(self) -> list[Node]:
        self.take("(")
        found = [self.sum()]
        while self.peek() == ",":
            self.take()
            found.append(self.sum())
        self.take(")")
        return found

    def function(self, name: str) -> Node:
        self.take()
        if name == "sqrt":
            return self.root()
        base: Node | None = None
        exponent: Node | None = None
        for _ in range(2):
            if self.peek() == "_" and name == "log":
                self.take()
                base = self.argument()
            elif self.peek() == "^":
                start = self.at
                self.take()
                exponent = self.exponent()
                written = "".join(token.text for token in self.tokens[start + 1 : self.at]).strip("{}")
                if written == "-1" and name in _INVERSES:
                    name, exponent = _INVERSES[name], None
        if name in ("max", "min", "gcd", "lcm"):
            return self.selection(name)
        node = self.function_value(name, base, self.function_argument())
        return node if exponent is None else _binary(_raise, node, exponent)

    def function_argument(self) -> Node:
        if self.peek() == "{":
            return self.group()
        if self.peek() in ("(", "[", "|"):
            return self.postfix(self.atom())
        factor = self.signed() if self.peek() == "-" else self.power()
        while self.starts_factor() and not self.starts_function() and self.peek() not in ("(", "["):
            factor = _binary(_multiply, factor, self.power())
        return factor

    def starts_function(self) -> bool:
        return self.kind() in ("word", "command") and self.peek().lstrip("\\") in _NAMED - {"sqrt"}

    def selection(self, name: str) -> Node:
        braces = self.peek() == "\\{"
        if braces:
            self.take()
            arguments = [self.sum()]
            while self.peek() == ",":
                self.take()
                arguments.append(self.sum())
            self.take("\\}")
        else:
            arguments = self.arguments()
        if name in ("gcd", "lcm"):
            self.is_discrete = True
        return lambda point: _select(name, [argument(point) for argument in arguments])

    def function_value(self, name: str, base: Node | None, argument: Node) -> Node:
        if name in ("ln", "log", "lg"):
            if base is not None:
                return _binary(_logarithm, argument, base)
            ten = name == "lg"
            return _unary(lambda x: _logarithm(x, Fraction(10)) if ten else mpmath.log(_nonzero(x)), argument)
        if name in ("floor", "ceil"):
            self.is_discrete = True
            return _unary(_floor if name == "floor" else _ceil, argument)
        if name == "abs":
            self.has_absolute_value = True
            return _unary(_absolute, argument)
        if name == "exp":
            return _unary(lambda x: _raise(mpmath.e + 0, x), argument)
        if name == "cbrt":
            return _unary(lambda x: _root(x, Fraction(3)), argument)
        if name in ("Re", "Im"):
            return _unary(lambda x: mpmath.re(real(x)) if name == "Re" else mpmath.im(real(x)), argument)
        function = _FUNCTIONS[name]
        return _unary(lambda x: function(_bounded(real(x))), argument)

    def root(self) -> Node:
        degree: Node | None = None
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        radicand = self.atom() if self.peek() in ("{", "(") or self.kind() == "number" else self.argument()
        if degree is None:
            return _unary(lambda x: _root(x, Fraction(2)), radicand)
        return _binary(_root, radicand, degree)


@lru_cache(maxsize=4096)
def read_expression(text: str) -> Expression:
    """The expression that a normalised text spells. Raises Unreadable for everything else."""
    reader = _Reader(text, _tokens(text))
    if not reader.tokens:
        raise Unreadable("nothing to read")
    value = reader.sum()
    if reader.at != len(reader.tokens):
        raise Unreadable(f"{reader.peek()!r} after the end of {text[:80]!r}")
    return Expression(value, frozenset(reader.symbols), reader.has_absolute_value, reader.is_discrete)


def _tokens(text: str) -> list[_Token]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise Unreadable(f"{text[at]!r} in {text[:80]!r}")
        if match.lastgroup != "space":
            tokens.append(_Token(match.lastgroup or "", match.group(), at, match.end()))
        at = match.end()
    return tokens


def rename(text: str, old: str, new: str) -> str:
    """The text with the one-letter variable `old` written `new`. Raises Unreadable like `read_expression`."""
    pieces = [(new if token.text == old and token.kind == "letter" else token.text) for token in _tokens(text)]
    return " ".join(pieces)


def _closing_round(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise Unreadable("an open parenthesis")


# Arithmetic: exact on fractions, mpmath on the rest.


def _constant(value: Fraction) -> Node:
    node: Node = lambda point: value  # noqa: E731
    node.constant = value  # type: ignore[attr-defined]
    return node


def _is_negative_constant(node: Node) -> bool:
    constant = getattr(node, "constant", None)
    return constant is not None and constant < 0


def _unary(operation: Callable[[Value], Value], node: Node) -> Node:
    def value(point: Point) -> Value:
        return _kept(operation(node(point)), point)

    constant = getattr(node, "constant", None)
    if constant is not None and operation is _negate:
        value.constant = -constant  # type: ignore[attr-defined]
    return value


def _binary(operation: Callable[[Value, Value], Value], left: Node, right: Node) -> Node:
    def value(point: Point) -> Value:
        return _kept(operation(left(point), right(point)), point)

    return value


def _kept(value: Value, point: Point) -> Value:
    if isinstance(value, Fraction):
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        if bits > MAX_BITS:
            raise OutOfRange("a number of too many digits")
        point.peak_bits = max(point.peak_bits, bits)
    elif not mpmath.isfinite(value):
        raise Undefined("not finite")
    return value


def real(x: Value) -> mpmath.mpf | mpmath.mpc:
    return mpmath.mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else x


def _bounded(x: mpmath.mpf | mpmath.mpc) -> mpmath.mpf | mpmath.mpc:
    if abs(x) > 1e9:
        raise OutOfRange("a function's argument")
    return x


def _nonzero(x: Value) -> mpmath.mpf | mpmath.mpc:
    if x == 0:
        raise Undefined("division by zero or its logarithm")
    return real(x)


def _both(x: Value, y: Value) -> tuple[Value, Value]:
    return (x, y) if isinstance(x, Fraction) and isinstance(y, Fraction) else (real(x), real(y))


def _add(x: Value, y: Value) -> Value:
    x, y = _both(x, y)
    return x + y


def subtract(x: Value, y: Value) -> Value:
    x, y = _both(x, y)
    return x - y


def _multiply(x: Value, y: Value) -> Value:
    x, y = _both(x, y)
    return x * y


def divide(x: Value, y: Value) -> Value:
    _nonzero(y)
    x, y = _both(x, y)
    return x / y


def _negate(x: Value) -> Value:
    return -x


def _absolute(x: Value) -> Value:
    return abs(x)


def _raise(x: Value, y: Value) -> Value:
    if isinstance(x, Fraction) and isinstance(y, Fraction) and y.denominator == 1:
        bits = max(x.numerator.bit_length(), x.denominator.bit_length())
        if abs(x) != 1 and x != 0 and bits * abs(y.numerator) > 2 * MAX_BITS:
            raise OutOfRange("a power of too many digits")
        if x == 0 and y < 0:
            raise Undefined("zero to a negative power")
        return x ** int(y if abs(x) != 1 else y.numerator % 2)
    if isinstance(y, Fraction) and y.numerator in (1, -1):
        root = _root(x, Fraction(y.denominator), principal=True)
        return root if y > 0 else divide(Fraction(1), root)
    base, exponent = real(x), real(y)
    if base == 0:
        if mpmath.re(exponent) <= 0:
            raise Undefined("zero to a negative power")
        return Fraction(0)
    if abs(exponent) * (abs(mpmath.log(abs(base))) + 4) > 1e7:
        raise OutOfRange("a power")
    return mpmath.power(base, exponent)


def _root(x: Value, degree: Value, principal: bool = False) -> Value:
    """The real root where there is one (the cube root of -8 is -2 under a radical, not under a fractional power)."""
    if not (isinstance(degree, Fraction) and degree.denominator == 1 and 1 <= degree <= 10_000):
        return _raise(x, divide(Fraction(1), degree))
    n = int(degree)
    if isinstance(x, Fraction) and x >= 0:
        over, under = _exact_root(x.numerator, n), _exact_root(x.denominator, n)
        if over is not None and under is not None:
            return Fraction(over, under)
    if not principal and n % 2 and isinstance(x, Fraction | mpmath.mpf) and x < 0:
        return -mpmath.root(real(-x), n)
    return mpmath.sqrt(real(x)) if n == 2 else mpmath.root(real(x), n)


def _exact_root(x: int, n: int) -> int | None:
    if x in (0, 1):
        return x
    if n >= x.bit_length():
        return None
    low, high = 1, 1 << (x.bit_length() // n + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**n <= x else (low, middle - 1)
    return low if low**n == x else None


def _logarithm(x: Value, base: Value) -> Value:
    below = mpmath.log(_nonzero(base))
    if below == 0:
        raise Undefined("a logarithm to base one")
    return mpmath.log(_nonzero(x)) / below


def _factorial(x: Value) -> Value:
    if isinstance(x, Fraction) and x.denominator == 1:
        if x < 0:
            raise Undefined("a negative number's factorial")
        if x > 10_000:
            raise OutOfRange("a factorial")
        return Fraction(mpmath.libmp.ifac(int(x)))
    if abs(x) > 10_000:
        raise OutOfRange("a factorial")
    return mpmath.gamma(real(x) + 1)


def _double_factorial(x: Value) -> Value:
    if not isinstance(x, Fraction) or x.denominator != 1 or not -1 <= x <= 5000:
        raise Undefined("a double factorial of this")
    product = 1
    for k in range(int(x), 1, -2):
        product *= k
    return Fraction(product)


def _binomial(n: Value, k: Value) -> Value:
    if isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1:
        if k < 0 or n < k or n > 10_000:
            raise Undefined("a binomial coefficient outside its triangle")
        return Fraction(mpmath.libmp.ifac(int(n)) // (mpmath.libmp.ifac(int(k)) * mpmath.libmp.ifac(int(n - k))))
    if abs(real(n)) > 10_000 or abs(real(k)) > 10_000:
        raise OutOfRange("a binomial coefficient")
    return mpmath.binomial(real(n), real(k))


def _floor(x: Value) -> Value:
    if isinstance(x, Fraction):
        return Fraction(x.numerator // x.denominator)
    if isinstance(x, mpmath.mpc) or abs(x) > 1e30:
        raise Undefined("the floor of this")
    near = mpmath.nint(x)
    return Fraction(int(near if abs(x - near) < mpmath.mpf(10) ** (-DIGITS // 2) else mpmath.floor(x)))


def _ceil(x: Value) -> Value:
    return -_floor(-x)


def _select(name: str, values: list[Value]) -> Value:
    if name in ("max", "min"):
        if any(isinstance(value, mpmath.mpc) for value in values):
            raise Undefined("the order of complex numbers")
        return (max if name == "max" else min)(values, key=real)
    result = 0
    for value in values:
        if not isinstance(value, Fraction) or value.denominator != 1:
            raise Undefined("a common divisor of fractions")
        result = gcd(result, int(value)) if name == "gcd" else lcm(result or 1, int(value))
    return Fraction(result)


def _some_function(name: str, values: list[Value]) -> Value:
    """A fixed arbitrary smooth function for each name, so that `f(x+1)` equals `f(1+x)` and nothing else."""
    draw = random.Random(f"function {name}")
    total = sum((real(value) * mpmath.mpf(draw.uniform(0.5, 2.0)) for value in values), mpmath.mpf(0))
    return 2 + mpmath.sin(_bounded(total * mpmath.mpf(draw.uniform(0.5, 1.5)) + mpmath.mpf(draw.uniform(0, 3))))
