"""Comparisons of rules, on studies whose truth is planted."""

import numpy as np
import pandas as pd
import pytest

from analysis import comparisons
from analysis.runs import LoggedRuns, in_panel
from analysis.statistics import mean_interval, seeds_and_problems_interval
from analysis.synthetic import Lengths, Study, draw_study

PANEL = ("gapped", "chains", "group")
STUDY = Study(seeds=4, datasets=("chains",), effects={"balanced": 0.05, "token": -0.04}, drops={"token": 0.08}, steps=8)


@pytest.fixture(scope="module")
def loaded() -> LoggedRuns:
    return draw_study(STUDY)


def without_problems(loaded: LoggedRuns) -> LoggedRuns:
    return loaded._replace(problems=loaded.problems.iloc[:0])


def scores(loaded: LoggedRuns, rule: str) -> pd.DataFrame:
    found = in_panel(loaded.problems[loaded.problems.rule == rule], PANEL)
    found = found[found.benchmark != "heldout"]
    return found.pivot(index="seed", columns=["benchmark", "problem"], values="score")


def test_intervals_are_over_problems_where_their_scores_were_logged(loaded: LoggedRuns):
    table = comparisons.final_accuracy(loaded)
    found = in_panel(table, PANEL).set_index(["rule", "benchmark"]).loc[("token", "mean")]
    of_problems = scores(loaded, "token")
    expected = seeds_and_problems_interval(of_problems.to_numpy(), of_problems.columns.get_level_values("benchmark"))
    assert (found["mean"], found.low, found.high) == pytest.approx(expected, rel=1e-9)
    assert found.over == comparisons.SEEDS_AND_PROBLEMS and found.seeds == 4
    assert found["mean"] == pytest.approx(np.mean(found["values"]), abs=1e-9)


def test_intervals_are_over_seeds_where_no_scores_were_logged(loaded: LoggedRuns):
    table = comparisons.final_accuracy(without_problems(loaded))
    found = in_panel(table, PANEL).set_index(["rule", "benchmark"]).loc[("token", "long")]
    assert (found["mean"], found.low, found.high) == pytest.approx(mean_interval(found["values"]), rel=1e-9)
    assert found.over == comparisons.SEEDS


def test_scores_that_are_not_those_of_the_logged_mean_are_not_used(loaded: LoggedRuns):
    partial = loaded._replace(problems=loaded.problems[loaded.problems.benchmark != "long"])
    table = comparisons.final_accuracy(partial).set_index(["rule", "benchmark", "model"])
    assert table.over["token", "mean", "gapped"] == comparisons.SEEDS
    assert table.over["token", "short", "gapped"] == comparisons.SEEDS_AND_PROBLEMS


def test_differences_pair_seeds_and_problems(loaded: LoggedRuns):
    table = comparisons.differences(loaded)
    found = in_panel(table, PANEL).set_index("rule").loc["balanced"]
    paired = scores(loaded, "balanced") - scores(loaded, "sequence")
    expected = seeds_and_problems_interval(paired.to_numpy(), paired.columns.get_level_values("benchmark"))
    assert (found["mean"], found.low, found.high) == pytest.approx(expected, rel=1e-9)
    assert found.low < 0.05 < found.high
    assert found["mean"] == pytest.approx(np.mean(found["values"]), abs=1e-9)


def test_differences_use_the_seeds_that_both_rules_have(loaded: LoggedRuns):
    metrics = loaded.metrics
    metrics = metrics[(metrics.rule != "sequence") | (metrics.seed > 0)]
    table = comparisons.differences(loaded._replace(metrics=metrics))
    found = in_panel(table, PANEL).set_index("rule").loc["token"]
    assert found.seeds == 3 and len(found["values"]) == 3
    alone = comparisons.differences(loaded._replace(metrics=metrics[metrics.rule != "sequence"]))
    assert set(alone.baseline) == {"token"} and set(alone.rule) == {"balanced"}


def test_overall_covers_what_was_planted(loaded: LoggedRuns):
    table = comparisons.overall(without_problems(loaded)).set_index("rule")
    for rule, truth in (("token", 0.51), ("balanced", 0.6), ("sequence", 0.55)):
        assert table.mean_low[rule] - 0.03 < truth < table.mean_high[rule] + 0.03
    assert table.difference_low["token"] < -0.04 < table.difference_high["token"]
    assert table.difference["token"] < 0 < table.difference["balanced"]


def test_peaks_find_the_planted_drop(loaded: LoggedRuns):
    table = comparisons.peaks(loaded)
    drops = table.groupby("rule")["drop"].mean()
    assert drops["token"] == pytest.approx(0.08, abs=0.03) and drops["sequence"] < 0.03
    assert set(table.peak_step[table.rule == "token"]) == {6} and set(table.last_step) == {8}
    assert set(table.checkpoints) == {4}
    compared = comparisons.drop_differences(table).set_index(["model", "rule"])
    assert compared.low["gapped", "token"] < 0.08 < compared.high["gapped", "token"]


def test_negative_share_is_that_of_the_mean_lengths():
    found = comparisons.negative_share(draw_study(STUDY).metrics, "token")
    shares = found.groupby("model")["value"].mean()
    # With 0/1 rewards the masses are as the mean lengths: 1 - gap/2 to 1 + gap/2.
    assert shares["gapped"] == pytest.approx(1.2 / 2, abs=0.02)
    assert shares["even"] == pytest.approx(0.5, abs=0.02)
    same = comparisons.negative_share(draw_study(STUDY).metrics, "balanced")
    assert same.value.dropna().to_numpy() == pytest.approx(0.5, abs=1e-9)


def test_regimes_hold_the_planted_lengths_and_the_advantage():
    study = Study(
        models={"short": Lengths(gap=0.2, cv=0.2, limit=1000), "long": Lengths(gap=-0.4, cv=0.2, limit=1000)},
        datasets=("d",), seeds=2, steps=30, effects={"balanced": 0.1}, num_groups=60,
    )  # fmt: skip
    loaded = draw_study(study)
    table = comparisons.regimes(loaded).set_index("model")
    # Relative to its mean a group of few right responses has another gap: hence the width.
    assert table.gap["short"] == pytest.approx(0.2, abs=0.03) and table.gap["long"] == pytest.approx(-0.4, abs=0.04)
    # 0.2 within one sign and half the gap between the two, less what a std of eight falls short.
    assert 0.18 < table.cv["short"] < 0.22 < table.cv["long"] < 0.3
    means = comparisons.final_accuracy(loaded).set_index(["model", "benchmark", "rule"])["mean"]["long", "mean"]
    assert table["mean"]["long"] == pytest.approx(means["token"] - means["sequence"])
    assert table.margin["long"] == pytest.approx(means["balanced"] - max(means["token"], means["sequence"]))
    assert table.margin["long"] == pytest.approx(0.1, abs=0.05)


def test_correlations_are_over_panels():
    table = pd.DataFrame(
        {"gap": [-0.4, -0.2, 0.0, 0.1], "cv": [0.5, 0.5, 0.5, 0.5], "mean": [-0.02, -0.01, 0.0, 0.004]}
    )
    found = comparisons.regime_correlations(table)
    assert found["gap"].estimate == pytest.approx(np.corrcoef(table.gap, table["mean"])[0, 1])
    assert found["gap"].low < found["gap"].estimate < found["gap"].high
    assert np.isnan(found["cv"].estimate)


def test_nothing_in_common_gives_empty_tables():
    study = Study(rules=("balanced",), datasets=("d",), seeds=1, steps=4)
    loaded = draw_study(study)
    assert comparisons.differences(loaded).empty and comparisons.regimes(loaded).empty
    assert comparisons.drop_differences(comparisons.peaks(loaded)).empty
    assert comparisons.overall(loaded).rule.tolist() == ["balanced"]
