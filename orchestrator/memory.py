"""What does a cell need of a GPU's memory, and which grid does this machine have room for?"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from orchestrator.config import ModelEntry
from orchestrator.grid import Cell
from trainers.footprint import Footprint, Shape, footprint
from trainers.recipe import Recipe

GIB = 2**30


def model_shape(entry: ModelEntry, root: Path) -> Shape | str:
    """The model's numbers from the experiments file, its own folder or the hub's cache; else why there are none."""
    config: Mapping[str, Any] = entry.architecture
    if not config and entry.path and (folder := root / Path(entry.path).expanduser() / "config.json").is_file():
        config = json.loads(folder.read_text())
    if not config and entry.hub_id:
        config = _cached_config(entry)
    if not config:
        return "unknown: give the model's `architecture`"
    try:
        return Shape.of({**config, **entry.config})
    except ValueError as error:
        return f"unknown: {error}"


def cell_footprint(cell: Cell, root: Path) -> Footprint | str:
    """A worker's memory, or why it cannot be told."""
    shape = model_shape(cell.model, root)
    return shape if isinstance(shape, str) else footprint(shape, Recipe(**cell.config["train"]), cell.model.workers)


def memory_table(cells: Sequence[Cell], root: Path) -> Table:
    """Per cell: its GPUs, memory on each and tokens of a step; estimates, in GiB."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", no_wrap=True)
    titles = ("GPUs", "weights", "optimizer", "activations", "engine", "KV cache", "needed, GiB a GPU", "tokens a step")
    for title in titles:
        table.add_column(title, justify="right")
    for cell in cells:
        gpus = f"{cell.model.workers} x {cell.model.gpus:g}"
        found = cell_footprint(cell, root)
        if isinstance(found, str):
            table.add_row(cell.id, gpus, found)
            continue
        parts = (found.weights, found.optimizer, found.activations, found.engine, found.kv_cache, found.needed)
        table.add_row(cell.id, gpus, *(f"{part / GIB:.1f}" for part in parts), f"{found.tokens_per_step:,}")
    return table


def _cached_config(entry: ModelEntry) -> dict[str, Any]:
    """The hub's config.json where an earlier download left it; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(entry.hub_id), "config.json", revision=entry.revision)
    return json.loads(Path(found).read_text()) if isinstance(found, str) else {}
