"""Generated problems of the laptop grid: two data sets and six small benchmarks, all verifiable.

`generate(kind, split, num, seed)` is the one entry. A hash of its question decides a problem's split, so the splits are
disjoint for every seed, number and kind: a question that two kinds share falls into the same split in both.

The maths kinds keep every number in 0..99 and need one to five steps of arithmetic, found in `metadata["steps"]` as
`[left, operator, right]`, where None stands for the result of the step before. `gen_functions` asks for a one-line
Python function and keeps it in `metadata["expression"]`.
"""

import hashlib
import json
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

from evals.problems import Problem

Step = tuple[int | None, str, int | None]

SPLITS = {"train": (0, 1), "heldout": (2,), "test": (3,)}  # which quarters of the hash space a split owns
LARGEST = 99
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
STORY_WORDS = (
    ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn"),
    ("apples", "books", "coins", "pens", "cards", "shells"),
)
TALE_WORDS = (
    ("Gus", "Hana", "Ivan", "June", "Kofi", "Lena"),
    ("plums", "stamps", "beads", "kites", "eggs", "keys"),
)
EVENTS = {"+": ("buys {}", "finds {}", "gets {} more", "makes {}"), "-": ("loses {}", "sells {}", "gives away {}")}
MAX_DRAWS_WITHOUT_NEWS = 3_000  # after as many repeats in a row a kind counts as exhausted


def generate(kind: str, split: str, num: int, seed: int) -> list[Problem]:
    """Return `num` different problems of one kind and split, the same ones for the same arguments.

    A longer list starts with the shorter one of the same seed.

    Raises:
        ValueError: unknown kind or split, or fewer than `num` different problems exist.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of generated problems {kind!r}; known: {', '.join(KINDS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r} of {kind}; known: {', '.join(SPLITS)}")
    rng = random.Random(f"{kind}/{split}/{seed}")
    problems: dict[str, Problem] = {}
    draws_without_news = 0
    while len(problems) < num:
        problem = KINDS[kind](rng)
        if problem.question in problems or split_of(problem.question) != split:
            draws_without_news += 1
            if draws_without_news > MAX_DRAWS_WITHOUT_NEWS:
                raise ValueError(f"{kind} has no {num} different {split} problems, only about {len(problems)}")
            continue
        draws_without_news = 0
        digest = hashlib.sha256(problem.question.encode()).hexdigest()[:10]
        problems[problem.question] = _with_id(problem, f"{kind}-{split}-{digest}")
    return list(problems.values())


def split_of(question: str) -> str:
    """The split that owns a question, whatever its kind and the seed."""
    quarter = hashlib.sha256(question.encode()).digest()[-1] % 4
    return next(split for split, quarters in SPLITS.items() if quarter in quarters)


def run_steps(steps: Sequence[Sequence[Any]]) -> list[int]:
    """The result of each step in order; each `[left, operator, right]`, None being the result before."""
    results: list[int] = []
    for left, sign, right in steps:
        left = results[-1] if left is None else left
        right = results[-1] if right is None else right
        results.append(OPERATORS[sign](left, right))
    return results


def _with_id(problem: Problem, identifier: str) -> Problem:
    return Problem(**{**vars(problem), "id": identifier})


def _maths(question: str, steps: list[Step]) -> Problem:
    return Problem(
        id="",
        question=question,
        answer=(str(run_steps(steps)[-1]),),
        metadata={"steps": [list(step) for step in steps]},
    )


def _walk(rng: random.Random, value: int, num_steps: int) -> list[tuple[str, int]]:
    """Additions and subtractions of 1..9 that keep the running value in 0..99."""
    moves = []
    for _ in range(num_steps):
        sign, amount = rng.choice("+-"), rng.randint(1, 9)
        if not 0 <= OPERATORS[sign](value, amount) <= LARGEST:
            sign = "-" if sign == "+" else "+"
        value = OPERATORS[sign](value, amount)
        moves.append((sign, amount))
    return moves


def _chain(min_terms: int, max_terms: int) -> Callable[[random.Random], Problem]:
    """`Compute 17 + 8 - 5.`"""

    def draw(rng: random.Random) -> Problem:
        start = rng.randint(1, 50)
        moves = _walk(rng, start, rng.randint(min_terms, max_terms) - 1)
        question = f"Compute {start}" + "".join(f" {sign} {amount}" for sign, amount in moves) + "."
        return _maths(question, _steps_from(start, moves))

    return draw


def _steps_from(start: int, moves: list[tuple[str, int]]) -> list[Step]:
    return [(None if i else start, sign, amount) for i, (sign, amount) in enumerate(moves)]


def _story(names: Sequence[str], objects: Sequence[str]) -> Callable[[random.Random], Problem]:
    """`Ann has 12 pens. Ann buys 5. Ann loses 3. How many pens?`, and two other settings; one to four steps."""

    def draw(rng: random.Random) -> Problem:
        name, things = rng.choice(names), rng.choice(objects)
        num_steps = rng.randint(1, 4)
        setting = rng.choice(("owner", "bags", "box"))
        steps: list[Step] = []
        if setting == "bags":
            bags, each = rng.randint(2, 6), rng.randint(2, 9)
            start = bags * each
            opening = f"{name} has {bags} bags of {each} {things}."
            steps.append((bags, "*", each))
            num_steps -= 1
        else:
            start = rng.randint(1, 50)
            opening = f"{name} has {start} {things}." if setting == "owner" else f"A box holds {start} {things}."
        moves = _walk(rng, start, num_steps)
        steps += [(None if steps or i else start, sign, amount) for i, (sign, amount) in enumerate(moves)]
        if setting == "box":
            events = [f"{name} {'adds' if sign == '+' else 'takes'} {amount}." for sign, amount in moves]
        else:
            events = [f"{name} {rng.choice(EVENTS[sign]).format(amount)}." for sign, amount in moves]
        return _maths(" ".join([opening, *events, f"How many {things}?"]), steps)

    return draw


def _equation(rng: random.Random) -> Problem:
    """`Solve x + 7 = 15.`, `Solve 3 * x - 2 = 10.`: the answer is the number that x stands for."""
    x, a, b = rng.randint(1, 50), rng.randint(1, 9), rng.randint(1, 9)
    form = rng.choice(("x + a", "a + x", "x - a", "a - x", "c * x + b", "c * x - b"))
    if form == "x + a" or form == "a + x":
        left = f"x + {a}" if form == "x + a" else f"{a} + x"
        return _maths(f"Solve {left} = {x + a}.", [(x + a, "-", a)])
    if form == "x - a":
        x = a + x
        return _maths(f"Solve x - {a} = {x - a}.", [(x - a, "+", a)])
    if form == "a - x":
        x, whole = a, a + x
        return _maths(f"Solve {whole} - x = {whole - x}.", [(whole, "-", whole - x)])
    x, c = rng.randint(2, 9), rng.randint(2, 6)
    if form == "c * x + b":
        return _maths(f"Solve {c} * x + {b} = {c * x + b}.", [(c * x + b, "-", b), (None, "/", c)])
    b = min(b, c * x)
    return _maths(f"Solve {c} * x - {b} = {c * x - b}.", [(c * x - b, "+", b), (None, "/", c)])


def _series(rng: random.Random) -> Problem:
    """`Next: 3, 7, 11, 15, ?`: equal steps up or down, three or four terms shown."""
    num_shown, difference = rng.randint(3, 4), rng.randint(1, 9)
    low = rng.randint(0, LARGEST - num_shown * difference)
    terms = [low + i * difference for i in range(num_shown + 1)]
    if rng.random() < 0.5:
        terms.reverse()
        steps: list[Step] = [(terms[0], "-", terms[1]), (terms[-2], "-", None)]
    else:
        steps = [(terms[1], "-", terms[0]), (terms[-2], "+", None)]
    return _maths(f"Next: {', '.join(map(str, terms[:-1]))}, ?", steps)


FUNCTION_FORMS = (  # parameters, what to return in words, the expression; c in 2..12, d in 1..60
    ("x", "{c} * x + {d}", "{c} * x + {d}"),
    ("x", "{c} times x minus {d}", "{c} * x - {d}"),
    ("x", "x plus {d}, times {c}", "(x + {d}) * {c}"),
    ("x", "x squared plus {d}", "x * x + {d}"),
    ("a, b", "a + {c} * b - {d}", "a + {c} * b - {d}"),
    ("a, b", "the larger of a and b, plus {d}", "max(a, b) + {d}"),
    ("a, b", "the smaller of a and b, times {c}", "min(a, b) * {c}"),
    ("v", "the sum of v, minus {d}", "sum(v) - {d}"),
    ("v", "{c} times the length of v", "{c} * len(v)"),
)
EXPRESSION_NAMES = {"max": max, "min": min, "sum": sum, "len": len}


def function_of(parameters: str, expression: str) -> Callable[..., Any]:
    """The function that an expression of `FUNCTION_FORMS` describes; for generated text only, never for a model's."""
    return eval(f"lambda {parameters}: {expression}", {"__builtins__": {}, **EXPRESSION_NAMES})


def _function(rng: random.Random) -> Problem:
    """`Write f(x) that returns 3 * x + 2.`, with five tests."""
    parameters, words, template = rng.choice(FUNCTION_FORMS)
    constants = {"c": rng.randint(2, 12), "d": rng.randint(1, 60)}
    expression = template.format(**constants)
    function = function_of(parameters, expression)
    tests = []
    for _ in range(5):
        arguments: list[Any] = [rng.randint(-9, 30) for _ in parameters.split(", ")]
        if parameters == "v":
            arguments = [[rng.randint(-9, 30) for _ in range(rng.randint(1, 5))]]
        tests.append({"input": "\n".join(map(json.dumps, arguments)), "output": json.dumps(function(*arguments))})
    return Problem(
        id="",
        question=f"Write f({parameters}) that returns {words.format(**constants)}.",
        tests=tuple(tests),
        fn_name="f",
        metadata={"kind": "code", "parameters": parameters, "expression": expression},
    )


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "gen_chains": _chain(2, 5),
    "gen_stories": _story(*STORY_WORDS),
    "gen_short": _chain(2, 3),
    "gen_long": _chain(4, 6),
    "gen_tales": _story(*TALE_WORDS),
    "gen_equations": _equation,
    "gen_series": _series,
    "gen_functions": _function,
}
