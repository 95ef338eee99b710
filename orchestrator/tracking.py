"""How do a cell's files get into MLflow, each point once? The process that looks after a cell mirrors its files.

The files are the truth, the queue and the order; MLflow is the view. While a store is away nothing is lost: the cells
go on, and whoever mirrors them next asks the store what it has and sends the rest. A point carries the time at which it
was measured: a batch that is sent twice, because its confirmation was lost, is one point in the database all the same.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator import run_facts
from orchestrator.errors import UserError
from orchestrator.grid import Cell
from orchestrator.leases import hold
from orchestrator.ledger import CellDir, MetricsTail
from orchestrator.run_facts import DatasetFacts, Evaluation, find_evaluations
from trainers.metric_names import NON_FINITE

SYNCED = "balagg.synced"
"""Tag with a digest of all files that the run holds; it saves asking for the history of finished cells. It counts once
the run says FINISHED, which comes last of all."""

STATE = "balagg.state"

CONFIG = "config"
"""Stands for params and config.json among what was sent."""

CONTENT = "2"
"""Part of that digest. Raise it when a mirror holds more than before: finished cells are then brought up to date."""

RUNNING, FINISHED = "RUNNING", "FINISHED"
STATUS = {"done": FINISHED, "failed": "FAILED", "stopped": "KILLED", "cancelled": "KILLED"}

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""MLflow's own switches, where the environment does not say otherwise. MLflow would go on with a request to a server
that is away for four minutes; here the files wait instead."""

LONGEST_PAUSE_S = 30.0


class StoreAway(Exception):
    """The store did not answer a moment ago, and is not asked again yet."""


@dataclass
class _Mirror:
    """What the run of one cell is known to hold.

    Attributes:
        run: MLflow's run, as it was when we looked.
        status: RUNNING, or how MLflow says that it ended.
        tags: its tags.
        files: where its artifacts go.
        logged: last value by (metric, step).
        models: logged model by step.
        datasets: data sets that are linked to the run.
        sent: steps, evaluations and the config. What is put down here and in `logged` before the store has confirmed
            it does not mislead: after an error the mirror is made anew.
    """

    run: Any
    status: str
    tags: dict[str, str]
    files: Any
    logged: dict[tuple[str, int], float] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)
    datasets: set[DatasetFacts] = field(default_factory=set)
    sent: set[Hashable] = field(default_factory=set)

    @property
    def id(self) -> str:
        return self.run.info.run_id


class Recorder:
    """Mirrors cells into one flat run each.

    Attributes:
        errors: what `sync` and `close` raise when the store did not take everything. A later call sends the rest.
    """

    def __init__(self, uri: str, grid: str, root: Path) -> None:
        """Open the store, and create database and experiment when they are not there.

        Args:
            uri: any MLflow tracking URI.
            grid: name of the grid.
            root: the folder whose git commit is tagged.

        Raises:
            UserError: the store cannot be reached, or the experiment was deleted in it.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.exceptions import MlflowException
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
        from sqlalchemy.exc import SQLAlchemyError

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)

        self._entities = mlflow.entities
        # The client's log_artifact would ask the store where the run's files go, which the run has told us.
        self._open_files = partial(get_artifact_repository, tracking_uri=uri)
        self.errors: tuple[type[Exception], ...] = (MlflowException, SQLAlchemyError, OSError, StoreAway)
        self._grid = grid
        self._environment = run_facts.environment_tags(root)
        self._runs: dict[str, Any] = {}
        self._mirrors: dict[str, _Mirror] = {}
        self._failures, self._ask_again = 0, 0.0
        # Two commands that open a fresh database at once would both run its migrations.
        with hold(_opening(uri, root), wait_s=120):
            try:
                self._client = mlflow.MlflowClient(uri)
                self._experiment = self._open_experiment(uri)
            except self.errors as error:
                raise UserError(f"cannot use the MLflow store {uri}: {_first_line(error)}") from error

    def open(self, cells: Iterable[Cell]) -> None:
        """Look up the runs that these cells have. Missing ones are created when there is something to record."""
        wanted = {cell.id for cell in cells}
        for run in self._search_runs():
            if (cell_id := run.data.tags.get("balagg.cell", run.info.run_name)) in wanted:
                self._runs.setdefault(cell_id, run)

    def is_synced(self, cell: Cell, folder: CellDir) -> bool:
        """Whether the run holds all that a finished cell's files say; asks nothing of the store."""
        run = self._runs.get(cell.id)
        if run is None or run.info.status != FINISHED:
            return False
        return bool(run.data.tags.get(SYNCED) == _digest(cell, folder))

    def sync(self, cell: Cell, folder: CellDir, tail: MetricsTail, state: str) -> None:
        """Send the steps and evaluations that the files have and the run lacks.

        Steps go in order, all that are new in one synchronous call. The caller holds the cell's claim: no other process
        writes this run.

        Raises:
            one of `self.errors`: the store did not take it. It is not asked again for a moment, which grows with the
                number of failures, so that a caller may come back as often as it likes.
        """
        with self._asking(cell):
            self._sync(cell, folder, tail, _tags(folder, state))

    def close(self, cell: Cell, folder: CellDir, tail: MetricsTail, state: str) -> None:
        """Send what is left, the rollout samples, and how the cell ended.

        Raises:
            as `sync`.
        """
        with self._asking(cell):
            tags = _tags(folder, state)
            if events := _non_finite(tail):
                tags["balagg.non_finite"] = json.dumps(events, sort_keys=True)
            if state == "done":
                tags[SYNCED] = _digest(cell, folder)
            mirror = self._sync(cell, folder, tail, tags)
            for file in _early_middle_late(folder.rollouts):
                mirror.files.log_artifact(str(file), "rollouts")
            if state in STATUS:
                self._client.set_terminated(mirror.id, STATUS[state], _ended(folder, tail))
        self._mirrors.pop(cell.id)

    def record_evaluations(self, cell: Cell, folder: CellDir) -> None:
        """Send the evaluations that the files have and the run lacks, and leave the cell's state as it is.

        Raises:
            as `sync`.
        """
        no_steps = MetricsTail(folder)
        with self._asking(cell):
            self._send(self._mirror(cell, folder, no_steps, {}), cell, folder, no_steps, {})

    def _sync(self, cell: Cell, folder: CellDir, tail: MetricsTail, tags: dict[str, str]) -> _Mirror:
        mirror = self._mirror(cell, folder, tail, tags)
        if mirror.status != RUNNING:
            self._client.update_run(mirror.id, RUNNING)
            mirror.status = RUNNING
        self._send(mirror, cell, folder, tail, tags)
        return mirror

    def _send(self, mirror: _Mirror, cell: Cell, folder: CellDir, tail: MetricsTail, tags: dict[str, str]) -> None:
        """What the files have and the run lacks, like things together: a call costs a store several transactions."""
        evaluations = list(find_evaluations(cell, folder, mirror.sent))
        provenance = _provenance(folder)
        datasets = {run_facts.train_dataset(provenance)} if provenance else set()
        for evaluation in evaluations:
            datasets.update(run_facts.evaluation_datasets(cell, evaluation.summary).values())
        self._log_datasets(mirror, datasets)
        self._add_models(mirror, cell, folder, {evaluation.step for evaluation in evaluations})
        points = self._step_points(mirror, tail)
        for evaluation in evaluations:
            points += self._score_points(mirror, cell, evaluation)
        self._client.log_batch(
            mirror.id,
            metrics=points,
            params=self._lacking_params(mirror, cell),
            tags=[self._entities.RunTag(*tag) for tag in sorted(tags.items() - mirror.tags.items())],
            synchronous=True,
        )
        mirror.tags |= tags
        self._log_files(mirror, folder, evaluations)

    @contextmanager
    def _asking(self, cell: Cell) -> Iterator[None]:
        """Let a store that is away alone for a while. Whether its last batch was stored is not known: ask it then."""
        if time.monotonic() < self._ask_again:
            raise StoreAway("MLflow did not answer; it is asked again in a moment")
        try:
            yield
        except self.errors as error:
            self._mirrors.pop(cell.id, None)
            if _is_away(error):
                self._failures += 1
                self._ask_again = time.monotonic() + min(LONGEST_PAUSE_S, 0.5 * 2**self._failures)
            raise
        self._failures = 0

    def _mirror(self, cell: Cell, folder: CellDir, tail: MetricsTail, tags: dict[str, str]) -> _Mirror:
        """What the cell's run holds; the run is created, with these tags, when there is none."""
        if cell.id not in self._mirrors:
            found = self._find_run(cell)
            run = found or self._create_run(cell, folder, tail, tags)
            files = self._open_files(run.info.artifact_uri)
            mirror = _Mirror(run, run.info.status, dict(run.data.tags), files)
            if found:
                mirror.logged, mirror.models = self._history(run), self._find_models(run)
            self._runs[cell.id] = run
            self._mirrors[cell.id] = mirror
        return self._mirrors[cell.id]

    def _find_run(self, cell: Cell) -> Any:
        """The cell's run as it is now. Another command may have created it since we looked."""
        if known := self._runs.get(cell.id):
            run = self._client.get_run(known.info.run_id)
            if run.info.lifecycle_stage == "active":
                return run
        return next(self._search_runs(f"tags.`balagg.cell` = '{cell.id}'"), None)

    def _create_run(self, cell: Cell, folder: CellDir, tail: MetricsTail, tags: dict[str, str]) -> Any:
        return self._client.create_run(
            self._experiment,
            run_name=cell.id,
            start_time=_milliseconds(min(tail.times.values(), default=folder.config.stat().st_mtime)),
            tags=self._environment | run_facts.cell_tags(cell, folder) | tags,
        )

    def _lacking_params(self, mirror: _Mirror, cell: Cell) -> list[Any]:
        """A kill may have come in between, so some may be there."""
        if CONFIG in mirror.sent:
            return []
        known = mirror.run.data.params
        return [self._entities.Param(key, value) for key, value in run_facts.params(cell).items() if key not in known]

    def _history(self, run: Any) -> dict[tuple[str, int], float]:
        """The last value of every (metric, step) that the run holds."""
        return {
            (point.key, point.step): point.value
            for key in run.data.metrics
            for point in self._client.get_metric_history(run.info.run_id, key)
        }

    def _find_models(self, run: Any) -> dict[int, str]:
        """The run's logged models by step. A kill may have come before one was linked to the run."""
        by_run = f"source_run_id = '{run.info.run_id}'"
        found = self._client.search_logged_models([self._experiment], by_run, max_results=1000)
        models = {int(model.params["step"]): model.model_id for model in found}
        linked = {output.model_id for output in run.outputs.model_outputs} if run.outputs else set()
        self._link_models(run.info.run_id, {step: model for step, model in models.items() if model not in linked})
        return models

    def _step_points(self, mirror: _Mirror, tail: MetricsTail) -> list[Any]:
        """What the run lacks of the steps. Values that are not finite are counted, not logged."""
        points = []
        for step in sorted(tail.steps):
            if ("train", step) in mirror.sent:
                continue
            bad = _non_finite_names(tail, step)
            metrics = {key: value for key, value in tail.steps[step].items() if key not in bad}
            if bad:
                metrics[NON_FINITE] = len(bad)
            when = _milliseconds(tail.times[step]) if step in tail.times else mirror.run.info.start_time + step
            for key, value in metrics.items():
                if (key, step) not in mirror.logged:
                    mirror.logged[key, step] = value
                    points.append(self._entities.Metric(key, float(value), when, step))
            mirror.sent.add(("train", step))
        return points

    def _score_points(self, mirror: _Mirror, cell: Cell, evaluation: Evaluation) -> list[Any]:
        """Scores of one checkpoint, on the checkpoint's own page too, with the problems that they are about."""
        step, summary = evaluation.step, evaluation.summary
        owners = run_facts.dataset_of_metric(cell, summary)
        when = evaluation.file.stat().st_mtime_ns // 1_000_000
        points = []
        for key, value in summary["metrics"].items():
            if math.isfinite(value) and mirror.logged.get((key, step)) != value:
                mirror.logged[key, step] = value
                about = owners.get(key)
                name, digest = (about.name, about.digest) if about else (None, None)
                points.append(self._entities.Metric(key, float(value), when, step, mirror.models[step], name, digest))
        return points

    def _log_files(self, mirror: _Mirror, folder: CellDir, evaluations: Iterable[Evaluation]) -> None:
        """The config, and summary and scores of these evaluations."""
        if CONFIG not in mirror.sent:
            mirror.files.log_artifact(str(folder.config))
            mirror.sent.add(CONFIG)
        for evaluation in evaluations:
            with tempfile.TemporaryDirectory() as scratch:
                (Path(scratch) / evaluation.artifact).write_text(json.dumps(evaluation.summary, indent=2) + "\n")
                run_facts.write_scores(evaluation.file.parent, evaluation.summary, Path(scratch))
                mirror.files.log_artifacts(scratch, f"evals/step-{evaluation.step}")
            mirror.sent.add(evaluation.file)

    def _add_models(self, mirror: _Mirror, cell: Cell, folder: CellDir, steps: set[int]) -> None:
        """The logged models that stand for checkpoints. They name the folders of the weights, which are not copied."""
        added = {step: self._create_model(mirror, cell, folder, step) for step in sorted(steps - mirror.models.keys())}
        self._link_models(mirror.id, added)
        mirror.models |= added

    def _create_model(self, mirror: _Mirror, cell: Cell, folder: CellDir, step: int) -> str:
        axes = {"rule": cell.rule, "model": cell.model_name, "dataset": cell.dataset_name, "seed": str(cell.seed)}
        model = self._client.create_logged_model(
            self._experiment,
            name=f"step-{step}-{cell.id.rpartition('-')[0]}".replace(".", "_"),  # MLflow takes no dots
            source_run_id=mirror.id,
            model_type="checkpoint",
            params=axes | {"scope": cell.config["scope"], "step": str(step)},
            tags={"balagg.cell": cell.id, "checkpoint": str(folder.checkpoint(step))},
        )
        return str(model.model_id)

    def _link_models(self, run_id: str, models: Mapping[int, str]) -> None:
        for model in models.values():
            self._client.finalize_logged_model(model, "READY")
        if models:
            outputs = [self._entities.LoggedModelOutput(model, step) for step, model in models.items()]
            self._client.log_outputs(run_id, outputs)

    def _log_datasets(self, mirror: _Mirror, datasets: set[DatasetFacts]) -> None:
        inputs = [
            self._entities.DatasetInput(
                self._entities.Dataset(
                    facts.name, facts.digest, "local", json.dumps({"uri": facts.source}),
                    profile=json.dumps({"num_rows": facts.problems}),
                ),
                [self._entities.InputTag("mlflow.data.context", facts.context)],
            )
            for facts in sorted(datasets - mirror.datasets)
        ]  # fmt: skip
        if inputs:
            self._client.log_inputs(mirror.id, inputs)
            mirror.datasets |= datasets

    def _search_runs(self, filter_string: str = "") -> Iterator[Any]:
        """Runs of the experiment, oldest first."""
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment], filter_string, max_results=1000,
                order_by=["attributes.start_time ASC"], page_token=token,
            )  # fmt: skip
            yield from page
            token = page.token
            if not token:
                return

    def _open_experiment(self, uri: str) -> str:
        name = experiment_name(self._grid)
        found = self._client.get_experiment_by_name(name)
        if found is None:
            database = _sqlite_file(uri)
            artifacts = (database.parent / "artifacts" / name).as_uri() if database else None
            # The kind makes MLflow's pages open on training runs and their charts.
            kind = {"mlflow.experimentKind": "custom_model_development"}
            try:
                return self._client.create_experiment(name, artifact_location=artifacts, tags=kind)
            except self.errors:
                # Another command on another machine may have been faster.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise UserError(
                f"the MLflow experiment {name} was deleted; "
                f"restore it: mlflow experiments restore --experiment-id {found.experiment_id}"
            )
        place = found.artifact_location.removeprefix("file://")
        if uri.startswith("http") and place.startswith("/") and not Path(place).exists():
            raise UserError(
                f"the MLflow experiment {name} was begun without its server {uri}: its files go to {place}, which this "
                "machine does not have; use another server, or run on the machine that has it"
            )
        return found.experiment_id


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI, or the SQLite file `mlruns/mlflow.db` under `root`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlruns' / 'mlflow.db'}"


def experiment_name(grid: str) -> str:
    """The MLflow experiment of a grid."""
    return f"balagg-{grid}"


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _opening(uri: str, root: Path) -> Path:
    """Leased while a command opens the store."""
    database = _sqlite_file(uri)
    return database.with_name(f".{database.name}.opening") if database else root / "mlruns" / ".opening"


def _is_away(error: Exception) -> bool:
    """Whether the store as a whole does not answer, rather than refuse one request."""
    status = getattr(error, "get_http_status_code", None)
    return status is None or status() >= 500


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _ended(folder: CellDir, tail: MetricsTail) -> int:
    """When the last result of the cell was made, in milliseconds since 1970."""
    times = [path.stat().st_mtime for path in folder.path.glob("evals/**/summary.json")]
    return _milliseconds(max([*tail.times.values(), *times], default=time.time()))


def _early_middle_late(rollouts: Path) -> list[Path]:
    """Rollout samples of the first, the middle and the last logged step."""
    files = sorted(rollouts.glob("step-*.parquet"), key=lambda path: int(path.stem.removeprefix("step-")))
    return [files[i] for i in sorted({0, len(files) // 2, len(files) - 1})] if files else []


def _provenance(folder: CellDir) -> dict[str, Any]:
    """Machine and training problems, once the trainer has told them."""
    try:
        return dict(json.loads(folder.provenance.read_text()))
    except FileNotFoundError:
        return {}


def _tags(folder: CellDir, state: str) -> dict[str, str]:
    """What changes as the cell goes on."""
    provenance = _provenance(folder)
    return {STATE: state} | (run_facts.machine_tags(provenance) if provenance else {})


def _non_finite_names(tail: MetricsTail, step: int) -> set[str]:
    bad = {key for key, value in tail.steps[step].items() if not math.isfinite(value)}
    return bad | set(tail.non_finite.get(step, ()))


def _non_finite(tail: MetricsTail) -> dict[str, int]:
    """How often each metric was NaN or infinite."""
    return dict(Counter(name for step in tail.steps for name in _non_finite_names(tail, step)))


def _digest(cell: Cell, folder: CellDir) -> str:
    digest = hashlib.sha256(CONTENT.encode())
    summaries = {folder.summary(step) for step in cell.evaluate_steps} | {*folder.path.glob("evals/**/summary.json")}
    for file in (folder.metrics, *sorted(summaries)):
        digest.update(file.relative_to(folder.path).as_posix().encode())
        digest.update(file.read_bytes() if file.exists() else b"-")
        digest.update(b"\0")
    return digest.hexdigest()[:16]
