"""`balagg evaluate`, `evaluate-checkpoints` and `grade`: one model on benchmarks, the checkpoints of cells, and saved
generations graded again.

`register(app)` adds them to the command line. Torch and the graders are imported when a command runs.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from orchestrator.config import load_config, unknown
from orchestrator.errors import UserError
from orchestrator.options import (
    EXPERIMENTS,
    CellNames,
    ConfigFile,
    DataDir,
    GridName,
    Only,
    RunsDir,
    Seeds,
    Skip,
    choose,
    pick,
)

Template = Annotated[str | None, typer.Option(help="Prompt template; default: each benchmark's own.")]
DataSet = Annotated[str | None, typer.Option(help="Training set whose held-out split `heldout` means.")]
Release = Annotated[str | None, typer.Option(help="LiveCodeBench release, v1 to v6.")]


def register(app: typer.Typer) -> None:
    """Add the commands to a typer app."""
    app.command("evaluate-checkpoints")(evaluate_checkpoints)
    app.command("evaluate")(evaluate)
    app.command("grade")(grade)


def evaluate(
    model: Annotated[str, typer.Option(help="Folder, hub id, or the name of a model in experiments.yaml.")],
    benchmarks: Annotated[str, typer.Option(help="Names with commas between, such as math500,aime24.")],
    out: Annotated[Path | None, typer.Option(help="Folder for results; default: evaluations/<model>.")] = None,
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = "torch",
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many problems of each.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Responses per problem, k of avg@k.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Length limit of a response.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    template: Template = None,
    release: Release = None,
    window: Annotated[str | None, typer.Option(help="Contest dates of LiveCodeBench: 2408-2502.")] = None,
    dataset: DataSet = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file in the model's folder.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Sampling seed.")] = 0,
    data_dir: DataDir = None,
) -> None:
    """Score a model on benchmarks; run again after a kill, it goes on where it stopped."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from evals.evaluate import BenchmarkSettings, evaluate_checkpoint

    checkpoint, own_template = _find_model(model, gguf_file)
    settings = [
        BenchmarkSettings(
            name=name,
            dataset=dataset if name == "heldout" else None,
            samples=samples,
            limit=limit,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            release=release if name == "livecodebench" else None,
            window=window if name == "livecodebench" else None,
        )
        for name in filter(None, (part.strip() for part in benchmarks.split(",")))
    ]
    if not settings:
        raise UserError("--benchmarks names no benchmark")
    out = out or Path("evaluations") / model.strip("/").replace("/", "--")
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    tasks = {setting.name: bars.add_task(setting.name, total=None) for setting in settings}

    def show(name: str, done: int, total: int | None) -> None:
        bars.update(tasks[name], completed=done, total=total)

    try:
        with bars:
            summary = evaluate_checkpoint(
                checkpoint, settings, out,
                data_dir=data_dir, engine=engine, template=template or own_template, seed=seed, progress=show,
            )  # fmt: skip
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    console = Console()
    console.print(_table(summary["benchmarks"]))
    for name, reason in summary["not_run"].items():
        console.print(f"{name} was not run: {reason}", soft_wrap=True)
    console.print(f"samples and summary: {out}", soft_wrap=True)


def grade(
    generations: Annotated[Path, typer.Argument(help="JSON lines with `id` and `completion`.")],
    benchmark: Annotated[str, typer.Option(help="Benchmark that the ids belong to.")],
    template: Template = None,
    release: Release = None,
    dataset: DataSet = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows with their new verdicts here.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Grade saved generations again."""
    from evals.evaluate import rescore
    from evals.grading.sandbox import SandboxUnavailable

    try:
        scores = rescore(
            benchmark, generations,
            data_dir=data_dir, dataset=dataset, template=template, release=release, out=out,
        )  # fmt: skip
    except (ValueError, FileNotFoundError, SandboxUnavailable) as error:
        raise UserError(str(error)) from error
    console = Console()
    console.print(_table({benchmark: scores}))
    console.print(f"verdicts that differ from the file's: {scores['changed']}")
    for message in scores["malformed"]:
        console.print(f"left out: {message}", soft_wrap=True)


def evaluate_checkpoints(
    cells: CellNames = None,
    steps: Annotated[str, typer.Option(help="all, or steps with commas between, such as 0,20,40.")] = "all",
    benchmarks: Annotated[str | None, typer.Option(help="Names with commas between; the grid's if left out.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Responses per problem, k of avg@k.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many problems of each.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Length limit of a response.")] = None,
    config: ConfigFile = EXPERIMENTS,
    grid: GridName = None,
    only: Only = None,
    skip: Skip = None,
    seeds: Seeds = None,
    data_dir: DataDir = None,
    runs_dir: RunsDir = None,
    function: Annotated[str | None, typer.Option("--evaluate", hidden=True)] = None,
) -> None:
    """Score existing checkpoints at other steps or on other benchmarks. Nothing is trained."""
    sampling = {"samples": samples, "limit": limit, "max_tokens": max_tokens}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given and benchmarks is None:
        raise UserError("--samples, --limit and --max-tokens go with --benchmarks: the grid's own are as it says")
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"--data-dir: there is no folder {data_dir}")
    chosen = choose(config, grid, only, skip, seeds, runs_dir)
    from orchestrator import tasks
    from orchestrator.evaluate_checkpoints import score_checkpoints

    all_well = score_checkpoints(
        chosen, pick(chosen.cells, cells), steps, benchmarks, given,
        data_dir.absolute() if data_dir else None, function or tasks.EVALUATE,
    )  # fmt: skip
    raise typer.Exit(0 if all_well else 1)


def _find_model(model: str, gguf_file: str | None) -> tuple[str | dict[str, Any], str | None]:
    """What to load, and the prompt template that belongs to it. A name without a slash is never a hub id."""
    if not Path(model).exists() and "/" not in model:
        entries = load_config(EXPERIMENTS).models if EXPERIMENTS.is_file() else {}
        if model not in entries:
            raise UserError(f"{unknown('model', model, entries)}; a folder or hub id will do as well")
        fields = {"path", "hub_id", "package", "revision", "gguf_file", "config"}
        return entries[model].model_dump(include=fields, exclude_defaults=True), entries[model].template
    if gguf_file is None:
        return model, None
    return {"path" if Path(model).is_dir() else "hub_id": model, "gguf_file": gguf_file}, None


def _table(benchmarks: dict[str, Any]) -> Table:
    first = Column("benchmark", no_wrap=True)
    table = Table(first, "score", "error", "95 % interval", "problems", "tokens", "truncated")
    for name, scores in benchmarks.items():
        low, high = scores["interval_95"]
        table.add_row(
            f"{name} avg@{scores['k']}",
            _number(scores["avg_at_k"]),
            _number(scores["se"]),
            f"{_number(low)} to {_number(high)}",
            str(scores["problems"]),
            _number(scores["length"], 1),
            _number(scores["truncated"]),
        )
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"
