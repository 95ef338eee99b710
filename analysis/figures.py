"""The study's figures: one function each, a table of logged values in, a figure out.

`table` is `LoggedRuns.metrics` (see `analysis.runs`); `notes` are sentences for the foot of the figure. Every
figure has one panel per model and data set, and shows each rule in its own colour and line style. With
`MIN_SEEDS` seeds or more a rule is a mean with a 95 % interval, with fewer it is one line or point per seed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import runs
from analysis.layout import (
    REFERENCE_LINE,
    Notes,
    View,
    canvas,
    counterfactual,
    mark_empty,
    one_view,
    panel_title,
    seeds_sentence,
    side_by_side,
)
from analysis.statistics import MIN_SEEDS, mean_interval
from analysis.style import RuleStyle, legend_handles, look, rule_styles, save
from analysis.tables import write_tables
from trainers import metric_names


@look()
def reward(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Mean training reward against step."""
    view = View(metric_names.REWARD_MEAN, "Mean reward\n(1 = right, 0 = wrong)")
    caption = "Mean reward of the responses sampled at each training step, by the rule that trained."
    return one_view(table, table, view, "Training reward", caption, notes)


@look()
def heldout_accuracy(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Held-out accuracy against step."""
    found = runs.scores(table)
    found = found[found.benchmark == metric_names.HELDOUT]
    k = _samples_per_problem(found)
    view = View(metric_names.HELDOUT, f"Held-out accuracy\n({k}, share right)")
    caption = (
        f"Accuracy ({k}: mean over the samples of each problem) on the held-out split of the cell's own "
        "training set, at each evaluated checkpoint; step 0 is the base model."
    )
    return one_view(table, found.assign(metric=view.metric), view, "Held-out accuracy", caption, notes)


@look()
def benchmark_accuracy(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Mean accuracy over the benchmarks against step."""
    view = View(metric_names.EVAL_MEAN, "Mean accuracy\n(share right)")
    names = _benchmarks(runs.scores(table))
    caption = (
        f"Mean of the accuracies on {len(names)} benchmarks ({', '.join(names)}), at each evaluated "
        "checkpoint; step 0 is the base model."
    )
    return one_view(table, table, view, "Benchmark accuracy", caption, notes)


@look()
def length_by_sign(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Mean response length of the positive and of the negative responses against step."""
    views = [
        View(metric_names.POS_LENGTH, "Mean length (tokens)", "A > 0: better than the group's mean"),
        View(metric_names.NEG_LENGTH, "Mean length (tokens)", "A < 0: worse than the group's mean"),
    ]
    caption = (
        "Mean length of the sampled responses with positive (left) and negative advantage A (right); with "
        "0/1 rewards these are the right and the wrong ones. Each row shares its scale."
    )
    return side_by_side(table, views, "Response length by sign of the advantage", caption, notes, share_y="row")


@look()
def sign_gap(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Sign-length gap against step, in tokens and relative to the group's mean length."""
    views = [
        View(metric_names.SIGN_GAP, "Gap (tokens)", "In tokens", reference=0.0),
        View(metric_names.SIGN_GAP_REL, "Gap / mean length", "Relative to the group's mean length", 0.0),
    ]
    caption = (
        "Mean length of responses with A > 0 minus mean length of those with A < 0, in each group that has "
        "both, averaged over those groups. Below the zero line the negative responses are the longer ones."
    )
    return side_by_side(table, views, "Sign-length gap", caption, notes, share_y="col")


@look()
def group_cv(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Length variation within groups against step."""
    view = View(metric_names.GROUP_CV, "Coefficient of variation\n(std / mean)")
    caption = "Standard deviation over mean of the response lengths within a group, averaged over groups."
    return one_view(table, table, view, "Length variation within groups", caption, notes)


@look()
def sign_mass(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Mass that each rule would put on either sign, whichever rule trained, against step."""
    rules = _mass_rules(table)
    negative = table.metric.isin([metric_names.negative_mass(rule) for rule in rules])
    caption = (
        "Mass |Σ w·n·A| that each rule (line style) would put on the responses with A > 0 (drawn upwards) and "
        "with A < 0 (drawn downwards), on the rollouts of the run that the column's rule trained. With 0/1 "
        "rewards sequence and balanced coincide: equal masses on both signs."
    )
    return counterfactual(
        table,
        table.assign(value=table.value.where(~negative, -table.value)),
        {rule: [metric_names.positive_mass(rule), metric_names.negative_mass(rule)] for rule in rules},
        View("", "Mass (A < 0 downwards)", reference=0.0),
        "Sign mass: lines by rule, columns by the rule that trained",
        caption,
        notes,
    )


@look()
def negative_share(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Share of each run's own sign mass that falls on negative responses, against step."""
    rules = [rule for rule in _mass_rules(table) if rule in set(table.rule)]
    view = View("negative share", "Share of the mass\non A < 0", reference=0.5)
    shares = [_negative_share(table[table.rule == rule], rule) for rule in rules]
    values = pd.concat(shares or [table.iloc[:0]]).assign(metric=view.metric)
    caption = (
        "Share of a run's sign mass that fell on responses with A < 0, under the rule that trained it. At 0.5 both "
        "signs pull equally; above it, lowering the probability of bad responses outweighs raising that of good ones."
    )
    return one_view(table, values, view, "Negative share of the sign mass", caption, notes)


@look()
def final_accuracy(table: pd.DataFrame, notes: Notes = ()) -> Figure:
    """Accuracy of the last checkpoint on every benchmark, with the base model's."""
    final, base = runs.final_scores(table), runs.base_scores(table)
    names = [*_benchmarks(final), runs.MEAN, metric_names.HELDOUT]
    cells = runs.cells(table)
    panels, styles = runs.panels(cells), rule_styles(list(cells.rule.unique()))
    caption = (
        "Accuracy (share right; @k: samples per problem) of each run's last checkpoint. Upright bar: the base "
        "model before training. Mean: over the benchmarks above it. Held-out: the split of the cell's own "
        "training set. " + seeds_sentence(final)
    )
    names = [name for name in names if name in set(final.benchmark)]
    labels = [_benchmark_label(final, name) for name in names]
    base_handle = Line2D([], [], color="black", marker="|", markersize=11, mew=1.6, ls="none", label="base model")
    handles = [*legend_handles(styles, markers=True, lines=False), base_handle]
    figure, axes = canvas(
        len(panels), 2, "Final accuracy per benchmark", caption, notes, handles, "Accuracy at the last step",
        row_height=0.36 * max(len(names), 1), left=0.25 + 0.07 * max(map(len, labels), default=0),
    )  # fmt: skip
    for panel, ax in zip(panels, axes, strict=True):
        _draw_final(ax, runs.in_panel(final, panel), runs.in_panel(base, panel), names, styles)
        ax.set_title(panel_title(panel, cells))
    axes[0].set_yticks(range(len(names)), labels)
    axes[0].set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes[0].set_xlim(left=0)
    return figure


FIGURES: dict[str, Callable[[pd.DataFrame, Notes], Figure]] = {
    "reward": reward,
    "heldout_accuracy": heldout_accuracy,
    "benchmark_accuracy": benchmark_accuracy,
    "final_accuracy": final_accuracy,
    "length_by_sign": length_by_sign,
    "sign_gap": sign_gap,
    "group_cv": group_cv,
    "sign_mass": sign_mass,
    "negative_share": negative_share,
}


def draw_all(tracking_uri: str, experiment: str, out_dir: Path, *, only_if_changed: bool = False) -> list[Path]:
    """Draw every figure (PNG and PDF) and write the table (CSV, Markdown, LaTeX) of one MLflow experiment.

    Equal runs give equal bytes. Returns the files written: none with `only_if_changed`, where the folder holds what
    these runs gave before.

    Raises:
        ValueError: there is no such database or experiment, or no cell in it has finished.
    """
    loaded = runs.load_runs(tracking_uri, experiment)
    drawn_from, digest = out_dir / ".drawn-from", runs.digest(loaded)
    if only_if_changed and drawn_from.is_file() and drawn_from.read_text() == digest:
        return []
    notes = runs.notes(loaded)
    out_dir.mkdir(parents=True, exist_ok=True)
    drawn_from.unlink(missing_ok=True)
    paths = [
        path
        for name, draw in FIGURES.items()
        for path in save(draw(loaded.metrics, notes), out_dir / name)
    ]  # fmt: skip
    paths += write_tables(loaded, out_dir, notes)
    drawn_from.write_text(digest)
    return paths


def _draw_final(
    ax: Axes, final: pd.DataFrame, base: pd.DataFrame, names: list[str], styles: dict[str, RuleStyle]
) -> None:
    """One row per benchmark: an upright bar for the base model, and each rule's seeds or mean and interval."""
    offsets = np.linspace(-0.27, 0.27, len(styles)) if len(styles) > 1 else [0.0]
    for row, name in enumerate(names):
        if row % 2:
            ax.axhspan(row - 0.5, row + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
        before = base.value[base.benchmark == name]
        if not before.empty:
            ax.vlines(before.mean(), row - 0.4, row + 0.4, color="black", linewidth=1.6, zorder=3)
        for offset, (rule, style) in zip(offsets, styles.items(), strict=True):
            values = final.value[(final.benchmark == name) & (final.rule == rule)].to_numpy()
            point: dict[str, Any] = style.line(
                linestyle="none", marker=style.marker, markersize=6, markeredgecolor="white", zorder=5
            )
            if len(values) < MIN_SEEDS:
                ax.plot(values, np.full(len(values), row + offset), label=style.label, **point)
                continue
            mean, low, _ = mean_interval(values)
            ax.errorbar(
                mean, row + offset, xerr=mean - low, label=style.label, elinewidth=1.2, ecolor=style.color, **point
            )
    if final.empty:
        mark_empty(ax)
    if runs.MEAN in names:
        ax.axhline(names.index(runs.MEAN) - 0.5, **REFERENCE_LINE)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)


def _benchmarks(scores: pd.DataFrame) -> list[str]:
    return sorted(set(scores.benchmark) - {runs.MEAN, metric_names.HELDOUT})


def _benchmark_label(scores: pd.DataFrame, benchmark: str) -> str:
    words = {runs.MEAN: "mean of the above", metric_names.HELDOUT: "held-out"}
    label = words.get(benchmark, benchmark)
    ks = sorted(scores.k[scores.benchmark == benchmark].unique())
    return label if benchmark == runs.MEAN else f"{label} @{'/'.join(map(str, ks))}"


def _samples_per_problem(scores: pd.DataFrame) -> str:
    ks = sorted(scores.k.unique())
    return "avg@" + ("/".join(map(str, ks)) or "k")


def _mass_rules(table: pd.DataFrame) -> list[str]:
    """Rules whose counterfactual masses were logged."""
    logged = set(table.metric.unique())
    return [rule for rule in metric_names.RULE_NAMES if metric_names.positive_mass(rule) in logged]


def _negative_share(table: pd.DataFrame, rule: str) -> pd.DataFrame:
    """The rows of the negative mass under `rule`, each divided by the sum of both masses."""
    negative = table[table.metric == metric_names.negative_mass(rule)]
    positive = table.loc[table.metric == metric_names.positive_mass(rule), ["run", "step", "value"]]
    both = negative.merge(positive, on=["run", "step"], suffixes=("", "_positive"))
    total = both.value + both.value_positive
    # A step whose groups are all one-signed or all tied has no mass to share.
    return both.assign(value=(both.value / total).where(total > 0)).drop(columns="value_positive")
