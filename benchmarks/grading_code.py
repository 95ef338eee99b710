"""What grading a program costs, as ratios within one run, and what the public reference solutions score.

    python benchmarks/grading_code.py [--rounds 15] [--data-dir DIR]

Cost of one trivial program: a bare `python -I -S` process, against `grade_program` on each rung. Cost of a problem of
ten tests: a process and a manager per problem, with no sandbox at all, as LiveCodeBench's checker has it, against
`grade_program`. Contenders take turns, and the median of the rounds counts. With `--data-dir`: how many reference
solutions of LeetCode, HumanEval and MBPP problems pass.
"""

import argparse
import ast
import contextlib
import gzip
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from evals.grading import sandbox
from evals.grading.code import grade_program

TRIVIAL = "print(int(input()) + 1)"
FUNCTION = "class Solution:\n    def add_one(self, n):\n        return n + 1\n"
PROGRAMS_PER_ROUND = 16
IMPORTS = "".join(
    f"from {module} import *\n"
    for module in (
        "string",
        "re",
        "datetime",
        "collections",
        "heapq",
        "bisect",
        "copy",
        "math",
        "random",
        "statistics",
        "itertools",
        "functools",
        "operator",
        "io",
        "json",
        "typing",
    )
)
"""What LiveCodeBench's checker puts before a program."""

TEN_TESTS = [{"input": str(n), "output": str(n + 1)} for n in range(10)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data-dir", type=Path, help="folder with the jsonl files of the reference solutions")
    arguments = parser.parse_args()
    rungs = [status.name for status in sandbox.rung_report() if status.usable]
    compare_trivial_programs(rungs, arguments.rounds)
    compare_ten_tests(rungs, arguments.rounds)
    if arguments.data_dir is not None:
        for rung in rungs:
            score_references(arguments.data_dir, rung)


def compare_trivial_programs(rungs: list[str], rounds: int) -> None:
    contenders: dict[str, Callable[[], object]] = {"python -I -S": run_bare}
    contenders |= {rung: partial(grade, TRIVIAL, TEN_TESTS[:1], rung) for rung in rungs}
    report("one trivial program", contenders, rounds, PROGRAMS_PER_ROUND)


def compare_ten_tests(rungs: list[str], rounds: int) -> None:
    contenders: dict[str, Callable[[], object]] = {"process and manager": run_in_process_with_manager}
    for rung in rungs:
        contenders[f"{rung}, script"] = partial(grade, TRIVIAL, TEN_TESTS, rung)
        contenders[f"{rung}, function"] = partial(grade, FUNCTION, TEN_TESTS, rung, "add_one")
    report("one problem of ten tests", contenders, rounds, PROGRAMS_PER_ROUND // 4)


def report(title: str, contenders: dict[str, Callable[[], object]], rounds: int, repeats: int) -> None:
    """Time the contenders in turns; print the median milliseconds, and the ratio to the first."""
    milliseconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()  # start what stays warm
    for _ in range(rounds):
        for name, run in contenders.items():
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            milliseconds[name].append((time.perf_counter() - started) / repeats * 1000)
    medians = {name: statistics.median(values) for name, values in milliseconds.items()}
    first = next(iter(medians.values()))
    print(f"{title}, median of {rounds} rounds of {repeats}")
    for name, median in medians.items():
        print(f"  {name:24} {median:8.2f} ms   {median / first:5.2f} x")


def grade(program: str, tests: list[dict[str, str]], rung: str, fn_name: str | None = None) -> None:
    assert grade_program(program, tests, fn_name=fn_name, rung=rung).correct


def run_bare() -> None:
    python = [os.path.realpath(sys.executable), "-I", "-S", "-c", TRIVIAL]
    assert subprocess.run(python, input=b"0", capture_output=True, check=True).stdout == b"1\n"


def run_in_process_with_manager() -> None:
    with multiprocessing.get_context("fork").Manager() as manager:
        results = manager.list()
        process = multiprocessing.get_context("fork").Process(target=run_ten_tests, args=(results,))
        process.start()
        process.join()
        assert list(results) == [True] * 10


def run_ten_tests(results: Any) -> None:
    """The program's tests in this very process, outputs compared where the program could reach them."""
    code = compile(IMPORTS + TRIVIAL, "<program>", "exec")
    for test in TEN_TESTS:
        output = io.StringIO()
        sys.stdin = io.StringIO(test["input"])
        with contextlib.redirect_stdout(output):
            exec(code, {"__name__": "__main__"})
        results.append(output.getvalue().strip() == test["output"])


def score_references(data_dir: Path, rung: str) -> None:
    for name, references in (("LeetCode", leetcode), ("HumanEval", humaneval), ("MBPP", mbpp)):
        started = time.perf_counter()
        verdicts = {
            task: grade_program(program, tests, rung=rung, time_limit_s=20, **options)
            for task, program, tests, options in references(data_dir)
        }
        failed = {task: verdict.reason for task, verdict in verdicts.items() if not verdict.correct}
        passed = f"{len(verdicts) - len(failed)} of {len(verdicts)}"
        print(f"{name} on {rung}: {passed} pass in {time.perf_counter() - started:.1f} s; others: {failed or 'none'}")


Reference = tuple[str, str, list[dict[str, str]], dict[str, Any]]


def leetcode(data_dir: Path) -> Iterator[Reference]:
    """Each `assert candidate(a = 1, b = 2) == 3` is a test of the method."""
    for i, row in enumerate(read_rows(data_dir / "leetcode_rllm_functional.jsonl")):
        tree: Any = ast.parse(row["tests"]["functional"])
        tests = []
        for statement in tree.body[0].body:
            call, expected = statement.test.left, statement.test.comparators[0]
            arguments = [json.dumps(ast.literal_eval(keyword.value)) for keyword in call.keywords]
            tests.append({"input": "\n".join(arguments), "output": json.dumps(ast.literal_eval(expected))})
        method = tree.body[1].value.args[0].attr
        yield f"{i}: {method}", row["solutions"], tests, {"fn_name": method, "packages": True}


def humaneval(data_dir: Path) -> Iterator[Reference]:
    for row in read_rows(data_dir / "HumanEval.jsonl.gz"):
        parts = [row["prompt"], row["canonical_solution"], row["test"], f"check({row['entry_point']})"]
        yield row["task_id"], *assertions_as_script(parts), {}


def mbpp(data_dir: Path) -> Iterator[Reference]:
    for row in read_rows(data_dir / "mbpp.jsonl"):
        parts = [row["code"], row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]]
        yield f"MBPP/{row['task_id']}", *assertions_as_script(parts), {}


def assertions_as_script(parts: list[str]) -> tuple[str, list[dict[str, str]]]:
    """A program that asserts, as one that is graded by its output. Only for programs that are trusted not to cheat."""
    return "\n".join([*parts, "print('all asserted')"]), [{"input": "", "output": "all asserted"}]


def read_rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


if __name__ == "__main__":
    main()
