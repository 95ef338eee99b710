"""What every grader returns: a verdict that carries its reason, never a bare boolean."""

from dataclasses import dataclass

UNJUDGED = frozenset({"grader_error", "sandbox_error", "no_tests"})
"""Reasons that say nothing about the response: not a wrong answer, and left out of scores and rewards."""


@dataclass(frozen=True)
class TestResult:
    """The outcome of one test of a program; `seconds` is wall-clock time."""

    __test__ = False  # the name is the domain's, not a test class for pytest to collect

    passed: bool
    reason: str
    seconds: float


@dataclass(frozen=True)
class Grade:
    """A verdict on one completion.

    Attributes:
        correct: whether the answer or program counts as right.
        reason: why, one word of the grader's fixed vocabulary (see `math` and `code`).
        extracted: the answer or program found in the completion, None when there was none.
        per_test: one entry per test that was run; empty for maths.
    """

    correct: bool
    reason: str
    extracted: str | None = None
    per_test: tuple[TestResult, ...] = ()
