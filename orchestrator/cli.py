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

from orchestrator import (
    control_commands,
    diagnose_command,
    evaluate_commands,
    export,
    largest_grid,
    report_command,
)
from orchestrator.config import load_config
from orchestrator.errors import UserError
from orchestrator.options import (
    EXPERIMENTS,
    ConfigFile,
    DataDir,
    GridName,
    Only,
    RunsDir,
    Seeds,
    Skip,
    choose,
    grid_name,
)


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
    """Show the cells of a grid, what a run would do for each and why, and what it would cost."""
    from orchestrator.cells import look_up
    from orchestrator.estimate import cost, total
    from orchestrator.memory import memory_table
    from orchestrator.results import plan_table

    chosen = choose(config, grid, only, skip, seeds, runs_dir)
    runs = [look_up(chosen.runs_dir, cell) for cell in chosen.cells]
    ids = {cell.id for cell in chosen.cells}
    others = [cell for cell in choose(config, grid).cells if cell.id not in ids] if only or skip or seeds else []
    history = runs + [look_up(chosen.runs_dir, cell) for cell in others]
    costs = [cost(run, history) for run in runs]
    console.print(plan_table(runs, costs))
    left = [found for run, found in zip(runs, costs, strict=True) if run.left]
    estimate = f"; estimate: {total(left)}" if left else ""
    console.print(f"{len(left)} of {len(runs)} cells have work left{estimate}", soft_wrap=True)
    on_gpus = [cell for cell in chosen.cells if cell.model.gpus]
    if on_gpus:
        console.print(memory_table(on_gpus, chosen.root))


@app.command()
def run(
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and do nothing.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Run on when this terminal is closed.")] = False,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
    train: Annotated[str | None, typer.Option(hidden=True)] = None,
    train_on_workers: Annotated[str | None, typer.Option(hidden=True)] = None,
    evaluate: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train and evaluate all cells that are not done. Run it again after any interruption: it goes on."""
    if dry_run:
        plan(config, grid, only, skip, seeds, runs_dir)
        return
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"--data-dir: there is no folder {data_dir}")
    chosen = choose(config, grid, only, skip, seeds, runs_dir)
    if detach:
        from orchestrator.detach import how_to_watch, start_detached

        arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
        pid, log = start_detached(arguments, chosen.runs_dir, chosen.grid)
        console.print(how_to_watch(pid, log, _which(config, grid, only, skip, seeds, runs_dir)), soft_wrap=True)
        return
    from orchestrator import tasks
    from orchestrator.run_grid import run_grid

    outcome = run_grid(
        chosen.cells,
        root=chosen.root,
        runs_dir=chosen.runs_dir,
        data_dir=data_dir.absolute() if data_dir else None,
        console=console,
        train=train or tasks.TRAIN,
        train_on_workers=train_on_workers or tasks.TRAIN_ON_WORKERS,
        evaluate=evaluate or tasks.EVALUATE,
    )
    if outcome.interrupted:
        console.print(f"Interrupted. Go on with:\n  {_this_command()}", soft_wrap=True, markup=False)
        raise typer.Exit(130)
    raise typer.Exit(1 if outcome.failed or outcome.unrecorded else 0)


@app.command()
def status(
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date until nothing is left.")] = False,
) -> None:
    """Show where each cell stands, also while another command runs the grid."""
    from orchestrator.cells import look_up
    from orchestrator.results import status_table
    from orchestrator.watch import watch_status

    chosen = choose(config, grid, only, skip, seeds, runs_dir)
    runs = [look_up(chosen.runs_dir, cell, trained_metrics=False) for cell in chosen.cells]
    if watch:
        watch_status(runs, console)
    else:
        console.print(status_table(runs))


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
    name = grid_name(loaded, grid)
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


for commands in (
    control_commands,
    diagnose_command,
    evaluate_commands,
    export,
    largest_grid,
    report_command,
):
    commands.register(app)


def _which(
    config: Path,
    grid: str | None,
    only: list[str] | None,
    skip: list[str] | None,
    seeds: str | None,
    runs_dir: Path | None,
) -> list[str]:
    """The options again that say which cells are meant."""
    given: list[tuple[str, object]] = [("--grid", grid), ("--seeds", seeds), ("--runs-dir", runs_dir)]
    given += [("--config", config if config != EXPERIMENTS else None)]
    given += [("--only", text) for text in only or ()] + [("--skip", text) for text in skip or ()]
    return [str(part) for option in given if option[1] is not None for part in option]


def _this_command() -> str:
    return shlex.join(["balagg", *sys.argv[1:]])


if __name__ == "__main__":
    app()
