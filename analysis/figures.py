"""The study's figures: one function each, a table in, a figure out.

Curves take `table` as `LoggedRuns.metrics` (see `analysis.runs`), the others one of the tables of `analysis.artifacts`
or `analysis.comparisons`; `FIGURES` names each figure's table. `notes` are sentences for the foot of the figure. Every
figure has one panel or one row per model and data set, and shows each rule in its own colour, line style and marker.
With `MIN_SEEDS` seeds or more a rule is a mean with a 95 % interval, with fewer it is one line or point per seed.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import comparisons, findings, runs
from analysis.layout import (
    REFERENCE_LINE,
    Notes,
    View,
    WordedFigure,
    Words,
    canvas,
    counterfactual,
    mark_empty,
    one_view,
    panel_title,
    scaled_once,
    side_by_side,
    without_sign,
)
from analysis.runs import LoggedRuns
from analysis.statistics import MIN_SEEDS
from analysis.style import RuleStyle, legend_handles, look, rule_styles, save
from analysis.tables import write_tables
from trainers import metric_names

NUM_PROCESSES = min(4, os.cpu_count() or 1)
"""That draw figures at once; each may hold tables of its own."""
MOST_BINS = 24
SPREAD = 0.27
"""How far rules lie apart in a row of height 1, to either side."""
MARGIN_COLORS = "PuOr"
POINT_SIZE = 6
CAP_SIZE = 4
"""Ends of an interval: they stand out above and below a marker that is wider than it."""
LABEL_LIFT, LABEL_HEIGHT, LABEL_WIDTH = 0.05, 0.07, 0.4
"""Of the labels in the regime map: above their points, line to line, and as wide; shares of the axes."""
LEAST_REACH = 0.01
"""Accuracy that an axis of drops spans at least, so that none does not look like some."""


@look()
def reward(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Mean training reward against step."""
    view = View(metric_names.REWARD_MEAN, "Mean reward")
    caption = (
        "Mean reward of the responses sampled at each training step (1 = right, 0 = wrong, less penalties where a "
        "recipe has them), by the rule that trained."
    )
    finding = findings.curve_ends(table[table.metric == view.metric], "Mean reward")
    return one_view(table, table, view, Words("Training reward", caption, finding, notes))


@look()
def heldout_accuracy(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Held-out accuracy against step."""
    found = runs.scores(table)
    found = found[found.benchmark == metric_names.HELDOUT]
    k = _samples_per_problem(found)
    view = View(metric_names.HELDOUT, f"Held-out accuracy\n({k}, share right)")
    caption = (
        f"Accuracy ({k}: mean over the samples of each problem) on the held-out split of the cell's own "
        "training set, at each evaluated checkpoint; step 0 is the base model."
    )
    words = Words("Held-out accuracy", caption, findings.accuracy_gain(found, "Held-out accuracy"), notes)
    return one_view(table, found.assign(metric=view.metric), view, words)


@look()
def benchmark_accuracy(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Mean accuracy over the benchmarks against step."""
    view = View(metric_names.EVAL_MEAN, "Mean accuracy\n(share right)")
    found = runs.scores(table)
    names = _benchmarks(found)
    caption = (
        f"Mean of the accuracies on {findings.count(len(names), 'benchmark')} ({', '.join(names)}), at each evaluated "
        "checkpoint; step 0 is the base model."
    )
    finding = findings.accuracy_gain(found[found.benchmark == runs.MEAN], "Mean accuracy")
    return one_view(table, table, view, Words("Benchmark accuracy", caption, finding, notes))


@look()
def length_by_sign(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Mean response length of the positive and of the negative responses against step."""
    views = [
        View(metric_names.POS_LENGTH, "Mean length (tokens)", "A > 0: better than the group's mean"),
        View(metric_names.NEG_LENGTH, "Mean length (tokens)", "A < 0: worse than the group's mean"),
    ]
    caption = (
        "Mean length of the sampled responses with positive (left) and negative advantage A (right); with "
        "0/1 rewards these are the right and the wrong ones. Each row shares its scale."
    )
    words = Words("Response length by sign of the advantage", caption, findings.length_ratio(table), notes)
    return side_by_side(table, views, words, share_y="row")


@look()
def sign_gap(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Sign-length gap against step, in tokens and relative to the group's mean length."""
    views = [
        View(metric_names.SIGN_GAP, "Gap (tokens)", "In tokens", reference=0.0),
        View(metric_names.SIGN_GAP_REL, "Gap / mean length", "Relative to the group's mean length", 0.0),
    ]
    caption = (
        "Mean length of responses with advantage A > 0 minus mean length of those with A < 0, in each group that has "
        "both, averaged over those groups. Below the zero line the negative responses are the longer ones."
    )
    words = Words("Sign-length gap", caption, findings.gap(table), notes)
    return side_by_side(table, views, words, share_y="col")


@look()
def group_cv(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Length variation within groups against step."""
    view = View(metric_names.GROUP_CV, "Coefficient of variation\n(std / mean)")
    caption = "Standard deviation over mean of the response lengths within a group, averaged over groups."
    return one_view(
        table, table, view, Words("Length variation within groups", caption, findings.variation(table), notes)
    )


@look()
def length_histograms(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Response lengths by sign, early, in the middle and late in training.

    `table`: `LoggedRuns.lengths`.
    """
    cells, styles = runs.cells(table), rule_styles(comparisons.rules_of(table))
    panels, table = runs.panels(cells), _with_phases(table)
    phases = [phase for phase in PHASES if phase in set(table.phase)] or ["early"]
    width = -(-int(table.length.max()) // MOST_BINS) if len(table) else 1  # whole, or bins would hold unequal numbers
    edges = 0.5 + width * np.arange(MOST_BINS + 1)
    caption = (
        f"Share of a rule's responses by length, in bins of {findings.count(width, 'token')}, all its seeds together: "
        "with advantage A > 0 drawn upwards, with A < 0 downwards; both add up to 1. Responses of groups that are all "
        "right or all wrong have no sign and are left out; those cut at the length limit lie at its bin. A title gives "
        f"the training step. {findings.seeds_per_rule(table)}"
    )
    words = Words("Response lengths by sign: early, middle, late", caption, findings.histograms(table), notes)
    figure, axes = canvas(
        max(len(panels), 1) * len(phases), len(phases), words, legend_handles(styles), "Response length (tokens)",
        title_lines=2,
    )  # fmt: skip
    if not panels:
        mark_empty(axes[0])
    with scaled_once(axes):
        for (panel, phase), ax in zip(product(panels, phases), axes, strict=False):
            inside = runs.in_panel(table[table.phase == phase], panel)
            head = panel_title(panel, cells) if phase == phases[0] else ""
            ax.set_title(f"{head}\n{_phase_title(phase, inside.step)}")
            _draw_histograms(ax, inside, edges, styles)
            if phase == phases[0]:
                ax.set_ylabel("Share of responses\n(A < 0 downwards)")
    return figure


@look()
def sign_mass(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Mass that each rule would put on either sign, whichever rule trained, against step."""
    rules = _mass_rules(table)
    negative = table.metric.isin([metric_names.negative_mass(rule) for rule in rules])
    caption = (
        "Mass |Σ w·n·A| that each rule (line style; also rules that trained no run) would put on the responses with "
        "A > 0 (drawn upwards) and with A < 0 (drawn downwards), on the rollouts of the run that the column's rule "
        "trained; w: the rule's weight of each of a response's n tokens, A: its advantage, so the mass has no unit. "
        "Where all rewards are 0 or 1, sequence and balanced coincide: equal masses on both signs."
    )
    title = "Sign mass: lines by rule, columns by the rule that trained"
    return counterfactual(
        table,
        table.assign(value=table.value.where(~negative, -table.value)),
        {rule: [metric_names.positive_mass(rule), metric_names.negative_mass(rule)] for rule in rules},
        View("", "Mass (A < 0 downwards)", reference=0.0),
        Words(title, caption, findings.counterfactual_share(table, rules), notes),
    )


@look()
def negative_share(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Share of each run's own sign mass that falls on negative responses, against step."""
    rules = [rule for rule in _mass_rules(table) if rule in set(table.rule)]
    view = View("negative share", "Share of the mass\non A < 0", reference=0.5)
    shares = [comparisons.negative_share(table[table.rule == rule], rule) for rule in rules]
    values = pd.concat(shares or [table.iloc[:0]]).assign(metric=view.metric)
    caption = (
        "Share of a run's sign mass (|Σ w·n·A| over the responses of either sign; w: weight of each of a response's n "
        "tokens, A: its advantage) that fell on responses with A < 0, under the rule that trained it. At 0.5 both "
        "signs pull equally, as under sequence and balanced wherever all rewards are 0 or 1; above it, lowering the "
        "probability of bad responses outweighs raising that of good ones."
    )
    words = Words("Negative share of the sign mass", caption, findings.own_share(values), notes)
    return one_view(table, values, view, words)


@look()
def final_accuracy(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Accuracy of the last checkpoint on every benchmark, with the base model's.

    `table`: as `comparisons.final_accuracy` gives it.
    """
    panels, styles = runs.panels(table), rule_styles(comparisons.rules_of(table))
    names = [name for name in [*_benchmarks(table), runs.MEAN, metric_names.HELDOUT] if name in set(table.benchmark)]
    labels = [_benchmark_label(table, name) for name in names]
    caption = (
        "Accuracy (share right; @k: samples per problem) of each run's last checkpoint. Upright bar: the base "
        "model before training. Mean: over the benchmarks above it. Held-out: the split of the cell's own "
        f"training set. {findings.seeds_and_interval(table.seeds, table.over)}"
    )
    base_handle = Line2D([], [], color="black", marker="|", markersize=11, mew=1.6, ls="none", label="base model")
    handles = [*legend_handles(styles, markers=True, lines=False), base_handle]
    figure, axes = canvas(
        max(len(panels), 1), 2, Words("Final accuracy per benchmark", caption, findings.best_rules(table), notes),
        handles, "Accuracy at the last step",
        row_height=0.36 * max(len(names), 2), left=0.25 + 0.07 * max(map(len, labels), default=0),
    )  # fmt: skip
    if not panels:
        mark_empty(axes[0])
    for panel, ax in zip(panels, axes, strict=False):
        inside = runs.in_panel(table, panel)
        for row, name in enumerate(names):
            found = inside[inside.benchmark == name]
            _draw_row(ax, row, found, styles)
            if found.base.notna().any():
                ax.vlines(found.base.mean(), row - 0.4, row + 0.4, color="black", linewidth=1.6, zorder=3)
        _finish_rows(ax, names, labels)
        if runs.MEAN in names:
            ax.axhline(names.index(runs.MEAN) - 0.5, **REFERENCE_LINE)
        ax.set_title(_rows_title(panel, table))
    axes[0].margins(x=0.05)
    axes[0].set_xlim(left=0)
    return figure


@look()
def accuracy_difference(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Accuracy of each rule minus that of the baseline rule at the same seed.

    `table`: as `comparisons.differences` gives it.
    """
    panels, styles = runs.panels(table), rule_styles(comparisons.rules_of(table))
    names = [runs.panel_name(panel, table) for panel in panels]
    baseline = table.baseline.iloc[0] if len(table) else comparisons.BASELINE
    caption = (
        f"Mean accuracy over the benchmarks at the last step, each rule minus {baseline} at the same seed (same "
        "problems in the same order). Right of the zero line the rule is ahead. "
        f"{findings.seeds_and_interval(table.seeds, table.over)}"
    )
    figure, [ax] = canvas(
        1, 1, Words(f"Difference in accuracy to {baseline} aggregation", caption, findings.differences(table), notes),
        legend_handles(styles, markers=True, lines=False), f"Accuracy minus that of {baseline}",
        row_height=0.42 * max(len(names), 2), left=0.25 + 0.07 * max(map(len, names), default=0), title_lines=0,
    )  # fmt: skip
    for row, panel in enumerate(panels):
        _draw_row(ax, row, runs.in_panel(table, panel), styles)
    _finish_rows(ax, names, names)
    ax.axvline(0.0, **REFERENCE_LINE)
    return figure


@look()
def regime_map(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """Advantage of token over sequence aggregation against the sign-length gap and the length variation.

    `table`: as `comparisons.regimes` gives it.
    """
    caption = (
        "One numbered point per model and data set: accuracy of token minus that of sequence at the last step, against "
        "two means over all steps of both rules' runs, the relative sign-length gap (left; below 0 negative responses "
        "are the longer ones) and the variation of lengths within groups (right). Colour and the number in brackets: "
        "accuracy of balanced minus that of the better of the two. "
        f"{findings.seeds_and_interval(table.seeds, table.over, means=True)}"
    )
    key = "; ".join(
        f"{place}: {runs.panel_name((row.model, row.dataset, row.scope), table)}"
        for place, row in enumerate(runs.rows(table), 1)
    )
    caption += f" {key}." if key else ""
    words = Words("When does token aggregation win?", caption, findings.regimes(table), notes)
    figure, axes = canvas(
        2, 2, words, [], "Relative sign-length gap", share_x=False, row_height=2.5, title_lines=0,
    )  # fmt: skip
    axes[1].set_xlabel("Length variation within groups (std / mean)")
    axes[0].set_ylabel("Token − sequence (accuracy)")
    # The ends of the colours are as dark as each other in grey, so the range stops short of them.
    widest = float(table.margin.abs().max())
    reach = 1.4 * widest if widest > 0 else 1.0
    for ax, x in zip(axes, ("gap", "cv"), strict=True):
        _draw_regimes(ax, table, x, TwoSlopeNorm(0.0, -reach, reach))
    return figure


@look()
def peak_to_last(table: pd.DataFrame, notes: Notes = ()) -> WordedFigure:
    """How far the last checkpoint lies below the best one.

    `table`: as `comparisons.peaks` gives it.
    """
    panels, styles = runs.panels(table), rule_styles(comparisons.rules_of(table))
    names = [runs.panel_name(panel, table) for panel in panels]
    checkpoints = "/".join(str(num) for num in sorted(table.checkpoints.unique()))
    caption = (
        f"Best mean accuracy over the benchmarks among a run's {checkpoints} evaluated checkpoints minus that of the "
        f"last one: 0 where the last is the best. From {MIN_SEEDS} seeds on, hollow points are seeds and filled ones "
        "their mean. The best of several noisy checkpoints lies above the last by chance too: compare the rules. "
        f"{findings.seeds_per_rule(table)}"
    )
    figure, [ax] = canvas(
        1, 1, Words("Drop from the best to the last checkpoint", caption, findings.drops(table), notes),
        legend_handles(styles, markers=True, lines=False), "Best minus last accuracy",
        row_height=0.42 * max(len(names), 2), left=0.25 + 0.07 * max(map(len, names), default=0), title_lines=0,
    )  # fmt: skip
    for row, panel in enumerate(panels):
        inside = runs.in_panel(table, panel)
        for place, (rule, style) in zip(_offsets(len(styles)), styles.items(), strict=True):
            values = inside["drop"][inside.rule == rule].to_numpy()
            if len(values) >= MIN_SEEDS:
                small = _point(style, markersize=3.5, markeredgecolor=style.color, markerfacecolor="none", zorder=4)
                ax.plot(values, np.full(len(values), row + place), **small)
                values = np.array([values.mean()])
            ax.plot(values, np.full(len(values), row + place), label=style.label, **_point(style))
    _finish_rows(ax, names, names)
    ax.axvline(0.0, **REFERENCE_LINE)
    reach = max(float(table["drop"].max()), LEAST_REACH) if len(table) else LEAST_REACH
    ax.set_xlim(-0.03 * reach, 1.05 * reach)
    return figure


class Drawing(NamedTuple):
    """A figure's function and the table that it shows."""

    draw: Callable[[pd.DataFrame, Notes], WordedFigure]
    table: Callable[[LoggedRuns], pd.DataFrame]


def _metrics(loaded: LoggedRuns) -> pd.DataFrame:
    return loaded.metrics


FIGURES: dict[str, Drawing] = {
    "reward": Drawing(reward, _metrics),
    "heldout_accuracy": Drawing(heldout_accuracy, _metrics),
    "benchmark_accuracy": Drawing(benchmark_accuracy, _metrics),
    "final_accuracy": Drawing(final_accuracy, comparisons.final_accuracy),
    "accuracy_difference": Drawing(accuracy_difference, comparisons.differences),
    "peak_to_last": Drawing(peak_to_last, comparisons.peaks),
    "length_by_sign": Drawing(length_by_sign, _metrics),
    "sign_gap": Drawing(sign_gap, _metrics),
    "group_cv": Drawing(group_cv, _metrics),
    "length_histograms": Drawing(length_histograms, lambda loaded: loaded.lengths),
    "sign_mass": Drawing(sign_mass, _metrics),
    "negative_share": Drawing(negative_share, _metrics),
    "regime_map": Drawing(regime_map, comparisons.regimes),
}


def draw_all(tracking_uri: str, experiment: str, out_dir: Path, *, only_if_changed: bool = False) -> list[Path]:
    """Draw every figure (PNG and PDF) and write the tables (CSV, Markdown, LaTeX) of one MLflow experiment.

    Equal runs give equal bytes. Returns the files written: none with `only_if_changed`, where the folder holds what
    these runs gave before.

    Raises:
        ValueError: there is no such database or experiment, or no cell in it has finished.
    """
    loaded = runs.load_runs(tracking_uri, experiment)
    drawn_from, digest = out_dir / ".drawn-from", runs.digest(loaded)
    if only_if_changed and drawn_from.is_file() and drawn_from.read_text() == digest:
        return []
    out_dir.mkdir(parents=True, exist_ok=True)
    drawn_from.unlink(missing_ok=True)
    # Forked processes share the tables; where there is no fork they are sent.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(NUM_PROCESSES, context, _remember, (loaded, runs.notes(loaded), out_dir)) as pool:
        tables = pool.submit(_write_tables)
        paths = [path for drawn in pool.map(_draw, FIGURES) for path in drawn] + tables.result()
    drawn_from.write_text(digest)
    return paths


_given: tuple[LoggedRuns, Notes, Path]
"""What a drawing process works on."""


def _remember(*given: Any) -> None:
    global _given
    _given = given


def _draw(name: str) -> list[Path]:
    loaded, notes, out_dir = _given
    return save(FIGURES[name].draw(FIGURES[name].table(loaded), notes), out_dir / name)


def _write_tables() -> list[Path]:
    loaded, notes, out_dir = _given
    return write_tables(loaded, out_dir, notes)


def _offsets(num: int) -> list[float]:
    return list(np.linspace(-SPREAD, SPREAD, num)) if num > 1 else [0.0] * num


def _point(style: RuleStyle, **changes: Any) -> dict[str, Any]:
    look = {"linestyle": "none", "marker": style.marker, "markersize": POINT_SIZE, "markeredgecolor": "white"}
    return style.line(**look | {"zorder": 5} | changes)


def _draw_row(ax: Axes, row: int, found: pd.DataFrame, styles: dict[str, RuleStyle]) -> None:
    """One row of estimates, a rule below the other. `found`: columns rule, mean, low, high, values."""
    by_rule = {estimate.rule: estimate for estimate in runs.rows(found)}
    for place, (rule, style) in zip(_offsets(len(styles)), styles.items(), strict=True):
        estimate = by_rule.get(rule)
        if estimate is None:
            continue
        if np.isnan(estimate.low):
            ax.plot(estimate.values, np.full(len(estimate.values), row + place), label=style.label, **_point(style))
            continue
        ends = [[estimate.mean - estimate.low], [estimate.high - estimate.mean]]
        ax.errorbar(
            estimate.mean, row + place, xerr=ends, label=style.label, elinewidth=1.2, ecolor=style.color,
            capsize=CAP_SIZE, **_point(style),
        )  # fmt: skip


def _finish_rows(ax: Axes, rows: list[str], labels: list[str]) -> None:
    """Stripes, labels and the order of reading from the top."""
    for row in range(1, len(rows), 2):
        ax.axhspan(row - 0.5, row + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
    if not rows:
        mark_empty(ax)
    ax.set_yticks(range(len(rows)), labels)
    ax.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)


def _rows_title(panel: runs.Panel, table: pd.DataFrame) -> str:
    """`panel_title` where a row already stands for all its seeds."""
    counts = runs.in_panel(table, panel).seeds
    low, high = counts.min(), counts.max()
    return f"{runs.panel_name(panel, table)}  (n = {low if low == high else f'{low} to {high}'})"


PHASES = ("early", "middle", "late")


def _with_phases(table: pd.DataFrame) -> pd.DataFrame:
    """The first, the last and any other logged step of each run, by name."""
    steps = table.groupby("run")["step"]
    late = table.step == steps.transform("max")
    phase = np.select([table.step == steps.transform("min"), late], ["early", "late"], "middle")
    return table.assign(phase=phase)


def _phase_title(phase: str, steps: pd.Series) -> str:
    found = sorted(set(steps))
    span = f"step {found[0]}" if len(found) == 1 else f"steps {found[0]} to {found[-1]}" if found else "not logged"
    return f"{phase}: {span}"


def _draw_histograms(ax: Axes, table: pd.DataFrame, edges: Any, styles: dict[str, RuleStyle]) -> None:
    if table.empty:
        mark_empty(ax)
    for rule, style in styles.items():
        of_rule = table[table.rule == rule]
        if of_rule.empty:
            continue
        for sign in (1, -1):
            found = of_rule[of_rule.sign == sign]
            counts, _ = np.histogram(found.length.astype(float), edges, weights=found["count"].astype(float))
            shares = sign * counts / of_rule["count"].sum()
            ax.stairs(shares, edges, label=style.label if sign > 0 else None, baseline=None, **_stairs(style))
    ax.axhline(0.0, **REFERENCE_LINE)
    ax.yaxis.set_major_formatter(without_sign)


def _stairs(style: RuleStyle) -> dict[str, Any]:
    return style.line(linewidth=0.75 * style.linewidth)


def _draw_regimes(ax: Axes, table: pd.DataFrame, x: str, norm: TwoSlopeNorm) -> None:
    ax.axhline(0.0, **REFERENCE_LINE)
    if x == "gap":
        ax.axvline(0.0, **REFERENCE_LINE | {"linestyle": ":"})
    shown = table.dropna(subset=[x])
    if shown.empty:
        mark_empty(ax)
        return
    known = shown.dropna(subset="low")
    ends = [known["mean"] - known.low, known.high - known["mean"]]
    ax.errorbar(known[x], known["mean"], yerr=ends, ls="none", color="#404040", elinewidth=1.0, zorder=2)
    ax.scatter(
        shown[x], shown["mean"], c=shown.margin, cmap=MARGIN_COLORS, norm=norm, s=70, edgecolors="black",
        linewidths=0.9, zorder=4, plotnonfinite=True,
    )  # fmt: skip
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.margins(x=0.1, y=0.15)
    ax.autoscale_view()
    _number_points(ax, table, x)


def _number_points(ax: Axes, table: pd.DataFrame, x: str) -> None:
    """Each point's number and margin beside it, moved up where it would lie on another label."""
    low, high = ax.get_xlim()
    bottom, top = ax.get_ylim()
    taken: list[tuple[bool, float, float]] = []
    for place, row in sorted(enumerate(runs.rows(table), 1), key=lambda item: item[1].mean):
        across, up = (getattr(row, x) - low) / (high - low), (row.mean - bottom) / (top - bottom)
        if np.isnan(across):
            continue
        is_right, level = across > 0.5, up + LABEL_LIFT
        for side, where, used in taken:
            if side == is_right and abs(across - where) < LABEL_WIDTH and level - used < LABEL_HEIGHT:
                level = used + LABEL_HEIGHT
        taken.append((is_right, across, level))
        margin = "" if np.isnan(row.margin) else f" ({findings.signed(row.margin)})"
        text = ax.annotate(
            f"{place}{margin}", (getattr(row, x), row.mean), xytext=(across + (-0.03 if is_right else 0.03), level),
            textcoords="axes fraction", ha="right" if is_right else "left", va="center", fontsize=8, zorder=5,
        )  # fmt: skip
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85})


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
