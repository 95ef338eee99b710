"""The command line, `balagg`: each verb reads the experiments file and hands over to the module that does the work.

Exit status: 0 all done, 1 a cell failed, 2 bad input, 130 interrupted.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from orchestrator import evaluate_commands
from orchestrator.config import load_config
from orchestrator.errors import UserError
from orchestrator.grid import Cell, expand


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Show what the user got wrong as a message. Anything else is a fault of ours and shows itself."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, evaluate and compare aggregation rules for GRPO.",
)

ConfigFile = Annotated[Path, typer.Option("--config", help="The experiments file.")]
GridName = Annotated[str | None, typer.Option("--grid", help="A grid of the file; its first one if left out.")]
Only = Annotated[list[str] | None, typer.Option(help="Keep the cells with axis=a,b. May be repeated.")]
Skip = Annotated[list[str] | None, typer.Option(help="Leave out the cells with axis=a,b. May be repeated.")]
Seeds = Annotated[str | None, typer.Option(help="Seeds instead of the grid's own, such as 0,1.")]
RunsDir = Annotated[Path | None, typer.Option(help="Folder of all cells; runs/ beside the file if left out.")]
DataDir = Annotated[Path | None, typer.Option(help="Local problem files, looked at before the hub.")]

EXPERIMENTS = Path("experiments.yaml")
PLAIN_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""

console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


@app.command()
def plan(
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
) -> None:
    """Show the cells of a grid, and what a run would do for each."""
    from orchestrator.results import plan_table
    from orchestrator.schedule import look_up

    cells, root = _cells(config, grid, only, skip, seeds)
    runs = [look_up(runs_dir or root / "runs", cell) for cell in cells]
    console.print(plan_table(runs))
    left = [run for run in runs if run.left]
    console.print(f"{len(left)} of {len(runs)} cells have work left")


@app.command()
def run(
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and do nothing.")] = False,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
    train: Annotated[str | None, typer.Option(hidden=True)] = None,
    evaluate: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train and evaluate all cells that are not done. Run it again after any interruption: it goes on."""
    if dry_run:
        plan(config, grid, only, skip, seeds, runs_dir)
        return
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"--data-dir: there is no folder {data_dir}")
    cells, root = _cells(config, grid, only, skip, seeds)
    from orchestrator import tasks
    from orchestrator.run_grid import run_grid

    outcome = run_grid(
        cells,
        root=root,
        runs_dir=(runs_dir or root / "runs").absolute(),
        data_dir=data_dir.absolute() if data_dir else None,
        console=console,
        train=train or tasks.TRAIN,
        evaluate=evaluate or tasks.EVALUATE,
    )
    if outcome.interrupted:
        console.print(f"Interrupted. Go on with:\n  {_this_command()}", soft_wrap=True, markup=False)
        raise typer.Exit(130)
    raise typer.Exit(1 if outcome.failed else 0)


@app.command()
def status(
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
) -> None:
    """Show where each cell stands, also while another command runs the grid."""
    from orchestrator.results import status_table
    from orchestrator.schedule import look_up

    cells, root = _cells(config, grid, only, skip, seeds)
    console.print(status_table([look_up(runs_dir or root / "runs", cell) for cell in cells]))


@app.command()
def figures(
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files; figures/GRID if left out.")] = None,
    if_changed: Annotated[bool, typer.Option("--if-changed", help="Do nothing where the runs are the same.")] = False,
) -> None:
    """Draw the figures and tables of a grid from MLflow."""
    from orchestrator.tracking import experiment_name, tracking_uri

    loaded = load_config(config)
    name = _grid_name(loaded.grids, grid)
    out = out or Path("figures") / name
    from analysis.figures import draw_all

    try:
        paths = draw_all(tracking_uri(loaded.root), experiment_name(name), out, only_if_changed=if_changed)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    console.print(f"{len(paths)} files drawn in {out}" if paths else f"{out} is up to date", soft_wrap=True)


@app.command()
def doctor(runs_dir: RunsDir = None) -> None:
    """Check that this machine is ready, and say what to do where it is not."""
    from orchestrator.doctor import examine

    findings = examine(Path.cwd(), runs_dir or Path("runs"))
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.needed else "[yellow]none[/]"
        remedy = "" if finding.ok or not finding.remedy else f"  -> {finding.remedy}"
        console.print(f"{mark:>18}  {finding.what}: {finding.found}{remedy}", soft_wrap=True, highlight=False)
    raise typer.Exit(any(finding.needed and not finding.ok for finding in findings))


evaluate_commands.register(app)


def _cells(
    config: Path, grid: str | None, only: list[str] | None, skip: list[str] | None, seeds: str | None
) -> tuple[list[Cell], Path]:
    """The cells that the options choose, and the folder that relative paths start from."""
    loaded = load_config(config)
    name = _grid_name(loaded.grids, grid)
    return expand(loaded, name, only or (), skip or (), _seeds(seeds)), loaded.root


def _grid_name(grids: dict[str, Any], name: str | None) -> str:
    if name is None and not grids:
        raise UserError("the experiments file has no grid")
    return next(iter(grids)) if name is None else name


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise UserError(f"--seeds {text!r}: give whole numbers with commas between, such as 0,1")
    return [int(part) for part in parts]


def _this_command() -> str:
    return shlex.join(["balagg", *sys.argv[1:]])


if __name__ == "__main__":
    app()
