"""How do a cell's files get into MLflow, each point once? The one process that runs the grid mirrors them.

The files are the truth and MLflow the view: whatever was logged before a crash, MLflow itself is asked what it has,
and only what it lacks is sent.
"""

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import UserError
from orchestrator.grid import Cell
from orchestrator.ledger import CellDir, MetricsTail, hold, read_summary

SYNCED = "balagg.synced"
"""Tag with a digest of all files that the run holds; it saves asking for the history of finished cells."""

VERSIONS_OF = ("balagg", "torch", "transformers", "ray", "mlflow", "math-verify", "vllm")

STATUS = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI, or the SQLite file `mlruns/mlflow.db` under `root`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlruns' / 'mlflow.db'}"


def experiment_name(grid: str) -> str:
    """The MLflow experiment of a grid."""
    return f"balagg-{grid}"


class Recorder:
    """Mirrors cells into one flat run each."""

    def __init__(self, uri: str, grid: str, root: Path) -> None:
        """Open the store, and create database and experiment when they are not there.

        Args:
            uri: any MLflow tracking URI.
            grid: name of the grid.
            root: the folder whose git commit is tagged.

        Raises:
            UserError: the store cannot be reached, or the experiment was deleted in it.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)

        self._entities = mlflow.entities
        self.errors: tuple[type[Exception], ...] = (MlflowException, SQLAlchemyError, OSError)
        self._root = root
        self._grid = grid
        self._runs: dict[str, Any] = {}
        self._logged: dict[str, dict[tuple[str, int], float]] = {}
        self._sent: dict[str, set[tuple[int, str]]] = {}
        self._states: dict[str, str] = {}
        self._lock = _lock_file(uri, root)
        # Two commands that open a fresh database at once would both run its migrations.
        with hold(self._lock, wait_s=120):
            try:
                self._client = mlflow.MlflowClient(uri)
                self._experiment = self._open_experiment(uri)
            except self.errors as error:
                raise UserError(f"cannot use the MLflow store {uri}: {str(error).splitlines()[0]}") from error

    def open(self, cells: Iterable[Cell]) -> None:
        """Find the cells' runs, and create those that are missing."""
        with hold(self._lock, wait_s=120):
            self._find_runs()
            missing = [cell for cell in cells if cell.id not in self._runs]
            fixed_tags = _fixed_tags(self._root) if missing else {}
            for cell in missing:
                tags = fixed_tags | {"balagg.cell": cell.id, "balagg.grid": cell.grid}
                run = self._client.create_run(self._experiment, run_name=cell.id, tags=tags)
                self._runs[cell.id] = run

    def is_synced(self, cell: Cell, folder: CellDir) -> bool:
        """Whether the run holds all that a finished cell's files say; asks nothing of the store."""
        run = self._runs.get(cell.id)
        return run is not None and run.data.tags.get(SYNCED) == _digest(cell, folder)

    def sync(self, cell: Cell, folder: CellDir, tail: MetricsTail, state: str) -> None:
        """Send the steps and evaluations that the files have and the run lacks, one batch per step.

        Raises:
            one of `self.errors`: the store did not take it; a later call sends what is missing.
        """
        run_id = self._runs[cell.id].info.run_id
        if cell.id not in self._logged:
            self._describe_run(cell)
            self._logged[cell.id] = self._history(cell)
        sent = self._sent.setdefault(cell.id, set())
        try:
            for step in sorted(tail.steps):
                if (step, "train") not in sent:
                    self._send(cell, step, tail.steps[step])
                    sent.add((step, "train"))
            for step in cell.evaluate_steps:
                if (step, "evaluate") not in sent and (summary := read_summary(cell, folder, step)):
                    self._send(cell, step, summary["metrics"], correct=True)
                    self._client.log_artifact(run_id, str(folder.summary(step)), f"evals/step-{step}")
                    sent.add((step, "evaluate"))
            self._show_state(cell, state)
        except self.errors:
            # Whether the batch was stored is not known: ask again next time.
            self._logged.pop(cell.id)
            self._sent.pop(cell.id)
            raise

    def close(self, cell: Cell, folder: CellDir, tail: MetricsTail, state: str) -> None:
        """Send what is left, the rollout samples, and how the cell ended."""
        run_id = self._runs[cell.id].info.run_id
        for file in _first_and_last(folder.rollouts):
            self._client.log_artifact(run_id, str(file), "rollouts")
        if events := _non_finite(tail):
            self._client.set_tag(run_id, "balagg.non_finite", json.dumps(events, sort_keys=True))
        self.sync(cell, folder, tail, state)
        if state == "done":
            self._client.set_tag(run_id, SYNCED, _digest(cell, folder))

    def _show_state(self, cell: Cell, state: str) -> None:
        """The cell's state as a tag and as the run's own status."""
        if self._states.get(cell.id) != state:
            run_id = self._runs[cell.id].info.run_id
            self._client.set_tag(run_id, "balagg.state", state)
            self._client.update_run(run_id, status=STATUS.get(state, "RUNNING"))
            self._states[cell.id] = state

    def _open_experiment(self, uri: str) -> str:
        name = experiment_name(self._grid)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            database = _sqlite_file(uri)
            artifacts = (database.parent / "artifacts" / name).as_uri() if database else None
            # The kind makes MLflow's pages open on training runs and their charts.
            kind = {"mlflow.experimentKind": "custom_model_development"}
            return self._client.create_experiment(name, artifact_location=artifacts, tags=kind)
        if found.lifecycle_stage != "active":
            raise UserError(
                f"the MLflow experiment {name} was deleted; "
                f"restore it: mlflow experiments restore --experiment-id {found.experiment_id}"
            )
        return found.experiment_id

    def _find_runs(self) -> None:
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment], max_results=1000, order_by=["attributes.start_time ASC"], page_token=token
            )
            for run in page:
                self._runs.setdefault(run.data.tags.get("balagg.cell", run.info.run_name), run)
            token = page.token
            if not token:
                return

    def _describe_run(self, cell: Cell) -> None:
        """Params and config.json; repeated after a kill in between, only what is missing is added."""
        run = self._runs[cell.id]
        known = run.data.params
        params = [self._entities.Param(key, value) for key, value in _params(cell).items() if key not in known]
        for start in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[start : start + 100])
        self._client.log_dict(run.info.run_id, cell.config, "config.json")

    def _history(self, cell: Cell) -> dict[tuple[str, int], float]:
        """The last value of every (metric, step) that the run holds."""
        run_id = self._runs[cell.id].info.run_id
        run = self._client.get_run(run_id)
        return {
            (point.key, point.step): point.value
            for key in run.data.metrics
            for point in self._client.get_metric_history(run_id, key)
        }

    def _send(self, cell: Cell, step: int, metrics: Mapping[str, float], correct: bool = False) -> None:
        """One synchronous batch of what the run lacks at this step; with `correct`, also of what differs."""
        logged = self._logged[cell.id]
        now = int(time.time() * 1000)
        points = [
            self._entities.Metric(key, float(value), now, step)
            for key, value in metrics.items()
            if math.isfinite(value) and ((key, step) not in logged or (correct and logged[(key, step)] != value))
        ]
        for start in range(0, len(points), 1000):
            self._client.log_batch(self._runs[cell.id].info.run_id, metrics=points[start : start + 1000])
        logged.update({(point.key, step): point.value for point in points})


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _lock_file(uri: str, root: Path) -> Path:
    database = _sqlite_file(uri)
    return database.with_name(f".{database.name}.lock") if database else root / "mlruns" / ".tracking.lock"


def _params(cell: Cell) -> dict[str, str]:
    """Axes, recipe and model as flat texts."""
    config = cell.config
    params = {
        "rule": cell.rule,
        "scope": config["scope"],
        "seed": cell.seed,
        "model": cell.model_name,
        "dataset": cell.dataset_name,
    }
    params |= {f"train.{key}": value for key, value in config["train"].items()}
    params |= {f"model.{key}": value for key, value in config["model"].items() if key != "name"}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in params.items()}


def _fixed_tags(root: Path) -> dict[str, str]:
    """Git commit and versions, read without importing the packages."""
    tags = {}
    for package in VERSIONS_OF:
        try:
            tags[f"version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
        tags["mlflow.source.git.commit"] = commit.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass  # not a git checkout
    return tags


def _first_and_last(rollouts: Path) -> list[Path]:
    by_step = {int(file.stem.removeprefix("step-")): file for file in rollouts.glob("step-*.parquet")}
    return [by_step[step] for step in sorted({min(by_step), max(by_step)})] if by_step else []


def _non_finite(tail: MetricsTail) -> dict[str, int]:
    """How many steps each metric was NaN or infinite at; such values are counted here and not logged."""
    events: dict[str, int] = {}
    for step, metrics in tail.steps.items():
        names = {key for key, value in metrics.items() if not math.isfinite(value)}
        for name in names | set(tail.non_finite.get(step, ())):
            events[name] = events.get(name, 0) + 1
    return events


def _digest(cell: Cell, folder: CellDir) -> str:
    digest = hashlib.sha256()
    for file in (folder.metrics, *(folder.summary(step) for step in cell.evaluate_steps)):
        digest.update(file.read_bytes() if file.exists() else b"-")
        digest.update(b"\0")
    return digest.hexdigest()[:16]
