"""Logged runs as tables: what MLflow holds about an experiment, and what is missing from its grid.

    params    one row per cell    run, name, status, started, rule, model, dataset, scope, seed, train.*, tag.* ...
    metrics   one row per value   run, rule, model, dataset, scope, seed, metric, step, value

`params` lists every cell of the experiment; `metrics`, and the tables of `analysis.artifacts`, hold the finished ones
only, so that no figure mixes a half-trained run with complete ones.
"""

import hashlib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import artifacts
from trainers import metric_names

PANEL = ["model", "dataset", "scope"]
"""What one panel of a figure and one row of the table stand for; rules are compared inside it."""
Panel = tuple[str, str, str]
CELL = ["rule", *PANEL, "seed"]
"""The axes of the grid. Two runs that agree on all of them are two tries at one cell."""
PAPER_RULES = ("sequence", "token", "balanced")
FINISHED = "FINISHED"
MEAN = "mean"
"""Benchmark name under which `scores` lists the mean over the grid's benchmarks."""

# MLflow stores infinities as the largest double.
LARGEST_DOUBLE = np.finfo(np.float64).max
MOST_CELLS_NAMED = 4


TAG = "tag."
"""Before the name of a tag among the columns of `params`."""
COMMIT = "mlflow.source.git.commit"
DIRTY = "mlflow.source.git.dirty"
VERSION = "version."


class LoggedRuns(NamedTuple):
    """What is known about an experiment; the last three tables are those of `analysis.artifacts`."""

    params: pd.DataFrame
    metrics: pd.DataFrame
    lengths: pd.DataFrame = pd.DataFrame(columns=["run", *CELL, *artifacts.LENGTHS])
    evaluations: pd.DataFrame = pd.DataFrame(columns=["run", *CELL, *artifacts.EVALUATIONS])
    problems: pd.DataFrame = pd.DataFrame(columns=["run", *CELL, *artifacts.PROBLEMS])


def digest(runs: LoggedRuns) -> str:
    """Changes with any logged value, and with the version of this package."""
    parts = hashlib.sha256(importlib.metadata.version("balagg").encode())
    for table in runs:
        parts.update("\0".join(table.columns).encode())
        parts.update(pd.util.hash_pandas_object(table, index=False).to_numpy().tobytes())
    return parts.hexdigest()


def load_runs(tracking_uri: str, experiment: str) -> LoggedRuns:
    """Read an experiment's cells from MLflow.

    Of several runs of one cell (same rule, model, data set, scope and seed) the latest finished one counts,
    or the latest one where none has finished. Of several values of one (run, metric, step) the last counts.

    Raises:
        ValueError: there is no such database or experiment, or no cell in it has finished.
    """
    from mlflow import MlflowClient

    _check_database_exists(tracking_uri)
    client = MlflowClient(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None or found.lifecycle_stage != "active":
        names = ", ".join(sorted(e.name for e in client.search_experiments())) or "none"
        raise ValueError(
            f"MLflow at {tracking_uri} has no experiment named {experiment!r}; it has: {names}. "
            "Train the grid first, or name one of these."
        )
    params = _read_params(client, found.experiment_id)
    finished = params[params.status == FINISHED]
    if finished.empty:
        states = ", ".join(f"{count} {status}" for status, count in params.status.value_counts().items())
        raise ValueError(
            f"Experiment {experiment!r} at {tracking_uri} has no finished run ({states or 'no runs'}). "
            "Let at least one cell finish: run the same command that started the grid again."
        )
    cells = finished[["run", *CELL]]
    files = artifacts.RunFiles(client, dict(zip(finished.run, finished.files, strict=True)))
    return LoggedRuns(
        params.drop(columns="files"),
        _read_metrics(client, tracking_uri, cells),
        artifacts.read_lengths(files, cells),
        artifacts.read_evaluations(files, cells),
        artifacts.read_problems(files, cells),
    )


def scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """The rows of `metrics` that are mean scores, with the columns `benchmark` and `k` (samples per problem).

    The held-out split appears as `metric_names.HELDOUT`, the mean over the benchmarks as `MEAN` with k = 0.
    """
    names = pd.DataFrame(
        [(name, *parsed) for name in metrics.metric.unique() if (parsed := _parse_score(name))],
        columns=["metric", "benchmark", "k"],
    )
    chosen = metrics[metrics.metric.isin(names.metric)]
    return chosen.astype({"metric": "str"}).merge(names, on="metric")


def base_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """`scores` of the untouched base models, which are evaluated as step 0."""
    found = scores(metrics)
    return found[found.step == 0]


def final_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """`scores` at each run's last evaluated step; runs evaluated before training only are left out."""
    found = scores(metrics)
    last = found.groupby("run")["step"].transform("max")
    return found[(found.step == last) & (found.step > 0)]


def rows(table: pd.DataFrame) -> Iterator[Any]:
    """The rows of a table as named tuples."""
    yield from table.itertuples(index=False)


def cells(table: pd.DataFrame) -> pd.DataFrame:
    """The distinct cells of a table: rule, model, dataset, scope, seed."""
    by_run = table.drop_duplicates("run") if "run" in table else table
    return by_run[CELL].drop_duplicates()


def panels(table: pd.DataFrame) -> list[Panel]:
    """The (model, dataset, scope) triples of a table, sorted."""
    return sorted((model, dataset, scope) for model, dataset, scope in table[PANEL].drop_duplicates().to_numpy())


def in_panel(table: pd.DataFrame, panel: Panel) -> pd.DataFrame:
    """The rows of a table that belong to one panel."""
    model, dataset, scope = panel
    return table[(table.model == model) & (table.dataset == dataset) & (table.scope == scope)]


def panel_name(panel: Panel, table: pd.DataFrame) -> str:
    """`model · dataset`, with the scope only where the table holds more than one."""
    model, dataset, scope = panel
    return f"{model} · {dataset}" + (f" · {scope} scope" if table.scope.nunique() > 1 else "")


def notes(runs: LoggedRuns) -> list[str]:
    """What a reader of the figures must know about the runs behind them, one sentence each.

    The full grid is taken to be every rule, seed and (model, data set, scope) that the experiment has a run of.
    """
    params = runs.params
    sentences = []
    absent = [rule for rule in PAPER_RULES if rule not in set(params.rule)]
    if absent:
        sentences.append(f"No runs of the rule{'s' if len(absent) > 1 else ''} {', '.join(absent)}.")
    full = params[PANEL].drop_duplicates().merge(params[["rule"]].drop_duplicates(), how="cross")
    full = full.merge(params[["seed"]].drop_duplicates(), how="cross")
    states = full.merge(params[[*CELL, "status"]], on=CELL, how="left").fillna({"status": "not started"})
    missing = states[states.status != FINISHED].sort_values(CELL)
    if not missing.empty:
        named = [
            f"{rule} on {panel_name((model, dataset, scope), params)} seed {seed} ({str(status).lower()})"
            for rule, model, dataset, scope, seed, status in missing[[*CELL, "status"]]
            .head(MOST_CELLS_NAMED)
            .to_numpy()
        ]
        more = f", and {len(missing) - len(named)} more" if len(missing) > len(named) else ""
        sentences.append(f"Missing {len(missing)} of {len(full)} cells: {', '.join(named)}{more}.")
    return [*sentences, *_differences(params[params.status == FINISHED]), *_uneven_scores(runs.metrics)]


def _differences(finished: pd.DataFrame) -> Iterator[str]:
    """Hyper-parameters that differ between the runs of one panel, and so may explain what a rule does not."""
    names = [name for name in finished.columns if name.startswith(("train.", "model."))]
    for panel in panels(finished):
        cells = in_panel(finished, panel)
        differing = [name for name in names if cells[name].nunique(dropna=False) > 1]
        if differing:
            yield f"Runs on {panel_name(panel, finished)} differ in {', '.join(differing)}."


def _uneven_scores(metrics: pd.DataFrame) -> Iterator[str]:
    """Benchmarks that some runs lack at their last step, so that their means are over fewer benchmarks."""
    final, num_runs = final_scores(metrics), metrics.run.nunique()
    lacking = num_runs - final.groupby("benchmark")["run"].nunique()
    named = [f"{benchmark} in {num} of {num_runs} runs" for benchmark, num in lacking.items() if num]
    if named:
        yield f"Not scored at the last step: {', '.join(named)}."


def _parse_score(metric: str) -> tuple[str, int] | None:
    if metric == metric_names.EVAL_MEAN:
        return MEAN, 0
    match = _SCORE.fullmatch(metric)
    return (match["benchmark"], int(match["k"])) if match else None


_SCORE = re.compile(
    re.escape(metric_names.eval_avg("BENCHMARK", 0))
    .replace("BENCHMARK", "(?P<benchmark>.+)")
    .replace("0", r"(?P<k>\d+)")
)


def _check_database_exists(tracking_uri: str) -> None:
    """MLflow would create an empty SQLite database at a mistyped path, and find no experiment in it."""
    if not tracking_uri.startswith("sqlite:"):
        return
    from sqlalchemy.engine import make_url

    path = make_url(tracking_uri).database
    if not path or not Path(path).is_file():
        raise ValueError(
            f"There is no MLflow database at {path} ({tracking_uri}). Train a grid first (`make reproduce`), "
            "or set MLFLOW_TRACKING_URI to the store that holds the runs."
        )


def _read_params(client: Any, experiment_id: str) -> pd.DataFrame:
    """One row per cell; runs without the grid's axes among their params are not cells and are left out."""
    rows, token = [], None
    while True:
        page = client.search_runs([experiment_id], max_results=1000, page_token=token)
        for run in page:
            info = {"run": run.info.run_id, "name": run.info.run_name, "status": run.info.status}
            info |= {"started": run.info.start_time, "files": run.info.artifact_uri}
            tags = {TAG + name: text for name, text in run.data.tags.items() if _is_provenance(name)}
            rows.append(info | run.data.params | tags)
        token = page.token
        if not token:
            break
    columns = ["run", "name", "status", "started", "files", *CELL]
    table = pd.DataFrame(rows, columns=list(dict.fromkeys(columns + [key for row in rows for key in row])))
    table = table.dropna(subset=CELL).assign(finished=lambda t: t.status == FINISHED)
    table["seed"] = table["seed"].astype(int)
    table = table.sort_values(["finished", "started", "run"]).drop_duplicates(CELL, keep="last")
    return table.drop(columns="finished").sort_values(CELL, ignore_index=True)


def _is_provenance(tag: str) -> bool:
    return tag in (COMMIT, DIRTY) or tag.startswith(VERSION)


def _read_metrics(client: Any, tracking_uri: str, cells: pd.DataFrame) -> pd.DataFrame:
    is_server = tracking_uri.startswith(("http:", "https:"))
    histories = _ask_server(client, cells.run) if is_server else _read_database(tracking_uri, cells.run)
    by_run = [_last_values(history) for _, history in histories]
    names = ["run", "rule", *PANEL]
    # Repeated as categories: texts of millions of rows would fill the memory.
    table = cells.astype(dict.fromkeys(names, "category")).loc[np.repeat(cells.index, list(map(len, by_run)))]
    values = pd.concat(by_run, ignore_index=True).astype({"metric": "category"})
    return pd.concat([table.reset_index(drop=True), values], axis=1)


def _last_values(history: pd.DataFrame) -> pd.DataFrame:
    """metric, step, value in order. `history`: HISTORY's columns.

    Equal timestamps go to the larger value, as in MLflow itself.
    """
    ordered = history.sort_values(["metric", "step", "timestamp", "value"], na_position="first", ignore_index=True)
    last = ordered.drop_duplicates(["metric", "step"], keep="last").drop(columns="timestamp")
    return last.assign(value=last["value"].where(last["value"].abs() < LARGEST_DOUBLE, np.nan))


HISTORY = {"metric": "O", "step": "i8", "timestamp": "i8", "value": "f8"}


def _read_database(tracking_uri: str, runs: Iterable[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """One query per run through MLflow's own store: its client would make one per run and metric."""
    from mlflow.store.tracking.dbmodels.models import SqlMetric
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy import select

    column = SqlMetric.__table__.c
    wanted = select(column.key, column.step, column.timestamp, column.value, column.is_nan)
    store = SqlAlchemyStore(tracking_uri, "mlruns")
    with store.ManagedSessionMaker() as session:
        # The driver's own cursor: SQLAlchemy's rows would cost more than the query.
        connection = session.connection()
        cursor = connection.connection.cursor()
        for run in runs:
            query = wanted.where(column.run_uuid == run).compile(connection, compile_kwargs={"literal_binds": True})
            cursor.execute(str(query))
            rows = np.fromiter(cursor, dtype=[*HISTORY.items(), ("is_nan", "?")])
            history = pd.DataFrame({name: rows[name] for name in HISTORY})
            yield run, history.assign(value=np.where(rows["is_nan"], np.nan, rows["value"]))


def _ask_server(client: Any, runs: Iterable[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    for run in runs:
        values = [
            (value.key, value.step, value.timestamp, value.value)
            for metric in client.get_run(run).data.metrics
            for value in client.get_metric_history(run, metric)
        ]
        yield run, pd.DataFrame(values, columns=list(HISTORY))
