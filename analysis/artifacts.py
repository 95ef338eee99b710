"""Tables of what runs logged as files: rollout samples, and evaluations by benchmark and by problem.

    lengths      one row per (run, step, sign, length)    sign, length (tokens), count
    evaluations  one row per (run, benchmark)             step, problems, se
    problems     one row per (run, benchmark, problem)    step, score

All three start with the columns of a cell (run, rule, model, dataset, scope, seed). The last two are of a run's last
evaluated step. A run without such files has no rows.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute, parquet

LENGTHS = ["step", "sign", "length", "count"]
EVALUATIONS = ["step", "benchmark", "problems", "se"]
PROBLEMS = ["step", "benchmark", "problem", "score"]
SCORES_SUFFIX = ".scores.parquet"
"""`<benchmark>.scores.parquet` beside an evaluation's summary: a row per sample, with problem_id and correct."""
SUMMARY = "summary.json"

Part = tuple[dict[str, Any], pa.Table]
"""Columns that are the same in all rows of a table, and the table."""

_STEP = re.compile(r"step-(\d+)")


class RunFiles:
    """The files that MLflow holds of runs, read where they are or fetched."""

    def __init__(self, client: Any, uris: dict[str, str]) -> None:
        """`uris`: where the files of each run are."""
        self._client = client
        self._uris = uris

    def steps(self, run: str, folder: str) -> dict[int, str]:
        """Step -> path of the entries `step-N` or `step-N.parquet` of a folder, in the order of steps."""
        found = {}
        for path in self.paths(run, folder):
            if match := _STEP.fullmatch(Path(path).stem):
                found[int(match.group(1))] = path
        return dict(sorted(found.items()))

    def paths(self, run: str, folder: str) -> list[str]:
        """Of a folder's entries, sorted; empty where there is no such folder."""
        if root := self._local_folder(run):
            return sorted(f"{folder}/{entry.name}" for entry in (root / folder).glob("*"))
        return sorted(entry.path for entry in self._client.list_artifacts(run, folder))

    def read(self, run: str, path: str, reader: Callable[[Path], pa.Table]) -> pa.Table:
        """What the reader makes of a file.

        Raises:
            ValueError: it cannot be read; the message names run and file.
        """
        try:
            if root := self._local_folder(run):
                return reader(root / path)
            with tempfile.TemporaryDirectory() as fetched:
                return reader(Path(self._client.download_artifacts(run, path, fetched)))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"The file {path} of MLflow run {run} cannot be read ({str(error).splitlines()[0]}). "
                "Delete it from the run's artifacts to draw without it."
            ) from error

    def _local_folder(self, run: str) -> Path | None:
        """The folder of a run's files where that is on this machine: asking MLflow for each would take longer."""
        address = urlparse(self._uris[run])
        return Path(url2pathname(address.path)) if address.scheme in ("", "file") else None


def read_lengths(files: RunFiles, cells: pd.DataFrame) -> pd.DataFrame:
    """Response lengths by sign of the advantage, at the first, middle and last step whose rollout was logged."""

    def of_run(run: str) -> Iterator[Part]:
        steps = files.steps(run, "rollouts")
        for step in _first_middle_last(list(steps)):
            yield {"step": step}, files.read(run, steps[step], _read_rollout)

    return _gather(cells, of_run, LENGTHS)


def read_evaluations(files: RunFiles, cells: pd.DataFrame) -> pd.DataFrame:
    """Number of problems of each benchmark, and the standard error over them of one run's score."""

    def of_run(run: str) -> Iterator[Part]:
        for step, path in _last_evaluation(files, run, lambda name: name == SUMMARY):
            yield {"step": step}, files.read(run, path, _read_summary)

    return _gather(cells, of_run, EVALUATIONS)


def read_problems(files: RunFiles, cells: pd.DataFrame) -> pd.DataFrame:
    """Score of each problem of each benchmark: the share of its graded samples that are right."""

    def of_run(run: str) -> Iterator[Part]:
        for step, path in _last_evaluation(files, run, lambda name: name.endswith(SCORES_SUFFIX)):
            benchmark = Path(path).name.removesuffix(SCORES_SUFFIX)
            yield {"step": step, "benchmark": benchmark}, files.read(run, path, _read_scores)

    return _gather(cells, of_run, PROBLEMS)


def count_lengths(rollout: pa.Table) -> pa.Table:
    """sign, length, count of a rollout; responses whose advantage is zero have no sign and are left out."""
    sign = compute.sign(rollout["advantage"]).cast(pa.int64())
    signed = pa.table({"sign": sign, "length": rollout["length"].cast(pa.int64())}).filter(compute.field("sign") != 0)
    counts = signed.group_by(["sign", "length"], use_threads=False).aggregate([([], "count_all")])
    return counts.rename_columns(["sign", "length", "count"])


def problem_scores(samples: pa.Table) -> pa.Table:
    """problem, score of graded samples; a problem without any is left out, as in the benchmark's own mean."""
    graded = samples.select(["problem_id", "correct"]).drop_null()
    columns = {"problem": graded["problem_id"].cast(pa.string()), "score": graded["correct"].cast(pa.float64())}
    scores = pa.table(columns).group_by("problem", use_threads=False).aggregate([("score", "mean")])
    return scores.rename_columns(["problem", "score"])


def gather(cells: pd.DataFrame, parts: Sequence[tuple[str, dict[str, Any], pa.Table]]) -> pd.DataFrame:
    """One table of many small ones.

    Args:
        cells: run and the columns of its cell, one row each.
        parts: run, the columns that are the same in all rows of its table, and the table.

    Returns:
        The columns of `cells` and those of the parts; texts as categories.
    """
    sizes = [len(table) for *_, table in parts]
    columns = cells.astype({name: "category" for name in cells.select_dtypes(exclude="number")})
    places = pd.Index(cells.run).get_indexer([run for run, *_ in parts])
    found = columns.iloc[np.repeat(places, sizes)].reset_index(drop=True)
    for name in parts[0][1]:
        found[name] = pd.Series([same[name] for _, same, _ in parts]).repeat(sizes).to_numpy()
    values = pa.concat_tables([table for *_, table in parts]).to_pandas()
    found = pd.concat([found, values], axis=1)
    return found.astype({name: "category" for name in found.select_dtypes(exclude="number")})


def _gather(cells: pd.DataFrame, of_run: Callable[[str], Iterable[Part]], columns: list[str]) -> pd.DataFrame:
    parts = [(run, *part) for run in cells.run for part in of_run(run)]
    return gather(cells, parts) if parts else pd.DataFrame(columns=[*cells.columns, *columns])


def _last_evaluation(files: RunFiles, run: str, wanted: Callable[[str], bool]) -> Iterator[tuple[int, str]]:
    """Step and path of the wanted files of the last evaluation, unless that is of the untouched base model."""
    steps = files.steps(run, "evals")
    last = max(steps, default=0)
    if last > 0:
        yield from ((last, path) for path in files.paths(run, steps[last]) if wanted(Path(path).name))


def _first_middle_last(steps: list[int]) -> list[int]:
    """Of ordered steps the ends and the one nearest to their middle."""
    if len(steps) < 3:
        return steps
    middle = min(steps[1:-1], key=lambda step: abs(step - (steps[0] + steps[-1]) / 2))
    return [steps[0], middle, steps[-1]]


def _read_rollout(file: Path) -> pa.Table:
    return count_lengths(_read_parquet(file, ["length", "advantage"]))


def _read_summary(file: Path) -> pa.Table:
    benchmarks = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    kinds = {"benchmark": pa.string(), "problems": pa.int64(), "se": pa.float64()}
    rows = [{"benchmark": name} | scores for name, scores in benchmarks.items()]
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()})


def _read_scores(file: Path) -> pa.Table:
    return problem_scores(_read_parquet(file, ["problem_id", "correct"]))


def _read_parquet(file: Path, columns: list[str]) -> pa.Table:
    """One file, as it is: there are thousands of small ones, and pandas would take ten times as long."""
    table = parquet.ParquetFile(file).read(columns, use_threads=False)
    if missing := set(columns) - set(table.column_names):
        raise ValueError(f"it has no column {', '.join(sorted(missing))}")
    return table
