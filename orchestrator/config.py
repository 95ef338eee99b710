"""What does experiments.yaml say? Every name is checked and every default filled before anything starts."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from orchestrator.errors import UserError
from orchestrator.yaml_source import Source
from trainers.metric_names import HELDOUT, RULE_NAMES
from trainers.recipe import Recipe

Location = tuple[str | int, ...]

_RECIPE = TypeAdapter(Recipe)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelEntry(_Strict):
    """A base model and what a cell of it needs. Give one of `path`, `hub_id` and `package`."""

    path: str | None = None
    """A folder of Hugging Face files, relative to the file that names it."""
    hub_id: str | None = None
    """A model of the Hugging Face hub."""
    package: str | None = None
    """An installed Python package that carries the model's files."""
    revision: str | None = None
    """Branch, tag or commit on the hub; give a commit for a run that others should repeat."""
    gguf_file: str | None = None
    """Name of a GGUF file to read the weights from."""
    config: dict[str, Any] = {}
    """Overrides of the model's own config, such as `max_position_embeddings`."""
    template: str
    """Prompt template, by its name in `evals.prompts`."""
    workers: PositiveInt = 1
    """Processes of one training task. They share the model and start together, on one node where one has room."""
    cpus: PositiveInt = 1
    """CPU cores of each of them, which is also its number of threads."""
    gpus: NonNegativeFloat = 0
    """GPUs of each of them."""
    eval_cpus: PositiveInt = 1
    """CPU cores of one evaluation task."""
    eval_gpus: NonNegativeFloat = 0
    """GPUs of one evaluation task."""
    architecture: dict[str, Any] = {}
    """What the hub's config.json says of the model's size, so that `balagg plan` can estimate memory offline."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelEntry":
        if sum(bool(source) for source in (self.path, self.hub_id, self.package)) != 1:
            raise ValueError("give one of path, hub_id and package")
        return self


class SamplingEntry(_Strict):
    """How a benchmark is sampled. What is left out takes the benchmark's own default."""

    samples: PositiveInt | None = None
    """Responses per problem, k of avg@k."""
    limit: PositiveInt | None = None
    """Use the first so many problems."""
    max_tokens: PositiveInt | None = None
    """Length limit of a response, in tokens."""
    temperature: NonNegativeFloat | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class BenchmarkEntry(SamplingEntry):
    """How a benchmark is sampled in every grid that does not say otherwise."""

    release: str | None = None
    """LiveCodeBench only: v1 to v6."""
    window: str | None = None
    """LiveCodeBench only: months of the problems, such as 2408-2502."""


def _step(value: Any) -> Any:
    named = value in ("first", "middle", "last")
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if named or number or (isinstance(value, float) and 0 <= value <= 1):
        return value
    raise ValueError(f"give first, middle, last, a fraction between 0 and 1, or a step number, not {value!r}")


class EvaluationEntry(SamplingEntry):
    """Which checkpoints are evaluated, and on what. Sampling values here go before the benchmarks' own."""

    at: list[Annotated[Any, BeforeValidator(_step)]] = ["first", "middle", "last"]
    """Checkpoints: `first` is the base model, `middle`, `last`, fractions of the steps, or step numbers."""
    benchmarks: Annotated[list[str], Field(min_length=1)]
    """Names in `evals.benchmarks`."""
    heldout: SamplingEntry | None = SamplingEntry()
    """The held-out split of the cell's own training set; null leaves it out."""
    engine: Literal["torch", "vllm"] = "torch"
    seed: NonNegativeInt = 0
    """Sampling seed, the same in every cell, so that cells are compared on the same draws."""


class GridEntry(_Strict):
    """A full factorial of rules, models, data sets and seeds."""

    description: str = ""
    rules: Annotated[list[str], Field(min_length=1)]
    scope: Literal["group", "batch"] = "group"
    models: Annotated[list[str], Field(min_length=1)]
    datasets: Annotated[list[str], Field(min_length=1)]
    """Names in `evals.datasets`."""
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]
    train: dict[str, Any] = {}
    """Fields of `trainers.recipe.Recipe`."""
    overrides: dict[str, dict[str, Any]] = {}
    """Recipe fields for one model or data set of the grid, by its name."""
    evaluate: EvaluationEntry
    priorities: dict[str, int] = {}
    """Higher goes first: a number for a model or data set of the grid, by its name; a cell has the sum of its two."""
    max_cells: PositiveInt | None = None
    """Limit on the cells that are trained or evaluated at once."""
    retries: NonNegativeInt = 3
    """How often in a row, without getting to a later checkpoint, a task is started again before its cell fails.
    `orchestrator.failures` says which failures are tried again."""
    retry_wait_s: NonNegativeFloat = 10
    """Seconds before the first retry; doubled each time."""
    hang_after_s: PositiveFloat | None = None
    """Seconds without a step, sample or log line after which a task is taken to hang. By default an hour, or twenty of
    the cell's own steps if that is more."""


class _File(_Strict):
    models: dict[str, ModelEntry]
    benchmarks: dict[str, BenchmarkEntry] = {}
    grids: dict[str, GridEntry]


@dataclass(frozen=True)
class Names:
    """The names that other packages define and this file may use."""

    rules: tuple[str, ...]
    datasets: tuple[str, ...]
    benchmarks: tuple[str, ...]
    templates: tuple[str, ...]


def known_names() -> Names:
    """The names as the packages define them now."""
    from evals.benchmarks import BENCHMARKS
    from evals.datasets import DATASETS
    from evals.prompts import TEMPLATES

    return Names(RULE_NAMES, tuple(DATASETS), tuple(BENCHMARKS), tuple(TEMPLATES))


@dataclass(frozen=True)
class Config:
    """A checked experiments.yaml."""

    source: Source
    root: Path
    """Folder of the file; relative model paths start here."""
    models: dict[str, ModelEntry]
    benchmarks: dict[str, BenchmarkEntry]
    grids: dict[str, GridEntry]

    def grid(self, name: str) -> GridEntry:
        """The grid of that name.

        Raises:
            UserError: there is none.
        """
        if name not in self.grids:
            raise UserError(f"{self.source.path}: {unknown('grid', name, self.grids)}")
        return self.grids[name]


def load_config(path: Path, names: Names | None = None) -> Config:
    """Read, type and cross-check a file.

    Args:
        path: the experiments.yaml.
        names: what rules, data sets, benchmarks and templates exist; by default, those of the other packages.

    Raises:
        UserError: one line per mistake: file, line, key, what is wrong, the nearest valid name.
    """
    source = Source(path)
    try:
        file = _File.model_validate(source.data)
    except ValidationError as error:
        raise UserError("\n".join(_describe(source, error, _File, ()))) from None
    config = Config(source, path.resolve().parent, file.models, file.benchmarks, file.grids)
    mistakes = [*_bad_names(config, names or known_names()), *_bad_recipes(config)]
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    return config


def recipe_for(config: Config, grid_name: str, model: str, dataset: str) -> Recipe:
    """The recipe of a grid for one model and data set: defaults, then `train`, then the overrides.

    Raises:
        UserError: a field is unknown or its value is wrong.
    """
    grid = config.grids[grid_name]
    values = dict(grid.train)
    for name in (model, dataset):
        values |= grid.overrides.get(name, {})
    try:
        return _RECIPE.validate_python(values)
    except ValidationError as error:
        # A field is reported where it was given: in the override if there is one.
        base: Location = ("grids", grid_name)
        layers = [*((*base, "overrides", name) for name in (dataset, model)), (*base, "train")]
        lines: list[str] = []
        for detail in error.errors():
            item: dict[str, Any] = dict(detail)
            # The recipe's own checks name the field first in their message.
            field = str(item["loc"][0] if item["loc"] else item["msg"].removeprefix("Value error, ")).split()[0]
            layer = next((at for at in layers if config.source.has((*at, field))), layers[-1])
            item["loc"] = item["loc"] or ((field,) if config.source.has((*layer, field)) else ())
            lines += _describe_item(config.source, item, Recipe, layer)
        raise UserError("\n".join(lines)) from None


def unknown(what: str, name: str, valid: Iterable[str]) -> str:
    """`unknown rule 'balancd'; did you mean 'balanced'? (known: ...)`"""
    valid = [str(entry) for entry in valid]
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{hint} (known: {', '.join(valid) or 'none'})"


def _bad_names(config: Config, names: Names) -> Iterable[str]:
    """Every name in the file that nothing defines."""

    def check(what: str, name: str, valid: Iterable[str], *location: str | int) -> Iterable[str]:
        if name not in (valid := tuple(valid)):
            yield config.source.error(location, unknown(what, name, valid))

    for section in ("models", "grids"):
        for name in getattr(config, section):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                message = "names hold letters, digits, dots, dashes and underscores"
                yield config.source.error((section, name), message)
    for name, model in config.models.items():
        yield from check("template", model.template, names.templates, "models", name, "template")
    for name in config.benchmarks:
        yield from check("benchmark", name, names.benchmarks, "benchmarks", name)
    for grid_name, grid in config.grids.items():
        axes: list[tuple[str, str, Sequence[str], Iterable[str]]] = [
            ("rule", "rules", grid.rules, names.rules),
            ("model", "models", grid.models, config.models),
            ("data set", "datasets", grid.datasets, names.datasets),
        ]
        for what, key, values, valid in axes:
            for i, value in enumerate(values):
                yield from check(what, value, valid, "grids", grid_name, key, i)
        at = ("grids", grid_name, "evaluate", "benchmarks")
        for i, name in enumerate(grid.evaluate.benchmarks):
            yield from check("benchmark", name, names.benchmarks, *at, i)
        if HELDOUT in grid.evaluate.benchmarks:
            yield config.source.error(at, f"{HELDOUT!r} is the held-out split's own name")
        for key in ("overrides", "priorities"):
            for name in getattr(grid, key):
                valid = (*grid.models, *grid.datasets)
                yield from check("model or data set", name, valid, "grids", grid_name, key, name)


def _bad_recipes(config: Config) -> Iterable[str]:
    for grid_name, grid in config.grids.items():
        for model in grid.models:
            for dataset in grid.datasets:
                try:
                    recipe = recipe_for(config, grid_name, model, dataset)
                except UserError as error:
                    yield from str(error).splitlines()
                    continue
                for i, at in enumerate(grid.evaluate.at):
                    if isinstance(at, int) and at > recipe.steps:
                        yield config.source.error(
                            ("grids", grid_name, "evaluate", "at", i),
                            f"there is no step {at}: training ends at step {recipe.steps}",
                        )


def _describe(source: Source, error: ValidationError, kind: Any, prefix: Location) -> Iterable[str]:
    for item in error.errors():
        yield from _describe_item(source, dict(item), kind, prefix)


def _describe_item(source: Source, item: dict[str, Any], kind: Any, prefix: Location) -> Iterable[str]:
    """One pydantic error in our words, with the line of the key that it is about."""
    location = (*prefix, *item["loc"])
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        message = unknown("key", str(location[-1]), _valid_keys(kind, item["loc"][:-1]))
    elif item["type"] in ("missing", "missing_argument"):
        message = "this key is required"
    elif item["type"] == "value_error":
        message = str(item["ctx"]["error"])
    else:
        given = "" if isinstance(item["input"], dict | list) else f", not {item['input']!r}"
        message = item["msg"][0].lower() + item["msg"][1:] + given
    yield source.error(location, message)


def _valid_keys(kind: Any, location: Sequence[str | int]) -> list[str]:
    """The keys that the type has at a place inside it."""
    for part in location:
        kind = _inner(kind, part)
    kind = _without_none(kind)
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def _inner(kind: Any, part: str | int) -> Any:
    kind = _without_none(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_fields[str(part)].annotation
    return get_args(kind)[-1]


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return next(member for member in get_args(kind) if member is not NoneType)
    return kind
