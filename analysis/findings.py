"""What the figures show, in numbers: tables in, sentences out. Nothing here is true by assumption."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd

from analysis import runs
from analysis.comparisons import (
    SEEDS_AND_PROBLEMS,
    baseline_of,
    drop_differences,
    negative_share,
    regime_correlations,
    rules_of,
)
from analysis.statistics import MIN_PAIRS_TO_CORRELATE, MIN_SEEDS, Interval
from trainers import metric_names

_Words = Callable[[float], str]

ENDS = 0.1
"""Share of the steps at either end of training that "first" and "last" mean in a curve of every step."""
NO_BREAK = "\u00a0"
SAME = 5e-4
"""Accuracies closer than this are equal to the digits shown."""


def number(value: float, digits: int = 3) -> str:
    """With a real minus sign, and no sign on a zero."""
    # A half rounds away from zero, whichever way the last bit of a difference fell.
    text = f"{value + np.sign(value) * 1e-9:.{digits}f}"
    return (text.removeprefix("-") if float(text) == 0 else text).replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    text = number(value, digits)
    return text if text.startswith("−") or float(text) == 0 else f"+{text}"


def percent(share: float) -> str:
    return f"{number(100 * share, 0)}{NO_BREAK}%"


def count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"


def curve_ends(values: pd.DataFrame, what: str) -> str:
    """Where each rule's curve of a metric logged at every step begins and ends. `what`: names the metric."""
    if values.empty:
        return ""
    steps = np.sort(values.step.unique())
    num = max(1, round(ENDS * len(steps)))
    first = _by_rule(values[values.step <= steps[num - 1]])
    last = _by_rule(values[values.step >= steps[-num]])
    changes = {rule: f"{number(first[rule])} to {number(last[rule])}" for rule in first.keys() & last.keys()}
    span = f"the first to the last {count(num, 'step')}" if num > 1 else "the first to the last step"
    return _sentence(f"{what} from {span}", changes, values)


def accuracy_gain(scores: pd.DataFrame, what: str) -> str:
    """Accuracy before training and at the last step. `scores`: rows of one benchmark of `runs.scores`."""
    base, final = _by_rule(scores[scores.step == 0]), _by_rule(runs.final_scores(scores))
    if not final:
        return ""
    gains = {
        rule: f"{number(base[rule])} to {number(final[rule])}" if rule in base else f"{number(final[rule])} at the end"
        for rule in final
    }
    return _sentence(f"{what} from the base model to the last step", gains, scores)


def best_rules(accuracy: pd.DataFrame) -> str:
    """In how many panels each rule has the highest mean. `accuracy`: as `comparisons.final_accuracy` gives it."""
    means = accuracy[accuracy.benchmark == runs.MEAN]
    table = means.pivot_table(index=runs.PANEL, columns="rule", values="mean", observed=True)
    if table.shape[1] < 2:
        return ""
    leads = table.ge(table.max(axis=1) - SAME, axis=0).sum()
    parts = [f"{rule} in {leads[rule]}" for rule in rules_of(means)]
    spread = table.max(axis=1) - table.min(axis=1)
    return (
        f"Highest mean accuracy among {_pairs(len(table))} (ties count for each): {_join(parts)}. "
        f"The highest rule is {_range(spread, number)} above the lowest."
    )


def problem_noise(evaluations: pd.DataFrame) -> str:
    """How far one run's mean accuracy would move with other problems: what a difference is to be held against."""
    found = evaluations[evaluations.benchmark != metric_names.HELDOUT].dropna(subset="se")
    if found.empty:
        return ""
    by_run = found.groupby("run", observed=True)
    errors = np.sqrt(by_run["se"].agg(lambda se: (se**2).sum())) / by_run["se"].size()
    num_problems = _range(by_run["problems"].sum(), str)
    return (
        f"For scale: one run's mean over the benchmarks ({num_problems} problems) has a standard error of "
        f"{_range(errors, number)} over problems alone."
    )


def differences(compared: pd.DataFrame) -> str:
    """The range over panels of every rule's difference, and how many intervals leave out zero."""
    sentences = []
    for rule in rules_of(compared) if len(compared) else []:
        found = compared[compared.rule == rule]
        text = f"Mean accuracy of {rule} minus that of {found.baseline.iloc[0]}: {_range(found['mean'], signed)}"
        known = found.dropna(subset="low")
        apart = int(((known.low > 0) | (known.high < 0)).sum())
        text += f", and {apart} of {count(len(known), 'interval')} without zero" if len(known) else ""
        sentences.append(f"{text} ({_pairs(len(found))}).")
    return " ".join(sentences)


def length_ratio(table: pd.DataFrame) -> str:
    """How much longer negative responses are than positive ones. `table`: logged metrics."""
    wanted = {metric_names.POS_LENGTH: "positive", metric_names.NEG_LENGTH: "negative"}
    found = table[table.metric.isin(wanted)].assign(sign=lambda t: t.metric.map(wanted).astype(str))
    if found.sign.nunique() < 2:
        return ""
    means = found.groupby([*runs.PANEL, "sign"], observed=True)["value"].mean().unstack("sign")
    ratios = _extremes(_by_panel(means.negative / means.positive, table), _times)
    return f"Over all steps and runs, responses with A < 0 are {ratios} as long as those with A > 0." if ratios else ""


def gap(table: pd.DataFrame) -> str:
    """The relative sign-length gap of the panels."""
    means = _extremes(_panel_means(table[table.metric == metric_names.SIGN_GAP_REL]), signed)
    return f"Mean relative sign-length gap over all steps and runs: {means}." if means else ""


def variation(table: pd.DataFrame) -> str:
    """The coefficient of variation of the panels."""
    means = _extremes(_panel_means(table[table.metric == metric_names.GROUP_CV]), number)
    return f"Mean length variation over all steps and runs: {means}." if means else ""


def counterfactual_share(table: pd.DataFrame, rules: Iterable[str]) -> str:
    """Share of its mass that each rule would put on negative responses, on everyone's rollouts."""
    means = {rule: _panel_means(negative_share(table, rule)) for rule in rules}
    shares = {rule: _range(by_panel.values(), percent) for rule, by_panel in means.items() if by_panel}
    head = "Share of the mass on A < 0, mean over steps and runs, by model and data set"
    return f"{head}: {_listing(shares)}." if shares else ""


def own_share(shares: pd.DataFrame) -> str:
    """The same of each run's own rule. `shares`: a value per run and step."""
    rules = rules_of(shares) if len(shares) else []
    parts = {rule: _extremes(_panel_means(shares[shares.rule == rule]), percent) for rule in rules}
    parts = {rule: text for rule, text in parts.items() if text}
    return f"Share of its mass that a rule put on A < 0, mean over steps and seeds: {_listing(parts)}." if parts else ""


def regimes(regime_table: pd.DataFrame) -> str:
    """How the advantage of token over sequence goes with the lengths, and how often balanced leads both."""
    if regime_table.empty:
        return ""
    names = {"gap": "relative gap", "cv": "length variation"}
    parts = [
        f"{names[name]} {_correlation(found)}"
        for name, found in regime_correlations(regime_table).items()
        if not np.isnan(found.estimate)
    ]
    text = f"Correlation of token − sequence over {_pairs(len(regime_table))}: with {_join(parts)}" if parts else ""
    if parts and len(regime_table) < MIN_PAIRS_TO_CORRELATE:
        text += f" (an interval takes {MIN_PAIRS_TO_CORRELATE})"
    margins = regime_table.margin.dropna()
    if margins.empty:
        return f"{text}." if text else ""
    lead = f"Balanced is ahead of both others in {int((margins > SAME).sum())} of {_pairs(len(margins))}"
    return f"{text + '. ' if text else ''}{lead}, its margin being {_range(margins, signed)}."


def drops(peak_table: pd.DataFrame) -> str:
    """The drop from peak to last step of each rule, and whether it differs from the baseline's."""
    if peak_table.empty:
        return ""
    means = _by_rule(peak_table.assign(value=peak_table["drop"]))
    sentence = _sentence(
        "Mean drop from the best to the last checkpoint", {rule: number(means[rule]) for rule in means}, peak_table
    )
    known = drop_differences(peak_table).dropna(subset="low")
    if known.empty:
        return sentence
    apart = int(((known.low > 0) | (known.high < 0)).sum())
    baseline = baseline_of(peak_table)
    return f"{sentence} Paired differences to {baseline} whose 95 % interval leaves out zero: {apart} of {len(known)}."


def histograms(lengths: pd.DataFrame) -> str:
    """Median length by sign, at the first and at the last logged step of every panel, over all rules."""
    if lengths.empty:
        return ""
    parts = []
    for sign, name in ((1, "A > 0"), (-1, "A < 0")):
        found = lengths[lengths.sign == sign]
        first, last = (found[found.step == found.groupby("run")["step"].transform(end)] for end in ("min", "max"))
        if not found.empty:
            parts.append(f"{number(_median(first), 0)} to {number(_median(last), 0)} tokens with {name}")
    return f"Median length from the first to the last of these steps, over all runs: {_join(parts)}."


def seeds_per_rule(values: pd.DataFrame) -> str:
    """What n is where all seeds are drawn together or by themselves."""
    counts = runs.cells(values).groupby([*runs.PANEL, "rule"], observed=True).size()
    return f"{_num_seeds(counts)} per rule." if len(counts) else ""


def seeds_and_interval(seeds: pd.Series, over: Iterable[str] = (), mark: str = "bars", *, means: bool = False) -> str:
    """What n is, and what the intervals are over.

    Args:
        seeds: number of seeds of each estimate.
        over: what each interval is over, "" where there is none.
        mark: how intervals are shown.
        means: estimates without an interval are shown as the mean of their seeds, not as each seed.
    """
    if seeds.empty:
        return ""
    low, high, found = seeds.min(), seeds.max(), _num_seeds(seeds)
    if high < MIN_SEEDS:
        several = "shown is their mean" if means else "each is shown by itself"
        each = several if high > 1 else "these are single runs"
        return f"{found}: {each}, and no interval is given below {MIN_SEEDS}."
    kinds = {kind for kind in over if kind}
    problems = "over new seeds and new problems" if kinds == {SEEDS_AND_PROBLEMS} else "over new seeds, same problems"
    if len(kinds) > 1:
        problems = "over new seeds (and new problems where their scores were logged)"
    alone = "none" if means else "each seed by itself"
    fewer = f"; {alone} where there are fewer than {MIN_SEEDS}" if low < MIN_SEEDS else ""
    return f"{found}; {mark}: 95 % interval {problems}{fewer}."


def _pairs(num: int) -> str:
    return f"{count(num, 'pair')} of model and data set"


def _num_seeds(seeds: pd.Series) -> str:
    low, high = int(seeds.min()), int(seeds.max())
    return f"n = {count(low, 'seed')}" if low == high else f"n = {low} to {high} seeds"


def _correlation(found: Interval) -> str:
    text = f"r = {signed(found.estimate, 2)}"
    return text if np.isnan(found.low) else f"{text} (95 % interval {signed(found.low, 2)} to {signed(found.high, 2)})"


def _by_rule(values: pd.DataFrame) -> dict[str, float]:
    """Rule -> mean over panels of the mean over a panel's runs and steps, in the order of legends."""
    by_panel = values.groupby(["rule", *runs.PANEL], observed=True)["value"].mean().dropna()
    means = by_panel.groupby("rule", observed=True).mean()
    return {rule: float(means[rule]) for rule in rules_of(values) if rule in means.index}


def _sentence(head: str, by_rule: Mapping[str, str], values: pd.DataFrame) -> str:
    """Says so where a rule lacks a panel, because its mean is over others then."""
    num_panels = len(runs.panels(values))
    head = f"{head}, mean over models and data sets" if num_panels > 1 else head
    own = values[["rule", *runs.PANEL]].drop_duplicates().groupby("rule", observed=True).size()
    parts = {
        rule: text if own[rule] == num_panels else f"{text} ({own[rule]} of {num_panels} pairs)"
        for rule, text in by_rule.items()
    }
    ordered = {rule: parts[rule] for rule in rules_of(values) if rule in parts}
    return f"{head}: {_listing(ordered)}."


def _panel_means(values: pd.DataFrame) -> dict[str, float]:
    """Panel name -> mean over a panel's runs and steps."""
    return _by_panel(values.groupby(runs.PANEL, observed=True)["value"].mean(), values) if len(values) else {}


def _by_panel(means: pd.Series, table: pd.DataFrame) -> dict[str, float]:
    """Panel name -> value, without the panels that have none."""
    known = means.dropna()
    return {runs.panel_name(panel, table): float(known[panel]) for panel in known.index}


def _extremes(by_panel: Mapping[str, float], words: _Words) -> str:
    """The lowest and the highest panel by name; one number where they read the same, nothing without panels."""
    if not by_panel:
        return ""
    low, high = min(by_panel, key=by_panel.__getitem__), max(by_panel, key=by_panel.__getitem__)
    ends = words(by_panel[low]), words(by_panel[high])
    if ends[0] == ends[1]:
        return f"{ends[0]} everywhere" if len(by_panel) > 1 else ends[0]
    return f"{ends[0]} ({low}) to {ends[1]} ({high})"


def _range(values: Iterable[float], words: _Words) -> str:
    numbers = list(values)
    ends = words(min(numbers)), words(max(numbers))
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _median(lengths: pd.DataFrame) -> float:
    return float(np.median(np.repeat(lengths.length.to_numpy(dtype=float), lengths["count"].to_numpy(dtype=int))))


def _times(ratio: float) -> str:
    return f"{number(ratio, 2)} times"


def _listing(parts: Mapping[str, str]) -> str:
    return ", ".join(f"{rule} {text}" for rule, text in parts.items())


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
