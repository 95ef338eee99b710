"""What does MLflow say about a cell besides its metrics? Params, tags, data sets and per-problem scores, as values."""

import getpass
import importlib.metadata
import json
import subprocess
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.grid import Cell
from orchestrator.ledger import CellDir, read_summary
from trainers import metric_names as names

VERSIONS_OF = ("balagg", "torch", "transformers", "ray", "mlflow", "math-verify", "vllm")

SCORE_COLUMNS = {"problem_id": "string", "sample": "int32", "correct": "bool", "length": "int32", "truncated": "bool"}
"""Columns of `<benchmark>.scores.parquet`, one row per sample. `length` is in tokens; `correct` is null where the
grader gave no verdict."""


class DatasetFacts(NamedTuple):
    """Problems that a run was trained or scored on; `digest` is over their ids, questions and golds."""

    name: str
    digest: str
    source: str
    problems: int
    context: str


class Evaluation(NamedTuple):
    """One finished evaluation of a checkpoint.

    Attributes:
        file: its summary.json.
        artifact: what the summary is called among the artifacts of that step.
        summary: what it says; without the mean over benchmarks where they are not the grid's own.
    """

    step: int
    file: Path
    artifact: str
    summary: dict[str, Any]


def find_evaluations(cell: Cell, folder: CellDir, known: Container[Any] = ()) -> Iterator[Evaluation]:
    """The evaluations that a cell's folder holds, by step, but for those whose file is in `known`.

    `evals/step-N` has the grid's own benchmarks, `evals/<benchmark>/step-N` one that was asked for later.
    """
    for file in _by_step(folder.path.glob("evals/step-*/summary.json")):
        if file not in known and (summary := read_summary(cell, folder, _step(file))):
            yield Evaluation(_step(file), file, "summary.json", summary)
    for file in _by_step(folder.path.glob("evals/*/step-*/summary.json")):
        if file not in known:
            summary = json.loads(file.read_text())
            metrics = {key: value for key, value in summary["metrics"].items() if key != names.EVAL_MEAN}
            artifact = f"{file.parent.parent.name}.summary.json"
            yield Evaluation(_step(file), file, artifact, summary | {"metrics": metrics})


def params(cell: Cell) -> dict[str, str]:
    """Axes, recipe and model as flat texts."""
    config = cell.config
    values = {
        "rule": cell.rule,
        "scope": config["scope"],
        "seed": cell.seed,
        "model": cell.model_name,
        "dataset": cell.dataset_name,
    }
    values |= {f"train.{key}": value for key, value in config["train"].items()}
    values |= {f"model.{key}": value for key, value in config["model"].items() if key != "name"}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def cell_tags(cell: Cell, folder: CellDir) -> dict[str, str]:
    """Which cell it is, and where its files are."""
    return {
        "balagg.cell": cell.id,
        "balagg.grid": cell.grid,
        "balagg.config_hash": cell.id.rpartition("-")[2],
        "balagg.folder": str(folder.path),
    }


def environment_tags(root: Path) -> dict[str, str]:
    """User, git commit and versions, as they are now; no package is imported for it."""
    known = {"mlflow.source.name": "balagg run", "mlflow.source.type": "LOCAL", "mlflow.user": _user()}
    for package in VERSIONS_OF:
        try:
            known[f"version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known | _git_tags(root)


def _git_tags(root: Path) -> dict[str, str]:
    """Commit of the folder and whether files differ from it; nothing where there is no git."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"mlflow.source.git.commit": commit, "mlflow.source.git.dirty": json.dumps(dirty)}


def machine_tags(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Host, GPU and versions of the machine that trained, from provenance.json."""
    told = {
        "host": provenance.get("host"),
        "gpu": provenance.get("gpu") or "none",
        "version.cuda": provenance.get("cuda"),
        "version.torch": provenance.get("torch"),
        "version.python": provenance.get("python"),
    }
    return {key: value for key, value in told.items() if value}


def train_dataset(provenance: Mapping[str, Any]) -> DatasetFacts:
    """The training problems, from provenance.json."""
    told = provenance["dataset"]
    return DatasetFacts(told["name"], told["digest"], told["source"], told["problems"], "train")


def evaluation_datasets(cell: Cell, summary: Mapping[str, Any]) -> dict[str, DatasetFacts]:
    """The problems of each benchmark of a summary, by the benchmark's name."""
    found = {}
    for benchmark, scores in summary.get("benchmarks", {}).items():
        name = f"{cell.dataset_name}-heldout" if benchmark == names.HELDOUT else benchmark
        digest, source = scores["problems_digest"], scores["source"]
        found[benchmark] = DatasetFacts(name, digest, source, scores["problems"], "evaluation")
    return found


def dataset_of_metric(cell: Cell, summary: Mapping[str, Any]) -> dict[str, DatasetFacts]:
    """The problems that a metric of a summary was measured on; the mean over benchmarks has none."""
    owners = {}
    for benchmark, facts in evaluation_datasets(cell, summary).items():
        k = summary["benchmarks"][benchmark]["k"]
        for metric in (names.eval_avg(benchmark, k), names.eval_pass(benchmark, k), names.eval_length(benchmark)):
            owners[metric] = facts
    return owners


def write_scores(evaluation: Path, summary: Mapping[str, Any], out: Path) -> None:
    """Write `out/<benchmark>.scores.parquet` (SCORE_COLUMNS) for each benchmark of an evaluation."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in SCORE_COLUMNS.items()])
    for benchmark, scores in summary.get("benchmarks", {}).items():
        rows = list(_score_rows(evaluation / f"{benchmark}.jsonl", scores["problems"], scores["k"]))
        table = pa.Table.from_pylist(rows, schema=schema)
        pq.write_table(table, out / f"{benchmark}.scores.parquet", compression="zstd")


def _score_rows(path: Path, num_problems: int, k: int) -> Iterator[dict[str, Any]]:
    """The samples that count for the score: the file may hold more, of an evaluation with a higher limit."""
    from evals.grading.verdict import UNJUDGED

    problems: set[str] = set()
    with path.open() as lines:
        for row in map(json.loads, lines):
            if len(problems) < num_problems:
                problems.add(row["id"])
            if row["id"] in problems and row["sample"] < k:
                yield {
                    "problem_id": row["id"],
                    "sample": row["sample"],
                    "correct": None if row["reason"] in UNJUDGED else row["correct"],
                    "length": row.get("tokens"),
                    "truncated": row.get("truncated"),
                }


def _step(summary: Path) -> int:
    return int(summary.parent.name.removeprefix("step-"))


def _by_step(summaries: Iterator[Path]) -> list[Path]:
    return sorted(summaries, key=lambda file: (_step(file), file))


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return "unknown"
