"""`balagg diagnose`: what is printed, drawn and written; what is wrong is one message and exit status 2."""

import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from analysis.dumps import Responses
from orchestrator import diagnose_command
from orchestrator.cli import app
from tests.test_diagnose import rollouts


@pytest.fixture
def run(tmp_path):
    def run(*arguments: str):
        return CliRunner().invoke(app, ["diagnose", *arguments, "--out", str(tmp_path / "figures")])

    return run


@pytest.fixture
def dump(tmp_path):
    def write(responses: Responses, name: str = "dump.jsonl", **extra):
        file = tmp_path / name
        lines = [
            {"step": step, "prompt": f"q{group}", "length": length, "reward": reward, **extra}
            for step, group, length, reward in zip(*(values.tolist() for values in responses[:4]), strict=True)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(file)

    return write


def test_a_diagnosis_is_printed_drawn_and_written(run, dump, tmp_path):
    numbers = tmp_path / "numbers.json"
    result = run(dump(rollouts()), "--json", str(numbers))
    assert result.exit_code == 0, result.output
    for line in (
        "1,920 responses in 240 groups; 30 steps from column 'step'; rules applied within each group",
        "no advantages in the dump: they are group-normalised rewards, (r - mean) / std",
        "the dump does not say which responses were cut at the length limit (--max-length does)",
        "Conclusion",
    ):
        assert line in result.output
    assert (tmp_path / "figures" / "diagnosis.png").stat().st_size > 10_000
    assert (tmp_path / "figures" / "diagnosis.pdf").exists()
    written = json.loads(numbers.read_text())
    assert written["columns"] == {"step": ["step"], "prompt": ["prompt"], "length": ["length"], "reward": ["reward"]}
    assert written["num_responses"] == 1920
    assert written["interval_over"] == "steps"
    estimate = written["estimates"]["negative_share/token"]
    assert estimate["low"] < estimate["value"] < estimate["high"]
    assert len(estimate["per_step"]) == len(written["steps"]) == 30
    assert "Both biases are there" in " ".join(written["conclusion"])
    assert f"{100 * estimate['value']:.1f} %" in result.output


def test_scope_and_limits_reach_the_measurement(run, dump, tmp_path):
    file, numbers = dump(rollouts()), tmp_path / "numbers.json"
    shares = {}
    for scope in ("group", "batch"):
        assert run(file, "--scope", scope, "--max-length", "250", "--json", str(numbers)).exit_code == 0
        assert run(file, "--scope", scope).output.count("average token of its step") == (scope == "batch")
        written = json.loads(numbers.read_text())
        shares[scope] = written["estimates"]["negative_share/token"]["value"]
        assert written["scope"] == scope
        assert 0.05 < written["estimates"]["truncated"]["value"] < 0.5
    assert shares["group"] != shares["batch"]


def test_rows_that_cannot_be_used_are_reported(run, dump, tmp_path):
    file = dump(rollouts())
    with open(file, "a") as stream:
        stream.write('{"step": 30, "prompt": "x", "length": "long", "reward": 1}\n{"torn": \n')
    result = run(file)
    assert result.exit_code == 0
    assert "2 of 1,922 rows could not be used:" in result.output
    assert f"1 row: 'length' is not a length ({file} line 1921, length = 'long')" in result.output
    assert f"1 row: not valid JSON ({file} line 1922)" in result.output


def test_curves_of_several_runs_are_reported_each(run, tmp_path):
    file = tmp_path / "chart.csv"
    file.write_text("Step,a - length/group_cv,b - length/group_cv\n" + "".join(f"{i},0.{i},0.5\n" for i in range(1, 9)))
    numbers = tmp_path / "numbers.json"
    result = run(str(file), "--json", str(numbers))
    assert result.exit_code == 0, result.output
    assert "Curves of a: 8 steps, 1 to 8" in result.output
    assert "These curves do not tell: how many times as long wrong responses are" in result.output
    assert [report["run"] for report in json.loads(numbers.read_text())] == ["a", "b"]
    assert (tmp_path / "figures" / "run-2" / "diagnosis.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "none.jsonl: there is no such file"),
        (["DUMP", "--map", "length=n"], "there is no column 'n'; it has step, prompt, length, reward"),
        (["DUMP", "--map", "size=n"], "--map size=n: write KEY=COLUMN, with KEY one of step, group, prompt"),
        (["DUMP", "--scope", "rank"], "--scope rank: give group or batch"),
        (["DUMP", "--tokenizer", "docs"], "--tokenizer docs: neither a tokenizer.json"),
        (["DUMP", "--map", "group=length"], "every response is alone in its group"),
    ],
)
def test_wrong_input_is_one_message_and_status_2(run, dump, arguments, message):
    responses = rollouts(steps=1)
    responses = responses._replace(length=responses.length + 1000 * np.arange(len(responses.step)))
    file = dump(responses)
    result = run(*[file if argument == "DUMP" else argument for argument in arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_the_command_registers_itself():
    other = typer.Typer()
    diagnose_command.register(other)
    assert [command.name for command in other.registered_commands] == ["diagnose"]


def test_torch_is_not_loaded(dump):
    code = (
        "import sys; from orchestrator.cli import app\n"
        "try: app()\n"
        "finally: print('torch' in sys.modules, 'ray' in sys.modules, 'mlflow' in sys.modules)"
    )
    file = dump(rollouts(steps=3))
    command = [sys.executable, "-c", code, "diagnose", file, "--out", f"{file}.figures"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("False False False")
