"""`balagg report`: the figures and tables of a grid as one page. `register(app)` adds it to the command line."""

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.config import load_config
from orchestrator.errors import UserError
from orchestrator.options import EXPERIMENTS, ConfigFile, GridName, grid_name


def register(app: typer.Typer) -> None:
    """Add the command to a typer app."""
    app.command("report")(report)


def report(
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    out: Annotated[Path, typer.Option(help="Folder for index.html.")] = Path("report"),
    show: Annotated[bool, typer.Option("--open", help="Open the page where there is a desktop.")] = False,
) -> None:
    """Write the report of a grid, one self-contained page, from MLflow alone."""
    loaded = load_config(config)
    name = grid_name(loaded, grid)
    from analysis.report import write_report
    from orchestrator.tracking import experiment_name, tracking_uri

    try:
        path = write_report(tracking_uri(loaded.root), experiment_name(name), out)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    typer.echo(path)
    if show and _has_desktop():
        webbrowser.open(path.absolute().as_uri())


def _has_desktop() -> bool:
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
