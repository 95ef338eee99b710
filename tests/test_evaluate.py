"""Evaluating a checkpoint: records, scores, going on after a kill, scoring saved generations again."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

import evals.evaluate
from evals.benchmarks import BENCHMARKS, load_benchmark
from evals.datasets import load_heldout
from evals.engines import Sample, SamplingParams
from evals.evaluate import BenchmarkSettings, evaluate_checkpoint, rescore
from evals.grading.sandbox import SandboxUnavailable, available_rung
from evals.problems import Problem
from orchestrator.errors import UserError
from orchestrator.evaluate_commands import register
from trainers import metric_names

ROOT = Path(__file__).resolve().parents[1]
needs_sandbox = pytest.mark.skipif(available_rung() is None, reason="no sandbox on this machine")


class Answering:
    """An engine that knows the answers: its sample number i of a problem is right where `right(problem, i)` says so."""

    def __init__(self, problems: list[Problem], right=lambda problem, place: True, template: str = "Q: {}\nA:"):
        self.problems = {template.format(problem.question): problem for problem in problems}
        self.right = right
        self.prompts: list[str] = []

    def generate(self, prompts: list[str], params: SamplingParams) -> list[list[Sample]]:
        self.prompts += prompts
        return [[self._sample(self.problems[prompt], place) for place in range(params.n)] for prompt in prompts]

    def _sample(self, problem: Problem, place: int) -> Sample:
        right = self.right(problem, place)
        if problem.is_code:
            body = problem.metadata["expression"] if right else "0 - 12345"
            text = f"```python\ndef f({problem.metadata['parameters']}):\n    return {body}\n```"
        else:
            text = f"That makes \\boxed{{{problem.answer[0] if right else -7}}}."
        return Sample([1], [2] * (3 + place), [0.0] * (3 + place), text, truncated=not right)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_seconds(path: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_rows(path)]


def even(problem: Problem, place: int) -> bool:
    return int(problem.answer[0]) % 2 == 0 or place == 0


# --- records and scores ---


def test_every_sample_is_recorded_and_summed_up(tmp_path):
    problems = load_benchmark("gen_short", limit=30)
    settings = BenchmarkSettings(name="gen_short", limit=30, samples=4, max_tokens=50)
    calls: list[tuple] = []
    summary = evaluate_checkpoint(
        "runs/step-12",
        [settings],
        tmp_path,
        engine=Answering(problems, even),
        progress=lambda *args: calls.append(args),
    )
    rows = read_rows(tmp_path / "gen_short.jsonl")
    assert [(row["id"], row["sample"]) for row in rows] == [(p.id, i) for p in problems for i in range(4)]
    first = rows[0]
    assert first["prompt"] == f"Q: {problems[0].question}\nA:" and first["extracted"] == problems[0].answer[0]
    assert (first["correct"], first["reason"], first["tokens"], first["truncated"]) == (True, "correct", 3, False)
    assert 0 < first["seconds"] < 5

    num_even = sum(int(p.answer[0]) % 2 == 0 for p in problems)
    expected = (num_even + 0.25 * (30 - num_even)) / 30
    scores = summary["benchmarks"]["gen_short"]
    assert scores["avg_at_k"] == pytest.approx(expected) and scores["pass_at_k"] == 1.0
    assert (scores["problems"], scores["samples"], scores["k"], scores["length"]) == (30, 120, 4, 4.5)
    assert scores["truncated"] == pytest.approx(0.75 * (30 - num_even) / 30)
    assert scores["reasons"] == {"correct": num_even * 4 + 30 - num_even, "wrong": 3 * (30 - num_even)}
    assert scores["interval_95"][0] < scores["avg_at_k"] < scores["interval_95"][1]
    assert (scores["version"], scores["sandbox"]) == (BENCHMARKS["gen_short"].version, None)
    assert summary["metrics"] == {
        metric_names.eval_avg("gen_short", 4): pytest.approx(expected),
        metric_names.eval_pass("gen_short", 4): 1.0,
        metric_names.eval_length("gen_short"): 4.5,
        metric_names.EVAL_MEAN: pytest.approx(expected),
    }
    assert summary["step"] == 12 and summary["settings"]["versions"]["torch"] == torch.__version__
    assert summary["settings"]["benchmarks"]["gen_short"]["max_tokens"] == 50
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert calls[0] == ("gen_short", 0, 120) and calls[-1] == ("gen_short", 120, 120)


def test_held_out_problems_are_scored_but_not_in_the_mean(tmp_path):
    heldout, tales = load_heldout("gen_chains", limit=20), load_benchmark("gen_tales", limit=10)
    wrong = {problem.id for problem in tales}
    summary = evaluate_checkpoint(
        "model",
        [
            BenchmarkSettings(name="gen_tales", limit=10),
            BenchmarkSettings(name="heldout", dataset="gen_chains", limit=20),
        ],
        tmp_path,
        engine=Answering([*heldout, *tales], lambda problem, place: problem.id not in wrong),
    )
    assert summary["metrics"]["eval/heldout_avg_at_1"] == 1.0
    assert summary["metrics"]["eval/gen_tales_avg_at_1"] == summary["metrics"]["eval/mean"] == 0.0
    assert [row["id"] for row in read_rows(tmp_path / "heldout.jsonl")] == [problem.id for problem in heldout]


def test_a_benchmark_may_have_another_name_and_template(tmp_path):
    problems = load_benchmark("gen_series", limit=5)
    summary = evaluate_checkpoint(
        "model",
        [BenchmarkSettings(name="quick", source="gen_series", limit=5, template="chat")],
        tmp_path,
        engine=Answering(problems, template="{}\n\n"),
        template="qa",
    )
    assert summary["metrics"]["eval/quick_avg_at_1"] == 1.0
    assert summary["settings"]["benchmarks"]["quick"]["benchmark"] == "gen_series"


@needs_sandbox
def test_programs_are_run_in_the_sandbox(tmp_path):
    problems = load_benchmark("gen_functions", limit=8)
    wrong = problems[3].id
    summary = evaluate_checkpoint(
        "model",
        [BenchmarkSettings(name="gen_functions", limit=8)],
        tmp_path,
        engine=Answering(problems, lambda problem, place: problem.id != wrong),
    )
    scores = summary["benchmarks"]["gen_functions"]
    assert scores["avg_at_k"] == 7 / 8 and scores["sandbox"] == available_rung()
    assert scores["reasons"] == {"passed": 7, "wrong_answer": 1}
    assert read_rows(tmp_path / "gen_functions.jsonl")[0]["extracted"].startswith("def f(")


@needs_sandbox
def test_livecodebench_results_state_release_and_dates(tmp_path):
    rows = [
        {
            "question_id": f"q{i}",
            "question_content": "Print twice the number.",
            "contest_date": f"2024-0{i + 1}-05T00:00:00",
            "public_test_cases": json.dumps([{"input": f"{i}\n", "output": f"{2 * i}\n"}]),
            "private_test_cases": json.dumps([{"input": "40\n", "output": "80\n"}]),
            "metadata": "{}",
        }
        for i in range(4)
    ]
    (tmp_path / "livecodebench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Doubling:
        def generate(self, prompts, params):
            text = "```python\nprint(2 * int(input()))\n```"
            return [[Sample([1], [2], [0.0], text, False) for _ in range(params.n)] for _ in prompts]

    settings = BenchmarkSettings(name="livecodebench", samples=1, release="v1", window="2402-2412")
    summary = evaluate_checkpoint("model", [settings], tmp_path / "out", engine=Doubling(), data_dir=tmp_path)
    scores = summary["benchmarks"]["livecodebench"]
    assert scores["version"] == "1, release v1, window 2402-2412, contests 2024-02-05 to 2024-03-05"
    assert (scores["problems"], scores["avg_at_k"], scores["source"]) == (2, 1.0, "file livecodebench.jsonl")


def test_without_a_sandbox_the_other_benchmarks_are_scored(tmp_path, monkeypatch):
    def none_here(rung):
        raise SandboxUnavailable("no sandbox to run programs in. Install bubblewrap")

    monkeypatch.setattr(evals.evaluate, "choose_rung", none_here)
    problems = load_benchmark("gen_short", limit=4)
    summary = evaluate_checkpoint(
        "model",
        [BenchmarkSettings(name="gen_functions"), BenchmarkSettings(name="gen_short", limit=4)],
        tmp_path,
        engine=Answering(problems),
    )
    assert summary["not_run"] == {"gen_functions": "no sandbox to run programs in. Install bubblewrap"}
    assert list(summary["benchmarks"]) == ["gen_short"] and summary["metrics"]["eval/mean"] == 1.0


def test_wrong_settings_are_said_before_anything_is_generated(tmp_path):
    engine = Answering([])
    short = BenchmarkSettings(name="gen_short", limit=2)
    for bad, message in [
        (BenchmarkSettings(name="gen_shorts"), "unknown benchmark 'gen_shorts'"),
        (BenchmarkSettings(name="gen_long", template="boxd"), "unknown prompt template 'boxd'"),
        (BenchmarkSettings(name="heldout"), r"needs the training set"),
        (BenchmarkSettings(name="gen_long", temperature=-1.0), "temperature"),
        (short, "more than one benchmark is named gen_short"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate_checkpoint("model", [short, bad], tmp_path, engine=engine)
    assert engine.prompts == [] and not list(tmp_path.glob("*.jsonl"))


# --- going on after a kill ---


def test_an_evaluation_goes_on_from_any_byte_of_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(evals.evaluate, "GRADED_AT_ONCE", 7)
    monkeypatch.setitem(
        BENCHMARKS, "gen_short", evals.evaluate.dataclasses.replace(BENCHMARKS["gen_short"], batch_samples=16)
    )
    problems = load_benchmark("gen_short", limit=20)
    settings = [BenchmarkSettings(name="gen_short", limit=20, samples=2)]
    whole = tmp_path / "whole"
    expected = evaluate_checkpoint("model", settings, whole, engine=Answering(problems, even))
    content = (whole / "gen_short.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == 40
    for cut in (0, 1, ends[0], ends[6] - 1, ends[15], ends[15] + 5, ends[20], len(content) - 1, len(content)):
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        (folder / "gen_short.jsonl").write_bytes(content[:cut])
        (folder / "gen_short.settings.json").write_bytes((whole / "gen_short.settings.json").read_bytes())
        engine = Answering(problems, even)
        assert evaluate_checkpoint("model", settings, folder, engine=engine) == expected
        num_kept = sum(end <= cut for end in ends)
        resumed = (folder / "gen_short.jsonl").read_bytes()
        assert resumed[: ends[num_kept - 1] if num_kept else 0] == content[: ends[num_kept - 1] if num_kept else 0]
        assert without_seconds(folder / "gen_short.jsonl") == without_seconds(whole / "gen_short.jsonl")
        # 8 problems of 2 samples to a batch: only batches with something missing are generated.
        assert len(engine.prompts) == 20 - num_kept // 16 * 8 if num_kept < 40 else engine.prompts == []


def test_damaged_rows_are_made_again(tmp_path, caplog):
    problems = load_benchmark("gen_short", limit=6)
    settings = [BenchmarkSettings(name="gen_short", limit=6)]
    expected = evaluate_checkpoint("model", settings, tmp_path, engine=Answering(problems))
    path = tmp_path / "gen_short.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:30], '{"id": 3}', *lines[3:]]) + "\n")
    with caplog.at_level(logging.WARNING):
        assert evaluate_checkpoint("model", settings, tmp_path, engine=Answering(problems)) == expected
    assert f"{path}:2" in caplog.text and f"{path}:3: not a graded sample" in caplog.text
    assert len(read_rows(path)) == 6


def test_samples_of_other_settings_are_set_aside(tmp_path):
    problems = load_benchmark("gen_short", limit=4)
    for seed in (0, 1):
        evaluate_checkpoint(
            "model",
            [BenchmarkSettings(name="gen_short", limit=4)],
            tmp_path,
            engine=Answering(problems, lambda problem, place, seed=seed: seed == 0),
            seed=seed,
        )
    assert [row["correct"] for row in read_rows(tmp_path / "gen_short.jsonl")] == [False] * 4
    assert [row["correct"] for row in read_rows(tmp_path / "gen_short.other-1.jsonl")] == [True] * 4


def test_a_higher_limit_keeps_what_is_there_and_a_lower_one_ignores_the_rest(tmp_path):
    problems = load_benchmark("gen_short", limit=6)
    for limit, num_new in ((3, 3), (6, 6), (2, 0)):
        engine = Answering(problems)
        summary = evaluate_checkpoint(
            "model", [BenchmarkSettings(name="gen_short", limit=limit)], tmp_path, engine=engine
        )
        assert summary["benchmarks"]["gen_short"]["samples"] == limit and len(engine.prompts) == num_new
    assert len(read_rows(tmp_path / "gen_short.jsonl")) == 6


def test_samples_that_could_not_be_judged_are_counted_and_left_out(tmp_path):
    problems = load_benchmark("gen_short", limit=4)
    settings = [BenchmarkSettings(name="gen_short", limit=4)]
    evaluate_checkpoint("model", settings, tmp_path, engine=Answering(problems))
    path = tmp_path / "gen_short.jsonl"
    rows = read_rows(path)
    rows[1] |= {"correct": False, "reason": "grader_error"}
    rows[2] |= {"correct": False, "reason": "wrong"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = evaluate_checkpoint("model", settings, tmp_path, engine=Answering([]))["benchmarks"]["gen_short"]
    assert (scores["samples"], scores["samples_ungraded"], scores["avg_at_k"]) == (4, 1, pytest.approx(2 / 3))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with an untrained model of a few thousand parameters and a tokenizer of characters."""
    folder = tmp_path_factory.mktemp("model")
    characters = sorted({c for c in map(chr, range(32, 127))} | {"\n"})
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


KILLED_RUN = """
import sys
from evals import evaluate
print(sorted({"ray", "mlflow", "vllm", "datasets", "pydantic", "math_verify"} & set(sys.modules)), flush=True)
evaluate.GRADED_AT_ONCE = 4
settings = evaluate.BenchmarkSettings(name="gen_tales", limit=60, samples=2, max_tokens=12)
evaluate.evaluate_checkpoint(sys.argv[1], [settings], sys.argv[2], progress=lambda *args: print(*args, flush=True))
"""


def test_a_killed_evaluation_ends_like_an_uninterrupted_one(tmp_path, tiny_model):
    """SIGKILL in the middle of grading, then the same call again: equal samples and scores, nothing graded twice."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN, str(tiny_model), str(tmp_path / "killed")],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout
        assert process.stdout.readline() == "[]\n"  # no heavy optional package is imported with the evaluator
        next(line for line in process.stdout if int(line.split()[1]) >= 20)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    path = tmp_path / "killed" / "gen_tales.jsonl"
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 20 <= kept.count(b"\n") < 120 and not (tmp_path / "killed" / "summary.json").exists()

    settings = [BenchmarkSettings(name="gen_tales", limit=60, samples=2, max_tokens=12)]
    summaries = [evaluate_checkpoint(tiny_model, settings, tmp_path / name) for name in ("killed", "uninterrupted")]
    assert summaries[0] == summaries[1]
    assert path.read_bytes().startswith(kept)
    assert without_seconds(path) == without_seconds(tmp_path / "uninterrupted" / "gen_tales.jsonl")


def test_a_finished_evaluation_is_summed_up_without_loading_the_model(tmp_path, tiny_model):
    settings = [BenchmarkSettings(name="gen_short", limit=3, max_tokens=4)]
    first = evaluate_checkpoint(str(tiny_model), settings, tmp_path)
    (tiny_model / "config.json").rename(tiny_model / "config.away")
    try:
        assert evaluate_checkpoint(str(tiny_model), settings, tmp_path) == first
    finally:
        (tiny_model / "config.away").rename(tiny_model / "config.json")


# --- scoring saved generations again ---


def test_rescore_reports_what_it_cannot_use(tmp_path, caplog):
    problems = load_benchmark("gen_short", limit=3)
    good = [
        {"id": problem.id, "sample": 0, "completion": f"\\boxed{{{problem.answer[0]}}}", "correct": True}
        for problem in problems
    ]
    good[1] |= {"completion": "\\boxed{-1}"}  # its saved verdict does not hold any more
    path = tmp_path / "generations.jsonl"
    lines = [json.dumps(good[0]), "{", json.dumps(good[1]), '{"id": "x"}', '{"id": "nobody", "completion": ""}']
    path.write_text("\n".join([*lines, json.dumps(good[2]), '{"id": "cut']) + "\n")
    with caplog.at_level(logging.WARNING):
        scores = rescore("gen_short", path, out=tmp_path / "new.jsonl")
    assert scores["avg_at_k"] == pytest.approx(2 / 3) and scores["changed"] == 1 and scores["k"] == 1
    assert sorted(message.split(" ")[0] for message in scores["malformed"]) == [f"{path}:{n}:" for n in (2, 4, 5, 7)]
    assert "4 rows cannot be used" in caplog.text
    assert [row["correct"] for row in read_rows(tmp_path / "new.jsonl")] == [True, False, True]


def test_rescoring_an_evaluation_changes_nothing(tmp_path):
    problems = load_benchmark("gen_long", limit=10)
    settings = [BenchmarkSettings(name="gen_long", limit=10, samples=3)]
    summary = evaluate_checkpoint("model", settings, tmp_path, engine=Answering(problems, even))
    scores = rescore("gen_long", tmp_path / "gen_long.jsonl")
    assert scores == summary["benchmarks"]["gen_long"] | {"changed": 0, "malformed": []}


def test_rescore_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing.jsonl does not exist"):
        rescore("gen_short", tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="the file is empty"):
        rescore("gen_short", tmp_path / "empty.jsonl")
    (tmp_path / "foreign.jsonl").write_text('{"id": "nobody", "completion": ""}\n')
    with pytest.raises(ValueError, match=r"foreign.jsonl:1: gen_short has no problem 'nobody'"):
        rescore("gen_short", tmp_path / "foreign.jsonl")


# --- the commands ---


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    register(app)
    return app


def test_evaluate_and_grade_commands(tmp_path, tiny_model, app):
    runner = CliRunner()
    options = ["--benchmarks", "gen_short, heldout", "--dataset", "gen_chains", "--limit", "3", "--max-tokens", "6"]
    result = runner.invoke(app, ["evaluate", "--model", str(tiny_model), "--out", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: entry["samples"] for name, entry in summary["benchmarks"].items()} == {"gen_short": 3, "heldout": 3}
    assert "gen_short avg@1" in result.output
    result = runner.invoke(app, ["grade", "--benchmark", "gen_short", str(tmp_path / "gen_short.jsonl")])
    assert result.exit_code == 0 and "verdicts that differ from the file's: 0" in result.output


def test_commands_turn_mistakes_into_one_message(tmp_path, app):
    for arguments, message in [
        (
            ["evaluate", "--model", "some/model", "--benchmarks", "math50", "--out", str(tmp_path)],
            "unknown benchmark 'math50'",
        ),
        (["evaluate", "--model", "no/model", "--benchmarks", "gen_short", "--out", str(tmp_path)], "cannot load"),
        (["evaluate", "--model", "tiny-qwen", "--benchmarks", "gen_short"], "unknown model 'tiny-qwen'"),
        (["grade", "--benchmark", "gen_short", "nothing.jsonl"], "nothing.jsonl does not exist"),
    ]:
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, UserError) and message in str(result.exception)


# --- real problems ---


def test_gold_answers_of_real_benchmarks_score_one(tmp_path, shared_data):
    names = ("math500", "aime24", "aime25", "olympiadbench", "minerva_math")
    problems = [problem for name in names for problem in load_benchmark(name, data_dir=shared_data, limit=5)]
    summary = evaluate_checkpoint(
        "model",
        [BenchmarkSettings(name=name, limit=5, samples=1, template="qa") for name in names],
        tmp_path,
        engine=Answering(problems),
        data_dir=shared_data,
    )
    assert summary["metrics"]["eval/mean"] == 1.0
    assert {scores["problems"] for scores in summary["benchmarks"].values()} == {5}
