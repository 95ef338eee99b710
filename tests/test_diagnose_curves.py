"""Curves exported by MLflow, W&B or a trainer give what they hold, and say what they cannot."""

import json
from pathlib import Path

import pytest

from analysis.diagnose import measure, negative_share
from analysis.diagnose_curves import is_curves, read_curves
from analysis.diagnose_formats import DumpError
from analysis.diagnose_words import conclude, not_computable
from tests.test_diagnose import rollouts
from trainers import metric_names as names

STEPS = range(1, 41)


def logged(step: int) -> dict[str, float]:
    wave = 0.01 * (-1) ** step
    return {
        names.LENGTH_MEAN: 100 + step,
        names.GROUP_CV: 0.4 + wave,
        names.SIGN_GAP_REL: -0.3 + wave,
        names.positive_mass("token"): 0.2,
        names.negative_mass("token"): 0.3 + wave,
        names.positive_mass("sequence"): 0.25,
        names.negative_mass("sequence"): 0.25,
    }


def wide(path, columns: dict[str, list], blank_at: int | None = None):
    rows = [",".join(columns)]
    for number, values in enumerate(zip(*columns.values(), strict=True)):
        rows.append(",".join("" if number == blank_at and i else str(v) for i, v in enumerate(values)))
    path.write_text("\n".join(rows) + "\n")
    return path


def check(measured) -> None:
    assert measured.steps.tolist() == list(STEPS)
    assert measured.estimate("length").value == pytest.approx(120.5)
    assert measured.trend("length").value == pytest.approx(39)
    assert measured.estimate("sign_gap_rel").value == pytest.approx(-0.3)
    assert measured.estimate(negative_share("token")).value == pytest.approx(0.6)
    assert measured.estimate(negative_share("sequence")).value == pytest.approx(0.5)
    assert not measured.estimate(negative_share("balanced")).known


def test_a_column_per_metric(tmp_path):
    columns = (
        {"step": list(STEPS)} | {key: [logged(s)[key] for s in STEPS] for key in logged(1)} | {"other/x": [1] * 40}
    )
    file = wide(tmp_path / "run.csv", columns)
    assert is_curves(file, {})
    runs = read_curves([file], {})
    assert list(runs) == ["run"]
    check(runs["run"])


def test_a_column_per_run_and_metric_as_wandb_exports_charts(tmp_path):
    columns: dict[str, list] = {"Step": list(STEPS)}
    for run, shift in (("token-s0", 0.0), ("a - b", 0.5)):
        for key in logged(1):
            head = f"{run} - train/{key}" if key == names.GROUP_CV else f"{run} - {key}"
            columns[head] = [logged(s)[key] + shift * (key == names.GROUP_CV) for s in STEPS]
            columns[f"{head}__MIN"] = columns[f"{head}__MAX"] = [9] * 40
    header = ",".join(f'"{name}"' for name in columns)
    file = wide(tmp_path / "chart.csv", columns, blank_at=3)
    text = file.read_text().split("\n", 1)[1]
    file.write_text(f"{header}\n{text}")
    runs = read_curves([file], {})
    assert list(runs) == ["token-s0", "a - b"]
    assert runs["token-s0"].steps.tolist() == [step for step in STEPS if step != 4]
    assert runs["a - b"].estimate("group_cv").value == pytest.approx(0.9, abs=0.001)
    assert runs["token-s0"].estimate("group_cv").value == pytest.approx(0.4, abs=0.001)


@pytest.mark.parametrize(
    "header", ["run_id,key,value,step,timestamp", "Run,Run ID,metric,step,timestamp,value"], ids=["runs", "chart"]
)
def test_a_row_per_value_as_mlflow_downloads_metrics(tmp_path, header):
    rows = [header]
    for key in logged(1):
        for step in STEPS:
            value = logged(step)[key]
            rows.append(f"r1,{key},{value},{step},0" if header[3] == "_" else f"one,r1,{key},{step},0,{value}")
    file = tmp_path / "metrics.csv"
    file.write_text("\n".join(rows))
    assert is_curves(file, {})
    (measured,) = read_curves([file], {}).values()
    check(measured)


def test_json_lines_of_this_suite_and_of_others(tmp_path):
    (tmp_path / "cell").mkdir()
    ours, flat = tmp_path / "cell" / "metrics.jsonl", tmp_path / "other.jsonl"
    ours.write_text("".join(json.dumps({"step": s, "metrics": logged(s)}) + "\n" for s in STEPS))
    flat.write_text("".join(json.dumps({"step": s, "time": 1.5, **logged(s)}) + "\n" for s in STEPS))
    for file, name in ((ours, "cell"), (flat, "other")):
        assert is_curves(file, {})
        runs = read_curves([file], {})
        assert list(runs) == [name]
        check(runs[name])


def test_metrics_of_other_trainers_have_their_names():
    (measured,) = read_curves([Path("tests/fixtures/trl_log_history.jsonl")], {}).values()
    assert measured.estimate("length").value == pytest.approx((35.25 + 38.66666793823242) / 2)
    assert measured.estimate("truncated").value == pytest.approx((0.5 + 0.5833333134651184) / 2)
    missing = not_computable(measured)
    assert "which tokens each rule down-weights" in missing
    assert "the sign-length gap (log length/sign_gap_rel)" in missing
    assert "the share of truncated responses (log length/truncated)" not in missing


def test_other_columns_can_be_mapped(tmp_path):
    columns = {"step": list(STEPS), "my_gap": [-0.2] * 40, "kl": [0.1] * 40}
    file = wide(tmp_path / "run.csv", columns)
    mapping = {names.SIGN_GAP_REL: "my_gap"}
    assert is_curves(file, mapping)
    assert not is_curves(file, {})
    assert read_curves([file], mapping)["run"].estimate("sign_gap_rel").value == pytest.approx(-0.2)
    with pytest.raises(DumpError, match="no metric with a known name"):
        read_curves([file], {names.SIGN_GAP_REL: "other"})


def test_dumps_are_not_taken_for_curves(tmp_path):
    assert not is_curves(wide(tmp_path / "d.csv", {"prompt": ["a"], "length": [3], "reward": [1]}), {})
    assert not is_curves(wide(tmp_path / "e.csv", {"step": [1], "prompt": ["a"], "rewards/form": [1]}), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("length/mean\n3\n", r"no column of steps \(step, _step"),
        ("step,length/mean\n1,long\n", r"line 2: length/mean is not a number: 'long'"),
        ("key,value,step\nlength/mean,x,1\n", r"line 2: value is not a number: 'x'"),
        ('{"metrics": {"length/mean": 3}}\n', r"line 1 has no step"),
    ],
)
def test_wrong_curves(tmp_path, text, message):
    file = tmp_path / "run"
    file.write_text(text)
    with pytest.raises(DumpError, match=message):
        read_curves([file], {})


def test_the_conclusion_of_curves_is_that_of_their_responses(tmp_path):
    measured = measure([rollouts(steps=40)])
    columns: dict[str, list] = {"step": measured.steps.tolist()}
    columns[names.GROUP_CV] = measured.per_step("group_cv").tolist()
    columns[names.SIGN_GAP_REL] = measured.per_step("sign_gap_rel").tolist()
    for rule in names.RULE_NAMES:
        columns[names.negative_mass(rule)] = measured.numerators[negative_share(rule)].tolist()
        positive = measured.denominators[negative_share(rule)] - measured.numerators[negative_share(rule)]
        columns[names.positive_mass(rule)] = positive.tolist()
    (curves,) = read_curves([wide(tmp_path / "run.csv", columns)], {}).values()
    text = " ".join(conclude(curves))
    share = measured.estimate(negative_share("token")).value
    assert f"gives responses with negative advantage {100 * share:.1f} % of the update" in text
    assert "Both biases are there" in text
    assert (
        "Responses with negative advantage are longer than the others of their group (relative sign-length gap" in text
    )
