"""Logged curves, exported from MLflow, W&B or a trainer's own log, as `analysis.diagnose.Measurements`.

Curves hold one number a step, so what needs the responses themselves (the weight of single tokens, lengths by prompt)
cannot be had from them; `analysis.diagnose_words.not_computable` says what.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.diagnose import Measurements, negative_share
from analysis.diagnose import mass_ratio as mass_ratio_name
from analysis.diagnose_columns import numbers
from analysis.diagnose_formats import DumpError, listed
from analysis.dumps import columns_of, json_rows, kind_of, open_text
from trainers import metric_names

NAMES = {
    metric_names.REWARD_MEAN: "reward",
    metric_names.LENGTH_MEAN: "length",
    metric_names.GROUP_CV: "group_cv",
    metric_names.SIGN_GAP: "sign_gap",
    metric_names.SIGN_GAP_REL: "sign_gap_rel",
    metric_names.POS_LENGTH: "positive_length",
    metric_names.NEG_LENGTH: "negative_length",
    metric_names.TRUNCATED: "truncated",
    metric_names.ZERO_VARIANCE_GROUPS: "no_signal_groups",
}
"""Logged metric -> what `Measurements` calls it."""
MASSES = {
    name(rule): (rule, sign)
    for rule in metric_names.RULE_NAMES
    for sign, name in (("positive", metric_names.positive_mass), ("negative", metric_names.negative_mass))
}
ALIASES = {
    # TRL 1.16
    "completions/mean_length": metric_names.LENGTH_MEAN,
    "completions/clipped_ratio": metric_names.TRUNCATED,
    "frac_reward_zero_std": metric_names.ZERO_VARIANCE_GROUPS,
    "reward": metric_names.REWARD_MEAN,
    # verl 0.9.1
    "response_length/mean": metric_names.LENGTH_MEAN,
    "response_length/clip_ratio": metric_names.TRUNCATED,
    "critic/score/mean": metric_names.REWARD_MEAN,
    # OpenRLHF 0.11.2
    "rollout/response_length_mean": metric_names.LENGTH_MEAN,
    "rollout/truncated_rate": metric_names.TRUNCATED,
    "rollout/reward_mean": metric_names.REWARD_MEAN,
    # prime-rl
    "is_truncated/all/mean": metric_names.TRUNCATED,
    "reward/all/mean": metric_names.REWARD_MEAN,
}
"""Metrics that other trainers log under their own names."""
METRICS = (*NAMES, *MASSES)
STEP_COLUMNS = ("step", "_step", "trainer/global_step", "train/global_step", "global_step")
KEY_COLUMNS = ("key", "metric")
RUN_COLUMNS = ("run", "run id", "run_id")

Points = dict[str, dict[int, float]]
"""Metric -> step -> value."""


def is_curves(path: Path, mapping: Mapping[str, str]) -> bool:
    """Whether a file holds logged metrics and not responses."""
    if any(key in METRICS for key in mapping):
        return True
    if kind_of(path) == "parquet":
        return False
    columns = columns_of(path)
    lower = {column.lower() for column in columns}
    if "value" in lower and lower.intersection(KEY_COLUMNS):
        return True
    return any(_metric(column, {})[1] for column in columns if "/" in column)


def read_curves(paths: Sequence[Path], mapping: Mapping[str, str]) -> dict[str, Measurements]:
    """The runs in some files, each measured by itself: name -> measurements.

    Args:
        paths: CSV in wide form (a column of steps, one column per metric, or per run and metric as W&B exports
            charts), CSV in long form (MLflow: metric, step, value), or JSON lines with a step and metrics in each.
        mapping: metric name -> the column, or the logged key, that stands for it.

    Raises:
        DumpError: no step, no metric that is known, or a value that is not a number.
    """
    by_column = {column: metric for metric, column in mapping.items()}
    runs: dict[str, Points] = {}
    for path in paths:
        for run, name, step, value in _points(path, by_column):
            runs.setdefault(run, {}).setdefault(name, {})[step] = value
    if not runs:
        raise DumpError(
            f"{listed([str(path) for path in paths])}: no metric with a known name. Known are {listed(METRICS)}; for "
            "others say which is which with --map METRIC=COLUMN"
        )
    return {run: measurements(points) for run, points in runs.items()}


def measurements(points: Points) -> Measurements:
    """One run's curves, each value of a step counting once."""
    steps = np.array(sorted({step for values in points.values() for step in values}), dtype=np.int64)

    def curve(metric: str) -> np.ndarray:
        return np.array([points[metric].get(int(step), np.nan) for step in steps])

    above: dict[str, np.ndarray] = {}
    below: dict[str, np.ndarray] = {}
    for metric, name in NAMES.items():
        if metric in points:
            values = curve(metric)
            above[name], below[name] = np.nan_to_num(values), np.isfinite(values).astype(np.float64)
    for rule in metric_names.RULE_NAMES:
        masses = metric_names.positive_mass(rule), metric_names.negative_mass(rule)
        if all(mass in points for mass in masses):
            both = np.stack([curve(mass) for mass in masses])
            positive, negative = np.where(np.isfinite(both).all(0), both, 0.0)
            above[negative_share(rule)], below[negative_share(rule)] = negative, positive + negative
            above[mass_ratio_name(rule)], below[mass_ratio_name(rule)] = positive, negative
    return Measurements(steps, above, below, moments={})


def _points(path: Path, by_column: Mapping[str, str]) -> Iterator[tuple[str, str, int, float]]:
    """(run, metric, step, value) of every value whose metric is known."""
    if kind_of(path) == "jsonl":
        yield from _from_json(path, by_column)
        return
    with open_text(path) as file:
        reader = csv.reader(file)
        header = next(reader, [])
        rows = ((reader.line_num, row) for row in reader if len(row) == len(header))
        lower = [column.lower() for column in header]
        key = next((lower.index(name) for name in KEY_COLUMNS if name in lower), None)
        if key is not None and "value" in lower and "step" in lower:
            yield from _from_long(path, rows, lower, key, by_column)
        else:
            yield from _from_wide(path, rows, header, by_column)


def _from_wide(
    path: Path, rows: Iterator[tuple[int, list[str]]], header: list[str], by_column: Mapping[str, str]
) -> Iterator[tuple[str, str, int, float]]:
    lower = [column.lower() for column in header]
    step_column = next((lower.index(name) for name in STEP_COLUMNS if name in lower), None)
    if step_column is None:
        raise DumpError(f"{path}: no column of steps ({listed(STEP_COLUMNS)}) among {listed(header)}")
    metrics = {at: _metric(column, by_column) for at, column in enumerate(header)}
    for line, row in rows:
        step = _number(path, line, header[step_column], row[step_column])
        if step is None:
            continue
        for at, (run, metric) in metrics.items():
            if metric and (value := _number(path, line, header[at], row[at])) is not None:
                yield run or path.stem, metric, int(step), value


def _from_long(
    path: Path, rows: Iterator[tuple[int, list[str]]], lower: list[str], key: int, by_column: Mapping[str, str]
) -> Iterator[tuple[str, str, int, float]]:
    step, value = lower.index("step"), lower.index("value")
    run = next((lower.index(name) for name in RUN_COLUMNS if name in lower), None)
    for line, row in rows:
        metric = _metric(row[key], by_column)[1]
        number, at = _number(path, line, "value", row[value]), _number(path, line, "step", row[step])
        if metric and number is not None and at is not None:
            yield row[run] if run is not None else path.stem, metric, int(at), number


def _from_json(path: Path, by_column: Mapping[str, str]) -> Iterator[tuple[str, str, int, float]]:
    """A step and its metrics on each line, flat or under "metrics"."""
    for line, row in json_rows(path, lambda line, why: None):
        step = next((row[name] for name in STEP_COLUMNS if name in row), None)
        if step is None:
            raise DumpError(f"{path}: line {line} has no step ({listed(STEP_COLUMNS)}), only {listed(row)}")
        values: Mapping[str, Any] = row["metrics"] if isinstance(row.get("metrics"), dict) else row
        for name, value in values.items():
            metric = _metric(name, by_column)[1]
            if metric and (number := _number(path, line, name, value)) is not None:
                yield path.parent.name if path.stem == "metrics" else path.stem, metric, int(step), number


def _metric(column: str, by_column: Mapping[str, str]) -> tuple[str, str]:
    """The run and the metric that a column or key stands for; empty where it tells none.

    W&B names the columns of an exported chart "run - metric", with the range of smoothed curves beside them.
    """
    if column in by_column:
        return "", by_column[column]
    run, dash, key = column.rpartition(" - ")
    if key.endswith(("__MIN", "__MAX")):
        return "", ""
    if dash and key in by_column:
        return run, by_column[key]
    for name in (key, re.sub(r"^(train/|rollout/|metrics\.)", "", key)):
        if name in METRICS:
            return run, name
        if name in ALIASES:
            return run, ALIASES[name]
    return "", ""


def _number(path: Path, line: int, column: str, text: Any) -> float | None:
    """A value; None where there is none or it is not finite.

    Raises:
        DumpError: it is not a number.
    """
    values, bad = numbers([text])
    if bad[0]:
        raise DumpError(f"{path}: line {line}: {column} is not a number: {text!r}")
    return float(values[0]) if np.isfinite(values[0]) else None
