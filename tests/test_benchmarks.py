"""Where problems come from: entries, local files, LiveCodeBench rows, training sets, prompts."""

import base64
import dataclasses
import gzip
import json
import logging
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import pytest

from evals import livecodebench
from evals.benchmarks import BENCHMARKS, get_benchmark, load_benchmark
from evals.datasets import (
    DATASETS,
    clean,
    load_heldout,
    load_train,
    split_heldout,
    strip_dapo_instruction,
)
from evals.grading import EXTRACTORS, grade
from evals.problems import Problem
from evals.prompts import QWEN_MATH_SYSTEM, TEMPLATES, get_template
from evals.sources import LoadReport, RowError, Source, SourceUnavailable

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data files are not there")

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on "
    'its own line after "Answer:".'
)


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def maths_rows(num: int) -> list[dict[str, object]]:
    return [{"problem": f"What is {i} + {i}?", "answer": str(2 * i), "unique_id": f"p{i}"} for i in range(num)]


def hidden(tests: object, *, as_pickle: bool = True) -> str:
    if not as_pickle:
        return json.dumps(tests)
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def code_row(number: int = 1, day: str = "2024-09-07T00:00:00", **changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "question_title": "doubling",
        "question_content": "Print twice the number.",
        "platform": "atcoder",
        "question_id": f"abc{number}",
        "contest_date": day,
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
        "private_test_cases": hidden([{"input": "4\n", "output": "8\n", "testtype": "stdin"}]),
        "metadata": "{}",
    }
    return row | changes


# --- entries ---


def test_every_entry_is_complete():
    assert list(BENCHMARKS)[:6] == [
        "math500", "aime24", "aime25", "olympiadbench", "minerva_math", "livecodebench",
    ]  # fmt: skip
    for entry in BENCHMARKS.values():
        assert entry.version and entry.num_samples >= 1 and entry.template in TEMPLATES
        assert (entry.source is None) == (entry.parse is None)
        assert entry.grader == ("code" if entry.name in ("livecodebench", "gen_functions") else "maths")
    assert all(entry.template in TEMPLATES for entry in DATASETS.values())
    assert all(template.extractor in EXTRACTORS for template in TEMPLATES.values())


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name.startswith("gen_")])
def test_generated_benchmarks_are_fixed_sets_of_200(name):
    problems = load_benchmark(name)
    assert len({problem.id for problem in problems}) == 200
    assert load_benchmark(name, limit=7) == problems[:7]
    assert all(problem.is_code == (name == "gen_functions") for problem in problems)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"'math50'; known: math500, aime24"):
        load_benchmark("math50")
    with pytest.raises(ValueError, match="known: gen_chains"):
        load_train("dapo")
    with pytest.raises(ValueError, match="known: qa, chat, boxed"):
        get_template("box")


# --- local files ---


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_local_files_of_each_kind(tmp_path, suffix):
    path = tmp_path / f"math500{suffix}"
    if suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(maths_rows(5)), path)
    else:
        write_rows(path, maths_rows(5))
    report = LoadReport()
    problems = load_benchmark("math500", data_dir=tmp_path, report=report)
    assert [(p.id, p.question, p.answer) for p in problems] == [
        (f"p{i}", f"What is {i} + {i}?", (str(2 * i),)) for i in range(5)
    ]
    assert report.counts()["source"] == f"file math500{suffix}" and report.rows == 5
    assert [p.id for p in load_benchmark("math500", data_dir=tmp_path, limit=2)] == ["p0", "p1"]


def test_bad_rows_are_named_by_line_and_counted(tmp_path, caplog):
    good = maths_rows(3)
    path = write_rows(
        tmp_path / "math500.jsonl",
        [good[0], '{"problem": "torn', "", good[1], {"problem": "no gold"}, [1], good[2], {"problem": 3, "answer": []}],
    )
    report = LoadReport()
    with caplog.at_level(logging.WARNING):
        problems = load_benchmark("math500", data_dir=tmp_path, report=report)
    assert [problem.id for problem in problems] == ["p0", "p1", "p2"]
    assert report.rows == 7 and report.counts()["bad_rows"] == 4
    assert [message.split(" ")[0] for message in report.bad] == [f"{path}:{n}:" for n in (2, 5, 6, 8)]
    assert "no column 'answer' (columns: problem)" in report.bad[1]
    assert "math500: 4 of 7 rows cannot be used" in caplog.text and f"{path}:5" in caplog.text


def test_a_file_without_one_usable_row_is_an_error(tmp_path):
    write_rows(tmp_path / "aime24.jsonl", [{"question": "?"}])
    with pytest.raises(ValueError, match=r"aime24: 1 of 1 rows cannot be used.*aime24.jsonl:1: no column 'problem'"):
        load_benchmark("aime24", data_dir=tmp_path)
    write_rows(tmp_path / "aime25.jsonl", [])
    with pytest.raises(ValueError, match=r"aime25: no rows in file aime25.jsonl"):
        load_benchmark("aime25", data_dir=tmp_path)


def test_two_problems_of_one_id_are_an_error(tmp_path):
    write_rows(tmp_path / "math500.jsonl", [*maths_rows(2), maths_rows(1)[0]])
    with pytest.raises(ValueError, match="two problems have the id 'p0'"):
        load_benchmark("math500", data_dir=tmp_path)


def test_a_missing_folder_and_a_wrong_limit(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data directory .*nowhere does not exist"):
        load_benchmark("math500", data_dir=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_benchmark("gen_short", limit=0)
    with pytest.raises(ValueError, match="only livecodebench has"):
        load_benchmark("math500", release="v6")


def test_one_message_when_neither_file_nor_hub_is_there(tmp_path):
    """In a process of its own, because the hub library reads its offline switch when it is imported."""
    code = (
        "import sys\n"
        "from evals.benchmarks import load_benchmark\n"
        "from evals.sources import SourceUnavailable\n"
        "try:\n    load_benchmark('math500', data_dir=sys.argv[1])\n"
        "except SourceUnavailable as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert f"in {tmp_path} there is no math500 (.jsonl, .jsonl.gz, .parquet)" in result.stdout
    assert "HuggingFaceH4/MATH-500 cannot be read from the Hugging Face hub" in result.stdout
    assert "--data-dir DIR" in result.stdout and len(result.stdout.splitlines()) == 1


def test_local_only_sets_say_so():
    with pytest.raises(SourceUnavailable, match=r"train_sample_deepscaler.*from local files alone: pass --data-dir"):
        load_train("deepscaler_sample")


@pytest.mark.parametrize("stream", [False, True])
def test_hub_data_sets_are_read_through_the_datasets_library(tmp_path, monkeypatch, stream):
    """A folder in the hub's layout stands for a hub id: the library reads both the same way."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_rows(tmp_path / "copy" / "test.jsonl", [*maths_rows(3), {"problem": "no gold", "unique_id": "p3"}])
    source = Source(hub_id=str(tmp_path / "copy"), split="test", files=("math500",), stream=stream)
    monkeypatch.setitem(BENCHMARKS, "math500", dataclasses.replace(BENCHMARKS["math500"], source=source))
    report = LoadReport()
    problems = load_benchmark("math500", data_dir=tmp_path, report=report)
    assert [(p.id, p.answer) for p in problems] == [("p0", ("0",)), ("p1", ("2",)), ("p2", ("4",))]
    assert report.source == f"hub {tmp_path / 'copy'}@newest"
    assert report.bad[0].startswith(f"{tmp_path / 'copy'} row 3: no column 'answer'")


# --- rows of each benchmark ---


def test_copies_with_other_column_names(tmp_path):
    write_rows(tmp_path / "aime24.jsonl", [{"ID": "2024-I-1", "Problem": "How long?", "Answer": 25}])
    write_rows(tmp_path / "aime25.jsonl", [{"id": "a-0", "problem": "How many?", "expected_answer": "070"}])
    write_rows(tmp_path / "minerva_math.jsonl", [{"question": "How bright?", "answer": "4.5e33"}])
    assert load_benchmark("aime24", data_dir=tmp_path) == [Problem("2024-I-1", "How long?", ("25",))]
    assert load_benchmark("aime25", data_dir=tmp_path) == [Problem("a-0", "How many?", ("070",))]
    assert load_benchmark("minerva_math", data_dir=tmp_path) == [Problem("minerva_math-0", "How bright?", ("4.5e33",))]


def test_olympiadbench_keeps_all_golds_and_its_units(tmp_path):
    row = {"id": 7, "question": "Find x.", "context": "Let x > 0.", "final_answer": ["$1$", "$2$"], "unit": "km"}
    write_rows(tmp_path / "olympiadbench.jsonl", [row, row | {"id": 8, "final_answer": []}])
    report = LoadReport()
    (problem,) = load_benchmark("olympiadbench", data_dir=tmp_path, report=report)
    assert problem == Problem("7", "Let x > 0.\n\nFind x.", ("$1$", "$2$"), metadata={"unit": "km"})
    assert report.bad == [f"{tmp_path / 'olympiadbench.jsonl'}:2: column 'final_answer' is not a list of texts"]


@pytest.mark.parametrize("as_pickle", [True, False])
def test_livecodebench_stdin_problem(tmp_path, as_pickle):
    tests = [{"input": "4\n", "output": "8\n", "testtype": "stdin"}]
    write_rows(tmp_path / "livecodebench.jsonl", [code_row(private_test_cases=hidden(tests, as_pickle=as_pickle))])
    (problem,) = load_benchmark("livecodebench", data_dir=tmp_path)
    assert problem.tests == ({"input": "1\n", "output": "2\n"}, {"input": "4\n", "output": "8\n"})
    assert problem.fn_name is None and problem.is_code and problem.time_limit_s == 6.0
    assert problem.metadata["contest_date"] == "2024-09-07"


def test_livecodebench_functional_problem(tmp_path):
    starter = "class Solution:\n    def twice(self, n: int) -> int:\n"
    row = code_row(metadata=json.dumps({"func_name": "twice"}), starter_code=starter)
    write_rows(tmp_path / "livecodebench.jsonl", [row])
    (problem,) = load_benchmark("livecodebench", data_dir=tmp_path)
    assert (problem.fn_name, problem.starter_code) == ("twice", starter)
    assert starter.rstrip() in TEMPLATES["boxed"].render(problem) and "boxed" not in TEMPLATES["boxed"].render(problem)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/balagg-unpickled",)


@pytest.mark.parametrize(
    "payload",
    [Evil(), date(2024, 1, 1), {"a": Evil()}],
    ids=["a function call", "a harmless class", "a call inside a dict"],
)
def test_hidden_tests_with_a_class_are_refused(payload):
    encoded = base64.b64encode(zlib.compress(pickle.dumps(payload))).decode()
    with pytest.raises(RowError, match=r"in their pickle: refused"):
        livecodebench.decode_hidden(encoded)
    assert not Path("/tmp/balagg-unpickled").exists()


@pytest.mark.parametrize(
    "encoded",
    ["not base64!", "aGVsbG8=", base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), hidden([])[:-12], "\u00e9"],
)
def test_damaged_hidden_tests_are_a_row_error(encoded):
    with pytest.raises(RowError, match="cannot be decoded"):
        livecodebench.decode_hidden(encoded)


def test_hidden_tests_that_would_fill_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(livecodebench, "MAX_TEST_BYTES", 1000)
    with pytest.raises(RowError, match="more than 1000 bytes"):
        livecodebench.decode_hidden(base64.b64encode(zlib.compress(b"0" * 10_000)).decode())


def test_bad_livecodebench_rows_are_reported(tmp_path):
    rows = [
        code_row(1),
        code_row(2, private_test_cases="!!"),
        code_row(3, public_test_cases=json.dumps([{"input": 1}])),
        code_row(4, day="May"),
        code_row(5, public_test_cases="[]", private_test_cases="[]"),
    ]
    write_rows(tmp_path / "livecodebench.jsonl", rows)
    report = LoadReport()
    assert [p.id for p in load_benchmark("livecodebench", data_dir=tmp_path, report=report)] == ["abc1"]
    assert [message.split(": ")[1].split(" ")[0] for message in report.bad] == [
        "private_test_cases", "public_test_cases", "contest_date", "neither",
    ]  # fmt: skip


def test_releases_and_windows_choose_by_contest_date(tmp_path):
    days = [
        "2023-05-07",
        "2024-03-31",
        "2024-04-01",
        "2024-08-01",
        "2025-01-31",
        "2025-02-01",
        "2025-02-02",
        "2025-04-06",
    ]
    write_rows(tmp_path / "livecodebench.jsonl", [code_row(i, day) for i, day in enumerate(days)])

    def ids(**options: str) -> list[int]:
        return [int(p.id[3:]) for p in load_benchmark("livecodebench", data_dir=tmp_path, **options)]

    assert ids() == list(range(8))
    assert ids(release="v1") == [0, 1]
    assert ids(release="v5") == [0, 1, 2, 3, 4]
    assert ids(window="2408-2502") == [3, 4, 5]
    assert ids(release="v5", window="2408-2502") == [3, 4]
    assert ids(window="2025-02-02..2025-04-06") == [6, 7]
    with pytest.raises(ValueError, match="no problem of release v1 in window 2408-2502"):
        ids(release="v1", window="2408-2502")
    with pytest.raises(ValueError, match="unknown LiveCodeBench release 'v7'; known: v1"):
        ids(release="v7")


@pytest.mark.parametrize("window", ["2024", "2413-2502", "2024-08-01", "2024-08-01..soon"])
def test_windows_of_another_form_are_refused(window):
    with pytest.raises(ValueError, match="neither like 2408-2502"):
        livecodebench.parse_window(window)
    with pytest.raises(ValueError, match="ends before it starts"):
        livecodebench.parse_window("2502-2408")


def test_the_upstream_increments_make_a_release(tmp_path):
    for part, name in enumerate(("test", "test2", "test3")):
        write_rows(tmp_path / "livecodebench" / f"{name}.jsonl", [code_row(part, "2024-01-01")])
    report = LoadReport()
    problems = load_benchmark("livecodebench", data_dir=tmp_path, release="v2", report=report)
    assert [problem.id for problem in problems] == ["abc0", "abc1"]
    assert report.source == "file test.jsonl, test2.jsonl"


# --- training sets ---


@pytest.mark.parametrize("name", ["gen_chains", "gen_stories"])
def test_generated_training_sets_keep_their_splits_apart(name):
    train, heldout = load_train(name), load_heldout(name)
    assert (len(train), len(heldout)) == (4096, 200)
    assert not {p.question for p in train} & {p.question for p in heldout}
    assert load_train(name, limit=10) == train[:10] and load_heldout(name, limit=10) == heldout[:10]


def dapo_row(question: str, answer: str, index: str) -> dict[str, object]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO_PROMPT.format(question)}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def test_dapo_rows_are_cleaned_and_counted(tmp_path):
    rows = [
        dapo_row("How many?", "34", "a"),
        dapo_row("How  many?\n", "34", "b"),  # the same question but for white space
        dapo_row("How long?", "5", "c"),
        dapo_row("How long?", "6", "d"),  # and another answer: both go
        dapo_row("How long?", "5", "e"),
        dapo_row("How far?", "7", "f"),
        {"prompt": "How old?", "reward_model": {"ground_truth": "1"}},
    ]
    write_rows(tmp_path / "dapo_17k.jsonl", rows)
    report = LoadReport()
    problems = load_train("dapo_17k", data_dir=tmp_path, report=report)
    assert problems == [Problem("a", "How many?", ("34",)), Problem("f", "How far?", ("7",))]
    assert report.counts() == {
        "source": "file dapo_17k.jsonl", "rows": 7, "bad_rows": 1, "duplicates": 1, "conflicting": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match="2 problems are too few to hold any out"):
        load_heldout("dapo_17k", data_dir=tmp_path)


def test_the_dapo_instruction_is_taken_off_and_nothing_else():
    question = "Solve the following math problem in your head.\n\nAnswer: is it 3?\n\nRemember the sign."
    assert strip_dapo_instruction(DAPO_PROMPT.format(question)) == question
    assert strip_dapo_instruction(question) == question


def test_polaris_and_processed_dapo_rows(tmp_path):
    write_rows(tmp_path / "polaris_53k.jsonl", [{"problem": "1+1?", "answer": "2", "difficulty": "3/8"}])
    write_rows(tmp_path / "dapo_17k_processed.jsonl", [{"prompt": "2+2?", "solution": "4"}])
    (polaris,) = load_train("polaris_53k", data_dir=tmp_path)
    assert (polaris.question, polaris.answer, polaris.metadata) == ("1+1?", ("2",), {"difficulty": "3/8"})
    (dapo,) = load_train("dapo_17k_processed", data_dir=tmp_path)
    assert (dapo.question, dapo.answer) == ("2+2?", ("4",))


def test_the_held_out_split_of_a_real_set_depends_on_the_questions_alone():
    problems = [Problem(f"p{i}", f"question {i}", (str(i),)) for i in range(50)]
    train, heldout = split_heldout(problems, 8)
    assert (len(train), len(heldout)) == (42, 8)
    assert {p.id for p in heldout} == {p.id for p in split_heldout(problems[::-1], 8)[1]}
    assert sorted([*train, *heldout], key=problems.index) == problems and train == sorted(train, key=problems.index)


def test_real_sets_hold_out_a_tenth_at_most(tmp_path):
    write_rows(tmp_path / "train_sample_deepscaler.jsonl", maths_rows(60))
    options = {"data_dir": tmp_path}
    train, heldout = load_train("deepscaler_sample", **options), load_heldout("deepscaler_sample", **options)
    assert (len(train), len(heldout)) == (54, 6)
    assert not {p.question for p in train} & {p.question for p in heldout}
    assert len(load_train("deepscaler_sample", num_heldout=2, **options)) == 58
    assert len(load_heldout("deepscaler_sample", num_heldout=2, **options)) == 2
    assert load_train("deepscaler_sample", limit=5, **options) == train[:5]


def test_clean_counts_every_row_once():
    rows = [Problem("1", "a", ("1",)), Problem("2", "a", ("1",)), Problem("3", "b", ("1",)), Problem("4", "b", ("2",))]
    report = LoadReport()
    assert [problem.id for problem in clean(rows, report)] == ["1"]
    assert (report.duplicates, report.conflicting) == (1, 2)


# --- prompts ---


class Chat:
    """What the templates use of a tokenizer."""

    chat_template = "given"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


QUESTION = Problem("p", "What is {1, 2}?", ("3",))


def test_qa_is_plain_text():
    assert TEMPLATES["qa"].render(QUESTION, Chat()) == "Q: What is {1, 2}?\nA:"


def test_qwen_math_is_the_models_own_prompt():
    assert TEMPLATES["qwen_math"].render(QUESTION, Chat()) == (
        f"<|im_start|>system\n{QWEN_MATH_SYSTEM}<|im_end|>\n<|im_start|>user\nWhat is {{1, 2}}?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_templates_use_the_tokenizers_own():
    assert TEMPLATES["chat"].render(QUESTION, Chat()) == "[user]What is {1, 2}?[assistant]"
    boxed = TEMPLATES["boxed"].render(QUESTION, Chat())
    assert boxed.startswith("[system]") and boxed.endswith("[user]What is {1, 2}?[assistant]") and "boxed{}" in boxed
    assert TEMPLATES["boxed"].render(QUESTION).endswith("\n\nWhat is {1, 2}?\n\n")
    assert "`Answer: $Answer`" in TEMPLATES["dapo"].render(QUESTION, Chat())


def test_code_problems_ask_for_a_program_in_every_template():
    stdin = Problem("c", "Add the numbers.", tests=({"input": "1 2", "output": "3"},))
    function = Problem("f", "Write f(x).", tests=({"input": "1", "output": "2"},), fn_name="f")
    for name in ("boxed", "qwen_math", "dapo", "polaris", "chat"):
        prompt = TEMPLATES[name].render(stdin, Chat())
        assert "standard input" in prompt and "boxed" not in prompt and "$Answer" not in prompt
        assert "def f(" in TEMPLATES[name].render(function, Chat())
    assert TEMPLATES["qa"].render(function) == "Q: Write f(x).\nA:"


@pytest.mark.parametrize(
    ("completion", "correct"),
    [
        ("We get \\boxed{7} along the way.\nAnswer: 12", True),
        ("Answer: 5\nno, wait\n**Answer:** $12$", True),
        ("So it is \\boxed{12}.", True),
        ("Answer: 12\nAnswer: 5", False),
        ("<think>Answer: 12", False),
        ("<think>Answer: 5</think>\nAnswer: 12", True),
        ("nothing", False),
    ],
)
def test_the_dapo_template_reads_the_answer_line_first(completion, correct):
    problem = Problem("p", "?", ("12",))
    assert grade(completion, problem, extractor=TEMPLATES["dapo"].extractor).correct is correct


# --- the real files ---


@needs_shared_data
@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "olympiadbench", "minerva_math"])
def test_real_benchmarks_are_whole(name):
    report = LoadReport()
    problems = load_benchmark(name, data_dir=SHARED_DATA, report=report)
    assert len(problems) == get_benchmark(name).num_problems and not report.bad
    assert all(problem.question and problem.answer and not problem.is_code for problem in problems)


@needs_shared_data
def test_real_livecodebench_rows():
    problems = load_benchmark("livecodebench", data_dir=SHARED_DATA)
    assert [problem.id for problem in problems] == ["1873_A", "2727", "abc301_a"]
    assert [problem.fn_name for problem in problems] == [None, "countSeniors", None]
    assert all(len(problem.tests) > 1 for problem in problems)


@needs_shared_data
def test_real_training_sets():
    dapo = load_train("dapo_17k", data_dir=SHARED_DATA)
    assert [p.answer for p in dapo][:2] == [("34",), ("113",)]
    assert dapo[0].question.startswith("In triangle $ABC$") and dapo[0].question.endswith("find $a + b + c$.")
    assert len(load_train("deepscaler_sample", data_dir=SHARED_DATA)) == 270
    assert len(load_heldout("deepmath_sample", data_dir=SHARED_DATA)) == 20
