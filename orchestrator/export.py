"""`balagg export`: a grid as two plain tables, for whoever wants to analyse it with other tools.

    runs      one row per cell     cell, rule, model, dataset, scope, seed, state, ..., the recipe as train.*
    metrics   one row per value    cell, rule, model, dataset, scope, seed, metric, step, value

`register(app)` adds the command. From files, every cell is there with what it has so far; from MLflow, the metrics of
finished cells only.
"""

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.errors import UserError
from orchestrator.options import EXPERIMENTS, Chosen, ConfigFile, GridName, Only, RunsDir, Seeds, Skip, choose

if TYPE_CHECKING:
    import pandas as pd

AXES = ["rule", "model", "dataset", "scope", "seed"]
METRIC_COLUMNS = ["cell", *AXES, "metric", "step", "value"]


class Source(StrEnum):
    """Where the tables come from."""

    FILES = "files"
    MLFLOW = "mlflow"


class Format(StrEnum):
    """What the tables are written as."""

    CSV = "csv"
    PARQUET = "parquet"


def register(app: typer.Typer) -> None:
    """Add the command to a typer app."""
    app.command()(export)


def export(
    out: Annotated[Path | None, typer.Option(help="Folder for the two files; exports/GRID if left out.")] = None,
    form: Annotated[Format, typer.Option("--format", help="How to write them.")] = Format.CSV,
    source: Annotated[Source, typer.Option("--from", help="The cells' files, or the MLflow store.")] = Source.FILES,
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
) -> None:
    """Write runs and metrics as CSV or Parquet."""
    chosen = choose(config, grid, only, skip, seeds, runs_dir)
    tables = from_files(chosen) if source is Source.FILES else from_mlflow(chosen)
    out = out or Path("exports") / chosen.grid
    for name, table in zip(("runs", "metrics"), tables, strict=True):
        path = out / f"{name}.{form.value}"
        write_table(table, path)
        typer.echo(f"{len(table)} rows: {path}")


def from_files(chosen: Chosen) -> tuple["pd.DataFrame", "pd.DataFrame"]:
    """Runs and metrics as the cells' files show them now.

    Raises:
        UserError: no cell has been started.
    """
    import pandas as pd

    from orchestrator.cells import look_up
    from orchestrator.results import describe

    runs, metrics = [], []
    for cell in chosen.cells:
        run = look_up(chosen.runs_dir, cell)
        if not run.folder.path.exists():
            continue
        axes = _axes(cell.config)
        state, reason = describe(run)
        progress = {"state": state, "reason": reason, "steps": cell.steps, "trained_steps": run.trained_steps}
        recipe = {f"train.{key}": value for key, value in cell.config["train"].items()}
        runs.append({"cell": cell.id, **axes, **progress, **recipe})
        values = [(key, step, value) for step, found in run.tail.steps.items() for key, value in found.items()]
        for step, summary in run.summaries.items():
            values += [(key, step, value) for key, value in summary["metrics"].items()]
        metrics += [(cell.id, *axes.values(), *value) for value in values]
    if not runs:
        raise UserError(f"none of these cells has been started: there is nothing in {chosen.runs_dir / chosen.grid}")
    return pd.DataFrame(runs), pd.DataFrame(metrics, columns=METRIC_COLUMNS)


def from_mlflow(chosen: Chosen) -> tuple["pd.DataFrame", "pd.DataFrame"]:
    """Runs and metrics as the MLflow store holds them.

    Raises:
        UserError: there is no such store or experiment, or no finished cell in it.
    """
    from analysis.runs import load_runs
    from orchestrator.tracking import ENVIRONMENT, experiment_name, tracking_uri

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        loaded = load_runs(tracking_uri(chosen.root), experiment_name(chosen.grid))
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    runs = loaded.params.rename(columns={"name": "cell", "status": "state"})
    runs = runs[runs.cell.isin([cell.id for cell in chosen.cells])]
    metrics = loaded.metrics.merge(runs[["run", "cell"]], on="run")
    first = ["cell", *AXES, "state"]
    others = [name for name in runs.columns if name not in {*first, "run", "started"}]
    return runs[[*first, *others]].reset_index(drop=True), metrics[METRIC_COLUMNS]


def write_table(table: "pd.DataFrame", path: Path) -> None:
    """Write a table that readers see either whole or not at all; the suffix says how."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    if path.suffix == ".parquet":
        _texts(table).to_parquet(partial, index=False)
    else:
        table.to_csv(partial, index=False)
    os.replace(partial, path)


def _texts(table: "pd.DataFrame") -> "pd.DataFrame":
    """Lists of a recipe, such as Adam's betas, as text: a column of Parquet has one type."""
    mixed = [name for name in table.select_dtypes("object").columns if table[name].map(_is_list).any()]
    return table.assign(**{name: table[name].map(str) for name in mixed})


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _axes(config: dict[str, Any]) -> dict[str, Any]:
    axes = {"rule": config["rule"], "model": config["model"]["name"], "dataset": config["dataset"]["name"]}
    return axes | {"scope": config["scope"], "seed": config["seed"]}
