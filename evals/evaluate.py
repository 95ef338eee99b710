"""Evaluate one model on benchmarks: generate, grade, keep every sample, sum up.

A benchmark is worked through in batches of problems. Each graded sample is appended to `<benchmark>.jsonl` at once, so
a killed evaluation goes on where it stopped; a batch that was cut short is generated again as a whole (the same
prompts with the same seeds, hence the same responses) and only its missing samples are graded. `summary.json` is
written last, under a temporary name.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import logging
import math
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evals import metrics
from evals.benchmarks import DEFAULT_RELEASE, Benchmark, get_benchmark, iter_benchmark
from evals.datasets import get_dataset, load_heldout
from evals.engines.interface import Engine, Sample, SamplingParams
from evals.grading import Grade, grade_many
from evals.grading.sandbox import SandboxUnavailable, choose_rung
from evals.grading.verdict import UNJUDGED
from evals.problems import Problem, problems_digest
from evals.prompts import Template, get_template
from evals.sources import LoadReport, json_lines, quote

log = logging.getLogger(__name__)
Item = TypeVar("Item")

HELDOUT = "heldout"
GRADED_AT_ONCE = 64  # samples between two appends

Progress = Callable[[str, int, int | None], None]
"""Called as progress(benchmark, samples done, samples in all or None when that is not known yet)."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """A benchmark as one run uses it; what is None takes the entry's own default.

    Attributes:
        name: names the results and metrics; `heldout` is the held-out split of the training set `dataset`.
        source: key in `evals.benchmarks.BENCHMARKS`; None when that is the name itself.
        samples: responses per problem, k of avg@k.
        limit: use the first so many problems.
        release, window: of LiveCodeBench.
    """

    name: str
    source: str | None = None
    dataset: str | None = None
    samples: int | None = None
    limit: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    template: str | None = None
    release: str | None = None
    window: str | None = None


@dataclass(frozen=True)
class _Job:
    """A benchmark with every default filled in."""

    name: str
    entry: Benchmark
    template: Template
    params: SamplingParams
    settings: dict[str, Any]
    report: LoadReport
    problems: Iterator[Problem]
    num_problems: int | None

    @property
    def problems_per_batch(self) -> int:
        return max(1, self.entry.batch_samples // self.params.n)


def evaluate_checkpoint(
    checkpoint: Path | str | dict[str, Any],
    benchmarks: Sequence[BenchmarkSettings],
    out_dir: Path | str,
    *,
    data_dir: Path | str | None = None,
    engine: str | Engine = "torch",
    template: str | None = None,
    seed: int = 0,
    rung: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score a model on benchmarks and return what is written to `out_dir/summary.json`.

    `out_dir/<benchmark>.jsonl` has one line per sample. Called again after a kill, it redoes no graded sample;
    samples that were made with other settings are set aside under another name.

    Args:
        checkpoint: folder, hub id or mapping, as for `evals.engines.load_model`.
        engine: name of an engine, or one that is loaded already.
        template: prompt template for all benchmarks that do not name their own.
        seed: of sampling; each response has its own stream, from the seed, its prompt and its place.
        rung: sandbox rung for code (see `evals.grading.sandbox`); None: the best one there is. Where there is none,
            code benchmarks go to `not_run` with the remedy, and the others are scored.

    Raises:
        ValueError: unknown benchmark, template or setting; two benchmarks of one name; no usable problem.
        FileNotFoundError: the problems or the model cannot be read.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    jobs = [_plan(settings, template, data_dir, seed) for settings in benchmarks]
    if repeated := [name for name, count in Counter(job.name for job in jobs).items() if count > 1]:
        raise ValueError(f"more than one benchmark is named {', '.join(repeated)}")

    @functools.cache
    def loaded() -> Engine:
        from evals.engines import open_engine

        return open_engine(engine, checkpoint) if isinstance(engine, str) else engine

    kind = engine if isinstance(engine, str) else type(engine).__name__
    scored: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    for job in jobs:
        try:
            used_rung = choose_rung(rung) if job.entry.grader == "code" else None
        except SandboxUnavailable as error:
            not_run[job.name] = str(error)
            continue
        identity = job.settings | {"checkpoint": _describe(checkpoint), "engine": kind, "sandbox": used_rung}
        samples = _Samples(out_dir / f"{job.name}.jsonl", identity)
        evaluated = _run(job, loaded, samples, used_rung, progress)
        scored[job.name] = _score(job, evaluated, samples.rows, job.params.n) | {"sandbox": used_rung}
    summary = {
        "step": _step_of(checkpoint),
        "metrics": _metrics(scored),
        "settings": {
            "checkpoint": _describe(checkpoint),
            "engine": kind,
            "seed": seed,
            "versions": versions(),
            "benchmarks": {job.name: job.settings for job in jobs},
        },
        "benchmarks": scored,
        "not_run": not_run,
    }
    write_json(out_dir / "summary.json", summary)
    return summary


def rescore(
    benchmark: str,
    generations: Path | str,
    *,
    data_dir: Path | str | None = None,
    dataset: str | None = None,
    template: str | None = None,
    release: str | None = None,
    rung: str | None = None,
    out: Path | str | None = None,
) -> dict[str, Any]:
    """Grade saved generations again and return their scores, with what the graders say differently now.

    A row needs `id` (of the problem) and `completion`; `sample`, `tokens`, `truncated` and `correct` are used where
    present. Rows that cannot be used are listed under `malformed` with file and line number. With `out`, the rows
    are written there with their new verdicts.

    Raises:
        ValueError: unknown benchmark or template, or not one row can be graded.
        FileNotFoundError: no such file, or the problems cannot be read.
        SandboxUnavailable: code, and no sandbox here.
    """
    path = Path(generations)
    if not path.is_file():
        raise FileNotFoundError(f"generations file {path} does not exist")
    settings = BenchmarkSettings(name=benchmark, dataset=dataset, template=template, release=release)
    job = _plan(settings, None, data_dir, seed=0)
    malformed: list[str] = []
    rows = list(_generation_rows(path, malformed))
    wanted = {row["id"] for _, row in rows}
    problems = {problem.id: problem for problem in job.problems if problem.id in wanted}
    graded: list[tuple[dict[str, Any], Problem]] = []
    for number, row in rows:
        if problem := problems.get(row["id"]):
            graded.append((row, problem))
        else:
            malformed.append(f"{path}:{number}: {benchmark} has no problem {row['id']!r}")
    if not graded:
        raise ValueError(f"no row of {path} can be graded: {quote(malformed) if malformed else 'the file is empty'}")
    used_rung = choose_rung(rung) if job.entry.grader == "code" else None
    verdicts = grade_many(
        [row["completion"] for row, _ in graded],
        [problem for _, problem in graded],
        extractor=job.template.extractor,
        rung=used_rung,
    )
    new_rows: dict[tuple[str, int], dict[str, Any]] = {}
    places: Counter[str] = Counter()
    num_changed = 0
    for (row, problem), verdict in zip(graded, verdicts, strict=True):
        num_changed += "correct" in row and bool(row["correct"]) != verdict.correct
        key = problem.id, places[problem.id]
        places[problem.id] += 1
        new_rows[key] = row | {
            "sample": row.get("sample", key[1]),
            "extracted": verdict.extracted,
            "correct": verdict.correct,
            "reason": verdict.reason,
        }
    if malformed:
        log.warning("%s: %d rows cannot be used: %s", path, len(malformed), quote(malformed))
    if out is not None:
        _write_rows(Path(out), new_rows.values())
    scores = _score(job, list(problems.values()), new_rows, max(places.values()))
    return scores | {"sandbox": used_rung, "changed": num_changed, "malformed": malformed}


def versions() -> dict[str, str]:
    """Versions of what a score depends on."""
    found = {"python": platform.python_version()}
    for package in ("balagg", "torch", "transformers", "math-verify", "sympy", "vllm"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file that is either whole or not there."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    temporary.replace(path)


class _Samples:
    """The graded samples of one benchmark on disk, by (problem id, place in its group).

    The identity of what made them lies beside them; samples of another identity are renamed, not mixed in.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}
        made_by = path.with_name(f"{path.stem}.settings.json")
        if path.exists() and not (made_by.exists() and json.loads(made_by.read_text()) == identity):
            self._set_aside()
        if path.exists():
            self._read()
        else:
            write_json(made_by, identity)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        self.rows.update(((row["id"], row["sample"]), row) for row in rows)

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # the process was killed while writing this line
            self.path.write_bytes(whole)
        bad: list[str] = []
        for number, row in json_lines(self.path, bad):
            if isinstance(row.get("id"), str) and isinstance(row.get("sample"), int) and "correct" in row:
                self.rows.setdefault((row["id"], row["sample"]), row)
            else:
                bad.append(f"{self.path}:{number}: not a graded sample")
        if bad:
            log.warning("%d rows are damaged and will be made again: %s", len(bad), quote(bad))
            _write_rows(self.path, self.rows.values())

    def _set_aside(self) -> None:
        number = next(i for i in itertools.count(1) if not self._other_name(i).exists())
        log.warning("%s holds samples of other settings: kept as %s", self.path, self._other_name(number).name)
        self.path.rename(self._other_name(number))

    def _other_name(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.other-{number}.jsonl")


def _plan(settings: BenchmarkSettings, template: str | None, data_dir: Path | str | None, seed: int) -> _Job:
    """Fill in defaults and open the problems, so that what is missing is said before anything is generated."""
    num_problems: int | None
    if settings.name == HELDOUT:
        entry, problems, num_problems, report = _open_heldout(settings, data_dir)
    else:
        entry = get_benchmark(settings.source or settings.name)
        report = LoadReport()
        problems = iter_benchmark(
            entry.name,
            data_dir=data_dir,
            limit=settings.limit,
            release=settings.release,
            window=settings.window,
            report=report,
        )
        num_problems = settings.limit or entry.num_problems
        if settings.limit and entry.num_problems:
            num_problems = min(settings.limit, entry.num_problems)
    problems = itertools.chain([next(problems)], problems)
    chosen = get_template(settings.template or template or entry.template)

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    params = SamplingParams(
        n=given(settings.samples, entry.num_samples),
        max_tokens=given(settings.max_tokens, entry.max_tokens),
        temperature=given(settings.temperature, entry.temperature),
        top_p=given(settings.top_p, entry.top_p),
        seed=seed,
    )
    resolved = {
        "benchmark": entry.name,
        "version": entry.version,
        "dataset": settings.dataset,
        "source": report.source,
        "template": chosen.name,
        "samples": params.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": seed,
        "batch_samples": entry.batch_samples,
    }
    if entry.name == "livecodebench":
        resolved |= {"release": settings.release or DEFAULT_RELEASE, "window": settings.window}
    return _Job(settings.name, entry, chosen, params, resolved, report, problems, num_problems)


def _open_heldout(
    settings: BenchmarkSettings, data_dir: Path | str | None
) -> tuple[Benchmark, Iterator[Problem], int, LoadReport]:
    if settings.dataset is None:
        raise ValueError("the benchmark heldout needs the training set whose held-out split is meant (dataset)")
    dataset = get_dataset(settings.dataset)
    report = LoadReport()
    problems = load_heldout(dataset.name, data_dir=data_dir, limit=settings.limit, report=report)
    like = get_benchmark("gen_short" if dataset.source is None else "math500")
    entry = dataclasses.replace(
        like,
        name=HELDOUT,
        title=f"{dataset.title}, held out",
        version=dataset.version,
        template=dataset.template,
        source=dataset.source,
        parse=dataset.parse,
    )
    return entry, iter(problems), len(problems), report


def _run(
    job: _Job, engine: Callable[[], Engine], samples: _Samples, rung: str | None, progress: Progress | None
) -> list[Problem]:
    """Make and grade every sample that is not there yet; returns the problems, without their tests."""
    total = job.num_problems * job.params.n if job.num_problems else None
    evaluated: list[Problem] = []
    for batch in _batched(job.problems, job.problems_per_batch):
        done = len(evaluated) * job.params.n
        wanted = {(problem.id, place) for problem in batch for place in range(job.params.n)}
        missing = wanted - samples.rows.keys()
        if progress is not None:
            progress(job.name, done + len(wanted) - len(missing), total)
        if missing:
            for num_missing in _run_batch(job, engine(), batch, missing, samples, rung):
                if progress is not None:
                    progress(job.name, done + len(wanted) - num_missing, total)
        # The hidden tests of a code benchmark are gigabytes: none is kept beyond its batch.
        evaluated += [dataclasses.replace(problem, tests=()) for problem in batch]
    return evaluated


def _run_batch(
    job: _Job,
    engine: Engine,
    batch: list[Problem],
    missing: set[tuple[str, int]],
    samples: _Samples,
    rung: str | None,
) -> Iterator[int]:
    """Generate a batch, grade and keep what was missing of it; yields how many are still missing."""
    tokenizer = getattr(engine, "tokenizer", None)
    prompts = [job.template.render(problem, tokenizer) for problem in batch]
    start = time.perf_counter()
    groups = engine.generate(prompts, job.params)
    generation_s = (time.perf_counter() - start) / (len(batch) * job.params.n)
    todo = [
        (problem, prompt, place, sample)
        for problem, prompt, group in zip(batch, prompts, groups, strict=True)
        for place, sample in enumerate(group)
        if (problem.id, place) in missing
    ]
    num_missing = len(todo)
    for part in _batched(todo, GRADED_AT_ONCE):
        start = time.perf_counter()
        grades = grade_many(
            [sample.text for *_, sample in part],
            [problem for problem, *_ in part],
            extractor=job.template.extractor,
            rung=rung,
        )
        seconds = generation_s + (time.perf_counter() - start) / len(part)
        samples.append(
            [
                _row(problem, prompt, place, sample, grade, seconds)
                for (problem, prompt, place, sample), grade in zip(part, grades, strict=True)
            ]
        )
        num_missing -= len(part)
        yield num_missing


def _row(problem: Problem, prompt: str, place: int, sample: Sample, grade: Grade, seconds: float) -> dict[str, Any]:
    """One line of the per-sample file. `seconds` is wall-clock time, shared out evenly within what ran together."""
    return {
        "id": problem.id,
        "sample": place,
        "prompt": prompt,
        "completion": sample.text,
        "extracted": grade.extracted,
        "correct": grade.correct,
        "reason": grade.reason,
        "tokens": len(sample.token_ids),
        "truncated": sample.truncated,
        "seconds": round(seconds, 6),
    }


def _score(
    job: _Job, problems: Sequence[Problem], rows: dict[tuple[str, int], dict[str, Any]], k: int
) -> dict[str, Any]:
    """The entry of one benchmark in the summary, from the samples of these problems."""
    by_problem: dict[str, list[dict[str, Any]]] = {problem.id: [] for problem in problems}
    for (identifier, _), row in rows.items():
        if identifier in by_problem:
            by_problem[identifier].append(row)
    present = [row for group in by_problem.values() for row in group]
    correct = [[row["correct"] for row in group if not _failed(row)] for group in by_problem.values()]
    means = metrics.problem_means(correct)
    lengths = [row["tokens"] for row in present if "tokens" in row]
    return {
        "title": job.entry.title,
        "version": _version(job, problems),
        "source": job.report.source,
        "problems": len(problems),
        "problems_digest": problems_digest(problems),
        "rows_left_out": len(job.report.bad),
        "samples": len(present),
        "samples_ungraded": sum(map(_failed, present)),
        "k": k,
        "avg_at_k": _plain(metrics.avg_at_k(correct)),
        "se": _plain(metrics.standard_error(means)),
        "interval_95": [_plain(end) for end in metrics.bootstrap_interval(means)],
        "pass_at_k": _pass_at(correct, k),
        "length": _plain(metrics.mean_length(lengths)),
        "truncated": _plain(metrics.share_truncated([row["truncated"] for row in present if "truncated" in row])),
        "reasons": dict(Counter(row["reason"] for row in present).most_common()),
    }


def _failed(row: dict[str, Any]) -> bool:
    return row["reason"] in UNJUDGED


def _pass_at(correct: list[list[bool]], k: int) -> float | None:
    """pass@k, None where a problem has fewer than k graded samples."""
    if any(0 < len(samples) < k for samples in correct):
        return None
    return _plain(metrics.mean_pass_at_k(correct, k))


def _metrics(scored: dict[str, Any]) -> dict[str, float]:
    """Flat metrics by name; `eval/mean` is over the benchmarks that were run, the held-out split left out."""
    flat: dict[str, float] = {}
    for name, scores in scored.items():
        flat[f"eval/{name}_avg_at_{scores['k']}"] = scores["avg_at_k"]
        if scores["k"] > 1:
            flat[f"eval/{name}_pass_at_{scores['k']}"] = scores["pass_at_k"]
        flat[f"eval/{name}_length"] = scores["length"]
    averages = [scores["avg_at_k"] for name, scores in scored.items() if name != HELDOUT]
    if averages and None not in averages:
        flat["eval/mean"] = sum(averages) / len(averages)
    return {name: value for name, value in flat.items() if value is not None}


def _version(job: _Job, problems: Sequence[Problem]) -> str:
    """The entry's version; for LiveCodeBench with release, window and the contest dates that were scored."""
    if job.entry.name != "livecodebench":
        return job.entry.version
    days = sorted(problem.metadata["contest_date"] for problem in problems)
    window = f", window {job.settings['window']}" if job.settings["window"] else ""
    return f"{job.entry.version}, release {job.settings['release']}{window}, contests {days[0]} to {days[-1]}"


def _generation_rows(path: Path, malformed: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in json_lines(path, malformed):
        if not isinstance(row.get("completion"), str) or not isinstance(row.get("id"), str | int):
            malformed.append(f"{path}:{number}: needs texts 'id' and 'completion'")
        else:
            yield number, row | {"id": str(row["id"])}


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.replace(path)


def _batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _describe(checkpoint: Path | str | dict[str, Any]) -> str:
    return json.dumps(checkpoint, sort_keys=True) if isinstance(checkpoint, dict) else str(checkpoint)


def _step_of(checkpoint: Path | str | dict[str, Any]) -> int | None:
    """N of a checkpoint folder `step-N`; None for any other model."""
    match = None if isinstance(checkpoint, dict) else re.fullmatch(r"step-(\d+)", Path(checkpoint).name)
    return int(match.group(1)) if match else None


def _plain(value: float) -> float | None:
    """JSON has no NaN: a score that is not defined is null."""
    return None if math.isnan(value) else value
