"""The benchmarks: one entry each, saying where the problems are, how they are asked, graded and scored.

Raise an entry's `version` whenever a change to it may move a score; the version goes into every result.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evals import livecodebench
from evals.generated import generate
from evals.problems import Problem
from evals.sources import LoadReport, RowError, Source, column, read_problems, text

GENERATED_SEED = 2605  # fixed, so that a generated benchmark is one set of problems
NUM_GENERATED = 200

RowParser = Callable[[dict[str, Any], str], Problem | None]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name, title: the key in `BENCHMARKS` and in metric names; the name people read.
        version: of this entry.
        source, parse: where rows are and how one becomes a problem; both None for generated problems.
        template: name in `evals.prompts.TEMPLATES`, which brings its answer extractor.
        grader: `maths` or `code`.
        num_samples: per problem, the k of avg@k.
        temperature, top_p: of sampling.
        max_tokens: length limit of a response.
        batch_samples: about how many responses one call of the engine generates; what a kill can cost.
        num_problems: how many the full set has, None where that depends on options.
    """

    name: str
    title: str
    version: str
    source: Source | None = None
    parse: RowParser | None = None
    template: str = "boxed"
    grader: Literal["maths", "code"] = "maths"
    num_samples: int = 4
    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 8192
    batch_samples: int = 256
    num_problems: int | None = None


def maths_row(
    *, question: tuple[str, ...], answer: tuple[str, ...], id: tuple[str, ...] = (), keep: tuple[str, ...] = ()
) -> RowParser:
    """A parser for rows with one gold answer.

    Each argument lists the names that a column has in the copies of the set; `keep` columns go to the metadata.
    """

    def parse(row: dict[str, Any], fallback_id: str) -> Problem:
        identifier = next((str(row[name]) for name in id if row.get(name) is not None), fallback_id)
        metadata = {name: row[name] for name in keep if row.get(name) is not None}
        return Problem(identifier, text(row, *question), (text(row, *answer).strip(),), metadata=metadata)

    return parse


def olympiadbench_row(row: dict[str, Any], fallback_id: str) -> Problem:
    """OlympiadBench: `final_answer` is a list of golds; unit and stated tolerance go to the metadata."""
    answers = column(row, "final_answer", "answer")
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not all(isinstance(a, str) and a.strip() for a in answers) or not answers:
        raise RowError("column 'final_answer' is not a list of texts")
    question = text(row, "question", "problem")
    if isinstance(row.get("context"), str) and row["context"].strip():
        question = f"{row['context'].strip()}\n\n{question}"
    keep = ("unit", "error", "answer_type", "is_multiple_answer", "subfield")
    return Problem(
        id=str(row.get("id", fallback_id)),
        question=question,
        answer=tuple(answer.strip() for answer in answers),
        metadata={name: row[name] for name in keep if row.get(name) is not None},
    )


def _generated(name: str, title: str, grader: Literal["maths", "code"] = "maths") -> Benchmark:
    return Benchmark(
        name=name,
        title=title,
        version="1",
        template="qa",
        grader=grader,
        num_samples=1,
        temperature=1.0,
        top_p=1.0,
        max_tokens=128,
        batch_samples=4096,
        num_problems=NUM_GENERATED,
    )


BENCHMARKS: dict[str, Benchmark] = {
    entry.name: entry
    for entry in (
        Benchmark(
            name="math500",
            title="MATH-500",
            version="1",
            source=Source(
                hub_id="HuggingFaceH4/MATH-500",
                split="test",
                revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
                files=("math500",),
            ),
            parse=maths_row(question=("problem",), answer=("answer",), id=("unique_id",), keep=("subject", "level")),
            num_problems=500,
        ),
        Benchmark(
            name="aime24",
            title="AIME 2024",
            version="1",
            source=Source(
                hub_id="HuggingFaceH4/aime_2024",
                split="train",
                revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
                files=("aime24",),
            ),
            parse=maths_row(
                question=("problem", "Problem"), answer=("answer", "Answer"), id=("id", "ID"), keep=("url",)
            ),
            num_samples=32,
            num_problems=30,
        ),
        Benchmark(
            name="aime25",
            title="AIME 2025",
            version="1",
            source=Source(
                hub_id="math-ai/aime25",
                split="test",
                revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
                files=("aime25",),
            ),
            parse=maths_row(question=("problem", "question"), answer=("answer", "expected_answer"), id=("id", "ID")),
            num_samples=32,
            num_problems=30,
        ),
        Benchmark(
            name="olympiadbench",
            title="OlympiadBench",
            version="1",
            source=Source(  # no revision known to us: the newest
                hub_id="Hothan/OlympiadBench",
                config="OE_TO_maths_en_COMP",
                split="train",
                files=("olympiadbench",),
            ),
            parse=olympiadbench_row,
            num_problems=675,
        ),
        Benchmark(
            name="minerva_math",
            title="Minerva-Math",
            version="1",
            source=Source(  # no revision known to us: the newest
                hub_id="math-ai/minervamath", split="test", files=("minerva_math",)
            ),
            parse=maths_row(question=("problem", "question"), answer=("answer",), id=("idx",), keep=("type",)),
            num_problems=272,
        ),
        Benchmark(  # source and parser depend on the release and the window: see `load_benchmark`
            name="livecodebench",
            title="LiveCodeBench",
            version="1",
            grader="code",
            num_samples=10,
            temperature=0.2,
        ),
        _generated("gen_short", "Short sums (generated)"),
        _generated("gen_long", "Long sums (generated)"),
        _generated("gen_tales", "Tales (generated)"),
        _generated("gen_equations", "Equations (generated)"),
        _generated("gen_series", "Series (generated)"),
        _generated("gen_functions", "Functions (generated)", grader="code"),
    )
}

DEFAULT_RELEASE = "v6"


def get_benchmark(name: str) -> Benchmark:
    """The entry of that name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def load_benchmark(
    name: str,
    *,
    data_dir: Path | str | None = None,
    limit: int | None = None,
    release: str | None = None,
    window: str | None = None,
    report: LoadReport | None = None,
) -> list[Problem]:
    """The problems of a benchmark in their order, the first `limit` of them: `iter_benchmark` as a list."""
    return list(iter_benchmark(name, data_dir=data_dir, limit=limit, release=release, window=window, report=report))


def iter_benchmark(
    name: str,
    *,
    data_dir: Path | str | None = None,
    limit: int | None = None,
    release: str | None = None,
    window: str | None = None,
    report: LoadReport | None = None,
) -> Iterator[Problem]:
    """Yield the problems of a benchmark one at a time.

    Looks under `data_dir` first, then on the hub. `release` (v1..v6) and `window` (`2408-2502`) choose among the
    LiveCodeBench problems. `report` is filled with the source and the number of rows left out.

    Raises:
        ValueError: unknown benchmark, release or window; options that the benchmark does not have; two problems
            of one id; no usable row.
        SourceUnavailable: the problems can be read from neither place.
    """
    entry = get_benchmark(name)
    report = report if report is not None else LoadReport()
    if (release or window) and name != "livecodebench":
        raise ValueError(f"{name} has neither releases nor date windows; only livecodebench has")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    source, parse = entry.source, entry.parse
    if name == "livecodebench":
        release = release or DEFAULT_RELEASE
        source, parse = livecodebench.source(release), livecodebench.row_parser(release, window)
    if source is None or parse is None:
        report.source = f"generated with seed {GENERATED_SEED}"
        report.rows = min(limit or NUM_GENERATED, NUM_GENERATED)
        yield from generate(name, "test", report.rows, GENERATED_SEED)
        return
    seen: set[str] = set()
    for problem in read_problems(name, source, parse, data_dir=data_dir, report=report):
        if problem.id in seen:
            raise ValueError(f"{name}: two problems have the id {problem.id!r}; their results would be mixed up")
        seen.add(problem.id)
        yield problem
        if len(seen) == limit:
            return
    if not seen:
        raise ValueError(f"{name}: no problem of release {release} in window {window} in {report.source}")
