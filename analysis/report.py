"""The report: one self-contained page with every figure, every table and where the numbers come from.

Everything is inside the file: style, figures (SVG), tables. Equal runs give equal bytes.
"""

import base64
import html
import importlib.metadata
import io
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from analysis import comparisons, findings, runs
from analysis.figures import FIGURES
from analysis.layout import TITLE, WordedFigure, Words
from analysis.runs import LoggedRuns
from analysis.statistics import MIN_SEEDS
from analysis.style import RuleStyle, look, rule_styles
from analysis.tables import Table, tables, to_html
from trainers import metric_names

STYLE_SHEET = Path(__file__).with_name("report.css")
MOST_SVG_BYTES = 1_000_000
"""A drawing with more curves than this is embedded as PNG."""
DRAWN_WITH = ("balagg", "matplotlib", "numpy", "pandas", "scipy")

SECTIONS = {
    "Accuracy": ("benchmark_accuracy", "final_accuracy", "accuracy_difference", "table_1", "differences", "overall"),
    "Stability": ("peak_to_last", "stability"),
    "Response lengths": ("length_by_sign", "sign_gap", "group_cv", "length_histograms"),
    "Balance of the update": ("sign_mass", "negative_share"),
    "Which rule wins where": ("regime_map",),
    "Training": ("reward", "heldout_accuracy"),
}
"""Figures and tables by name, in the order of reading."""
SUMMARY = ("benchmark_accuracy", "final_accuracy", "accuracy_difference", "peak_to_last", "sign_gap", "negative_share")
"""The figures whose findings open the page."""

WEIGHTS = {
    "sequence": "1 / (G · nᵢ)",
    "token": "1 / Σⱼ nⱼ",
    "balanced": "(|S| / G) / T, where S are the responses whose advantage has the sign of i's, and T their tokens",
    "constant": "1 / (G · L), where L is the length limit",
}


def write_report(tracking_uri: str, experiment: str, out_dir: Path) -> Path:
    """Write `out_dir/index.html` about one MLflow experiment and return its path.

    Raises:
        ValueError: there is no such database or experiment, or no cell in it has finished.
    """
    page = report_page(runs.load_runs(tracking_uri, experiment), experiment)
    out_dir.mkdir(parents=True, exist_ok=True)
    path, partial = out_dir / "index.html", out_dir / "index.html.partial"
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
    return path


def report_page(loaded: LoggedRuns, title: str) -> str:
    """The whole page as text."""
    figures = {name: drawing.draw(drawing.table(loaded), ()) for name, drawing in FIGURES.items()}
    blocks = {name: _figure(name, figure) for name, figure in figures.items()}
    blocks |= {table.name: _table(table) for table in tables(loaded)}
    sections = "".join(
        f'<section><h2 id="{_anchor(heading)}">{heading}</h2>{"".join(blocks[name] for name in names)}</section>'
        for heading, names in SECTIONS.items()
    )
    links = " ".join(f'<a href="#{_anchor(heading)}">{heading}</a>' for heading in (*SECTIONS, "Provenance"))
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>\n{STYLE_SHEET.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><header><h1>{_text(title)}</h1><p>{_text(_scope(loaded))}</p>{_notes(loaded)}"
        f'<nav>{links}</nav><p class="quiet hint"></p></header>\n<main>'
        f"{_summary(loaded, figures)}{_rules(loaded)}{sections}{_provenance(loaded)}</main></body></html>\n"
    )


def _scope(loaded: LoggedRuns) -> str:
    """What was run, in two sentences."""
    finished = loaded.params[loaded.params.status == runs.FINISHED]
    steps = (
        loaded.metrics[loaded.metrics.metric == metric_names.REWARD_MEAN].groupby("run", observed=True)["step"].max()
    )
    axes = [
        f"{findings.count(len(values), noun)} ({', '.join(values)})"
        for noun, values in (
            ("aggregation rule", comparisons.rules_of(finished)),
            ("model", sorted(finished.model.unique())),
            ("data set", sorted(finished.dataset.unique())),
        )
    ]
    text = f"{findings.count(len(finished), 'finished run')}: {'; '.join(axes)}; {findings.seeds_per_rule(finished)}"
    trained = f" {_span(steps)} training steps each." if len(steps) else ""
    return (
        "How should the token-level terms of a GRPO group be aggregated? Rules are compared within a model and a data "
        f"set, seed by seed. {text}{trained}"
    )


def _summary(loaded: LoggedRuns, figures: dict[str, WordedFigure]) -> str:
    found = [(figures[name].words, name) for name in SUMMARY if figures[name].words.finding]
    items = [f'<li>{_text(words.finding)} <a href="#{name}">{_text(words.title)}</a></li>' for words, name in found]
    noise = findings.problem_noise(loaded.evaluations)
    items += [f"<li>{_text(noise)}</li>"] if noise else []
    return f'<section><h2 id="section-found">What was found</h2><ul>{"".join(items)}</ul></section>'


def _rules(loaded: LoggedRuns) -> str:
    """Which line is which rule, and what the rule does."""
    styles = rule_styles(comparisons.rules_of(loaded.metrics))
    rows = "".join(
        f'<tr><td><img class="swatch" alt="line style of {_text(rule)}" src="{_swatch(style)}"></td>'
        f'<td class="name">{_text(style.label)}</td><td>{_text(WEIGHTS.get(rule, ""))}</td></tr>'
        for rule, style in styles.items()
    )
    return (
        '<section><h2 id="section-rules">The rules</h2>'
        "<p>A rule gives a weight to every token of response i, which has nᵢ tokens, in a group of G responses to one "
        "prompt. A is a response's advantage: its reward minus the group's mean, over their standard deviation. In a "
        "grey print dashes and markers tell the rules apart.</p>"
        '<div class="scroll" tabindex="0"><table><thead><tr><th>in figures</th><th>rule</th>'
        f"<th>weight of each token of response i</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _figure(name: str, figure: WordedFigure) -> str:
    words = figure.words
    finding = f'<p class="finding">{_text(words.finding)}</p>' if words.finding else ""
    return (
        f'<figure id="{name}"><h3>{_text(words.title)}</h3>'
        f'<div class="scroll drawing" tabindex="0"><img alt="{_text(_spoken(words))}" src="{_embedded(figure)}"></div>'
        f"<figcaption>{finding}<p>{_text(words.caption)}</p></figcaption></figure>"
    )


def _spoken(words: Words) -> str:
    return f"{words.title}. {words.finding or words.caption}"


def _table(table: Table) -> str:
    return (
        f'<section id="{table.name}"><h3>{_text(table.title)}</h3>'
        f'<div class="scroll" tabindex="0">{to_html(table)}</div>'
        f'<p class="caption">{_text(table.caption)}</p></section>'
    )


def _notes(loaded: LoggedRuns) -> str:
    notes = runs.notes(loaded)
    return f'<div class="notes">{"".join(f"<p>{_text(note)}</p>" for note in notes)}</div>' if notes else ""


def _provenance(loaded: LoggedRuns) -> str:
    """Commits, versions and configurations behind the numbers."""
    params = loaded.params
    facts = {"commit of the runs": _values(params, runs.TAG + runs.COMMIT)}
    if runs.TAG + runs.DIRTY in params and (params[runs.TAG + runs.DIRTY] == "true").any():
        facts["commit of the runs"] += " (with uncommitted changes in some)"
    prefix = runs.TAG + runs.VERSION
    facts |= {
        f"{name.removeprefix(prefix)}, runs": _values(params, name)
        for name in sorted(params.columns)
        if name.startswith(prefix)
    }
    facts |= {f"{name}, report": importlib.metadata.version(name) for name in DRAWN_WITH}
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td><code>{_text(text)}</code></td></tr>" for name, text in facts.items()
    )
    cells = "".join(
        f"<tr><td><code>{_text(cell.name)}</code></td><td>{_text(str(cell.status).lower())}</td>"
        f"<td>{_text(_time(cell.started))}</td><td><code>{_text(cell.run)}</code></td></tr>"
        for cell in runs.rows(params)
    )
    return (
        '<section><h2 id="section-provenance">Provenance</h2>'
        "<p>All numbers were read from MLflow. A cell's name ends with the hash of its resolved configuration, which "
        "its MLflow run holds as <code>config.json</code>.</p>"
        f'<div class="scroll" tabindex="0"><table><tbody>{rows}</tbody></table></div>'
        f"<details><summary>{findings.count(len(params), 'cell')}</summary>"
        '<div class="scroll" tabindex="0"><table><thead><tr><th>cell</th><th>state</th><th>started (UTC)</th>'
        f"<th>MLflow run</th></tr></thead><tbody>{cells}</tbody></table></div></details>"
        f"{_method(loaded)}</section>"
    )


def _method(loaded: LoggedRuns) -> str:
    problems = (
        "Where the score of every problem was logged, intervals of accuracies are over new seeds and new problems "
        "(two-way random effects, Satterthwaite's degrees of freedom); else over new seeds on the same problems."
        if len(loaded.problems)
        else "No run logged the score of every problem, so all intervals are over new seeds on the same problems."
    )
    return (
        f"<h3>Intervals</h3><p>All intervals are at 95 %, and none is given with fewer than {MIN_SEEDS} seeds. "
        "Means and paired differences have Student's t intervals over seeds; means over panels add the panels' "
        f"variances (Welch). {problems} Interquartile means have jackknife t intervals, leaving out one seed at a "
        "time; those of probabilities and correlations are exact for normally distributed values.</p>"
    )


def _values(params: pd.DataFrame, name: str) -> str:
    found = sorted(map(str, params[name].dropna().unique())) if name in params else []
    return ", ".join(found) or "not recorded"


def _time(milliseconds: float) -> str:
    moment = pd.to_datetime(milliseconds, unit="ms", errors="coerce")
    return "" if pd.isna(moment) else f"{moment:%Y-%m-%d %H:%M}"


def _span(steps: Iterable[int]) -> str:
    low, high = min(steps), max(steps)
    return str(low) if low == high else f"{low} to {high}"


@look()
def _embedded(figure: WordedFigure) -> str:
    """The figure without its foot of text, as a data URI."""
    for text in figure.texts:  # the page says it
        text.set_visible(False)
    width, height = figure.get_size_inches()
    return _data_uri(figure, Bbox([[0, figure.foot], [width, height - TITLE]]))


@look()
def _swatch(style: RuleStyle) -> str:
    """A rule's line and marker."""
    figure = Figure(figsize=(0.9, 0.2))
    figure.add_artist(Line2D([0.04, 0.5, 0.96], [0.5] * 3, marker=style.marker, markevery=[1], **style.line()))
    return _data_uri(figure)


def _data_uri(figure: Figure, crop: Bbox | None = None) -> str:
    svg = _saved(figure, "svg", crop, {"Date": None, "Creator": None})
    if len(svg) <= MOST_SVG_BYTES:
        return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    png = _saved(figure, "png", crop, {"Software": None})
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _saved(figure: Figure, kind: str, crop: Bbox | None, metadata: dict[str, None]) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, bbox_inches=crop, transparent=True, metadata=metadata)
    return file.getvalue()


def _anchor(heading: str) -> str:
    return f"section-{heading.lower().replace(' ', '-')}"


def _text(text: str) -> str:
    return html.escape(text)
