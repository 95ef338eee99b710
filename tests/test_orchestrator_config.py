"""The typed experiments file, the grid and the identity of a cell."""

import dataclasses
from pathlib import Path

import pytest

from orchestrator.config import Names, load_config
from orchestrator.errors import UserError
from orchestrator.grid import canonical_json, expand, identity
from trainers.metric_names import RULE_NAMES

ROOT = Path(__file__).resolve().parent.parent
NAMES = Names(RULE_NAMES, ("gen_chains", "gen_stories"), ("gen_short", "gen_long"), ("qa", "boxed"))

GOOD = """\
models:
  small: {path: small, template: qa}
  large: {hub_id: some/large, revision: abc, template: boxed, workers: 8, cpus: 4, gpus: 1, eval_gpus: 1}
benchmarks:
  gen_short: {samples: 4, max_tokens: 64}
grids:
  main:
    rules: [sequence, token, balanced]
    models: [small, large]
    datasets: [gen_chains, gen_stories]
    seeds: [0, 1]
    train:
      steps: 20
      learning_rate: 1e-3
    overrides:
      large: {learning_rate: 1}
    evaluate:
      at: [first, 0.25, 12, last]
      benchmarks: [gen_short, gen_long]
      temperature: 0.5
      heldout: {samples: 2}
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")

    def write_file(text: str = GOOD) -> Path:
        path = tmp_path / "experiments.yaml"
        path.write_text(text)
        return path

    return write_file


def errors(path: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(path, NAMES)
    return [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("path: small", "pathh: small", "2: models.small.pathh: unknown key 'pathh'; did you mean 'path'?"),
        ("template: qa", "template: qaa", "2: models.small.template: unknown template 'qaa'; did you mean 'qa'?"),
        ("{path: small, ", "{", "2: models.small: give one of path, hub_id and package"),
        ("gpus: 1,", "gpus: many,", "3: models.large.gpus: input should be a valid number"),
        ("gen_short: {s", "gen_shrt: {s", "5: benchmarks.gen_shrt: unknown benchmark 'gen_shrt'; did you mean"),
        ("rules: [sequence", "rules: [sequense", "8: grids.main.rules.0: unknown rule 'sequense'; did you mean"),
        ("[small, large]", "[small, larg]", "9: grids.main.models.1: unknown model 'larg'; did you mean 'large'?"),
        ("[gen_chains,", "[gen_chain,", "10: grids.main.datasets.0: unknown data set 'gen_chain'; did you mean"),
        ("steps: 20", "step: 20", "13: grids.main.train.step: unknown key 'step'; did you mean 'steps'?"),
        ("steps: 20", "steps: -2", "13: grids.main.train.steps: steps must be above 0, not -2"),
        ("learning_rate: 1e-3", "learning_rate: fast", "14: grids.main.train.learning_rate: input should be"),
        ("large: {learning_rate: 1}", "large: {group_size: x}", "16: grids.main.overrides.large.group_size: input"),
        ("large: {learning_rate: 1}", "lage: {}", "16: grids.main.overrides.lage: unknown model or data set 'lage'"),
        ("    evaluate:", "    priorities: {larg: 1}\n    evaluate:", "17: grids.main.priorities.larg: unknown model"),
        ("    evaluate:", "    max_cells: 0\n    evaluate:", "17: grids.main.max_cells: input should be greater"),
        ("    evaluate:", "    hang_after_s: 0\n    evaluate:", "17: grids.main.hang_after_s: input should be greater"),
        ("workers: 8", "workers: 0", "3: models.large.workers: input should be greater than 0"),
        ("12, last", "99, last", "18: grids.main.evaluate.at.2: there is no step 99: training ends at step 20"),
        ("[first, 0.25", "[frist, 0.25", "18: grids.main.evaluate.at.0: give first, middle, last, a fraction"),
        ("gen_long]", "heldout]", "19: grids.main.evaluate.benchmarks.1: unknown benchmark 'heldout'"),
        ("    evaluate:", "    evaluat:", "17: grids.main.evaluat: unknown key 'evaluat'; did you mean 'evaluate'?"),
        ("    seeds: [0, 1]", "    rules: [token]", "11: 'rules' was already given on line 8"),
        ("seeds: [0, 1]", "seeds: [0, 1", "12: not valid YAML"),
        ("  main:", "  ma/in:", "7: grids.ma/in: names hold letters, digits, dots, dashes and underscores"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line_and_the_nearest_valid_name(write, old, new, expected):
    assert old in GOOD
    lines = errors(write(GOOD.replace(old, new, 1)))
    assert any(line.startswith(expected) for line in lines), lines


def test_all_mistakes_are_named_at_once(write):
    lines = errors(write(GOOD.replace("balanced]", "balancd]").replace("qa}", "qqa}")))
    assert [line.split(":")[0] for line in lines] == ["2", "8"]


def test_a_missing_file_is_a_message(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml", NAMES)


def test_the_grid_is_a_full_factorial_with_the_rules_of_a_comparison_side_by_side(write):
    cells = expand(load_config(write(), NAMES), "main")
    points = [(cell.seed, cell.model_name, cell.dataset_name, cell.rule) for cell in cells]
    assert len(set(points)) == len({cell.id for cell in cells}) == 24
    assert [point[3] for point in points[:3]] == ["sequence", "token", "balanced"]
    assert {point[:3] for point in points[:3]} == {(0, "small", "gen_chains")}
    assert points == sorted(points, key=lambda point: (point[0], point[1] != "small", point[2]))


def test_a_cell_is_resolved_whole(write):
    config = load_config(write(), NAMES)
    cell = expand(config, "main", only=["model=large", "rule=token"], seeds=[7])[0]
    assert cell.id == f"token-large-gen_chains-s7-{identity(cell.config)}"
    assert cell.config["model"] == {
        "name": "large", "hub_id": "some/large", "revision": "abc", "template": "boxed",
    }  # fmt: skip
    assert (cell.config["train"]["steps"], cell.config["train"]["learning_rate"]) == (20, 1.0)
    assert cell.config["train"]["clip_high"] == 0.28
    assert cell.evaluate_steps == (0, 5, 12, 20)
    assert cell.evaluation == {
        "template": "boxed", "engine": "torch", "seed": 0,
        "benchmarks": [
            {"name": "gen_short", "samples": 4, "max_tokens": 64, "temperature": 0.5},
            {"name": "gen_long", "temperature": 0.5},
            {"name": "heldout", "dataset": "gen_chains", "samples": 2, "temperature": 0.5},
        ],
    }  # fmt: skip
    assert (cell.model.workers, cell.model.gpus, cell.model.eval_gpus) == (8, 1, 1)
    assert (cell.retries, cell.retry_wait_s, cell.hang_after_s, cell.max_cells, cell.priority) == (3, 10, None, None, 0)


def test_higher_priorities_come_first_and_comparisons_stay_together(write):
    limits = "    priorities: {large: 2, gen_stories: 1}\n    max_cells: 4\n    hang_after_s: 60\n    evaluate:"
    cells = expand(load_config(write(GOOD.replace("    evaluate:", limits)), NAMES), "main")
    assert [(cell.priority, *cell.comparison) for cell in cells[::3]] == [
        (3, "large", "gen_stories", 0), (3, "large", "gen_stories", 1),
        (2, "large", "gen_chains", 0), (2, "large", "gen_chains", 1),
        (1, "small", "gen_stories", 0), (1, "small", "gen_stories", 1),
        (0, "small", "gen_chains", 0), (0, "small", "gen_chains", 1),
    ]  # fmt: skip
    assert all(len({cell.comparison for cell in cells[i : i + 3]}) == 1 for i in range(0, 24, 3))
    assert {(cell.max_cells, cell.hang_after_s) for cell in cells} == {(4, 60)}


def test_the_overrides_concern_their_own_model_only(write):
    cells = expand(load_config(write(), NAMES), "main")
    rates = {(cell.model_name, cell.config["train"]["learning_rate"]) for cell in cells}
    assert rates == {("small", 1e-3), ("large", 1.0)}


@pytest.mark.parametrize(
    ("only", "skip", "expected"),
    [
        (["rule=balanced"], [], 8),
        (["rule=balanced,token", "dataset=gen_chains"], [], 8),
        (["seed=1"], ["rule=token"], 8),
        ([], ["model=large", "seed=0"], 6),
    ],
)
def test_filters(write, only, skip, expected):
    cells = expand(load_config(write(), NAMES), "main", only, skip)
    assert len(cells) == expected
    for axis, values in (text.split("=") for text in only):
        field = {"rule": "rule", "dataset": "dataset_name", "seed": "seed"}[axis]
        assert {str(getattr(cell, field)) for cell in cells} <= set(values.split(","))


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("rule", "write it as axis=value"),
        ("rul=token", "unknown axis 'rul'; did you mean 'rule'?"),
        ("rule=tokn", "unknown rule 'tokn'; did you mean 'token'?"),
        ("seed=9", "unknown seed '9'"),
    ],
)
def test_a_wrong_filter_is_a_message(write, only, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        expand(load_config(write(), NAMES), "main", only=[only])


def test_filters_that_leave_nothing_are_a_message(write):
    with pytest.raises(UserError, match="the filters leave no cell"):
        expand(load_config(write(), NAMES), "main", ["rule=token"], ["rule=token"])
    with pytest.raises(UserError, match=r"unknown grid 'mian'; did you mean 'main'\?"):
        expand(load_config(write(), NAMES), "mian")


def test_a_missing_model_folder_is_one_message(write):
    path = write(GOOD.replace("path: small", "path: models/none"))
    with pytest.raises(UserError) as caught:
        expand(load_config(path, NAMES), "main")
    assert str(caught.value).startswith(f"{path}:2: models.small.path: there is no model folder {path.parent}")
    assert "\n" not in str(caught.value)
    assert len(expand(load_config(path, NAMES), "main", only=["model=large"])) == 12


def test_what_does_not_train_leaves_the_identity_alone_and_what_does_changes_it(write):
    def ids(text: str) -> list[str]:
        return [cell.id for cell in expand(load_config(write(text), NAMES), "main")]

    before = ids(GOOD)
    assert ids(GOOD.replace("cpus: 4", "cpus: 2").replace("samples: 4", "samples: 8")) == before
    assert ids(GOOD.replace("workers: 8, cpus: 4, gpus: 1", "workers: 2, cpus: 1, gpus: 4")) == before
    assert ids(GOOD.replace("    evaluate:", "    max_cells: 1\n    retries: 9\n    evaluate:")) == before
    assert ids("# a comment\n" + GOOD.replace("1e-3", "0.001")) == before
    assert ids(GOOD.replace("    train:", "    scope: group\n    train:")) == before
    changed = ids(GOOD.replace("steps: 20", "steps: 21"))
    assert not set(changed) & set(before)
    rebuilt = write().parent / "small" / "config.json"
    rebuilt.write_text('{"hidden_size": 3}')
    from orchestrator.grid import _fingerprint

    _fingerprint.cache_clear()
    assert [old == new for old, new in zip(before, ids(GOOD), strict=True)] == ["-large-" in old for old in before]


def test_the_hash_is_what_it_always_was():
    value = {"b": [1, 2.5, None, True], "a": {"é": "x", "lr": 1e-06}}
    assert canonical_json(value) == '{"a":{"lr":1e-06,"\\u00e9":"x"},"b":[1,2.5,null,true]}'
    assert identity(value) == identity(dict(reversed(value.items()))) == "f01f677a"


@pytest.mark.parametrize("value", [{"a": {1, 2}}, {"a": float("nan")}, {"a": [object()]}, {1: "a"}, {"a": Path("x")}])
def test_values_without_a_stable_serialisation_are_refused(value):
    with pytest.raises(TypeError, match="config"):
        canonical_json(value)


def test_the_shipped_file_resolves_every_grid_but_for_model_files():
    config = load_config(ROOT / "experiments.yaml")
    assert {"laptop", "real-smoke", "paper"} <= set(config.grids)
    assert next(iter(config.grids)) == "laptop"
    paper = expand(config, "paper")
    assert len(paper) == 12
    assert {cell.rule for cell in paper} == {"sequence", "token", "balanced"}
    assert {len(cell.evaluation["benchmarks"]) for cell in paper} == {7}


def test_a_cell_is_immutable(write):
    cell = expand(load_config(write(), NAMES), "main")[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        cell.id = "other"  # type: ignore[misc]
