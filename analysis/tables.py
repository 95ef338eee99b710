"""The paper's Table 1 for our runs: one row per model and data set, one column per rule."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import runs
from analysis.statistics import MIN_SEEDS, mean_interval
from analysis.style import rule_styles

PAPER_TABLE = {
    ("Qwen/Qwen2.5-Math-7B", "dapo_17k"): {"sequence": 0.3446, "token": 0.3364, "balanced": 0.3424},
    ("Qwen/Qwen2.5-Math-7B", "polaris_53k"): {"sequence": 0.3172, "token": 0.3292, "balanced": 0.3319},
    ("Qwen/Qwen3-1.7B", "dapo_17k"): {"sequence": 0.4481, "token": 0.4360, "balanced": 0.4695},
    ("Qwen/Qwen3-1.7B", "polaris_53k"): {"sequence": 0.4614, "token": 0.4349, "balanced": 0.4640},
}
"""Last-step accuracy, mean over six benchmarks: arXiv 2605.04077, Table 1. One number a cell."""
DIGITS = 4
NO_VALUE = "–"
TEXT_COLUMNS = [*runs.PANEL, "step"]
LATEX = str.maketrans(
    {character: "\\" + character for character in "_%&#$"} | {"±": r"$\pm$", "·": r"$\cdot$", NO_VALUE: "--"}
)


def table_1(loaded: runs.LoggedRuns) -> pd.DataFrame:
    """Last-step accuracy, mean over the benchmarks, of every rule in every panel.

    Columns: model, dataset, scope, step (of the last evaluation, "a-b" where runs differ), base (before
    training), and for each rule: <rule> (mean over seeds), <rule>_low and <rule>_high (95 % t interval of that
    mean, NaN with fewer than three seeds), <rule>_seeds, <rule>_paper (NaN where the paper has no such cell).
    """
    means = runs.scores(loaded.metrics)
    means = means[means.benchmark == runs.MEAN]
    base, final = runs.base_scores(means), runs.final_scores(means)
    rules = list(rule_styles(list(loaded.metrics.rule.unique())))
    rows = []
    for panel in runs.panels(loaded.metrics):
        inside = runs.in_panel(final, panel)
        row: dict[str, object] = dict(zip(runs.PANEL, panel, strict=True))
        row["step"] = "-".join(str(step) for step in sorted({*inside.step.agg(["min", "max"]).dropna()}))
        row["base"] = runs.in_panel(base, panel).value.mean()
        paper = PAPER_TABLE.get((_hub_id(loaded.params, panel[0]), panel[1]), {})
        for rule in rules:
            values = inside.value[inside.rule == rule].dropna().to_numpy()
            mean, low, high = mean_interval(values)
            row |= {rule: float(mean), f"{rule}_low": float(low), f"{rule}_high": float(high)}
            row |= {f"{rule}_seeds": len(values), f"{rule}_paper": paper.get(rule, np.nan)}
        rows.append(row)
    return pd.DataFrame(rows)


def to_csv(table: pd.DataFrame) -> str:
    """`table_1` as it is, in full precision."""
    return table.to_csv(index=False, lineterminator="\n")


def to_markdown(table: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    """A Markdown table, the best rule of each row in bold, with its caption and notes below."""
    display = _display(table, bold="**{}**", plus_minus="±")
    rows = [list(display.columns), *display.to_numpy().tolist()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("---" if name in TEXT_COLUMNS else "---:" for name in display) + "|")
    return "\n".join([*lines, "", _caption(table, notes), ""])


def to_latex(table: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    r"""A LaTeX table for \usepackage{booktabs}, the best rule of each row in bold."""
    text = {name: [_escape(value) for value in table[name]] for name in runs.PANEL}
    display = _display(table.assign(**text), bold=r"\textbf{{{}}}", plus_minus=r"$\pm$")
    alignment = "".join("l" if name in TEXT_COLUMNS else "r" for name in display)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escape(_caption(table, notes))}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(_escape(name) for name in display) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in display.to_numpy().tolist()),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def write_tables(loaded: runs.LoggedRuns, out_dir: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Write `table_1` as table_1.csv, table_1.md and table_1.tex; return the paths."""
    table = table_1(loaded)
    texts = {"csv": to_csv(table), "md": to_markdown(table, notes), "tex": to_latex(table, notes)}
    paths = {out_dir / f"table_1.{suffix}": text for suffix, text in texts.items()}
    for path, text in paths.items():
        path.write_text(text, encoding="utf-8")
    return list(paths)


def _display(table: pd.DataFrame, *, bold: str, plus_minus: str) -> pd.DataFrame:
    """The table as its readers see it: text cells, no columns that say nothing."""
    rules = _rules(table)
    display = table[[name for name in TEXT_COLUMNS if name != "scope" or table.scope.nunique() > 1]].copy()
    display["base model"] = [_number(value) for value in table.base]
    numbers = {rule: [_number(mean) for mean in table[rule]] for rule in rules}
    # Compared as shown: rules that agree to the digits shown share the bold.
    best = [
        max((number for number in row if number != NO_VALUE), key=float, default="")
        for row in zip(*numbers.values(), strict=True)
    ]
    labels = {rule: style.label for rule, style in rule_styles(rules).items()}
    for rule in rules:
        cells = []
        for number, mean, high, top in zip(numbers[rule], table[rule], table[f"{rule}_high"], best, strict=True):
            text = bold.format(number) if number == top and len(rules) > 1 else number
            cells.append(text if np.isnan(high) else f"{text} {plus_minus} {_number(high - mean)}")
        display[labels[rule]] = cells
        if table[f"{rule}_paper"].notna().any():
            display[f"{labels[rule]}, paper"] = [_number(value) for value in table[f"{rule}_paper"]]
    return display


def _caption(table: pd.DataFrame, notes: Sequence[str]) -> str:
    seeds = table[[f"{rule}_seeds" for rule in _rules(table)]].to_numpy()
    seeds = seeds[seeds > 0]
    low, high = (seeds.min(), seeds.max()) if seeds.size else (0, 0)
    count = f"{low} seed{'' if low == 1 else 's'}" if low == high else f"{low} to {high} seeds"
    interval = (
        "± is the half-width of the 95 % t interval over seeds."
        if high >= MIN_SEEDS
        else f"No intervals: they take at least {MIN_SEEDS} seeds."
    )
    parts = [
        f"Accuracy at the last step, mean over the benchmarks; {count} per cell. Bold: best rule. {interval}",
        *notes,
    ]
    return " ".join(parts)


def _rules(table: pd.DataFrame) -> list[str]:
    return [name.removesuffix("_seeds") for name in table.columns if name.endswith("_seeds")]


def _number(value: float) -> str:
    return NO_VALUE if np.isnan(value) else f"{value:.{DIGITS}f}"


def _escape(text: object) -> str:
    return str(text).translate(LATEX)


def _hub_id(params: pd.DataFrame, model: str) -> str:
    """The model's Hugging Face id where the run logged one, else the name the grid gives it."""
    if "model.hub_id" not in params:
        return model
    ids = params.loc[params.model == model, "model.hub_id"].dropna()
    return ids.iloc[0] if len(ids) else model
