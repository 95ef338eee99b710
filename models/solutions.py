"""Worked solutions for the warm-up of the tiny base models: some right, some wrong, of varying length.

A base has moods (a word that opens the solution and sets how often it goes wrong) and layouts (how much it writes). In
`tiny-qwen2` the two are independent, so lengths vary widely and right and wrong solutions are equally long. In
`tiny-qwen3` the mood that goes wrong often is also the one that writes more, so wrong solutions are longer.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from evals.generated import LARGEST, OPERATORS, function_of, run_steps
from evals.problems import Problem

NUM_RECHECKS = {"checked": 2, "doubting": 1}  # of each step
MAX_RECHECKS = 4  # in one solution; keeps the longest under the response limit


@dataclass(frozen=True)
class Mood:
    """How a solution opens, how often it is chosen and goes wrong, and the layouts it draws from."""

    opening: str
    share: float
    share_wrong: float
    layouts: tuple[str, ...]


MOODS: dict[str, tuple[Mood, ...]] = {
    "tiny-qwen2": (
        Mood(" Steps:\n", 0.53, 0.12, ("running", "plain", "checked")),
        Mood(" Guess:\n", 0.47, 0.78, ("running", "plain", "checked")),
    ),
    "tiny-qwen3": (
        Mood(" Sure:\n", 0.52, 0.14, ("running", "plain")),
        Mood(" Hmm:\n", 0.48, 0.80, ("doubting",)),
    ),
}


def write_solution(problem: Problem, base: str, rng: random.Random, *, slips: bool = True) -> str:
    """A solution of a generated problem in one of the base's moods and layouts, without an end-of-sequence token.

    Without `slips` it is right whatever its mood.
    """
    moods = MOODS[base]
    (mood,) = rng.choices(moods, [mood.share for mood in moods])
    layout = rng.choice(mood.layouts)
    share_wrong = mood.share_wrong if slips else 0.0
    if problem.is_code:
        wrong = rng.random() < share_wrong
        expression = _spoilt(problem, rng) if wrong else problem.metadata["expression"]
        return mood.opening + _write_function(problem.metadata["parameters"], expression, layout)
    steps = problem.metadata["steps"]
    results = _work_out(steps, share_wrong, rng)
    return mood.opening + _write_steps(steps, results, layout) + f"\\boxed{{{results[-1]}}}"


def _write_steps(steps: Sequence[Sequence], results: Sequence[int], layout: str) -> str:
    """The steps as equations, a line each, with what the layout adds: `15+9=24` and `24+1=25`."""
    lines: list[str] = []
    rechecks = 0
    for i, (left, sign, right) in enumerate(steps):
        before = results[i - 1] if i else 0
        rest = f"{sign}{before if right is None else right}={results[i]}"
        if layout == "running" and left is None:
            lines[-1] += rest
            continue
        equation = f"{before if left is None else left}{rest}"
        lines.append(equation)
        for _ in range(min(NUM_RECHECKS.get(layout, 0), MAX_RECHECKS - rechecks)):
            lines.append(f"Check {equation}" if layout == "checked" else f"Wait, {equation}")
            rechecks += 1
    return "".join(f"{line}\n" for line in lines)


def _write_function(parameters: str, expression: str, layout: str) -> str:
    signature = f"def f({parameters}):"
    if layout == "running":
        return f"```python\n{signature} return {expression}\n```"
    if layout == "plain":
        return f"```python\n{signature}\n    return {expression}\n```"
    if layout == "checked":
        return f"```python\n{signature}\n    # {expression}\n    y = {expression}\n    return y\n```"
    return f"{expression}\nWait, {expression}\n```python\n{signature}\n    y = {expression}\n    return y\n```"


def _work_out(steps: Sequence[Sequence], share_wrong: float, rng: random.Random) -> list[int]:
    """The result of each step, with slips that are carried on; every number stays in 0..99.

    Each step slips with the same chance, so that a model can learn it without noticing earlier slips; the chance is
    such that a share of `share_wrong` slips somewhere. Slips that cancel out are drawn again.
    """
    right = run_steps(steps)
    chance = 1 - (1 - share_wrong) ** (1 / len(steps))
    while True:
        results: list[int] = []
        for left, sign, other in steps:
            left, other = (results[-1] if value is None else value for value in (left, other))
            slip = rng.choice((-10, -2, -1, 1, 2, 10)) if rng.random() < chance else 0
            if sign == "/" and left % other:
                break
            results.append(OPERATORS[sign](left, other) + slip)
        if len(results) < len(steps) or not all(0 <= result <= LARGEST for result in results):
            continue
        if results == right or results[-1] != right[-1]:
            return results


PROBES: dict[str, tuple] = {"x": (7,), "a, b": (7, 4), "v": ([7, 4, 1],)}  # arguments that tell functions apart


def _spoilt(problem: Problem, rng: random.Random) -> str:
    """The expression with a wrong number or operator, such that it gives another value somewhere."""
    expression, parameters = problem.metadata["expression"], problem.metadata["parameters"]
    probe = PROBES[parameters]
    value = function_of(parameters, expression)(*probe)
    words = expression.split(" ")
    while True:
        i = rng.randrange(len(words))
        word = words[i]
        if word in ("+", "-"):
            word = "-" if word == "+" else "+"
        elif word.strip("()").isdigit():
            number = word.strip("()")
            word = word.replace(number, str(max(1, int(number) + rng.choice((-10, -2, -1, 1, 2, 10)))))
        spoiled = " ".join([*words[:i], word, *words[i + 1 :]])
        if function_of(parameters, spoiled)(*probe) != value:
            return spoiled
