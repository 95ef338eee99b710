"""The diagnosis drawn: one page of six panels, made from `analysis.diagnose.Measurements` alone."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.diagnose import LENGTH_BINS, QUARTERS, SIGNS, Measurements, negative_share, token_weight
from analysis.layout import CAPTION_CHARACTERS, REFERENCE_LINE, WIDTH, mark_empty
from analysis.style import legend_handles, look, rule_styles, save
from trainers.metric_names import RULE_NAMES

HEIGHT = 5.1
MOST_POINTS_WITH_MARKERS = 15
SIGN_LINES: dict[str, dict[str, Any]] = {
    "positive": {"color": "#0072b2", "linestyle": "solid", "marker": "o", "label": "A > 0"},
    "negative": {"color": "#a0522d", "linestyle": (0, (4, 1.5)), "marker": "s", "label": "A < 0"},
}
BUCKET_LABELS = {
    "shortest": "shortest\n1/4", "longest": "longest\n1/4", "positive": "A > 0", "negative": "A < 0",
}  # fmt: skip


@look()
def diagnosis(measured: Measurements, title: str, unit: str) -> Figure:
    """Lengths, gap, variation, share of the update by sign and token weights, over the steps of one run."""
    caption = textwrap.wrap(_caption(measured, unit), CAPTION_CHARACTERS)
    foot = 0.152 * len(caption) + 0.12
    figure = Figure(figsize=(WIDTH, HEIGHT + foot))
    height = HEIGHT + foot
    axes = figure.subplots(
        2, 3,
        gridspec_kw={
            "left": 0.09, "right": 0.985, "top": 1 - 0.95 / height, "bottom": (foot + 0.5) / height,
            "wspace": 0.42, "hspace": 0.55,
        },
    )  # fmt: skip
    figure.text(0.013, 1 - 0.08 / height, title, va="top", fontsize=12)
    figure.text(0.013, foot / height, "\n".join(caption), va="top", fontsize=8, linespacing=1.35)
    styles = rule_styles(list(RULE_NAMES))
    figure.legend(
        handles=legend_handles(styles, markers=True), loc="upper left", bbox_to_anchor=(0.0, 1 - 0.29 / height),
        ncols=len(styles), columnspacing=1.4, borderaxespad=0.2,
    )  # fmt: skip
    panels: list[Callable[[Axes, Measurements, str], None]] = [
        _histogram, _lengths, _gap, _variation, _shares, _weights,
    ]  # fmt: skip
    for ax, draw in zip(axes.flat, panels, strict=True):
        draw(ax, measured, unit)
        if not ax.has_data():
            mark_empty(ax)
    return figure


def draw(measured: Measurements, title: str, unit: str, out_dir: Path) -> list[Path]:
    """Write `diagnosis.png` and `.pdf` into a folder; equal measurements give equal bytes."""
    out_dir.mkdir(parents=True, exist_ok=True)
    return save(diagnosis(measured, title, unit), out_dir / "diagnosis")


def _caption(measured: Measurements, unit: str) -> str:
    whole = "group" if measured.scope == "group" else "step"
    over = "blocks of consecutive steps" if measured.interval_over == "steps" else "groups"
    source = "the dump's" if measured.has_advantages else "group-normalised rewards"
    if not measured.lengths:
        source = "those of the run that logged the curves"
    return (
        f"Lengths in {unit}; A: advantage ({source}). Sign-length gap: mean length of the responses with A > 0 minus "
        "that of those with A < 0, in each group that has both, over the group's mean length. Variation: standard "
        "deviation over mean of the lengths in a group (CV). Share: |Σ w·n·A| of the responses with A < 0 over that of "
        "all, under each rule, whichever rule trained. Token weight: mean weight of the tokens in a part of a group's "
        f"responses, over the weight of the {whole}'s average token; below 1 a rule down-weights them. Bands and bars: "
        f"95 % intervals of the mean over all steps, from {over}."
    )


def _histogram(ax: Axes, measured: Measurements, unit: str) -> None:
    ax.set_title("Lengths by sign")
    ax.set_xlabel(f"Length ({unit})")
    ax.set_ylabel("Share of responses")
    shown = [sign for sign in SIGNS if measured.lengths and measured.lengths[sign].sum()]
    for sign in shown:
        counts = measured.lengths[sign]
        line = {key: value for key, value in SIGN_LINES[sign].items() if key != "marker"}
        ax.stairs(counts / counts.sum(), LENGTH_BINS, linewidth=1.6, **line)
    if shown:
        occupied = np.flatnonzero(sum(measured.lengths[sign] for sign in shown))
        ax.set_xscale("log", base=2)
        ax.set_xlim(max(LENGTH_BINS[occupied[0]], 1), LENGTH_BINS[occupied[-1] + 1])
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.legend(loc="best", fontsize=8, handlelength=2.2)


def _lengths(ax: Axes, measured: Measurements, unit: str) -> None:
    ax.set_title("Mean length by sign")
    ax.set_ylabel(f"Length ({unit})")
    for sign in SIGNS:
        _curve(ax, measured, f"{sign}_length", **SIGN_LINES[sign])
    if ax.lines:
        ax.set_ylim(bottom=0)
        ax.legend(loc="best", fontsize=8, handlelength=2.2)


def _gap(ax: Axes, measured: Measurements, unit: str) -> None:
    ax.set_title("Relative sign-length gap")
    ax.set_ylabel("Gap / mean length")
    _curve(ax, measured, "sign_gap_rel", color="black")
    _band(ax, measured, "sign_gap_rel")
    if ax.lines:
        ax.axhline(0.0, **REFERENCE_LINE)


def _variation(ax: Axes, measured: Measurements, unit: str) -> None:
    ax.set_title("Variation, truncation")
    ax.set_ylabel("CV; share cut")
    _curve(ax, measured, "group_cv", color="black", label="length CV in a group")
    _curve(ax, measured, "truncated", color="#777777", linestyle=(0, (1.2, 1.2)), label="share cut at limit")
    _band(ax, measured, "group_cv")
    if ax.lines:
        ax.set_ylim(bottom=0)
        ax.legend(loc="best", fontsize=8, handlelength=2.2)


def _shares(ax: Axes, measured: Measurements, unit: str) -> None:
    ax.set_title("Share of the update on A < 0")
    ax.set_ylabel("Share")
    for rule, style in rule_styles(list(RULE_NAMES)).items():
        _curve(ax, measured, negative_share(rule), **style.line(marker=style.marker))
    if ax.lines:
        ax.axhline(0.5, **REFERENCE_LINE)


def _weights(ax: Axes, measured: Measurements, unit: str) -> None:
    """One point per rule and part of the responses, with its interval."""
    ax.set_title("Token weight by response")
    ax.set_ylabel("Weight / average")
    buckets = [*QUARTERS, *SIGNS]
    styles = rule_styles(list(RULE_NAMES))
    offsets = np.linspace(-0.27, 0.27, len(styles))
    for offset, (rule, style) in zip(offsets, styles.items(), strict=True):
        estimates = [measured.estimate(token_weight(rule, bucket)) for bucket in buckets]
        if not any(estimate.known for estimate in estimates):
            continue
        half = np.nan_to_num([estimate.value - estimate.low for estimate in estimates])
        ax.errorbar(
            np.arange(len(buckets)) + offset, [estimate.value for estimate in estimates], yerr=half,
            elinewidth=1.2, ecolor=style.color,
            **style.line(linestyle="none", marker=style.marker, markersize=5.5, markeredgecolor="white"),
        )  # fmt: skip
    if ax.has_data():
        ax.axhline(1.0, **REFERENCE_LINE)
        ax.set_xticks(range(len(buckets)), [BUCKET_LABELS[bucket] for bucket in buckets])
        ax.set_xlim(-0.5, len(buckets) - 0.5)
        ax.set_ylim(bottom=0)
        ax.grid(axis="x", visible=False)


def _curve(ax: Axes, measured: Measurements, name: str, **line: Any) -> None:
    values = measured.per_step(name)
    ax.set_xlabel("Training step")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10], integer=True))
    defined = np.isfinite(values)
    if not defined.any():
        return
    if defined.sum() > MOST_POINTS_WITH_MARKERS:
        line = line | {"marker": ""}
    elif "marker" not in line:
        line = line | {"marker": "o"}
    ax.plot(measured.steps[defined], values[defined], **line)


def _band(ax: Axes, measured: Measurements, name: str) -> None:
    estimate = measured.estimate(name)
    if np.isfinite(estimate.low):
        ax.axhspan(estimate.low, estimate.high, color="black", alpha=0.12, linewidth=0, zorder=0)
