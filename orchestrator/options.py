"""Which cells does a command mean? The options that the verbs share, and the cells that they choose."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.config import Config, load_config
from orchestrator.errors import UserError
from orchestrator.grid import Cell, expand

EXPERIMENTS = Path("experiments.yaml")
MOST_NAMED = 4

ConfigFile = Annotated[Path, typer.Option("--config", help="The experiments file.")]
GridName = Annotated[str | None, typer.Option("--grid", help="A grid of the file; its first one if left out.")]
Only = Annotated[list[str] | None, typer.Option(help="Keep the cells with axis=a,b. May be repeated.")]
Skip = Annotated[list[str] | None, typer.Option(help="Leave out the cells with axis=a,b. May be repeated.")]
Seeds = Annotated[str | None, typer.Option(help="Seeds instead of the grid's own, such as 0,1.")]
RunsDir = Annotated[Path | None, typer.Option(help="Folder of all cells; runs/ beside the file if left out.")]
DataDir = Annotated[Path | None, typer.Option(help="Local problem files, looked at before the hub.")]
CellNames = Annotated[
    list[str] | None, typer.Argument(metavar="[CELL]...", help="Ids of cells, or how they begin; all if left out.")
]


@dataclass(frozen=True)
class Chosen:
    """The cells that the options choose, in the order in which they are started.

    Attributes:
        root: folder of the experiments file; relative model paths start there.
        runs_dir: folder of all cells.
    """

    config: Config
    grid: str
    cells: list[Cell]
    root: Path
    runs_dir: Path


def choose(
    config: Path,
    grid: str | None = None,
    only: Sequence[str] | None = None,
    skip: Sequence[str] | None = None,
    seeds: str | None = None,
    runs_dir: Path | None = None,
) -> Chosen:
    """Read the experiments file and apply the filters.

    Raises:
        UserError: the file or an option is wrong, or no cell is left.
    """
    loaded = load_config(config)
    name = grid_name(loaded, grid)
    cells = expand(loaded, name, only or (), skip or (), _seeds(seeds))
    return Chosen(loaded, name, cells, loaded.root, (runs_dir or loaded.root / "runs").absolute())


def grid_name(config: Config, name: str | None) -> str:
    """The grid's name, or the first grid's.

    Raises:
        UserError: the file has no grid.
    """
    if name is None and not config.grids:
        raise UserError(f"{config.source.path}: there is no grid in it")
    return next(iter(config.grids)) if name is None else name


def pick(cells: Sequence[Cell], names: Iterable[str] | None) -> list[Cell]:
    """The cells that the names stand for, each by its whole id or by how it alone begins; all without names.

    Raises:
        UserError: no cell begins like that, or several do.
    """
    names = list(names or ())
    return [_pick_one(cells, name) for name in dict.fromkeys(names)] if names else list(cells)


def _pick_one(cells: Sequence[Cell], name: str) -> Cell:
    found = [cell for cell in cells if cell.id == name] or [cell for cell in cells if cell.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{name!r} is the beginning of {len(found)} cells: {_listed([cell.id for cell in found])}")
    ids = {cell.id[: len(name)]: cell.id for cell in cells}
    near = [ids[part] for part in difflib.get_close_matches(name, ids, n=MOST_NAMED, cutoff=0.4)]
    hint = f"near it: {_listed(near)}" if near else f"there are: {_listed([cell.id for cell in cells])}"
    raise UserError(f"no cell of this grid is, or begins with, {name!r}; {hint}")


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return ", ".join(ids[:MOST_NAMED]) + more


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise UserError(f"--seeds {text!r}: give whole numbers with commas between, such as 0,1")
    return [int(part) for part in parts]
