"""`balagg diagnose`: what somebody's rollouts, or their logged curves, say about aggregation.

`register(app)` adds it to the command line. Only the analysis is needed, neither torch nor Ray.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from orchestrator.errors import UserError

if TYPE_CHECKING:
    from analysis.diagnose import Estimate, Measurements
    from analysis.dumps import Dump, Responses

PLAIN_WIDTH = 120


def register(app: typer.Typer) -> None:
    """Add the command to a typer app."""
    app.command("diagnose")(diagnose)


def diagnose(
    files: Annotated[list[Path], typer.Argument(help="Dumps or curves: files, folders, or quoted patterns.")],
    columns: Annotated[
        list[str] | None,
        typer.Option("--map", help="What columns mean, such as prompt=question,length=n,reward=score."),
    ] = None,
    reward_column: Annotated[
        list[str] | None, typer.Option(help="Reward column; repeat it to sum several. All are summed if left out.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, its folder or a hub id, to count the tokens of texts.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="The run's length limit, in tokens.")] = None,
    scope: Annotated[str, typer.Option(help="Where rules apply: group, or batch (all responses of a step).")] = "group",
    group_size: Annotated[
        int | None, typer.Option(min=2, help="Responses per group, where a prompt recurs without a step to tell by.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the figure.")] = Path("diagnosis"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
) -> None:
    """Diagnose rollouts of TRL, verl, OpenRLHF, prime-rl or any CSV, JSON lines or parquet; or logged curves."""
    if scope not in ("group", "batch"):
        raise UserError(f"--scope {scope}: give group or batch")
    from analysis.diagnose_curves import METRICS, is_curves, read_curves
    from analysis.diagnose_formats import ROLES, DumpError, parse_mapping
    from analysis.dumps import ReadOptions, find_files, open_dump

    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    try:
        mapping = parse_mapping(columns or (), (*ROLES, *METRICS))
        found = find_files(files)
        if is_curves(found[0], mapping):
            runs = read_curves(found, mapping)
            reports = [_report_curves(console, name, measured) for name, measured in runs.items()]
            titles = [f"Diagnosis of {name}" for name in runs]
            results = list(runs.values())
            unit = "tokens"
        else:
            options = ReadOptions(mapping, reward_column or (), _token_counter(tokenizer), max_length)
            dump = open_dump(files, options)
            measured = _measure(dump, scope, group_size)
            reports, titles = [_report_dump(console, dump, measured)], [f"Diagnosis of {files[0]}"]
            results, unit = [measured], dump.length_unit
    except DumpError as error:
        raise UserError(str(error)) from error

    from analysis.diagnose_figure import draw

    for number, (title, measured) in enumerate(zip(titles, results, strict=True), start=1):
        folder = out if len(results) == 1 else out / f"run-{number}"
        paths = draw(measured, title, unit, folder)
        console.print(f"\nfigure: {paths[0]}, {paths[1].name}", soft_wrap=True, highlight=False)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(reports if len(reports) > 1 else reports[0], indent=2) + "\n")
        console.print(f"numbers: {json_file}", soft_wrap=True, highlight=False)


def _token_counter(tokenizer: str | None) -> Any:
    from analysis.diagnose_columns import load_tokenizer

    if tokenizer is None:
        return None
    try:
        return load_tokenizer(tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error


def _measure(dump: "Dump", scope: Any, group_size: int | None) -> "Measurements":
    """Measure with a line on the terminal that says how far it got."""
    from analysis.diagnose import measure_dump

    terminal = Console(stderr=True)
    with terminal.status("reading") as status:

        def watch(batches: "Iterator[Responses]") -> "Iterator[Responses]":
            for batch in batches:
                status.update(f"{dump.rows:,} rows read")
                yield batch

        return measure_dump(dump, scope=scope, group_size=group_size, watch=watch)


def _report_dump(console: Console, dump: "Dump", measured: "Measurements") -> dict[str, Any]:
    from analysis.diagnose_words import conclude

    lines = _what_was_read(dump, measured)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    conclusion = conclude(measured, dump.length_unit)
    _print_tables(console, measured, dump.length_unit)
    _print_conclusion(console, conclusion)
    return {
        "files": [str(file) for file in dump.files],
        "format": dump.layout.format.name,
        "columns": {role: list(named) for role, named in dump.layout.roles.items()},
        "length_unit": dump.length_unit,
        "scope": measured.scope,
        "rows": dump.rows,
        "unusable_rows": dump.problem_lines(),
        **_numbers(measured),
        "conclusion": conclusion,
    }


def _report_curves(console: Console, name: str, measured: "Measurements") -> dict[str, Any]:
    from analysis.diagnose_words import conclude, not_computable

    steps = measured.steps
    console.print(
        f"\nCurves of {name}: {len(steps)} steps, {steps[0]} to {steps[-1]}",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip
    _print_tables(console, measured, "tokens")
    conclusion, missing = conclude(measured), not_computable(measured)
    _print_conclusion(console, conclusion)
    if missing:
        console.print(f"\nThese curves do not tell: {'; '.join(missing)}.", highlight=False)
    return {"run": name, **_numbers(measured), "conclusion": conclusion, "not_computable": missing}


def _what_was_read(dump: "Dump", measured: "Measurements") -> list[str]:
    """How the files were understood, and every reservation about them."""
    layout = dump.layout
    shown = " to ".join(map(str, dict.fromkeys([dump.files[0], dump.files[-1]])))
    shown += f" ({len(dump.files)} files)" * (len(dump.files) > 1)
    steps = f"{len(measured.steps)} steps from {dump.step_source}" if dump.step_source else "steps unknown"
    lines = [
        f"{shown}: {layout.format.name}",
        f"{measured.num_responses:,} responses in {measured.num_groups:,} groups; {steps}; rules applied within each "
        + ("group" if measured.scope == "group" else "step (batch scope)"),
        "columns: "
        + ", ".join(
            f"{role} = {' + '.join(dump.reward_columns if role == 'reward' else named)}"
            for role, named in layout.roles.items()
            if set(named) & set(layout.needed)
        ),
    ]
    if len(dump.reward_columns) > 1:
        lines.append("the reward is the sum of those columns; --reward-column chooses")
    if not measured.has_advantages:
        lines.append("no advantages in the dump: they are group-normalised rewards, (r - mean) / std")
    if dump.length_unit == "characters":
        lines.append("lengths are in characters: the dump has no token counts, and no --tokenizer was given")
    elif "length" not in layout.roles:
        lines.append(
            "lengths are tokens of the texts, counted anew" + (", end token added" * bool(layout.format.end_tokens))
        )
    if dump.step_source is None:
        lines.append(
            "no step in columns or file names: all responses to one prompt are one group (--group-size cuts them), and "
            "no trend can be given"
        )
    if "truncated" not in layout.roles and dump.options.max_length is None:
        share = measured.num_longest / measured.num_responses
        longest = f"; {100 * share:.1f} % have the greatest length, {measured.longest:,.0f} tokens"
        lines.append(
            "the dump does not say which responses were cut at the length limit (--max-length does)"
            + longest * (dump.length_unit == "tokens")
        )
    counted = (
        (measured.groups_of_one, "groups have one response: their advantage is 0"),
        (measured.empty_responses, "responses of length 0 were left out"),
        (measured.emptied_groups, "groups held nothing else and were left out"),
        (measured.repeated_steps, "steps repeat the responses of the step before and count once"),
    )
    lines += [f"{count:,} {words}" for count, words in counted if count]
    if dump.unusable:
        lines += [
            f"{dump.unusable:,} of {dump.rows:,} rows could not be used:",
            *("  " + x for x in dump.problem_lines()),
        ]
    return lines


def _print_tables(console: Console, measured: "Measurements", unit: str) -> None:
    from analysis.diagnose import QUARTERS, SIGNS, mass_ratio, negative_share, token_weight
    from analysis.diagnose_words import bad_and_good
    from trainers.metric_names import RULE_NAMES

    statistics = Table("statistic", Column("value", justify="right"), "95 % interval", "change over the run")
    bad, good = bad_and_good(measured)
    for name, words, as_percent in (
        ("reward", "mean reward", False),
        ("length", f"mean length ({unit})", False),
        ("group_cv", "length variation in a group (std / mean)", False),
        ("sign_gap", f"sign-length gap, A > 0 minus A < 0 ({unit})", False),
        ("sign_gap_rel", "relative sign-length gap", False),
        ("length_ratio", f"length of {bad} over {good}" if measured.binary else "length of A < 0 over A > 0", False),
        ("truncated", "cut at the length limit", True),
        ("mixed_groups", "groups with both signs", True),
        ("no_signal_groups", "groups without any advantage", True),
    ):
        estimate = measured.estimate(name)
        if estimate.known:
            statistics.add_row(words, *_cells(estimate, measured.trend(name), as_percent))
    console.print()
    console.print(statistics, highlight=False)
    if measured.interval_over == "groups" and measured.moments:
        console.print("Intervals are over groups: there are too few steps.", highlight=False)

    shares = Table("rule", "update on A < 0", "95 % interval", "change over the run", "mass A > 0 : A < 0")
    for rule in RULE_NAMES:
        share, ratio = measured.estimate(negative_share(rule)), measured.estimate(mass_ratio(rule))
        if share.known:
            shares.add_row(rule, *_cells(share, measured.trend(negative_share(rule)), True), _plain(ratio.value))
    if shares.row_count:
        console.print("\nShare of the update's mass |sum w n A| under each rule, whichever rule trained")
        console.print(shares, highlight=False)

    weights = Table("rule", "shortest quarter", "longest quarter", "A > 0", "A < 0")
    for rule in RULE_NAMES:
        estimates = [measured.estimate(token_weight(rule, bucket)) for bucket in (*QUARTERS, *SIGNS)]
        if any(estimate.known for estimate in estimates):
            weights.add_row(rule, *(_plain(estimate.value) for estimate in estimates))
    if weights.row_count:
        whole = "group" if measured.scope == "group" else "step"
        console.print(f"\nWeight of a token, by its response, over that of the average token of its {whole}")
        console.print(weights, highlight=False)


def _print_conclusion(console: Console, conclusion: list[str]) -> None:
    console.print("\n[bold]Conclusion[/]")
    for paragraph in conclusion:
        console.print(paragraph, highlight=False, markup=False)


def _cells(estimate: "Estimate", trend: "Estimate", as_percent: bool) -> tuple[str, str, str]:
    from analysis.diagnose_words import interval, percent

    value = percent(estimate.value) if as_percent else _plain(estimate.value)
    change = "none shown" if trend.known else "-"
    if trend.excludes(0.0):
        change = f"{100 * trend.value:+.1f} points" if as_percent else f"{trend.value:+.3g}"
    return value, interval(estimate, as_percent), change


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _numbers(measured: "Measurements") -> dict[str, Any]:
    """Every estimate with its interval and trend, and every curve; what is not defined is null."""

    def finite(value: float) -> float | None:
        return float(value) if math.isfinite(value) else None

    estimates = {}
    for name in measured.numerators:
        estimate, trend = measured.estimate(name), measured.trend(name)
        estimates[name] = {
            "value": finite(estimate.value), "low": finite(estimate.low), "high": finite(estimate.high),
            "trend": finite(trend.value), "trend_low": finite(trend.low), "trend_high": finite(trend.high),
            "per_step": [finite(value) for value in measured.per_step(name)],
        }  # fmt: skip
    counts = ("num_responses", "num_groups", "groups_of_one", "empty_responses", "emptied_groups", "repeated_steps")
    return {
        **({name: getattr(measured, name) for name in counts} if measured.num_responses else {}),
        "steps": measured.steps.tolist(),
        "interval_over": measured.interval_over,
        "estimates": estimates,
    }
