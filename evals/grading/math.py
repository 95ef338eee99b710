"""Is a maths answer right? The reward of training and the grade of every maths benchmark.

An answer passes through layers, the cheap ones first: whole numbers; normalised strings and exact numbers, compared
along the structure of the answer (`math_judge`, in this process); expressions, by evaluation at random points and by
Math-Verify (`math_algebra`, in a worker process that is killed at its limits). Answer text is never run as code.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from evals.grading import math_pool
from evals.grading.math_extract import extract_answer
from evals.grading.math_judge import Undecided, judge
from evals.grading.verdict import Grade

__all__ = ["extract_answer", "grade_math", "grade_math_many"]

Form = Literal["completion", "answer"]
_INTEGER = re.compile(r"([-+]?)0*(\d+)")


def grade_math(
    prediction: str,
    gold: str | Sequence[str],
    *,
    form: Form = "completion",
    timeout_s: float = 5.0,
    rel_tolerance: float = 1e-4,
) -> Grade:
    """Grades a completion, or with `form="answer"` an answer already extracted from one.

    Args:
        prediction: the model's text.
        gold: the right answer; of several, all are required, in any order.
        form: whether the answer must first be found in `prediction` (see `math_extract`).
        timeout_s: wall-clock limit in seconds of the layers that run in a worker.
        rel_tolerance: relative tolerance where the gold is written as a decimal; other golds are matched exactly.

    Returns:
        A grade with one of the reasons `correct`, `wrong`, `no_answer` (none found, or an unfinished completion),
        `unparsed` (not readable as mathematics), `timeout` (over the time, memory or size limit) and `grader_error`
        (the grader's own failure, which says nothing about the answer).

    Raises:
        ValueError: there is no gold, or it is blank.
    """
    golds = (gold,) if isinstance(gold, str) else tuple(gold)
    if not golds or not all(text.strip() for text in golds):
        raise ValueError(f"grade_math needs a gold answer, got {gold!r}: check the problem's answer column")
    answer = extract_answer(prediction) if form == "completion" else prediction.strip()
    if not answer:
        return Grade(False, "no_answer")
    reason = _judge_integers(answer, golds) or _judge(answer, golds, timeout_s, rel_tolerance)
    return Grade(reason == "correct", reason, answer)


def grade_math_many(
    predictions: Sequence[str],
    golds: Sequence[str | Sequence[str]],
    *,
    form: Form = "completion",
    timeout_s: float = 5.0,
    rel_tolerance: float = 1e-4,
) -> list[Grade]:
    """`grade_math` on each pair, keeping every worker busy; one slow answer does not hold up the others."""

    def one(prediction: str, gold: str | Sequence[str]) -> Grade:
        return grade_math(prediction, gold, form=form, timeout_s=timeout_s, rel_tolerance=rel_tolerance)

    if len(predictions) != len(golds):
        raise ValueError(f"{len(predictions)} predictions but {len(golds)} golds")
    with ThreadPoolExecutor(math_pool.MAX_WORKERS) as threads:
        return list(threads.map(one, predictions, golds))


def _judge_integers(answer: str, golds: tuple[str, ...]) -> str | None:
    """The common case, decided without any parsing; digits are compared as text, whatever their number."""
    if len(golds) != 1:
        return None
    mine, theirs = _INTEGER.fullmatch(answer), _INTEGER.fullmatch(golds[0])
    if mine is None or theirs is None:
        return None
    same_sign = (mine[1] == "-") == (theirs[1] == "-") or mine[2] == "0"
    return "correct" if same_sign and mine[2] == theirs[2] else "wrong"


def _judge(answer: str, golds: tuple[str, ...], timeout_s: float, rel_tolerance: float) -> str:
    try:
        return judge(answer, golds, rel_tolerance)
    except Undecided:
        request = {"answer": answer, "golds": golds, "rel_tolerance": rel_tolerance}
        return math_pool.pool.ask(request, timeout_s)["reason"]
