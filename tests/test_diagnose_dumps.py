"""Dumps of each trainer are read for what they are, whole or in pieces; what cannot be used is said, with its place."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import dumps
from analysis.diagnose import measure, measure_dump, negative_share
from analysis.diagnose_columns import load_tokenizer
from analysis.diagnose_formats import ROLES, DumpError, parse_mapping
from analysis.dumps import ReadOptions, Responses, concatenate, open_dump

# Two steps of two groups; step, prompt, response, tokens, reward, cut.
ROWS = [
    (1, "2+2", "4", 3, 1.0, False),
    (1, "2+2", "five, I think", 9, 0.0, False),
    (1, "3+3", "6", 4, 1.0, False),
    (1, "3+3", "99999999", 16, 0.0, True),
    (2, "2+2", "it is 4", 5, 1.0, False),
    (2, "2+2", "4", 3, 1.0, False),
    (2, "1+1", "2", 2, 1.0, False),
    (2, "1+1", "eleven", 7, 0.0, False),
]
NAMES = ("step", "prompt", "response", "length", "reward", "truncated")


def table(*columns: str) -> dict[str, list]:
    return {name: [row[NAMES.index(name)] for row in ROWS] for name in columns or NAMES}


def write(path: Path, columns: dict[str, list]) -> Path:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read(*paths: Path, **options) -> Responses:
    return concatenate(list(open_dump(paths, ReadOptions(**options)).batches()))


def message(*paths: Path, **options) -> str:
    with pytest.raises(DumpError) as error:
        measure_dump(open_dump(paths, ReadOptions(**options)))
    return str(error.value)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv", ".jsonl.gz"])
def test_every_kind_of_file_gives_the_same_numbers(tmp_path, suffix):
    found = read(write(tmp_path / f"dump{suffix}", table()))
    assert found.step.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert found.length.tolist() == [3, 9, 4, 16, 5, 3, 2, 7]
    assert found.reward.tolist() == [1, 0, 1, 0, 1, 1, 1, 0]
    assert found.truncated.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert np.isnan(found.advantage).all()
    assert [found.group.tolist().index(key) for key in found.group] == [0, 0, 2, 2, 0, 0, 6, 6]


def test_pieces_do_not_change_what_is_read(tmp_path, monkeypatch):
    files = [write(tmp_path / f"dump{suffix}", table()) for suffix in (".parquet", ".jsonl", ".csv")]
    whole = [read(file) for file in files]
    monkeypatch.setattr(dumps, "MOST_CHUNK_ROWS", 3)
    for file, expected in zip(files, whole, strict=True):
        assert [len(batch.step) for batch in open_dump([file], ReadOptions()).batches()] == [3, 3, 2]
        for ours, theirs in zip(read(file), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_long_texts_are_read_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(dumps, "CHUNK_BYTES", 1000)
    columns = {"prompt": ["p"] * 40, "response": ["x" * 400] * 40, "reward": [0.0, 1.0] * 20}
    for suffix in (".parquet", ".jsonl", ".csv"):
        sizes = [len(b.step) for b in open_dump([write(tmp_path / f"d{suffix}", columns)], ReadOptions()).batches()]
        assert max(sizes) <= 4 or suffix == ".parquet"  # parquet stores the repeated text once
        assert sum(sizes) == 40


def test_lengths_are_characters_unless_tokens_can_be_counted(tmp_path):
    file = write(tmp_path / "dump.jsonl", table("step", "prompt", "response", "reward"))
    dump = open_dump([file], ReadOptions())
    assert dump.length_unit == "characters"
    assert concatenate(list(dump.batches())).length.tolist() == [1, 13, 1, 8, 7, 1, 1, 6]
    count = load_tokenizer("models/tiny-qwen2")
    counted = open_dump([file], ReadOptions(count_tokens=count))
    assert counted.length_unit == "tokens"
    # One more than the text's tokens, for the end-of-sequence token.
    expected = [tokens + 1 for tokens in count([row[2] for row in ROWS])]
    assert concatenate(list(counted.batches())).length.tolist() == expected
    with pytest.raises(DumpError, match="--max-length counts tokens, but this dump has texts alone"):
        open_dump([file], ReadOptions(max_length=8))


def test_max_length_tells_which_responses_were_cut(tmp_path):
    file = write(tmp_path / "dump.csv", table("step", "prompt", "length", "reward"))
    assert np.isnan(read(file).truncated).all()
    assert read(file, max_length=9).truncated.tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


def test_what_stands_for_a_length_a_group_and_a_cut(tmp_path):
    columns = {
        "uid": [7, 7, 8, 8],
        "completion_ids": [[5, 6, 7], [5], [], [9, 9]],
        "rewards": ["1", 0, "0.5", True],
        "finish_reason": ["stop", "length", None, "stop"],
    }
    found = read(write(tmp_path / "dump.jsonl", columns))
    assert found.length.tolist() == [3, 1, 0, 2]
    assert found.reward.tolist() == [1, 0, 0.5, 1]
    assert found.group[0] == found.group[1] != found.group[2] == found.group[3]
    np.testing.assert_array_equal(found.truncated, [0, 1, np.nan, 0])


def test_chat_messages_count_what_the_assistant_says(tmp_path):
    prompt = [{"role": "user", "content": "2+2"}]
    turns = [
        {"role": "assistant", "content": "let me look", "reasoning_content": "hm"},
        {"role": "tool", "content": "a long tool result"},
        {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
    ]
    columns = {"prompt": [prompt] * 2, "completion": [turns, [turns[0]]], "reward": [1, 0]}
    found = read(write(tmp_path / "dump.jsonl", columns))
    assert found.length.tolist() == [14, 13]
    assert found.group[0] == found.group[1]
    columns["completion"] = [[turns[0]], [turns[0] | {"content": "no"}]]
    assert read(write(tmp_path / "dump.parquet", columns)).length.tolist() == [13, 4]


def test_chat_messages_in_parquet_are_those_of_json_lines(tmp_path):
    def say(role, content):
        return {"role": role, "content": content}

    prompts = [[say("system", "be brief"), say("user", "2+2")], [say("user", "2+2")], [say("user", "be brief")], []]
    columns = {
        "prompt": [prompts[i] for i in (0, 0, 1, 1, 2, 2, 3, 3)],
        "completion": [[say("assistant", "x" * i), say("tool", "ignored"), say("assistant", "äö")] for i in range(7)]
        + [[]],
        "reward": [1.0, 0.0] * 4,
    }
    by_row = read(write(tmp_path / "dump.jsonl", columns))
    by_column = read(write(tmp_path / "dump.parquet", columns))
    assert by_column.length.tolist() == by_row.length.tolist() == [2, 3, 4, 5, 6, 7, 8, 0]
    for found in (by_row, by_column):
        assert [found.group.tolist().index(key) for key in found.group] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_a_map_names_columns_and_overrides_the_usual_names(tmp_path):
    columns = {"q": ["a", "a"], "prompt": ["x", "y"], "n": [3, 4], "length": [1, 1], "ok": [1.0, 0.0], "meta.k": [5, 5]}
    file = write(tmp_path / "dump.jsonl", columns)
    mapping = parse_mapping(["prompt=q,length=n", "reward=ok", "step=meta.k"], ROLES)
    found = read(file, mapping=mapping)
    assert found.length.tolist() == [3, 4]
    assert found.step.tolist() == [5, 5]
    assert found.group[0] == found.group[1]


def test_nested_columns_have_dotted_names(tmp_path):
    rows = {"id": ["a", "a"], "usage": [{"out": {"n": 3}}, {"out": {"n": 5}}], "score": [0, 1]}
    for suffix in (".jsonl", ".parquet"):
        file = write(tmp_path / f"dump{suffix}", rows)
        assert read(file, mapping={"group": "id", "length": "usage.out.n"}).length.tolist() == [3, 5]


def test_several_reward_columns_are_summed_and_can_be_chosen(tmp_path):
    columns = table("step", "prompt", "length") | {"rewards/right": [1.0] * 8, "rewards/form": [0.5] * 7 + [None]}
    file = write(tmp_path / "dump.jsonl", columns)
    assert open_dump([file], ReadOptions()).reward_columns == ["rewards/right", "rewards/form"]
    assert read(file).reward.tolist() == [1.5] * 7 + [1.0]
    assert read(file, reward_columns=["rewards/right"]).reward.tolist() == [1.0] * 8
    assert "no column 'rewards/rihgt' (did you mean 'rewards/right'?)" in message(
        file, reward_columns=["rewards/rihgt"]
    )


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("12.jsonl", 12), ("step-7.parquet", 7), ("completions_00003.parquet", 3), ("step_4/train_rollouts.jsonl", 4),
        ("global_step_9_rollouts.jsonl", 9), ("rollouts.jsonl", None), ("2024/rollouts.jsonl", None),
        ("part-00001-of-00002.parquet", None),
    ],
)  # fmt: skip
def test_steps_in_file_names(name, step):
    assert dumps.step_in_name(Path("runs") / name) == step


def test_a_folder_is_read_in_the_order_of_its_numbers_without_evaluation(tmp_path):
    for step in (10, 9, 1):
        (tmp_path / f"step_{step}").mkdir()
        write(tmp_path / f"step_{step}" / "train_rollouts.jsonl", table("prompt", "length", "reward"))
        write(tmp_path / f"step_{step}" / "eval_rollouts.jsonl", table("prompt", "length", "reward"))
    (tmp_path / ".cache").mkdir()
    write(tmp_path / ".cache" / "step_2.jsonl", table("prompt", "length", "reward"))
    found = dumps.find_files([tmp_path])
    assert [file.relative_to(tmp_path).as_posix() for file in found] == [
        f"step_{step}/train_rollouts.jsonl" for step in (1, 9, 10)
    ]
    assert dumps.find_files([tmp_path / "step_1*" / "train*"]) == [found[0], found[2]]
    dump = open_dump([tmp_path], ReadOptions())
    assert dump.step_source == "the names of the files"
    assert sorted(set(concatenate(list(dump.batches())).step)) == [1, 9, 10]


def test_missing_columns_are_named_with_what_to_do(tmp_path):
    file = write(tmp_path / "dump.csv", {"question_text": ["a"], "answer": ["b"], "n": [3]})
    text = message(file)
    assert text.startswith(f"{file}: no column says which prompt a response belongs to (--map prompt=COLUMN or group=")
    assert "how long it is (--map length=COLUMN" in text
    assert "its reward (--map reward=COLUMN or advantage=COLUMN)" in text
    assert "It has the columns question_text, answer, n" in text
    assert "there is no column 'lenght'; it has" in message(file, mapping={"length": "lenght"})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "the file has no rows"),
        (b"step,prompt,length,reward\n", "the file has no rows"),
        (b"[1, 2]", "one JSON array; write one object a line instead (jq"),
        (b"\x7fELF\0\0", "neither parquet, JSON lines nor CSV"),
        (b"PAR1 and then nothing", "broken parquet"),
        (b'{"prompt": "a"\n', "no row of data; line 1: not valid JSON"),
    ],
)
def test_files_that_are_no_dump(tmp_path, content, text):
    file = tmp_path / "dump"
    file.write_bytes(content)
    assert text in message(file)


def test_paths_that_lead_nowhere(tmp_path):
    assert message(tmp_path / "none.jsonl") == f"{tmp_path}/none.jsonl: there is no such file"
    assert "no .parquet, .jsonl" in message(tmp_path)


def test_files_of_two_kinds_are_refused(tmp_path):
    ours = write(tmp_path / "a.jsonl", table())
    theirs = write(tmp_path / "b.jsonl", {"input": ["a"], "output": ["b"], "score": [1], "step": [1]})
    text = message(ours, theirs)
    assert text.startswith(f"{ours} and {theirs} are not of one dump: one is columns by name, the other verl")
    other = write(tmp_path / "c.jsonl", table("step", "prompt", "response", "reward"))
    assert "length is 'length' in one and absent in the other" in message(ours, other)


def test_unusable_rows_are_counted_with_their_lines(tmp_path):
    lines = [json.dumps(dict(zip(NAMES, row, strict=True))) for row in ROWS]
    lines[1] = lines[1].replace("0.0", '"wrong"')
    lines[3] = lines[3].replace("16", "null")
    lines.insert(6, "{torn")
    file = tmp_path / "dump.jsonl"
    file.write_text("\n".join(lines) + "\n")
    dump = open_dump([file], ReadOptions())
    found = concatenate(list(dump.batches()))
    assert found.length.tolist() == [3, 4, 5, 3, 2, 7]
    assert dump.rows == 9
    assert sorted(dump.problem_lines()) == sorted([
        f"1 row: 'reward' is not a number ({file} line 2, reward = 'wrong')",
        f"1 row: 'length' is missing ({file} line 4, length = None)",
        f"1 row: not valid JSON ({file} line 7)",
    ])  # fmt: skip


def test_rows_of_another_schema_are_counted(tmp_path):
    lines = [json.dumps(dict(zip(NAMES, row, strict=True))) for row in ROWS]
    lines += [json.dumps({"prompt": "5+5", "completion": "10", "score": 1.0})] * 4
    file = tmp_path / "dump.jsonl"
    file.write_text("\n".join(lines) + "\n")
    dump = open_dump([file], ReadOptions())
    assert len(concatenate(list(dump.batches())).step) == 8
    assert dump.problem_lines() == [
        f"4 rows: 'step' is missing ({file} line 9, step = None; {file} line 10; {file} line 11; ...)"
    ]


def test_a_file_that_is_mostly_unusable_is_refused(tmp_path):
    file = write(
        tmp_path / "dump.csv", table("step", "prompt", "length") | {"reward": ["good", "bad"] * 3 + ["1", "0"]}
    )
    text = message(file)
    assert text.startswith(
        "6 of 8 rows cannot be used, so the rest may not stand for the run:\n6 rows: 'reward' is not a"
    )
    assert f"{file} line 2, reward = 'good'; {file} line 3; {file} line 4; ..." in text


def test_ragged_lines_of_csv(tmp_path):
    file = write(tmp_path / "dump.csv", table("step", "prompt", "length", "reward"))
    file.write_text(file.read_text() + '2,"a\nb",5\n')
    dump = open_dump([file], ReadOptions())
    assert len(concatenate(list(dump.batches())).step) == 8
    assert dump.problem_lines() == [f"1 row: not the 4 fields of the header ({file} line 11)"]


def test_parquet_rows_are_named_by_number(tmp_path):
    lengths = [3.0, float("inf"), None, -1.0, 5.0, 3.0, 2.0, 7.0]
    file = write(tmp_path / "dump.parquet", table("step", "prompt", "reward") | {"length": lengths})
    dump = open_dump([file], ReadOptions())
    assert concatenate(list(dump.batches())).length.tolist() == [3, 5, 3, 2, 7]
    assert dump.problem_lines() == [
        f"1 row: 'length' is not a length ({file} row 2, length = inf)",
        f"1 row: 'length' is missing ({file} row 3, length = None)",
        f"1 row: 'length' is negative ({file} row 4, length = -1.0)",
    ]


def test_a_file_that_breaks_off_is_named(tmp_path):
    file = write(tmp_path / "dump.jsonl.gz", {name: values * 400 for name, values in table().items()})
    file.write_bytes(file.read_bytes()[:-200])
    assert message(file).startswith(f"{file}: cannot be read to its end (")
    whole = write(
        tmp_path / "dump.parquet", {"prompt": ["a", "b"] * 9000, "length": list(range(18000)), "reward": [1] * 18000}
    )
    content = bytearray(whole.read_bytes())
    content[2000:6000] = bytes(4000)
    whole.write_bytes(content)
    assert message(whole).startswith(f"{whole}: cannot be read to its end (")


def test_a_line_without_end_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(dumps, "LONGEST_LINE", 1000)
    file = tmp_path / "dump.jsonl"
    file.write_text('{"prompt": "' + "a" * 2000)
    assert "line 1 is longer than" in message(file)


def test_responses_alone_in_their_group_are_refused(tmp_path):
    file = write(tmp_path / "dump.jsonl", table("step", "length", "reward") | {"uid": list("abcdefgh")})
    text = message(file)
    assert "every response is alone in its group" in text
    assert "A group is the responses with the same 'uid' in one step" in text


def test_batch_scope_needs_steps(tmp_path):
    file = write(tmp_path / "dump.jsonl", table("prompt", "length", "reward"))
    dump = open_dump([file], ReadOptions())
    assert dump.step_source is None
    with pytest.raises(DumpError, match="--scope batch needs to know which responses share a step"):
        measure_dump(dump, scope="batch")


def test_a_tokenizer_that_is_not_there():
    with pytest.raises(ValueError, match=r"--tokenizer models: neither a tokenizer\.json, a folder with one"):
        load_tokenizer("models")


@pytest.mark.parametrize("pair", ["prompt", "prompt=", "promt=a"])
def test_a_malformed_map(pair):
    with pytest.raises(DumpError, match=f"--map {pair}: write KEY=COLUMN, with KEY one of step, group"):
        parse_mapping([pair], ROLES)


def test_advantages_of_the_dump_come_first(tmp_path):
    columns = table("step", "prompt", "length", "reward") | {"advantage": [-1.0, 1.0, -1.0, 1.0, 0.0, 0.0, -1.0, 1.0]}
    file = write(tmp_path / "dump.csv", columns)
    measured = measure([read(file)])
    assert measured.has_advantages
    # The signs are turned round: the long responses are the positive ones.
    assert measured.estimate("sign_gap").value == pytest.approx(((9 - 3) + (16 - 4) + (7 - 2)) / 3)
    assert measured.estimate(negative_share("token")).value < 0.5
