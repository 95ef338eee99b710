"""What TRL, verl, OpenRLHF and prime-rl really write (tests/fixtures, made by their own code) is read for what it is.

The fixtures of all but TRL hold the same sampled responses, so what one format tells must agree with the others.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.diagnose import measure_dump
from analysis.diagnose_columns import load_tokenizer
from analysis.dumps import Dump, ReadOptions, Responses, concatenate, open_dump

FIXTURES = Path("tests/fixtures")
COUNT_TOKENS = load_tokenizer("models/tiny-qwen2")
PER_GROUP = 4


def read(name: str, **options) -> tuple[Dump, Responses]:
    dump = open_dump([FIXTURES / name], ReadOptions(**options))
    return dump, concatenate(list(dump.batches()))


def groups_of(responses: Responses) -> list[int]:
    """Groups by number, in the order of their first response."""
    keys = list(zip(responses.step.tolist(), responses.group.tolist(), strict=True))
    order = list(dict.fromkeys(keys))
    return [order.index(key) for key in keys]


@pytest.fixture(scope="module")
def true_lengths() -> np.ndarray:
    """Sampled tokens of the 24 responses, which only prime-rl's rows hold."""
    return read("prime_rl_flat")[1].length


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("trl", "TRL"), ("verl", "verl"), ("verl_v1", "verl"), ("openrlhf.jsonl", "OpenRLHF reward function"),
        ("prime_rl_flat", "prime-rl"), ("prime_rl_traces", "prime-rl traces"), ("prime_rl_episodes", "prime-rl traces"),
    ],
)  # fmt: skip
def test_the_format_and_its_groups_are_recognised(name, format_name):
    dump, found = read(name)
    assert dump.layout.format.name == format_name
    assert dump.unusable == 0
    num_groups = 2 if "traces" in name or "episodes" in name else 6
    assert groups_of(found) == [group for group in range(num_groups) for _ in range(PER_GROUP)]
    if name == "openrlhf.jsonl":
        assert dump.step_source is None
    else:
        assert found.step.tolist() == [1] * (len(found.step) // 2) + [2] * (len(found.step) // 2)


def test_trl_completions_as_its_trainer_wrote_them():
    dump, found = read("trl", count_tokens=COUNT_TOKENS)
    assert dump.reward_columns == ["correct", "has_digits"]
    table = pd.concat([pd.read_parquet(file) for file in sorted((FIXTURES / "trl").glob("*.parquet"))])
    assert found.reward.tolist() == pytest.approx((table.correct + table.has_digits).tolist())
    assert found.advantage.tolist() == table.advantage.tolist()
    # TRL's own log of the run has the sampled tokens; counting texts anew comes close.
    log = pd.read_json(FIXTURES / "trl_log_history.jsonl", lines=True)
    for step, mean in zip(log.step, log["completions/mean_length"], strict=False):
        if np.isfinite(mean):
            assert found.length[found.step == step].mean() == pytest.approx(mean, abs=1.0)


def test_texts_counted_anew_have_the_sampled_lengths(true_lengths):
    cut = read("prime_rl_flat")[1].truncated.astype(bool)
    assert 0 < cut.sum() < len(cut)
    for name in ("verl", "verl_v1"):
        counted = read(name, count_tokens=COUNT_TOKENS)[1].length
        assert counted[~cut].tolist() == true_lengths[~cut].tolist()
        # A response that was cut has no end-of-sequence token, which the text cannot show.
        assert counted[cut].tolist() == (true_lengths[cut] + 1).tolist()
    # OpenRLHF decodes special tokens too, so nothing is added, and the prompt is cut off.
    assert read("openrlhf.jsonl", count_tokens=COUNT_TOKENS)[1].length.tolist() == true_lengths.tolist()


def test_openrlhf_characters_leave_the_prompt_out():
    verl, openrlhf = read("verl")[1], read("openrlhf.jsonl")[1]
    ended = ~read("prime_rl_flat")[1].truncated.astype(bool)
    assert openrlhf.length.tolist() == (verl.length + ended * len("<eos>")).tolist()


def test_rewards_agree_between_formats():
    rewards = read("prime_rl_flat")[1].reward
    assert 0 < rewards.sum() < len(rewards)
    for name in ("verl", "verl_v1", "openrlhf.jsonl"):
        assert read(name)[1].reward.tolist() == rewards.tolist()


def test_traces_give_what_their_nodes_hold(true_lengths):
    flat = read("prime_rl_flat")[1]
    first_groups = np.array([group in (0, 3) for group in groups_of(flat)])
    for name in ("prime_rl_traces", "prime_rl_episodes"):
        found = read(name)[1]
        assert found.length.tolist() == true_lengths[first_groups].tolist()
        assert found.reward.tolist() == flat.reward[first_groups].tolist()
        assert found.truncated.tolist() == flat.truncated[first_groups].tolist()
        expected = found.reward - np.repeat(found.reward.reshape(-1, PER_GROUP).mean(1), PER_GROUP)
        assert found.advantage.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_formats_agree_on_the_diagnosis():
    exact = measure_dump(open_dump([FIXTURES / "prime_rl_flat"], ReadOptions()))
    counted = measure_dump(open_dump([FIXTURES / "openrlhf.jsonl"], ReadOptions(count_tokens=COUNT_TOKENS)))
    for name in ("group_cv", "sign_gap", "length_ratio", "negative_share/balanced", "token_weight/sequence/longest"):
        assert counted.estimate(name).value == pytest.approx(exact.estimate(name).value, rel=1e-12), name


def test_rollouts_of_this_suite(tmp_path):
    columns = {
        "prompt_id": ["a"] * 3 + ["b"] * 3, "group": [0] * 3 + [1] * 3, "prompt": ["2+2"] * 3 + ["3+3"] * 3,
        "response": ["x"] * 6, "length": [4, 9, 5, 7, 7, 2], "reward": [1.0, 0, 1, 0, 0, 1],
        "advantage": [0.7, -1.4, 0.7, -0.7, -0.7, 1.4], "truncated": [False, True, False, False, False, False],
    }  # fmt: skip
    for step in (10, 9):
        pd.DataFrame(columns).to_parquet(tmp_path / f"step-{step}.parquet")
    dump = open_dump([tmp_path], ReadOptions())
    found = concatenate(list(dump.batches()))
    assert dump.layout.format.name == "balagg"
    assert dump.step_source == "the names of the files"
    assert found.step.tolist() == [9] * 6 + [10] * 6
    assert groups_of(found) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert found.length.tolist() == columns["length"] * 2
    assert found.advantage.tolist() == columns["advantage"] * 2
    assert found.truncated.tolist() == [0, 1, 0, 0, 0, 0] * 2


def test_evaluation_and_untrained_agents_are_left_out(tmp_path):
    lines = (FIXTURES / "prime_rl_episodes" / "step_1" / "train_rollouts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records[0]["run"]["work"]["type"] = "eval"
    records[1]["traces"][0]["agent"]["trainable"] = False
    file = tmp_path / "1.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = concatenate(list(open_dump([file], ReadOptions()).batches()))
    assert len(found.step) == len(records) - 2


def test_a_batch_that_trl_wrote_twice_counts_once(tmp_path):
    for file in (FIXTURES / "trl").glob("*.parquet"):
        shutil.copy(file, tmp_path)
    once = measure_dump(open_dump([tmp_path], ReadOptions()))
    again = pd.read_parquet(tmp_path / "completions_00002.parquet").assign(step=3)
    again.to_parquet(tmp_path / "completions_00003.parquet")
    twice = measure_dump(open_dump([tmp_path], ReadOptions()))
    assert (once.repeated_steps, twice.repeated_steps) == (0, 1)
    assert twice.num_responses == once.num_responses == 24
    assert twice.estimate("group_cv") == once.estimate("group_cv")


def test_group_size_cuts_the_epochs_of_a_dump_without_steps(tmp_path):
    text = (FIXTURES / "openrlhf.jsonl").read_text()
    file = tmp_path / "rollouts.jsonl"
    file.write_text(text + text)
    once = measure_dump(open_dump([FIXTURES / "openrlhf.jsonl"], ReadOptions()))
    merged = measure_dump(open_dump([file], ReadOptions()))
    cut = measure_dump(open_dump([file], ReadOptions()), group_size=PER_GROUP)
    assert (once.num_groups, merged.num_groups, cut.num_groups) == (6, 6, 12)
    assert cut.estimate("sign_gap").value == pytest.approx(once.estimate("sign_gap").value)


def test_a_short_run_of_trl_can_be_diagnosed(tmp_path):
    """Runs TRL's trainer where it is installed; elsewhere the fixture that it wrote stands for it."""
    pytest.importorskip("trl")
    script = "import sys; sys.path.insert(0, 'tests/fixtures'); import make_dumps, pathlib; "
    script += "make_dumps.trl(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True)
    dump = open_dump([tmp_path / "trl"], ReadOptions(count_tokens=COUNT_TOKENS))
    measured = measure_dump(dump)
    assert dump.layout.format.name == "TRL"
    assert (measured.num_responses, measured.num_groups) == (24, 6)
