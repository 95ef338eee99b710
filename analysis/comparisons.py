"""What the study compares, worked out once for figures, tables and captions: logged runs in, one table out.

Rules are compared inside a panel (model, data set, scope) and seed by seed: the same seed means the same problems in
the same order. Intervals are over new seeds, or over new seeds and new problems where the runs logged the score of
every problem (see `analysis.artifacts`); the column `over` says which.
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis import runs
from analysis.runs import PANEL, LoggedRuns
from analysis.statistics import (
    Interval,
    correlation,
    improvement_probability,
    interquartile_mean_interval,
    mean_interval,
    mean_of_means_interval,
    peak_to_last,
    seeds_and_problems_interval,
)
from analysis.style import rule_styles
from trainers import metric_names

BASELINE = "sequence"
"""Standard GRPO; where no run used it, the first rule in the order of legends."""
SEEDS = "seeds"
SEEDS_AND_PROBLEMS = "seeds and problems"
NO_INTERVAL = ""

Values = dict[int, float]
"""Seed -> value."""
ProblemScores = dict[tuple[str, ...], pd.DataFrame]
"""(model, dataset, scope, rule) -> scores by seed and problem."""


def rules_of(table: pd.DataFrame) -> list[str]:
    """The rules of a table in the order of legends."""
    return list(rule_styles([str(rule) for rule in table.rule.unique()]))


def baseline_of(table: pd.DataFrame) -> str:
    """The rule that the others are compared with."""
    rules = rules_of(table)
    return BASELINE if BASELINE in rules else rules[0]


def final_accuracy(loaded: LoggedRuns) -> pd.DataFrame:
    """Accuracy at the last step, by panel, rule and benchmark.

    Columns: model, dataset, scope, rule, benchmark (`mean`: over the benchmarks; `heldout`: the data set's own split),
    k (samples per problem), step ("a-b" where runs differ), seeds (how many), mean, low, high, over, base (before
    training, mean over the panel's runs), values (one per seed, a tuple).
    """
    final, base = runs.final_scores(loaded.metrics), runs.base_scores(loaded.metrics)
    before = base.groupby([*PANEL, "benchmark"], observed=True)["value"].mean()
    problems = _problem_scores(loaded.problems)
    rows = []
    for key, found in final.groupby([*PANEL, "rule", "benchmark"], observed=True, sort=True):
        model, dataset, scope, rule, benchmark = map(str, key)
        panel = model, dataset, scope
        values = dict(zip(found.seed, found.value, strict=True))
        interval, over = _accuracy_interval(problems, panel, rule, benchmark, values)
        rows.append(
            dict(zip([*PANEL, "rule", "benchmark"], [*panel, rule, benchmark], strict=True))
            | {"k": int(found.k.max()), "step": _span(found.step), "seeds": len(values)}
            | _columns(interval) | {"over": over}
            | {"base": float(before.get((*panel, benchmark), np.nan)), "values": tuple(values.values())}
        )  # fmt: skip
    columns = ["k", "step", "seeds", "mean", "low", "high", "over", "base", "values"]
    return pd.DataFrame(rows, columns=[*PANEL, "rule", "benchmark", *columns])


def differences(loaded: LoggedRuns, benchmark: str = runs.MEAN) -> pd.DataFrame:
    """Last-step accuracy of each rule minus that of the baseline rule at the same seed, by panel.

    Columns: model, dataset, scope, rule, baseline, seeds (that both have), mean, low, high, over, probability (that a
    new seed ends higher than the baseline), probability_low, probability_high, values (one per seed, a tuple). Rules
    that share no seed with the baseline have no row.
    """
    final = runs.final_scores(loaded.metrics)
    final = final[final.benchmark == benchmark]
    problems = _problem_scores(loaded.problems)
    rows = []
    for panel in runs.panels(final):
        by_rule = _by_rule(runs.in_panel(final, panel))
        baseline = baseline_of(loaded.metrics)
        for rule in rules_of(loaded.metrics):
            seeds = sorted(by_rule.get(rule, {}).keys() & by_rule.get(baseline, {}).keys())
            if rule == baseline or not seeds:
                continue
            values = {seed: by_rule[rule][seed] - by_rule[baseline][seed] for seed in seeds}
            interval, over = _difference_interval(problems, panel, rule, baseline, benchmark, values)
            chance = improvement_probability(list(values.values()))
            rows.append(
                dict(zip(PANEL, panel, strict=True))
                | {"rule": rule, "baseline": baseline, "seeds": len(seeds)} | _columns(interval) | {"over": over}
                | {"probability": chance.estimate, "probability_low": chance.low, "probability_high": chance.high}
                | {"values": tuple(values.values())}
            )  # fmt: skip
    columns = ["rule", "baseline", "seeds", "mean", "low", "high", "over"]
    chances = ["probability", "probability_low", "probability_high"]
    return pd.DataFrame(rows, columns=[*PANEL, *columns, *chances, "values"])


def overall(loaded: LoggedRuns) -> pd.DataFrame:
    """Each rule over all panels in which every rule has a finished run; the intervals are over new seeds.

    Columns: rule, panels, seeds (of the panel that has fewest), mean, mean_low, mean_high (of the panels' mean
    accuracies), iqm, iqm_low, iqm_high (interquartile mean over panels, benchmarks and seeds), difference,
    difference_low, difference_high (mean over panels of the paired difference to the baseline; NaN for that rule).
    """
    final = runs.final_scores(loaded.metrics)
    final = final[final.benchmark != metric_names.HELDOUT]
    means, single = final[final.benchmark == runs.MEAN], final[final.benchmark != runs.MEAN]
    rules, compared = rules_of(loaded.metrics), differences(loaded)
    shared = [panel for panel in runs.panels(means) if set(_by_rule(runs.in_panel(means, panel))) == set(rules)]
    rows = []
    for rule in rules if shared else []:
        of_rule = [runs.in_panel(means[means.rule == rule], panel).value.to_numpy() for panel in shared]
        tables = [_scores_by_seed(runs.in_panel(single[single.rule == rule], panel)) for panel in shared]
        paired = [runs.in_panel(compared[compared.rule == rule], panel)["values"] for panel in shared]
        difference = mean_of_means_interval([list(values.iloc[0]) for values in paired if len(values)])
        rows.append(
            {"rule": rule, "panels": len(shared), "seeds": min(map(len, of_rule))}
            | _columns(mean_of_means_interval(of_rule), "mean")
            | _columns(interquartile_mean_interval(tables), "iqm")
            | _columns(difference, "difference")
        )
    ends = [f"{name}{end}" for name in ("mean", "iqm", "difference") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["rule", "panels", "seeds", *ends])


def peaks(loaded: LoggedRuns) -> pd.DataFrame:
    """Best and last evaluated mean accuracy of every run.

    Columns: rule, model, dataset, scope, seed, peak, peak_step, last, last_step, drop (peak minus last, never
    negative), checkpoints (evaluated, with the base model's).
    """
    scores = runs.scores(loaded.metrics)
    scores = scores[(scores.benchmark == runs.MEAN) & scores.value.notna()]
    rows = []
    for cell, found in scores.groupby(runs.CELL, observed=True, sort=True):
        curve = found.sort_values("step")
        best = curve.value.to_numpy().argmax()
        rows.append(
            dict(zip(runs.CELL, cell, strict=True))
            | {"peak": curve.value.iloc[best], "peak_step": curve.step.iloc[best]}
            | {"last": curve.value.iloc[-1], "last_step": curve.step.iloc[-1]}
            | {"drop": float(peak_to_last(curve.value.to_numpy())), "checkpoints": len(curve)}
        )
    columns = ["peak", "peak_step", "last", "last_step", "drop", "checkpoints"]
    return pd.DataFrame(rows, columns=[*runs.CELL, *columns])


def drop_differences(peak_table: pd.DataFrame) -> pd.DataFrame:
    """Each rule's drop from peak to last minus the baseline's at the same seed, by panel.

    Args:
        peak_table: as `peaks` gives it.

    Returns:
        model, dataset, scope, rule, baseline, seeds, mean, low, high.
    """
    rows = []
    for panel in runs.panels(peak_table):
        inside, baseline = runs.in_panel(peak_table, panel), baseline_of(peak_table)
        by_rule = _by_rule(inside.assign(value=inside["drop"]))
        for rule in rules_of(peak_table):
            seeds = sorted(by_rule.get(rule, {}).keys() & by_rule.get(baseline, {}).keys())
            if rule != baseline and seeds:
                interval = mean_interval([by_rule[rule][seed] - by_rule[baseline][seed] for seed in seeds])
                names = {"rule": rule, "baseline": baseline, "seeds": len(seeds)}
                rows.append(dict(zip(PANEL, panel, strict=True)) | names | _columns(interval))
    return pd.DataFrame(rows, columns=[*PANEL, "rule", "baseline", "seeds", "mean", "low", "high"])


def negative_share(table: pd.DataFrame, rule: str) -> pd.DataFrame:
    """Share of the mass under `rule` that falls on negative responses, at every step of every run.

    `table`: logged metrics. Returns the rows of the negative mass, their value divided by the sum of both masses.
    """
    negative = table[table.metric == metric_names.negative_mass(rule)]
    positive = table.loc[table.metric == metric_names.positive_mass(rule), ["run", "step", "value"]]
    both = negative.merge(positive, on=["run", "step"], suffixes=("", "_positive"))
    total = both.value + both.value_positive
    # A step whose groups are all one-signed or all tied has no mass to share.
    return both.assign(value=(both.value / total).where(total > 0)).drop(columns="value_positive")


def regimes(loaded: LoggedRuns) -> pd.DataFrame:
    """The lengths of each panel beside which rule wins in it: the paper's explanation, one row per panel.

    Columns: model, dataset, scope, gap (relative sign-length gap) and cv (length variation within groups), both means
    over steps and over the runs of the token and the sequence rule; seeds, mean, low, high, over: accuracy of token
    minus sequence at the last step; margin: mean accuracy of balanced minus that of the better of the two, NaN without
    runs. Panels without both rules have no row.
    """
    compared = differences(loaded)
    compared = compared[(compared.rule == "token") & (compared.baseline == "sequence")]
    final = final_accuracy(loaded)
    means = final[final.benchmark == runs.MEAN]
    lengths = loaded.metrics[loaded.metrics.metric.isin([metric_names.SIGN_GAP_REL, metric_names.GROUP_CV])]
    lengths = lengths[lengths.rule.isin(["token", "sequence"])]
    rows = []
    for found in runs.rows(compared):
        panel = (found.model, found.dataset, found.scope)
        by_metric = runs.in_panel(lengths, panel).groupby("metric", observed=True)["value"].mean()
        accuracy = runs.in_panel(means, panel).set_index("rule")["mean"]
        best = max(accuracy["token"], accuracy["sequence"])
        rows.append(
            dict(zip(PANEL, panel, strict=True))
            | {"gap": by_metric.get(metric_names.SIGN_GAP_REL, np.nan)}
            | {"cv": by_metric.get(metric_names.GROUP_CV, np.nan)}
            | {"seeds": found.seeds, "mean": found.mean, "low": found.low, "high": found.high, "over": found.over}
            | {"margin": accuracy.get("balanced", np.nan) - best}
        )
    return pd.DataFrame(rows, columns=[*PANEL, "gap", "cv", "seeds", "mean", "low", "high", "over", "margin"])


def regime_correlations(regime_table: pd.DataFrame) -> dict[str, Interval]:
    """Pearson's correlation over panels of token minus sequence accuracy with `gap` and with `cv`."""
    return {name: correlation(regime_table[name], regime_table["mean"]) for name in ("gap", "cv")}


def _accuracy_interval(
    problems: ProblemScores, panel: runs.Panel, rule: str, benchmark: str, values: Values
) -> tuple[Interval, str]:
    scores = _of_benchmark(problems, panel, rule, benchmark)
    if not scores.shape[1] or {*scores.index} != {*values}:
        return _over_seeds(values)
    return _over_problems(scores, values)


def _difference_interval(
    problems: ProblemScores, panel: runs.Panel, rule: str, baseline: str, benchmark: str, values: Values
) -> tuple[Interval, str]:
    ours, theirs = (_of_benchmark(problems, panel, name, benchmark) for name in (rule, baseline))
    seeds = list(values)
    if not ours.shape[1] or not ours.columns.equals(theirs.columns) or not {*seeds} <= {*ours.index} & {*theirs.index}:
        return _over_seeds(values)
    return _over_problems(ours.loc[seeds] - theirs.loc[seeds], values)


def _over_seeds(values: Values) -> tuple[Interval, str]:
    interval = mean_interval(list(values.values()))
    return interval, NO_INTERVAL if np.isnan(interval.low) else SEEDS


def _over_problems(scores: pd.DataFrame, values: Values) -> tuple[Interval, str]:
    """`values`, the logged means, must be those of the scores; else some benchmark or problem is not among them."""
    interval = seeds_and_problems_interval(scores.to_numpy(), scores.columns.get_level_values("benchmark"))
    if not np.isclose(interval.estimate, np.mean(list(values.values())), atol=1e-6):
        return _over_seeds(values)
    return interval, NO_INTERVAL if np.isnan(interval.low) else SEEDS_AND_PROBLEMS


def _problem_scores(problems: pd.DataFrame) -> ProblemScores:
    """One row per seed and one column per (benchmark, problem)."""
    return {
        tuple(map(str, key)): found.pivot(index="seed", columns=["benchmark", "problem"], values="score").sort_index(
            axis=1
        )
        for key, found in problems.groupby([*PANEL, "rule"], observed=True)
    }


def _of_benchmark(problems: ProblemScores, panel: runs.Panel, rule: str, benchmark: str) -> pd.DataFrame:
    """The columns of one benchmark or of all but the held-out split; none where not every seed has every problem."""
    scores = problems.get((*panel, rule))
    if scores is None:
        return pd.DataFrame()
    names = scores.columns.get_level_values("benchmark")
    scores = scores.loc[:, names != metric_names.HELDOUT if benchmark == runs.MEAN else names == benchmark]
    return scores if not scores.isna().any(axis=None) else scores.iloc[:, :0]


def _scores_by_seed(single: pd.DataFrame) -> NDArray[np.float64]:
    """(num_seeds, num_benchmarks), of the benchmarks that every seed has."""
    scores = single.pivot(index="seed", columns="benchmark", values="value").dropna(axis=1)
    return scores.to_numpy(dtype=np.float64)


def _by_rule(inside: pd.DataFrame) -> dict[str, Values]:
    """Rule -> seed -> value, of one panel's rows."""
    return {
        str(rule): dict(zip(found.seed, found.value, strict=True))
        for rule, found in inside.groupby("rule", observed=True)
    }


def _columns(interval: Interval, name: str = "") -> dict[str, float]:
    """`mean`, `low` and `high`, or `name`, `name_low` and `name_high`."""
    names = (name, f"{name}_low", f"{name}_high") if name else ("mean", "low", "high")
    return {key: float(value) for key, value in zip(names, interval, strict=True)}


def _span(steps: pd.Series) -> str:
    return "-".join(str(step) for step in sorted({steps.min(), steps.max()}))
