"""The training sets: entries in the form of the benchmarks, with a held-out split that training never sees.

Real sets are cleaned the same way: repeated questions are kept once, and questions that come with different answers
are dropped; both are counted. The held-out split of a real set is cut off by a hash of the question, so that it is
the same whatever the order of the rows.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.benchmarks import BENCHMARKS, RowParser, maths_row
from evals.generated import generate
from evals.problems import Problem
from evals.sources import LoadReport, RowError, Source, column, read_problems, text

GENERATED_SEED = 2605
MAX_HELDOUT_SHARE = 0.1  # of a real set, so that small samples keep most of their rows for training


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One training set.

    Attributes:
        name, title, version: as for benchmarks.
        source, parse: where rows are and how one becomes a problem; None for generated problems.
        template: prompt template to use unless the run names another.
        num_train: how many problems are generated for training; real sets have as many as they have.
        num_heldout: size of the held-out split (at most `MAX_HELDOUT_SHARE` of a real set).
    """

    name: str
    title: str
    version: str
    source: Source | None = None
    parse: RowParser | None = None
    template: str = "boxed"
    num_train: int | None = None
    num_heldout: int = 200


def dapo_row(row: dict[str, Any], fallback_id: str) -> Problem:
    """DAPO-17k as published: a chat list and `reward_model.ground_truth`.

    The published prompt asks for a last line `Answer: ...`; that instruction is taken off, because the template of
    the run states its own.
    """
    messages = column(row, "prompt")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        raise RowError("column 'prompt' is not a list of chat messages")
    reward_model = column(row, "reward_model")
    if not isinstance(reward_model, dict):
        raise RowError("column 'reward_model' is not an object")
    extra = row.get("extra_info")
    identifier = extra.get("index") if isinstance(extra, dict) else None
    return Problem(
        id=str(identifier) if identifier is not None else fallback_id,
        question=strip_dapo_instruction(text(messages[-1], "content")),
        answer=(text(reward_model, "ground_truth").strip(),),
    )


_INSTRUCTION_BEFORE = re.compile(r"\A\s*Solve the following math problem[^\n]*\$Answer[^\n]*\n+")
_INSTRUCTION_AFTER = re.compile(r'\n+\s*Remember to put your answer on its own line[^\n]*"?\s*\Z')


def strip_dapo_instruction(prompt: str) -> str:
    """The question alone, of a DAPO prompt with its sentences about the format of the answer around it."""
    return _INSTRUCTION_AFTER.sub("", _INSTRUCTION_BEFORE.sub("", prompt, count=1), count=1).strip()


def math_level1_row(row: dict[str, Any], fallback_id: str) -> Problem | None:
    """A MATH-500 row of the easiest level; others are passed over."""
    if str(column(row, "level")).removeprefix("Level ") != "1":
        return None
    return Problem(text(row, "unique_id") if "unique_id" in row else fallback_id, text(row, "problem"),
                   (text(row, "answer").strip(),))  # fmt: skip


DATASETS: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet(name="gen_chains", title="Chains (generated)", version="1", template="qa", num_train=4096),
        DataSet(name="gen_stories", title="Stories (generated)", version="1", template="qa", num_train=4096),
        DataSet(
            name="dapo_17k",
            title="DAPO-Math-17k",
            version="1",
            source=Source(
                hub_id="BytedTsinghua-SIA/DAPO-Math-17k",
                revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
                files=("dapo_17k", "dapo-math-17k", "dapo17k_sample"),
            ),
            parse=dapo_row,
            template="dapo",
        ),
        DataSet(
            name="dapo_17k_processed",
            title="DAPO-Math-17k, processed",
            version="1",
            source=Source(  # no revision known to us: the newest
                hub_id="open-r1/DAPO-Math-17k-Processed", config="all", files=("dapo_17k_processed",)
            ),
            parse=maths_row(question=("prompt",), answer=("solution",)),
            template="dapo",
        ),
        DataSet(
            name="polaris_53k",
            title="Polaris-53K",
            version="1",
            source=Source(  # no revision known to us: the newest
                hub_id="POLARIS-Project/Polaris-Dataset-53K", files=("polaris_53k",)
            ),
            parse=maths_row(question=("problem",), answer=("answer",), keep=("difficulty",)),
            template="polaris",
        ),
        DataSet(
            name="deepscaler_sample",
            title="DeepScaleR, 300 rows",
            version="1",
            source=Source(files=("train_sample_deepscaler",)),
            parse=maths_row(question=("problem",), answer=("answer",), keep=("source", "difficulty")),
        ),
        DataSet(
            # For trying real models on problems they can sometimes solve; do not evaluate them on math500 then.
            name="math500_level1",
            title="MATH-500, level 1",
            version="1",
            source=BENCHMARKS["math500"].source,
            parse=math_level1_row,
        ),
        DataSet(
            name="deepmath_sample",
            title="DeepMath, 200 rows",
            version="1",
            source=Source(files=("train_sample_deepmath_roll",)),
            parse=maths_row(question=("prompt",), answer=("ground_truth",), id=("id",), keep=("source", "difficulty")),
        ),
    )
}


def get_dataset(name: str) -> DataSet:
    """The entry of that name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in DATASETS:
        raise ValueError(f"unknown training set {name!r}; known: {', '.join(DATASETS)}")
    return DATASETS[name]


def load_train(
    name: str,
    *,
    data_dir: Path | str | None = None,
    limit: int | None = None,
    num_heldout: int | None = None,
    report: LoadReport | None = None,
) -> list[Problem]:
    """The training problems in their order, the first `limit` of them; never one of `load_heldout`.

    `num_heldout` must be the same as in `load_heldout` (None: the entry's).

    Raises:
        ValueError: unknown set, or no usable row.
        SourceUnavailable: the problems can be read from neither a local file nor the hub.
    """
    entry = get_dataset(name)
    if entry.source is None:
        num_train = entry.num_train or 0
        problems = generate(name, "train", min(limit or num_train, num_train), GENERATED_SEED)
        _describe_generated(report, problems)
        return problems
    train, _ = _load_real(entry, data_dir, num_heldout, report)
    return train[:limit]


def load_heldout(
    name: str,
    *,
    data_dir: Path | str | None = None,
    limit: int | None = None,
    num_heldout: int | None = None,
    report: LoadReport | None = None,
) -> list[Problem]:
    """The held-out problems of a training set, the first `limit` of them.

    Raises:
        ValueError: unknown set, no usable row, or too few rows to hold any out.
        SourceUnavailable: as for `load_train`.
    """
    entry = get_dataset(name)
    if entry.source is None:
        num = num_heldout or entry.num_heldout
        problems = generate(name, "heldout", min(limit or num, num), GENERATED_SEED)
        _describe_generated(report, problems)
        return problems
    train, heldout = _load_real(entry, data_dir, num_heldout, report)
    if not heldout:
        raise ValueError(f"{name}: {len(train)} problems are too few to hold any out")
    return heldout[:limit]


def clean(problems: Iterable[Problem], report: LoadReport) -> list[Problem]:
    """Keep each question once, in order of first appearance; drop those that come with different answers.

    Questions are the same when they differ in white space alone. Counts go to `report`: `duplicates` are rows
    beyond the first with the same answer, `conflicting` are rows of dropped questions.
    """
    first: dict[str, Problem] = {}
    counts: dict[str, int] = {}
    conflicting: set[str] = set()
    for problem in problems:
        key = " ".join(problem.question.split())
        counts[key] = counts.get(key, 0) + 1
        if first.setdefault(key, problem).answer != problem.answer:
            conflicting.add(key)
    report.conflicting += sum(counts[key] for key in conflicting)
    report.duplicates += sum(count - 1 for key, count in counts.items() if key not in conflicting)
    return [problem for key, problem in first.items() if key not in conflicting]


def split_heldout(problems: list[Problem], num_heldout: int) -> tuple[list[Problem], list[Problem]]:
    """Cut `num_heldout` problems off, chosen by a hash of the question; both parts keep their order."""
    ranked = sorted(problems, key=lambda problem: hashlib.sha256(problem.question.encode()).digest())
    chosen = {problem.question for problem in ranked[:num_heldout]}
    train = [problem for problem in problems if problem.question not in chosen]
    return train, [problem for problem in problems if problem.question in chosen]


def _load_real(
    entry: DataSet, data_dir: Path | str | None, num_heldout: int | None, report: LoadReport | None
) -> tuple[list[Problem], list[Problem]]:
    assert entry.source and entry.parse
    report = report if report is not None else LoadReport()
    rows = read_problems(entry.name, entry.source, entry.parse, data_dir=data_dir, report=report)
    problems = clean(rows, report)
    num_heldout = entry.num_heldout if num_heldout is None else num_heldout
    return split_heldout(problems, min(num_heldout, int(len(problems) * MAX_HELDOUT_SHARE)))


def _describe_generated(report: LoadReport | None, problems: list[Problem]) -> None:
    if report is not None:
        report.source, report.rows = f"generated with seed {GENERATED_SEED}", len(problems)
