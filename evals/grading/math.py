"""Is a maths answer right? (reward and benchmark grading)"""

import re
from collections.abc import Sequence
from typing import Literal

from evals.grading import math_pool
from evals.grading.math_extract import extract_answer
from evals.grading.verdict import Grade

__all__ = ["extract_answer", "grade_math"]

_PLAIN_INTEGER = re.compile(r"([-+]?)0*(\d+)")


def grade_math(
    prediction: str,
    gold: str | Sequence[str],
    *,
    form: Literal["completion", "answer"] = "completion",
    timeout_s: float = 5.0,
    rel_tolerance: float = 1e-4,
) -> Grade:
    """Grades a completion, or an answer already extracted from one, against the gold answer."""
    answer = extract_answer(prediction) if form == "completion" else prediction.strip()
    if not answer:
        return Grade(False, "no_answer")
    golds = (gold,) if isinstance(gold, str) else tuple(gold)
    if len(golds) == 1:
        mine, theirs = _PLAIN_INTEGER.fullmatch(answer), _PLAIN_INTEGER.fullmatch(golds[0])
        if mine and theirs:
            same = mine.group(2) == theirs.group(2) and (mine.group(1) == "-") == (theirs.group(1) == "-")
            return Grade(same, "correct" if same else "wrong", answer)
        if answer == golds[0]:
            return Grade(True, "correct", answer)
    reply = math_pool.pool.ask(
        {"answer": answer, "golds": golds, "rel_tolerance": rel_tolerance}, timeout_s
    )
    return Grade(reply["reason"] == "correct", reply["reason"], answer)
