"""How right and how fast is the maths grader, beside Math-Verify alone?

    python benchmarks/grading_math.py --cases ../shared/cases/math.jsonl --data ../shared/data

Prints the verdicts on the cases side by side, then the rates on one core as ratios of one run. `--cases` is JSON lines
with `gold`, `pred`, `pred_form` ("answer" or "completion") and `expected`; `--data` holds `math500.jsonl` and
`olympiadbench.jsonl`.
"""

import argparse
import json
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as OutOfTime
from pathlib import Path

import math_verify
import pebble

from evals.grading.math import grade_math

CASE_LIMIT_S = 20.0


def math_verify_alone(prediction: str, gold: str) -> bool:
    """The library's defaults, with the golds between dollar signs as its documentation asks for."""
    return math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(prediction))


def ours(prediction: str, gold: str) -> bool:
    return grade_math(prediction, gold).correct


def compare_cases(path: Path) -> None:
    """One row per case; Math-Verify runs in a process of its own, because two of the cases hang it."""
    scores = {"ours": [0, 0, 0], "math-verify": [0, 0, 0]}
    print(f"{'case':10} {'expected':9} {'ours':9} {'seconds':>7}   {'math-verify':12} {'seconds':>7}")
    with pebble.ProcessPool(max_workers=1) as processes:
        processes.schedule(math_verify_alone, args=["$1$", "1"]).result()
        for case in map(json.loads, path.read_text().splitlines()):
            prediction = case["pred"] if case["pred_form"] == "completion" else rf"\boxed{{{case['pred']}}}"
            start = time.perf_counter()
            verdicts = {"ours": ours(prediction, case["gold"])}
            middle = time.perf_counter()
            try:
                task = processes.schedule(math_verify_alone, args=[prediction, case["gold"]], timeout=CASE_LIMIT_S)
                verdicts["math-verify"] = task.result()
                shown = str(verdicts["math-verify"])
            except OutOfTime:
                verdicts["math-verify"], shown = False, "hangs"
            end = time.perf_counter()
            for grader, verdict in verdicts.items():
                outcome = 0 if verdict == case["expected"] else 1 if verdict else 2
                scores[grader][outcome] += 1
            print(
                f"{case['id']:10} {case['expected']!s:9} {verdicts['ours']!s:9} {middle - start:7.3f}   "
                f"{shown:12} {end - middle:7.3f}"
            )
    for grader, (right, accepts, rejects) in scores.items():
        print(f"{grader:12} right {right}, accepts wrong {accepts}, rejects right {rejects}")


def rate(grade: Callable[[str, str], bool], pairs: list[tuple[str, str]]) -> tuple[float, int]:
    """Verdicts per second of wall time, one after the other, and how many were accepted."""
    start = time.perf_counter()
    accepted = sum(grade(prediction, gold) for prediction, gold in pairs)
    return len(pairs) / (time.perf_counter() - start), accepted


def compare_rates(name: str, pairs: list[tuple[str, str]]) -> None:
    for grade in (ours, math_verify_alone):
        rate(grade, pairs)  # the parser tables and caches of both are warm when the clock starts
    mine, accepted = rate(ours, pairs)
    theirs, accepted_there = rate(math_verify_alone, pairs)
    print(
        f"{name:34} {len(pairs):5} pairs   ours {mine:8.0f}/s ({accepted} accepted)   "
        f"math-verify {theirs:6.0f}/s ({accepted_there} accepted)   ratio {mine / theirs:.1f}"
    )


def golds(path: Path, column: str) -> list[str]:
    rows = map(json.loads, path.read_text().splitlines())
    values = [row[column] for row in rows]
    return [(", ".join(value) if isinstance(value, list) else value).replace("$", "") for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=Path("../shared/cases/math.jsonl"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    if arguments.cases.exists():
        compare_cases(arguments.cases)
    draw = random.Random(0)
    for name, column in (("math500", "answer"), ("olympiadbench", "final_answer")):
        path = arguments.data / f"{name}.jsonl"
        if not path.exists():
            print(f"{name}: no {path}; give --data")
            continue
        found = golds(path, column)
        compare_rates(f"{name}, gold against itself", [(rf"\boxed{{{gold}}}", gold) for gold in found])
        compare_rates(f"{name}, in another spelling", [(rf"\boxed{{{respelt(gold)}}}", gold) for gold in found])
        compare_rates(f"{name}, another gold", [(rf"\boxed{{{draw.choice(found)}}}", gold) for gold in found])
    compare_rates("whole numbers", [(rf"It is \boxed{{{i % 9}}}.", str(i % 7)) for i in range(3000)])


def respelt(gold: str) -> str:
    """Another spelling that only algebra sees through, so that the worker is timed."""
    return f"{gold} + 0" if not any(sign in gold for sign in "=,[\\t") else gold.replace("\\frac", "\\dfrac")


if __name__ == "__main__":
    main()
