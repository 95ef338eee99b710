"""The one record that data sets, benchmarks, graders and the trainer exchange."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A question and what a grader needs to mark an answer to it.

    Maths: `answer` holds the gold answers, all of which are required (usually one).
    Code: `tests` holds `{"input": ..., "output": ...}` texts. With `fn_name`, `input` is one JSON value per line, one
    line per argument, and `output` is the JSON of the returned value; without it, they are standard input and output.
    `time_limit_s` is in seconds, per test. `packages` says whether the program may import installed packages.
    """

    id: str
    question: str
    answer: tuple[str, ...] = ()
    tests: tuple[dict[str, str], ...] = ()
    fn_name: str | None = None
    time_limit_s: float = 6.0
    packages: bool = False
    starter_code: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_code(self) -> bool:
        """Whether the answer is a program; a code problem may lack tests, which no program then passes."""
        return bool(self.tests) or self.metadata.get("kind") == "code"


def problems_digest(problems: Iterable[Problem]) -> str:
    """Tells whether two results are about the same problems: ids, questions and golds, in order."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(json.dumps([problem.id, problem.question, problem.answer]).encode())
    return digest.hexdigest()[:16]
