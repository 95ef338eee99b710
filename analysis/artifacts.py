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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import numpy as np
import pandas as pd

LENGTHS = ["step", "sign", "length", "count"]
EVALUATIONS = ["step", "benchmark", "problems", "se"]
PROBLEMS = ["step", "benchmark", "problem", "score"]
SCORES_SUFFIX = ".scores.parquet"
"""`<benchmark>.scores.parquet` beside an evaluation's summary: a row per sample, with problem_id and correct."""
SUMMARY = "summary.json"

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

    def read(self, run: str, path: str, reader: Callable[[Path], pd.DataFrame]) -> pd.DataFrame:
        """What the reader makes of a file.

        Raises:
            ValueError: it cannot be read; the message names run and file.
        """
        with tempfile.TemporaryDirectory() as fetched:
            root = self._local_folder(run)
            file = root / path if root else Path(self._client.download_artifacts(run, path, fetched))
            try:
                return reader(file)
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

    def of_run(run: str) -> Iterator[pd.DataFrame]:
        steps = files.steps(run, "rollouts")
        for step in _first_middle_last(list(steps)):
            yield files.read(run, steps[step], _read_rollout).assign(step=step)

    return _gather(cells, of_run, LENGTHS)


def read_evaluations(files: RunFiles, cells: pd.DataFrame) -> pd.DataFrame:
    """Number of problems of each benchmark, and the standard error over them of one run's score."""

    def of_run(run: str) -> Iterator[pd.DataFrame]:
        for step, path in _last_evaluation(files, run, lambda name: name == SUMMARY):
            yield files.read(run, path, _read_summary).assign(step=step)

    return _gather(cells, of_run, EVALUATIONS)


def read_problems(files: RunFiles, cells: pd.DataFrame) -> pd.DataFrame:
    """Score of each problem of each benchmark: the share of its graded samples that are right."""

    def of_run(run: str) -> Iterator[pd.DataFrame]:
        for step, path in _last_evaluation(files, run, lambda name: name.endswith(SCORES_SUFFIX)):
            benchmark = Path(path).name.removesuffix(SCORES_SUFFIX)
            yield files.read(run, path, _read_scores).assign(step=step, benchmark=benchmark)

    return _gather(cells, of_run, PROBLEMS)


def count_lengths(rollout: pd.DataFrame) -> pd.DataFrame:
    """sign, length, count of a rollout; responses whose advantage is zero have no sign and are left out."""
    signed = pd.DataFrame({"sign": np.sign(rollout.advantage).astype(int), "length": rollout.length.astype(int)})
    return signed[signed.sign != 0].value_counts(sort=False).sort_index().rename("count").reset_index()


def problem_scores(samples: pd.DataFrame) -> pd.DataFrame:
    """problem, score of graded samples; a problem without any is left out, as in the benchmark's own mean."""
    graded = samples[["problem_id", "correct"]].dropna(subset="correct").astype({"correct": float})
    scores = graded.groupby("problem_id")["correct"].mean()
    return scores.rename_axis("problem").rename("score").reset_index()


def _gather(cells: pd.DataFrame, of_run: Callable[[str], Iterable[pd.DataFrame]], columns: list[str]) -> pd.DataFrame:
    """The tables of all runs with the columns of their cells in front."""
    tables = [table.assign(run=run) for run in cells.run for table in of_run(run)]
    if not tables:
        return pd.DataFrame(columns=[*cells.columns, *columns])
    found = cells.merge(pd.concat(tables, ignore_index=True), on="run")
    return found[[*cells.columns, *columns]]


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


def _read_rollout(file: Path) -> pd.DataFrame:
    return count_lengths(pd.read_parquet(file, columns=["length", "advantage"]))


def _read_summary(file: Path) -> pd.DataFrame:
    benchmarks = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    rows = [(name, scores["problems"], scores["se"]) for name, scores in benchmarks.items()]
    return pd.DataFrame(rows, columns=["benchmark", "problems", "se"]).astype({"se": float})


def _read_scores(file: Path) -> pd.DataFrame:
    return problem_scores(pd.read_parquet(file, columns=["problem_id", "correct"]))
