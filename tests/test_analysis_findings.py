"""Sentences hold the numbers of the tables that they are about."""

import numpy as np
import pandas as pd
import pytest

from analysis import comparisons, findings
from analysis.runs import CELL, scores
from trainers import metric_names as names


def logged(values: dict[tuple[str, str, int], dict[int, float]], metric: str) -> pd.DataFrame:
    """(rule, dataset, seed) -> step -> value, as rows of logged metrics."""
    rows = [
        (f"{rule}-{dataset}-{seed}", rule, "m", dataset, "group", seed, metric, step, value)
        for (rule, dataset, seed), curve in values.items()
        for step, value in curve.items()
    ]
    return pd.DataFrame(rows, columns=["run", *CELL, "metric", "step", "value"])


def test_numbers_have_a_real_minus_and_no_negative_zero():
    assert findings.number(-0.1234) == "−0.123" and findings.number(-0.0001) == "0.000"
    assert findings.signed(0.02) == "+0.020" and findings.signed(0.0) == "0.000"
    assert findings.signed(-0.02) == "−0.020"
    assert findings.percent(0.614) == "61\u00a0%" and findings.count(1, "seed") == "1 seed"


def test_curves_from_their_first_to_their_last_tenth():
    curve = {step: 0.2 if step <= 2 else 0.5 if step < 19 else 0.8 for step in range(1, 21)}
    table = logged(
        {("token", "a", 0): curve, ("token", "a", 1): {step: 2 * v for step, v in curve.items()}}, "reward/mean"
    )
    assert findings.curve_ends(table, "Reward") == "Reward from the first to the last 2 steps: token 0.300 to 1.200."


def test_a_rule_that_lacks_a_panel_is_said_to():
    flat = {1: 0.5, 2: 0.5}
    values = {("sequence", "a", 0): flat, ("sequence", "b", 0): {1: 0.1, 2: 0.3}, ("token", "a", 0): flat}
    assert findings.curve_ends(logged(values, "reward/mean"), "Reward") == (
        "Reward from the first to the last step, mean over models and data sets: sequence 0.300 to 0.400, token 0.500 "
        "to 0.500 (1 of 2 pairs)."
    )


def test_accuracy_from_the_base_model_to_the_last_step():
    table = scores(logged({("balanced", "a", 0): {0: 0.4, 20: 0.9, 40: 0.7}}, names.EVAL_MEAN))
    assert (
        findings.accuracy_gain(table, "Accuracy")
        == "Accuracy from the base model to the last step: balanced 0.400 to 0.700."
    )


def accuracy(values: dict[tuple[str, str], float]) -> pd.DataFrame:
    rows = [("m", data, "group", rule, "mean", mean) for (rule, data), mean in values.items()]
    return pd.DataFrame(rows, columns=["model", "dataset", "scope", "rule", "benchmark", "mean"])


def test_the_best_rule_is_counted_and_ties_count_for_each():
    table = accuracy({("sequence", "a"): 0.5, ("token", "a"): 0.52, ("sequence", "b"): 0.6, ("token", "b"): 0.6})
    assert findings.best_rules(table) == (
        "Highest mean accuracy among 2 pairs of model and data set (ties count for each): sequence in 1 and token in "
        "2. The highest rule is 0.000 to 0.020 above the lowest."
    )
    assert findings.best_rules(accuracy({("token", "a"): 0.5})) == ""


def compared(rows: list[tuple[float, float, float]]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["mean", "low", "high"])
    return table.assign(rule="token", baseline="sequence")


def test_differences_count_the_intervals_without_zero():
    some = compared([(0.02, 0.01, 0.03), (-0.01, -0.02, 0.001), (0.0, np.nan, np.nan)])
    assert findings.differences(some) == (
        "Mean accuracy of token minus that of sequence: −0.010 to +0.020, and 1 of 2 intervals without zero (3 pairs "
        "of model and data set)."
    )
    assert findings.differences(compared([(0.02, np.nan, np.nan)])) == (
        "Mean accuracy of token minus that of sequence: +0.020 (1 pair of model and data set)."
    )


def test_lengths_name_their_extreme_panels():
    table = pd.concat(
        [
            logged({("token", "a", 0): {1: 10.0}, ("token", "b", 0): {1: 20.0}}, names.POS_LENGTH),
            logged({("token", "a", 0): {1: 16.0}, ("token", "b", 0): {1: 20.0}}, names.NEG_LENGTH),
        ]
    )
    assert findings.length_ratio(table) == (
        "Over all steps and runs, responses with A < 0 are 1.00 times (m · b) to 1.60 times (m · a) as long as those "
        "with A > 0."
    )
    gap = logged({("token", "a", 0): {1: -0.4, 2: -0.2}}, names.SIGN_GAP_REL)
    assert findings.gap(gap) == "Mean relative sign-length gap over all steps and runs: −0.300."


def test_medians_are_over_responses_not_over_rows():
    rows = [(1, 1, 10, 5), (1, 1, 90, 1), (1, -1, 50, 1), (9, 1, 20, 2), (9, 1, 30, 4), (9, -1, 70, 3)]
    table = pd.DataFrame(rows, columns=["step", "sign", "length", "count"]).assign(run="r")
    assert findings.histograms(table) == (
        "Median length from the first to the last of these steps, over all runs: 10 to 30 tokens with A > 0 and 50 to "
        "70 tokens with A < 0."
    )


def test_noise_of_the_mean_over_benchmarks():
    rows = [("r", "x", 100, 0.03), ("r", "y", 50, 0.04), ("r", names.HELDOUT, 10, 0.9)]
    table = pd.DataFrame(rows, columns=["run", "benchmark", "problems", "se"])
    assert "(150 problems) has a standard error of 0.025 over problems alone" in findings.problem_noise(table)


def test_correlations_come_with_their_interval_or_with_why_there_is_none():
    gaps = {"gap": [-0.4, -0.2, 0.0, 0.1], "cv": [0.3, 0.2, 0.5, 0.3], "mean": [-0.02, -0.01, 0.0, 0.004]}
    table = pd.DataFrame(gaps).assign(margin=[0.01, 0.0, -0.01, 0.02])
    found = comparisons.regime_correlations(table)["gap"]
    expected = f"relative gap r = {found.estimate:+.2f} (95 % interval {found.low:+.2f} to {found.high:+.2f})"
    assert expected.replace("-", "−") in findings.regimes(table)
    assert (
        "Balanced is ahead of both others in 2 of 4 pairs of model and data set, its margin being −0.010 to +0.020."
        in findings.regimes(table)
    )
    assert "(an interval takes 4)" in findings.regimes(table.iloc[:3])


@pytest.mark.parametrize(
    ("seeds", "over", "expected"),
    [
        ([1, 1], ["", ""], "n = 1 seed: these are single runs, and no interval is given below 3."),
        ([2, 2], ["", ""], "n = 2 seeds: each is shown by itself, and no interval is given below 3."),
        ([3, 3], ["seeds"] * 2, "n = 3 seeds; bars: 95 % interval over new seeds, same problems."),
        ([5, 5], ["seeds and problems"] * 2, "n = 5 seeds; bars: 95 % interval over new seeds and new problems."),
        (
            [2, 4],
            ["", "seeds"],
            "n = 2 to 4 seeds; bars: 95 % interval over new seeds, same problems; each seed by itself where there are "
            "fewer than 3.",
        ),
    ],
)
def test_seeds_and_what_intervals_are_over(seeds: list[int], over: list[str], expected: str):
    assert findings.seeds_and_interval(pd.Series(seeds), over) == expected


def test_nothing_logged_says_nothing():
    empty = logged({}, "x")
    assert findings.curve_ends(empty, "") == findings.gap(empty) == findings.variation(empty) == ""
    assert findings.length_ratio(empty) == findings.own_share(empty) == findings.accuracy_gain(scores(empty), "") == ""
    assert findings.counterfactual_share(empty, ["token"]) == ""
