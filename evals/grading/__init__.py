"""The graders' front door: mark a completion as maths or as code, whichever the problem is.

The graders (`math`, `code`) are imported on first use, so that importing this package costs nothing.
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from evals.grading.verdict import Grade, TestResult
from evals.problems import Problem

__all__ = ["EXTRACTORS", "Grade", "TestResult", "grade", "grade_many"]

EXTRACTORS = ("any", "answer_line")
"""How a maths answer is found. `any`: whatever `math.extract_answer` accepts. `answer_line`: the last line
`Answer: ...`, else as `any`. Programs are always found by `code.extract_program`."""

_ANSWER_LINE = re.compile(r"^[\s*#>_]*answer[*_]*\s*:[*_]*[ \t]*(\S.*?)\s*$", re.IGNORECASE | re.MULTILINE)


def grade(
    completion: str, problem: Problem, *, extractor: str = "any", rung: str | None = None, mode: str = "strict"
) -> Grade:
    """Mark one completion.

    `rung` and `mode` concern code alone (see `code.grade_program`); `extractor` concerns maths alone.

    Raises:
        ValueError: unknown extractor.
    """
    if problem.is_code:
        return _grade_code(completion, problem, rung, mode)
    return _grade_maths(completion, problem, extractor)


def grade_many(
    completions: Sequence[str],
    problems: Sequence[Problem],
    *,
    extractor: str = "any",
    rung: str | None = None,
    mode: str = "strict",
    num_threads: int | None = None,
) -> list[Grade]:
    """Mark each completion against the problem at the same index, in order; the reward of the trainer.

    Up to `num_threads` are marked at a time (default: `OMP_NUM_THREADS`, else the cores of the machine).

    Raises:
        ValueError: the two sequences differ in length; unknown extractor.
    """
    if len(completions) != len(problems):
        raise ValueError(f"{len(completions)} completions for {len(problems)} problems")

    def mark(pair: tuple[str, Problem]) -> Grade:
        return grade(*pair, extractor=extractor, rung=rung, mode=mode)

    pairs = list(zip(completions, problems, strict=True))
    num_threads = num_threads or thread_budget()
    if num_threads > 1 and len(pairs) > 1:
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(mark, pairs))
    return [mark(pair) for pair in pairs]


def thread_budget() -> int:
    """Threads that this process may keep busy: `OMP_NUM_THREADS` (Ray sets it to a task's CPUs), else all cores."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(stated)) if stated.isdigit() else os.cpu_count() or 1


def _grade_maths(completion: str, problem: Problem, extractor: str) -> Grade:
    from evals.grading.math import grade_math

    if extractor not in EXTRACTORS:
        raise ValueError(f"unknown answer extractor {extractor!r}; known: {', '.join(EXTRACTORS)}")
    if extractor == "answer_line":
        lines = _ANSWER_LINE.findall(completion.rpartition("</think>")[2])
        # An unclosed <think> is an unfinished answer, whatever lines it holds: that verdict is the grader's.
        if lines and completion.count("<think>") <= completion.count("</think>"):
            return grade_math(lines[-1], problem.answer, form="answer")
    return grade_math(completion, problem.answer)


def _grade_code(completion: str, problem: Problem, rung: str | None, mode: str) -> Grade:
    from evals.grading.code import extract_program, grade_program

    program = extract_program(completion)
    verdict = grade_program(
        program,
        problem.tests,
        fn_name=problem.fn_name,
        time_limit_s=problem.time_limit_s,
        mode=mode,
        packages=problem.packages,
        rung=rung,
    )
    return Grade(verdict.correct, verdict.reason, program, verdict.per_test)
