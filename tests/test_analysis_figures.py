"""Figures show the numbers of the table they are given, and are the same bytes whenever they are redrawn."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from analysis import figures
from analysis.runs import CELL, LoggedRuns
from analysis.style import RULE_STYLES, rule_styles, save
from trainers import metric_names as names

RULES = ("sequence", "token", "balanced")
STEPS = (1, 2, 3, 4)
BENCHMARKS = ("gen_long", "gen_short")


def logged_table(
    seeds: int = 1,
    rules: tuple[str, ...] = RULES,
    panels: tuple[tuple[str, str], ...] = (("qwen2", "chains"), ("qwen3", "stories")),
) -> pd.DataFrame:
    """A table as `load_runs` returns it, with values that tell every cell, metric and step apart."""
    rows = []
    for number, (rule, (model, dataset), seed) in enumerate(itertools.product(rules, panels, range(seeds))):
        base = {"run": f"run{number}", "rule": rule, "model": model, "dataset": dataset, "scope": "group", "seed": seed}
        shift = 0.01 * number
        per_step = {
            names.REWARD_MEAN: 0.3 + shift,
            names.GROUP_CV: 0.5 + shift,
            names.POS_LENGTH: 40 + number,
            names.NEG_LENGTH: 60 + 2 * number,
            names.SIGN_GAP: -20 - number,
            names.SIGN_GAP_REL: -0.4 - shift,
        }
        for other in RULES:
            per_step[names.positive_mass(other)] = 0.2
            per_step[names.negative_mass(other)] = 0.6 if other == "token" else 0.2
        rows += [base | {"metric": m, "step": t, "value": v + 0.001 * t} for m, v in per_step.items() for t in STEPS]
        for step in (0, STEPS[-1]):
            accuracies = {benchmark: 0.2 + 0.1 * i + shift + 0.05 * step for i, benchmark in enumerate(BENCHMARKS)}
            evaluated = {names.eval_avg(b, 4): a for b, a in accuracies.items()}
            evaluated[names.EVAL_MEAN] = float(np.mean(list(accuracies.values())))
            evaluated[names.eval_avg(names.HELDOUT, 8)] = 0.4 + shift + 0.1 * (step > 0)
            rows += [base | {"metric": m, "step": step, "value": v} for m, v in evaluated.items()]
    return pd.DataFrame(rows)


def loaded(table: pd.DataFrame) -> LoggedRuns:
    return LoggedRuns(table[["run", *CELL]].drop_duplicates(), table)


def draw_figure(name: str, table: pd.DataFrame, notes: tuple[str, ...] = ()) -> Figure:
    drawing = figures.FIGURES[name]
    return drawing.draw(drawing.table(loaded(table)), notes)


def curve(table: pd.DataFrame, metric: str, rule: str, model: str, seed: int = 0) -> list[float]:
    chosen = table[(table.metric == metric) & (table.rule == rule) & (table.model == model) & (table.seed == seed)]
    return list(chosen.sort_values("step").value)


def lines(ax: Axes, rule: str) -> list[list[float]]:
    label = RULE_STYLES[rule].label
    return [list(line.get_ydata()) for line in ax.lines if line.get_label() == label]


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def text_of(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


@pytest.mark.parametrize(
    ("draw", "metric"),
    [
        (figures.reward, names.REWARD_MEAN),
        (figures.group_cv, names.GROUP_CV),
        (figures.benchmark_accuracy, names.EVAL_MEAN),
        (figures.heldout_accuracy, names.eval_avg(names.HELDOUT, 8)),
    ],
)
def test_one_seed_is_drawn_as_logged(draw, metric):
    table = logged_table()
    figure = draw(table)
    for ax, model in zip(figure.axes, ("qwen2", "qwen3"), strict=True):
        assert title(ax).startswith(model) and title(ax).endswith("(n = 1)")
        for rule in RULES:
            assert lines(ax, rule) == [curve(table, metric, rule, model)]
        assert ax.get_ylim()[0] == 0
        assert not ax.collections
    assert "n = 1 seed per rule" in text_of(figure)


def test_two_seeds_are_two_lines_and_three_are_a_mean_with_its_interval():
    two = figures.reward(logged_table(seeds=2)).axes[0]
    assert len(lines(two, "token")) == 2 and not two.collections
    table = logged_table(seeds=3)
    figure = figures.reward(table)
    [mean] = lines(figure.axes[0], "token")
    by_seed = [curve(table, names.REWARD_MEAN, "token", "qwen2", seed) for seed in range(3)]
    assert mean == pytest.approx(np.mean(by_seed, axis=0), rel=1e-12)
    assert len(figure.axes[0].collections) == len(RULES)
    half_width = 4.302653 * np.std([row[0] for row in by_seed], ddof=1) / np.sqrt(3)
    band = figure.axes[0].collections[1].get_paths()[0].vertices
    at_first_step = band[band[:, 0] == 1][:, 1]
    assert (at_first_step.min(), at_first_step.max()) == pytest.approx(
        (mean[0] - half_width, mean[0] + half_width), rel=1e-6
    )
    assert "95 % t interval" in text_of(figure)


def test_lengths_of_both_signs_share_a_scale():
    table = logged_table()
    figure = figures.length_by_sign(table)
    positive, negative = figure.axes[:2]
    assert lines(positive, "balanced") == [curve(table, names.POS_LENGTH, "balanced", "qwen2")]
    assert lines(negative, "balanced") == [curve(table, names.NEG_LENGTH, "balanced", "qwen2")]
    assert positive.get_ylim() == negative.get_ylim() and positive.get_ylim()[0] == 0
    assert positive.get_ylabel() == "Mean length (tokens)"


def test_gap_has_its_zero_line_in_view():
    table = logged_table()
    tokens, relative = figures.sign_gap(table).axes[:2]
    assert lines(tokens, "token") == [curve(table, names.SIGN_GAP, "token", "qwen2")]
    assert lines(relative, "token") == [curve(table, names.SIGN_GAP_REL, "token", "qwen2")]
    for ax in (tokens, relative):
        assert [0, 0] in [list(line.get_ydata()) for line in ax.lines]
        assert ax.get_ylim()[0] < 0 < ax.get_ylim()[1]


def test_sign_mass_is_drawn_for_every_rule_whatever_rule_trained():
    table = logged_table(rules=("sequence", "balanced"))
    figure = figures.sign_mass(table)
    assert len(figure.axes) == 2 * 2
    trained_with_balanced = figure.axes[1]
    for rule in RULES:
        positive = curve(table, names.positive_mass(rule), "balanced", "qwen2")
        negative = curve(table, names.negative_mass(rule), "balanced", "qwen2")
        assert lines(trained_with_balanced, rule) == [positive, [-value for value in negative]]


def test_negative_share_is_of_the_mass_under_the_rule_that_trained():
    table = logged_table()
    ax = figures.negative_share(table).axes[0]
    expected = [(0.6 + 0.001 * t) / (0.8 + 0.002 * t) for t in STEPS]
    assert lines(ax, "token") == [pytest.approx(expected, rel=1e-12)]
    assert lines(ax, "balanced") == [[0.5] * 4]
    tied = table.assign(value=table.value.where(~table.metric.str.startswith("balance/"), 0.0))
    assert lines(figures.negative_share(tied).axes[0], "token") == [[]]


def test_final_accuracy_shows_the_last_step_and_the_base_model():
    table = logged_table()
    figure = draw_figure("final_accuracy", table)
    ax = figure.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "gen_long @4", "gen_short @4", "mean of the above", "held-out @8",
    ]  # fmt: skip
    metrics = [
        names.eval_avg("gen_long", 4),
        names.eval_avg("gen_short", 4),
        names.EVAL_MEAN,
        names.eval_avg("heldout", 8),
    ]
    for rule in RULES:
        label = RULE_STYLES[rule].label
        points = [line.get_xdata()[0] for line in ax.lines if line.get_label() == label]
        assert points == [curve(table, metric, rule, "qwen2")[-1] for metric in metrics]
    bars = [collection.get_segments()[0][0][0] for collection in ax.collections]
    base = [np.mean([curve(table, metric, rule, "qwen2")[0] for rule in RULES]) for metric in metrics]
    assert bars == pytest.approx(base, rel=1e-12)
    assert ax.get_xlim()[0] == 0


def test_final_accuracy_of_three_seeds_has_intervals():
    table = logged_table(seeds=3)
    ax = draw_figure("final_accuracy", table).axes[0]
    bars = [container for container in ax.containers if isinstance(container, ErrorbarContainer)]
    assert len(bars) == 4 * len(RULES)
    finals = [curve(table, names.eval_avg("gen_long", 4), "sequence", "qwen2", seed)[-1] for seed in range(3)]
    half_width = 4.302653 * np.std(finals, ddof=1) / np.sqrt(3)
    [[left, right]] = [segment[:, 0] for segment in bars[0].lines[2][0].get_segments()]
    assert (left, right) == pytest.approx((np.mean(finals) - half_width, np.mean(finals) + half_width), rel=1e-6)


def rows_of(ax: Axes, rule: str) -> list[tuple[list[float], float]]:
    """Values and height of each row's points of a rule, from the top."""
    label = RULE_STYLES[rule].label
    found = [(list(line.get_xdata()), float(line.get_ydata()[0])) for line in ax.lines if line.get_label() == label]
    return sorted(found, key=lambda row: row[1])


def test_differences_are_to_sequence_at_the_same_seed():
    table = logged_table(seeds=2)
    ax = draw_figure("accuracy_difference", table).axes[0]
    for rule in ("token", "balanced"):
        for (points, _), model in zip(rows_of(ax, rule), ("qwen2", "qwen3"), strict=True):
            ours = [curve(table, names.EVAL_MEAN, rule, model, seed)[-1] for seed in range(2)]
            theirs = [curve(table, names.EVAL_MEAN, "sequence", model, seed)[-1] for seed in range(2)]
            assert points == pytest.approx(np.subtract(ours, theirs), abs=1e-12)
    assert rows_of(ax, "sequence") == []
    assert [label.get_text() for label in ax.get_yticklabels()] == ["qwen2 · chains", "qwen3 · stories"]


def test_a_drop_is_the_best_checkpoint_less_the_last():
    table = logged_table(seeds=2)
    falls = (table.metric == names.EVAL_MEAN) & (table.rule == "token") & (table.step == STEPS[-1])
    table.loc[falls, "value"] = 0.1 + 0.05 * table.seed
    ax = draw_figure("peak_to_last", table).axes[0]
    peaks = [curve(table, names.EVAL_MEAN, "token", "qwen2", seed)[0] for seed in range(2)]
    assert rows_of(ax, "token")[0][0] == pytest.approx([peaks[0] - 0.1, peaks[1] - 0.15], abs=1e-12)
    assert rows_of(ax, "balanced")[0][0] == [0.0, 0.0]


def lengths_table(**changes: int) -> pd.DataFrame:
    """Rollouts of one run at three steps: three right responses of 10 tokens, one wrong one of 30."""
    cell = {"run": "r", "rule": "token", "model": "m", "dataset": "d", "scope": "group", "seed": 0} | changes
    rows = [(step, sign, length, count) for step in (1, 20, 40) for sign, length, count in ((1, 10, 3), (-1, 30, 1))]
    return pd.DataFrame([cell | dict(zip(("step", "sign", "length", "count"), row, strict=True)) for row in rows])


def test_histograms_show_shares_of_a_rule_with_negative_responses_downwards():
    figure = figures.length_histograms(lengths_table())
    assert [title(ax).split("\n")[1] for ax in figure.axes] == ["early: step 1", "middle: step 20", "late: step 40"]
    upwards, downwards = figure.axes[0].patches
    assert upwards.get_data().values.sum() == pytest.approx(0.75) and upwards.get_data().values.min() == 0
    assert downwards.get_data().values.sum() == pytest.approx(-0.25)
    edges = downwards.get_data().edges
    [place] = np.flatnonzero(downwards.get_data().values)
    assert edges[place] <= 30 <= edges[place + 1]
    assert "10 to 10 tokens with A > 0 and 30 to 30 tokens with A < 0" in text_of(figure)


def test_histograms_without_a_middle_step_have_two_columns():
    table = lengths_table()
    assert len(figures.length_histograms(table[table.step != 20]).axes) == 2


def regime_table(margins: list[float]) -> pd.DataFrame:
    num = len(margins)
    axes = {"model": [f"m{place}" for place in range(num)], "dataset": "d", "scope": "group", "seeds": 1}
    lengths = {"gap": np.linspace(-0.4, 0.1, num), "cv": np.linspace(0.2, 0.6, num)}
    advantage = {"mean": np.linspace(-0.02, 0.03, num), "low": np.nan, "high": np.nan, "over": ""}
    return pd.DataFrame(axes | lengths | advantage | {"margin": margins})


def test_regime_map_places_and_numbers_every_panel():
    table = regime_table([0.01, -0.005, 0.02])
    figure = figures.regime_map(table)
    for ax, x in zip(figure.axes, ("gap", "cv"), strict=True):
        [points] = [found for found in ax.collections if len(found.get_offsets()) == 3]
        assert np.asarray(points.get_offsets()) == pytest.approx(table[[x, "mean"]].to_numpy())
        assert [text.get_text() for text in ax.texts] == ["1 (+0.010)", "2 (−0.005)", "3 (+0.020)"]
    assert figure.axes[0].get_xlabel() == "Relative sign-length gap"
    assert "1: m0 · d; 2: m1 · d; 3: m2 · d." in text_of(figure)
    assert (
        "Balanced is ahead of both others in 2 of 3 pairs of model and data set, its margin being −0.005 to +0.020"
        in text_of(figure)
    )


def test_regime_map_without_balanced_runs_has_no_margin():
    figure = figures.regime_map(regime_table([np.nan, np.nan]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["1", "2"]
    assert "Balanced is ahead" not in text_of(figure)


def test_a_rule_missing_from_one_panel_still_draws_with_its_note():
    table = logged_table()
    table = table[(table.rule != "token") | (table.model != "qwen3")]
    for name in figures.FIGURES:
        figure = draw_figure(name, table, ("Missing 1 of 6 cells: token on qwen3 · stories seed 0 (failed).",))
        assert "token on qwen3 · stories seed 0 (failed)." in text_of(figure)
    complete, partial = figures.reward(table).axes
    assert len(lines(complete, "token")) == 1 and lines(partial, "token") == []


def test_metrics_that_nobody_logged_say_so():
    table = logged_table(panels=(("a", "x"),))
    table = table[table.metric == names.REWARD_MEAN]
    for name in figures.FIGURES:
        said = [text.get_text() for text in draw_figure(name, table).axes[0].texts]
        assert said == ([] if name == "reward" else ["no values"])


def test_an_odd_number_of_panels_labels_every_lowest_axes():
    table = logged_table(panels=(("a", "x"), ("a", "y"), ("b", "x")))
    axes = figures.reward(table).axes
    assert [ax.get_xlabel() for ax in axes] == ["", "Training step", "Training step"]
    assert [title(ax) for ax in axes] == ["a · x  (n = 1)", "a · y  (n = 1)", "b · x  (n = 1)"]


def test_scopes_are_kept_apart():
    group = logged_table(panels=(("a", "x"),))
    batch = group.assign(scope="batch", run=group.run + "b", value=group.value + 1)
    axes = figures.reward(pd.concat([group, batch])).axes
    assert [title(ax) for ax in axes] == ["a · x · batch scope  (n = 1)", "a · x · group scope  (n = 1)"]
    assert lines(axes[1], "token") == [curve(group, names.REWARD_MEAN, "token", "a")]


def test_legend_names_each_rule_once_in_one_order():
    figure = figures.reward(logged_table())
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["sequence (GRPO)", "token (DAPO)", "balanced (BA)"]
    assert list(rule_styles(["newest", "balanced", "sequence"])) == ["sequence", "balanced", "newest"]


def test_rules_differ_in_line_style_and_in_grey():
    styles = list(RULE_STYLES.values())
    for one, other in itertools.combinations(styles, 2):
        assert one.linestyle != other.linestyle and one.marker != other.marker
    greys = sorted(float(np.dot(to_rgb(style.color), (0.299, 0.587, 0.114))) for style in styles)
    assert min(np.diff(greys)) > 0.05 and greys[-1] < 0.8


def test_redrawing_gives_the_same_bytes_and_embeds_fonts(tmp_path: Path):
    table = logged_table(seeds=3)
    first = [path.read_bytes() for path in save(figures.sign_gap(table), tmp_path / "first")]
    second = [path.read_bytes() for path in save(figures.sign_gap(table), tmp_path / "second")]
    assert first == second
    png, pdf = first
    assert png.startswith(b"\x89PNG") and b"Software" not in png
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf and b"CreationDate" not in pdf


def test_another_process_draws_the_same_bytes_without_heavy_imports(tmp_path: Path):
    logged_table().to_pickle(tmp_path / "table.pkl")
    script = (
        "import sys, pandas, pathlib; from analysis import figures, style; folder = pathlib.Path(sys.argv[1]);"
        "table = pandas.read_pickle(folder / 'table.pkl'); style.save(figures.reward(table), folder / 'there');"
        "print([name for name in ('torch', 'ray', 'transformers', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONHASHSEED": "12345"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
    for here in save(figures.reward(logged_table()), tmp_path / "here"):
        assert here.read_bytes() == (tmp_path / f"there{here.suffix}").read_bytes()
