"""Panels: how figures are laid out, and how a rule's seeds are drawn into an axes.

Every figure has one panel per model and data set. Its head is the title and one legend of the rules; its foot is a
caption that says what is shown, in which unit and over how many seeds, what was found, and what is missing.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import runs
from analysis.statistics import MIN_SEEDS, mean_interval
from analysis.style import RuleStyle, legend_handles, rule_styles

Notes = Sequence[str]

# Inches. A figure is as wide as a text page and as high as its rows need. Plain sums instead of a layout engine:
# all figures line up, and drawing takes half the time.
WIDTH = 7.6
ROW_HEIGHT = 1.55
ROW_GAP = 0.16
LEFT = 0.86
RIGHT = 0.14
GAP = 0.22
GAP_WITH_LABELS = 0.72
TITLE = 0.29
LEGEND = 0.33
TITLE_LINE = 0.165
X_LABELS = 0.46
CAPTION_LINE = 0.152
CAPTION_CHARACTERS = 126

MOST_POINTS_WITH_MARKERS = 15
X_LABEL = "Training step"
REFERENCE_LINE: dict[str, Any] = {"color": "#404040", "linewidth": 1.0, "zorder": 1}


@dataclass(frozen=True)
class Words:
    """The text around a figure.

    Attributes:
        title: names what is shown.
        caption: what is drawn, in which unit, over how many seeds.
        finding: what the numbers say.
        notes: what a reader must know about the runs.
    """

    title: str
    caption: str
    finding: str = ""
    notes: Notes = ()


class WordedFigure(Figure):
    """A figure that knows its words, and how high its foot of text is (inches): a page can set them itself."""

    words: Words
    foot: float


@dataclass(frozen=True)
class View:
    """One kind of axes: which metric it shows, the words around it, and the value of its reference line."""

    metric: str
    y_label: str
    title: str = ""
    reference: float | None = None


def one_view(table: pd.DataFrame, values: pd.DataFrame, view: View, words: Words) -> WordedFigure:
    """A grid of panels, all with one scale. `table` names panels and rules, `values` holds the curves."""
    values = values[values.metric == view.metric]
    cells, curves = runs.cells(table), _seed_curves(values)
    panels, styles = runs.panels(cells), rule_styles(list(cells.rule.unique()))
    words = _with_seeds(words, values)
    figure, axes = canvas(len(panels), 2, words, legend_handles(styles, markers=_few_points(values)))
    with scaled_once(axes):
        for panel, ax in zip(panels, axes, strict=True):
            for rule, style in styles.items():
                draw_seeds(ax, curves.get((*panel, rule, view.metric)), style)
            finish(ax, view, panel_title(panel, cells))
    if view.reference is None:
        start_at_zero(axes, values)
    return figure


def side_by_side(table: pd.DataFrame, views: list[View], words: Words, share_y: Literal["row", "col"]) -> WordedFigure:
    """One row per panel and one column per view."""
    shown = table[table.metric.isin([view.metric for view in views])]
    cells, curves = runs.cells(table), _seed_curves(shown)
    panels, styles = runs.panels(cells), rule_styles(list(cells.rule.unique()))
    figure, axes = canvas(
        len(panels) * len(views), len(views), _with_seeds(words, shown),
        legend_handles(styles, markers=_few_points(shown)), share_y=share_y,
        gap=GAP if share_y == "row" else GAP_WITH_LABELS, title_lines=2,
    )  # fmt: skip
    with scaled_once(axes):
        for (panel, view), ax in zip(product(panels, views), axes, strict=True):
            for rule, style in styles.items():
                draw_seeds(ax, curves.get((*panel, rule, view.metric)), style)
            head = panel_title(panel, cells) if view is views[0] else ""
            finish(ax, view, f"{head}\n{view.title}", own_scale=share_y == "col")
    start_at_zero(axes, shown)
    return figure


def counterfactual(
    table: pd.DataFrame,
    values: pd.DataFrame,
    metrics: dict[str, list[str]],
    view: View,
    words: Words,
) -> WordedFigure:
    """One row per panel, one column per rule that trained; `metrics`: what is drawn in each rule's style."""
    shown = values[values.metric.isin([metric for names in metrics.values() for metric in names])]
    cells, curves = runs.cells(table), _seed_curves(shown)
    panels, trained = runs.panels(cells), rule_styles(list(cells.rule.unique()))
    styles = rule_styles(list(metrics))
    figure, axes = canvas(
        len(panels) * len(trained), len(trained), _with_seeds(words, shown),
        legend_handles(styles, markers=_few_points(shown)), title_lines=2,
    )  # fmt: skip
    with scaled_once(axes):
        for (panel, rule), ax in zip(product(panels, trained), axes, strict=True):
            for other, style in styles.items():
                for metric in metrics[other]:
                    draw_seeds(ax, curves.get((*panel, rule, metric)), style)
            head = panel_title(panel, cells) if rule == next(iter(trained)) else ""
            finish(ax, view, f"{head}\ntrained with {rule}")
            ax.yaxis.set_major_formatter(without_sign)
    return figure


def canvas(
    num_axes: int,
    most_columns: int,
    words: Words,
    handles: list[Line2D],
    x_label: str = X_LABEL,
    *,
    share_x: bool = True,
    share_y: bool | Literal["row", "col"] = True,
    row_height: float = ROW_HEIGHT,
    left: float = LEFT,
    gap: float = GAP,
    title_lines: int = 1,
) -> tuple[WordedFigure, list[Axes]]:
    """A figure with its title and legend above the axes and its caption below; axes in reading order.

    Lengths are in inches: `row_height` of one axes, `left` of the labels left of the first, `gap` between two.
    """
    columns = min(num_axes, most_columns)
    rows = -(-num_axes // columns)
    texts = [words.caption, words.finding, *words.notes]
    foot_lines = textwrap.wrap(" ".join(filter(None, texts)), CAPTION_CHARACTERS)
    foot = CAPTION_LINE * len(foot_lines) + 0.1
    titles = TITLE_LINE * title_lines + 0.1
    head = TITLE + (LEGEND if handles else 0)
    height = head + rows * (titles + row_height) + (rows - 1) * ROW_GAP + X_LABELS + foot
    width = (WIDTH - left - RIGHT - (columns - 1) * gap) / columns
    figure = WordedFigure(figsize=(WIDTH, height))
    figure.words, figure.foot = words, foot
    grid = figure.subplots(
        rows,
        columns,
        sharex=share_x,
        sharey=share_y,
        squeeze=False,
        gridspec_kw={
            "left": left / WIDTH,
            "right": 1 - RIGHT / WIDTH,
            "top": 1 - (head + titles) / height,
            "bottom": (foot + X_LABELS) / height,
            "wspace": gap / width,
            "hspace": (titles + ROW_GAP) / row_height,
        },
    )
    figure.text(0.1 / WIDTH, 1 - 0.08 / height, words.title, va="top", fontsize=12)
    figure.text(0.1 / WIDTH, foot / height, "\n".join(foot_lines), va="top", fontsize=8, linespacing=1.35)
    if handles:
        has_lines = any(handle.get_linestyle() != "None" for handle in handles)
        figure.legend(
            handles=handles,
            handlelength=None if has_lines else 1.2,
            loc="upper left",
            bbox_to_anchor=(0.0, 1 - TITLE / height),
            ncols=len(handles),
            columnspacing=1.4,
            borderaxespad=0.2,
        )
    axes = list(grid.flat)
    for ax in axes[num_axes:]:
        ax.remove()
    for ax in axes[num_axes - columns : num_axes]:
        ax.set_xlabel(x_label)
        ax.tick_params(labelbottom=True)
    return figure, axes[:num_axes]


@contextmanager
def scaled_once(axes: Sequence[Axes]) -> Iterator[None]:
    """Fit the scales after all is drawn: axes that share one would all be fitted again with every band drawn."""
    for ax in axes:
        ax.set_autoscale_on(False)
    yield
    for ax in axes:
        ax.autoscale()


def draw_seeds(ax: Axes, curves: pd.DataFrame | None, style: RuleStyle) -> None:
    """Draw one rule. `curves`: one row per seed, one column per step."""
    if curves is None:
        return
    marker: dict[str, Any] = {"marker": style.marker if curves.shape[1] <= MOST_POINTS_WITH_MARKERS else ""}
    if len(curves) < MIN_SEEDS:
        for _, values in curves.iterrows():
            values = values.dropna()
            ax.plot(values.index, values, **style.line(label=style.label), **marker)
        return
    mean, low, high = mean_interval(curves.to_numpy())
    ax.plot(curves.columns, mean, **style.line(label=style.label), **marker)
    ax.fill_between(curves.columns, low, high, color=style.color, alpha=0.13, linewidth=0, zorder=1)


def finish(ax: Axes, view: View, title: str, *, own_scale: bool = False) -> None:
    """Titles, labels and reference line of an axes whose curves are drawn."""
    ax.set_title(title)
    place = ax.get_subplotspec()
    ax.set_ylabel(view.y_label if own_scale or (place and place.is_first_col()) else "")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    if not ax.lines:
        mark_empty(ax)
    if view.reference is not None:
        ax.axhline(view.reference, **REFERENCE_LINE)


def mark_empty(ax: Axes) -> None:
    """Say that nothing was logged, where an axes without curves might pass for a zero."""
    text = ax.text(0.5, 0.55, "no values", transform=ax.transAxes, ha="center", va="center", color="#606060")
    text.set_bbox({"facecolor": "white", "edgecolor": "none"})


def without_sign(value: float, _: object = None) -> str:
    """A tick's label where the direction says the sign."""
    return f"{abs(value):g}"


def start_at_zero(axes: list[Axes], values: pd.DataFrame) -> None:
    """A scale that starts at zero wherever all values are positive, so that heights compare as they look."""
    if not values.empty and (values.value.dropna() >= 0).all():
        for ax in axes:
            ax.set_ylim(bottom=0)


def panel_title(panel: runs.Panel, cells: pd.DataFrame) -> str:
    """Model, data set and the number of seeds per rule."""
    counts = runs.in_panel(cells, panel).groupby("rule", observed=True).size()
    low, high = counts.min(), counts.max()
    return f"{runs.panel_name(panel, cells)}  (n = {low if low == high else f'{low} to {high}'})"


def seeds_sentence(values: pd.DataFrame) -> str:
    """What n means in the titles, and what is drawn of so many seeds."""
    counts = runs.cells(values).groupby([*runs.PANEL, "rule"], observed=True).size()
    interval = "mean over n seeds with its 95 % t interval"
    if counts.empty:
        return ""
    if counts.max() == 1:
        return (
            "n = 1 seed per rule: single runs, so no interval can be given. Where curves coincide, sequence lies over "
            "token, and token over balanced."
        )
    if counts.max() < MIN_SEEDS:
        return f"n = seeds per rule; with fewer than {MIN_SEEDS} each is shown by itself, without an interval."
    if counts.min() >= MIN_SEEDS:
        return f"n = seeds per rule; shown is the {interval}."
    return f"n = seeds per rule; shown is the {interval}, or each seed where a rule has fewer than {MIN_SEEDS}."


def _with_seeds(words: Words, values: pd.DataFrame) -> Words:
    return replace(words, caption=f"{words.caption} {seeds_sentence(values)}".strip())


def _seed_curves(values: pd.DataFrame) -> dict[tuple[str, ...], pd.DataFrame]:
    """The curves of each (model, dataset, scope, rule, metric): one row per seed, one column per step."""
    key = [*runs.PANEL, "rule", "metric"]
    texts = values.astype(dict.fromkeys(key, "str"))
    curves = texts.pivot(index=[*key, "seed"], columns="step", values="value").groupby(key)
    return {tuple(map(str, names)): found.droplevel([*key]).dropna(axis=1, how="all") for names, found in curves}


def _few_points(values: pd.DataFrame) -> bool:
    return values.step.nunique() <= MOST_POINTS_WITH_MARKERS
