"""The study's tables, each as CSV, Markdown and LaTeX.

`accuracy` is the paper's Table 1 for our runs, with the paper's numbers beside ours where the cell is the paper's;
`differences`, `overall` and `stability` say how sure the comparison is. CSV holds the numbers in full precision, the
others hold what a reader sees.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import comparisons, runs
from analysis.comparisons import rules_of
from analysis.findings import number, percent, seeds_and_interval, signed
from analysis.runs import PANEL, LoggedRuns
from analysis.style import rule_styles

PAPER_TABLE = {
    ("Qwen/Qwen2.5-Math-7B", "dapo_17k"): {"sequence": 0.3446, "token": 0.3364, "balanced": 0.3424},
    ("Qwen/Qwen2.5-Math-7B", "polaris_53k"): {"sequence": 0.3172, "token": 0.3292, "balanced": 0.3319},
    ("Qwen/Qwen3-1.7B", "dapo_17k"): {"sequence": 0.4481, "token": 0.4360, "balanced": 0.4695},
    ("Qwen/Qwen3-1.7B", "polaris_53k"): {"sequence": 0.4614, "token": 0.4349, "balanced": 0.4640},
}
"""Last-step accuracy, mean over six benchmarks, rules within a group: arXiv 2605.04077, Table 1. One number a cell."""
PAPER_SCOPE = "group"
DIGITS = 4
NO_VALUE = "–"
WORDS = {"model": "model", "dataset": "data set", "scope": "scope"}
TEXT_COLUMNS = {*WORDS.values(), "step", "rule"}


class Markup(NamedTuple):
    """How a text format sets a cell."""

    bold: str
    plus_minus: str
    escape: Callable[[str], str]


_LATEX = str.maketrans(
    {character: "\\" + character for character in "_%&#$"}
    | {"±": r"$\pm$", "·": r"$\cdot$", "−": "$-$", NO_VALUE: "--", "<": "$<$", ">": "$>$"}
)
MARKDOWN = Markup("**{}**", "±", lambda text: text.replace("|", "\\|"))
LATEX = Markup(r"\textbf{{{}}}", r"$\pm$", lambda text: text.translate(_LATEX))
HTML = Markup("<b>{}</b>", "±", lambda text: html.escape(text, quote=False))


@dataclass(frozen=True)
class Table:
    """Numbers, and how readers see them.

    Attributes:
        name: of its files.
        title: names what it holds.
        numbers: what the CSV file holds.
        caption: what the numbers are, in which unit, over how many seeds.
        display: the cells as text of a markup.
    """

    name: str
    title: str
    numbers: pd.DataFrame
    caption: str
    display: Callable[[Markup], pd.DataFrame]


def tables(loaded: LoggedRuns) -> list[Table]:
    """All tables of an experiment."""
    return [accuracy(loaded), differences(loaded), overall(loaded), stability(loaded)]


def accuracy(loaded: LoggedRuns) -> Table:
    """Last-step accuracy, mean over the benchmarks, of every rule in every panel.

    Numbers: model, dataset, scope, step (of the last evaluation, "a-b" where runs differ), base (before training), and
    for each rule: <rule> (mean over seeds), <rule>_low and <rule>_high (95 % interval of that mean, NaN with fewer than
    three seeds), <rule>_seeds, <rule>_paper (NaN where the paper has no such cell).
    """
    final = comparisons.final_accuracy(loaded)
    means = final[final.benchmark == runs.MEAN]
    rules = rules_of(loaded.metrics)
    rows = []
    for panel in runs.panels(loaded.metrics):
        inside = runs.in_panel(means, panel)
        by_rule = inside.set_index("rule")
        row: dict[str, object] = dict(zip(PANEL, panel, strict=True))
        row["step"] = _span(inside.step)
        row["base"] = inside.base.mean()
        paper = _paper_values(loaded.params, panel)
        for rule in rules:
            row[rule] = by_rule["mean"].get(rule, np.nan)
            row |= {f"{rule}_{end}": by_rule[end].get(rule, np.nan) for end in ("low", "high")}
            row |= {f"{rule}_seeds": by_rule.seeds.get(rule, 0), f"{rule}_paper": paper.get(rule, np.nan)}
        rows.append(row)
    caption = (
        "Accuracy (share right) at the last step, mean over the benchmarks. Bold: highest of the row. "
        f"{seeds_and_interval(means.seeds, means.over, mark='±', means=True)}"
    )
    numbers = pd.DataFrame(rows)
    if numbers.filter(like="_paper").notna().any(axis=None):
        caption += " Paper: its Table 1, one number a cell, on its own runs."
    return Table("table_1", "Accuracy at the last step", numbers, caption, lambda m: _show_accuracy(numbers, rules, m))


def differences(loaded: LoggedRuns) -> Table:
    """Accuracy of every rule beside the baseline rule at the same seeds. Numbers: see `comparisons.differences`."""
    numbers = comparisons.differences(loaded).drop(columns="values")
    baseline = comparisons.baseline_of(loaded.metrics)
    chance = f"Probability: that a new seed ends higher than with {baseline}, for normally distributed differences. "
    chance = chance if numbers.probability.notna().any() else ""
    caption = (
        f"Mean accuracy at the last step minus that of {baseline} at the same seed. {chance}"
        f"{seeds_and_interval(numbers.seeds, numbers.over, mark='brackets', means=True)}"
    )

    def display(markup: Markup) -> pd.DataFrame:
        shown = _panels(numbers, markup)
        shown["rule"] = [markup.escape(label) for label in _labels(numbers.rule)]
        shown["seeds"] = numbers.seeds.astype(str)
        shown[f"minus {baseline}"] = _with_ends(numbers, "mean", _signed, markup)
        if numbers.probability.notna().any():
            shown["probability"] = _with_ends(numbers, "probability", percent, markup)
        return shown

    return Table("differences", f"Difference to {baseline}", numbers, caption, display)


def overall(loaded: LoggedRuns) -> Table:
    """Every rule over all panels. Numbers: see `comparisons.overall`."""
    numbers = comparisons.overall(loaded)
    baseline = comparisons.baseline_of(loaded.metrics)
    over = [comparisons.SEEDS] * int(numbers.mean_low.notna().any())
    seeds = seeds_and_interval(numbers.seeds, over, "brackets", means=True)
    caption = (
        "Over the pairs of model and data set that have every rule: mean accuracy; interquartile mean of all scores by "
        f"pair, benchmark and seed; mean difference to {baseline} at the same seeds. {seeds}"
    )

    def display(markup: Markup) -> pd.DataFrame:
        shown = pd.DataFrame({"rule": [markup.escape(label) for label in _labels(numbers.rule)]})
        shown["pairs"], shown["seeds"] = numbers.panels.astype(str), numbers.seeds.astype(str)
        shown["mean"] = _with_ends(numbers, "mean", _number, markup)
        shown["interquartile mean"] = _with_ends(numbers, "iqm", _number, markup)
        shown[f"minus {baseline}"] = _with_ends(numbers, "difference", _signed, markup)
        return shown

    return Table("overall", "All models and data sets together", numbers, caption, display)


def stability(loaded: LoggedRuns) -> Table:
    """Best and last checkpoint of every rule in every panel, the paper's stability claim.

    Numbers: model, dataset, scope, rule, seeds, peak, last, drop (means over seeds), difference, difference_low,
    difference_high (of the drop, to the baseline rule at the same seed).
    """
    peaks = comparisons.peaks(loaded)
    means = peaks.groupby([*PANEL, "rule"], observed=True)[["peak", "last", "drop"]].mean()
    means.insert(0, "seeds", peaks.groupby([*PANEL, "rule"], observed=True).size())
    compared = comparisons.drop_differences(peaks).rename(
        columns={"mean": "difference", "low": "difference_low", "high": "difference_high"}
    )
    compared = compared[[*PANEL, "rule", "difference", "difference_low", "difference_high"]]
    numbers = means.reset_index().merge(compared, on=[*PANEL, "rule"], how="left")
    numbers = _in_rule_order(numbers)
    baseline = comparisons.baseline_of(loaded.metrics)
    over = [comparisons.SEEDS] * int(numbers.difference_low.notna().any())
    caption = (
        "Mean accuracy over the benchmarks at a run's best and at its last evaluated checkpoint, their difference, and "
        f"that difference minus the one of {baseline} at the same seed. "
        f"{seeds_and_interval(numbers.seeds, over, mark='brackets', means=True)}"
    )

    def display(markup: Markup) -> pd.DataFrame:
        shown = _panels(numbers, markup)
        shown["rule"] = [markup.escape(label) for label in _labels(numbers.rule)]
        shown["seeds"] = numbers.seeds.astype(str)
        for name, words in {"peak": "best", "last": "last", "drop": "drop"}.items():
            shown[words] = [_number(value) for value in numbers[name]]
        shown[f"drop minus {baseline}'s"] = _with_ends(numbers, "difference", _signed, markup)
        return shown

    return Table("stability", "Best and last checkpoint", numbers, caption, display)


def to_csv(table: Table) -> str:
    """The numbers as they are, in full precision."""
    return table.numbers.to_csv(index=False, lineterminator="\n")


def to_markdown(table: Table, notes: Sequence[str] = ()) -> str:
    """A Markdown table with its caption and notes below."""
    display = table.display(MARKDOWN)
    lines = ["| " + " | ".join(row) + " |" for row in [list(display.columns), *display.to_numpy().tolist()]]
    lines.insert(1, "|" + "|".join("---" if name in TEXT_COLUMNS else "---:" for name in display) + "|")
    return "\n".join([*lines, "", " ".join([table.caption, *notes]), ""])


def to_latex(table: Table, notes: Sequence[str] = ()) -> str:
    r"""A LaTeX table for \usepackage{booktabs}."""
    display = table.display(LATEX)
    alignment = "".join("l" if name in TEXT_COLUMNS else "r" for name in display)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{LATEX.escape(' '.join([table.caption, *notes]))}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(map(LATEX.escape, display.columns)) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in display.to_numpy().tolist()),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def to_html(table: Table) -> str:
    """A `<table>` whose first cell of each column has the class `text` or `number`."""
    display = table.display(HTML)
    kinds = ["text" if name in TEXT_COLUMNS else "number" for name in display]

    def row(tag: str, cells: Iterable[str]) -> str:
        inner = "".join(f'<{tag} class="{kind}">{cell}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{inner}</tr>"

    body = "".join(row("td", cells) for cells in display.to_numpy().tolist())
    head = row("th", map(HTML.escape, display.columns))
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def write_tables(loaded: LoggedRuns, out_dir: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Write every table as NAME.csv, NAME.md and NAME.tex; return the paths."""
    paths = []
    for table in tables(loaded):
        texts = {"csv": to_csv(table), "md": to_markdown(table, notes), "tex": to_latex(table, notes)}
        for suffix, text in texts.items():
            paths.append(out_dir / f"{table.name}.{suffix}")
            paths[-1].write_text(text, encoding="utf-8")
    return paths


def _show_accuracy(numbers: pd.DataFrame, rules: list[str], markup: Markup) -> pd.DataFrame:
    shown = _panels(numbers, markup)
    shown["step"] = numbers.step
    shown["base model"] = [_number(value) for value in numbers.base]
    texts = {rule: [_number(mean) for mean in numbers[rule]] for rule in rules}
    # Compared as shown: rules that agree to the digits shown share the bold.
    best = [
        max((text for text in row if text != NO_VALUE), key=float, default="")
        for row in zip(*texts.values(), strict=True)
    ]
    for rule, label in zip(rules, _labels(rules), strict=True):
        shown[label] = [
            (markup.bold.format(text) if text == top and len(rules) > 1 else text)
            + ("" if np.isnan(high) else f" {markup.plus_minus} {_number(high - mean)}")
            for text, mean, high, top in zip(texts[rule], numbers[rule], numbers[f"{rule}_high"], best, strict=True)
        ]
        if numbers[f"{rule}_paper"].notna().any():
            shown[f"{label}, paper"] = [_number(value) for value in numbers[f"{rule}_paper"]]
    return shown


def _panels(numbers: pd.DataFrame, markup: Markup) -> pd.DataFrame:
    """The text columns of a panel; the scope only where the table holds more than one."""
    names = [name for name in PANEL if name != "scope" or numbers.scope.nunique() > 1]
    return pd.DataFrame({WORDS[name]: [markup.escape(str(text)) for text in numbers[name]] for name in names})


def _labels(rules: Iterable[str]) -> list[str]:
    rules = list(rules)
    styles = rule_styles(list(dict.fromkeys(rules)))
    return [styles[rule].label for rule in rules]


def _with_ends(numbers: pd.DataFrame, name: str, words: Callable[[float], str], markup: Markup) -> list[str]:
    """`estimate [low, high]`, without the brackets where there is no interval."""
    ends = [name, "low", "high"] if name == "mean" and "low" in numbers else [name, f"{name}_low", f"{name}_high"]
    cells = []
    for estimate, low, high in runs.rows(numbers[ends].astype(float)):
        text = NO_VALUE if np.isnan(estimate) else words(estimate)
        cells.append(markup.escape(text if np.isnan(low) else f"{text} [{words(low)}, {words(high)}]"))
    return cells


def _in_rule_order(numbers: pd.DataFrame) -> pd.DataFrame:
    places = {rule: place for place, rule in enumerate(rules_of(numbers))} if len(numbers) else {}
    return numbers.sort_values([*PANEL, "rule"], key=lambda c: c.map(places) if c.name == "rule" else c.astype(str))


def _span(steps: pd.Series) -> str:
    ends = sorted({int(end) for step in steps for end in str(step).split("-")})
    return "-".join(str(end) for end in dict.fromkeys([*ends[:1], *ends[-1:]]))


def _number(value: float) -> str:
    return NO_VALUE if np.isnan(value) else number(value, DIGITS)


def _signed(value: float) -> str:
    return signed(value, DIGITS)


def _paper_values(params: pd.DataFrame, panel: runs.Panel) -> dict[str, float]:
    """The paper's row for a panel; empty where model, data set or scope are not the paper's."""
    model, dataset, scope = panel
    return PAPER_TABLE.get((_hub_id(params, model), dataset), {}) if scope == PAPER_SCOPE else {}


def _hub_id(params: pd.DataFrame, model: str) -> str:
    """The model's Hugging Face id where the run logged one, else the name the grid gives it."""
    if "model.hub_id" not in params:
        return model
    ids = params.loc[params.model == model, "model.hub_id"].dropna()
    return ids.iloc[0] if len(ids) else model
