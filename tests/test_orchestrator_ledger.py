"""A cell's files: what they show, and what a crash or a careless hand can do to them."""

import json
import os
import threading

import pytest

from orchestrator import ledger
from orchestrator.cells import look_up
from orchestrator.config import ModelEntry
from orchestrator.grid import Cell, canonical_json
from orchestrator.ledger import LedgerError, MetricsTail, Work


@pytest.fixture
def cell() -> Cell:
    return Cell(
        id="token-m-d-s0-00000000",
        config={"grid": "g", "rule": "token", "seed": 0, "train": {"steps": 8, "max_tokens_per_micro_batch": 4096}},
        evaluate_steps=(0, 4, 8),
        evaluation={"benchmarks": [{"name": "gen_short"}]},
        model=ModelEntry(path="m", template="qa"),
        retries=1,
    )


@pytest.fixture
def folder(tmp_path, cell):
    return ledger.open_cell(tmp_path, cell)


def checkpoint(folder, step: int, whole: bool = True) -> None:
    folder.checkpoint(step).mkdir(parents=True)
    if whole:
        (folder.checkpoint(step) / ledger.COMPLETE).touch()


def evaluated(cell, folder, step: int) -> None:
    ledger.prepare_evaluation(cell, folder, step)
    folder.summary(step).write_text(json.dumps({"step": step, "metrics": {"eval/mean": step / 10}}))


def test_a_new_cell_has_its_config_and_is_pending(folder, cell):
    assert json.loads(folder.config.read_text()) == cell.config
    state = ledger.read_state(folder)
    assert (state.state, state.reason) == ("pending", "new")
    assert state.since == state.created


def left(cell, folder) -> list[Work]:
    return look_up(folder.path.parent.parent, cell).left


def test_the_work_left_is_what_the_files_lack(folder, cell):
    evaluations = [Work("evaluate", step) for step in (0, 4, 8)]
    assert left(cell, folder) == [Work("train", 8), *evaluations]
    checkpoint(folder, 4)
    checkpoint(folder, 8, whole=False)
    evaluated(cell, folder, 4)
    assert ledger.complete_checkpoints(folder) == [4]
    assert left(cell, folder) == [Work("train", 8), evaluations[0], evaluations[2]]
    (folder.checkpoint(8) / ledger.COMPLETE).touch()
    evaluated(cell, folder, 0)
    evaluated(cell, folder, 8)
    assert left(cell, folder) == []


def test_a_state_that_says_done_does_not_make_a_cell_done(folder, cell):
    ledger.write_state(folder, "done", "so it says")
    assert len(left(cell, folder)) == 4


@pytest.mark.parametrize("content", ["", "{", '{"metrics": 3}', "[]", "null", "\x00\xff"])
def test_a_damaged_summary_is_work_again(folder, cell, content):
    evaluated(cell, folder, 4)
    folder.summary(4).write_text(content)
    assert Work("evaluate", 4) in left(cell, folder)


def test_other_settings_ask_for_a_new_evaluation(folder, cell):
    evaluated(cell, folder, 0)
    assert ledger.read_summary(cell, folder, 0)["metrics"] == {"eval/mean": 0.0}
    other = Cell(**{**cell.__dict__, "evaluation": {"benchmarks": [{"name": "gen_short", "samples": 2}]}})
    assert ledger.read_summary(other, folder, 0) is None
    ledger.prepare_evaluation(other, folder, 0)
    assert not folder.summary(0).exists()
    assert folder.settings(0).read_text() == canonical_json(other.evaluation)


def test_an_evaluation_can_be_taken_over_from_another_cell(folder, cell, tmp_path):
    evaluated(cell, folder, 0)
    (folder.evaluation(0) / "gen_short.jsonl").write_text("{}\n")
    twin = ledger.CellDir(tmp_path / "twin")
    ledger.copy_evaluation(folder, twin, 0)
    assert ledger.read_summary(cell, twin, 0) == ledger.read_summary(cell, folder, 0)
    assert (twin.evaluation(0) / "gen_short.jsonl").read_text() == "{}\n"
    assert [path.name for path in twin.evaluation(0).parent.iterdir()] == ["step-0"]


def test_a_state_keeps_its_times(folder):
    created = ledger.read_state(folder).created
    state = json.loads(folder.state.read_text())
    folder.state.write_text(json.dumps(state | {"since": "2001-01-01T00:00:00+00:00"}))
    ledger.write_state(folder, "pending", "still")
    assert ledger.read_state(folder).since == "2001-01-01T00:00:00+00:00"
    ledger.write_state(folder, "training", "from step 0")
    now = ledger.read_state(folder)
    assert (now.state, now.reason, now.created) == ("training", "from step 0", created)
    assert now.since >= created


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": "odd", "reason": "", "since": "", "created": ""}', "{}"])
def test_a_damaged_state_is_a_message_and_can_be_replaced(folder, content):
    folder.state.write_text(content)
    with pytest.raises(LedgerError, match=r"state.json is damaged \("):
        ledger.read_state(folder)
    ledger.write_state(folder, "pending", "anew")
    assert ledger.read_state(folder).reason == "anew"


def test_a_changed_config_is_refused(folder, cell, tmp_path):
    folder.config.write_text(json.dumps(cell.config | {"seed": 1}))
    with pytest.raises(LedgerError, match=r"config.json was changed; delete .* to start this cell over"):
        ledger.open_cell(tmp_path, cell)


def test_a_damaged_config_is_named_and_written_anew(folder, cell, tmp_path):
    assert ledger.damaged(folder) == []
    folder.config.write_text("{")
    folder.state.write_text("")
    config, state = ledger.damaged(folder)
    assert config.startswith(f"{folder.config} is damaged (") and config.endswith("; it is written anew")
    assert state.startswith(f"{folder.state} is damaged (")
    ledger.open_cell(tmp_path, cell)
    assert json.loads(folder.config.read_text()) == cell.config


def test_readers_never_see_half_a_file(tmp_path):
    path = tmp_path / "file"
    texts = ["a" * 300_000, "b" * 500_000]
    ledger.write_atomic(path, texts[0])
    seen: set[int] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            text = path.read_text()
            assert text in texts
            seen.add(len(text))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(40):
        ledger.write_atomic(path, texts[i % 2])
    stop.set()
    reader.join()
    assert seen <= {300_000, 500_000}
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "file"
    ledger.write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        ledger.write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_tail_takes_whole_lines_only_and_follows_the_file(folder):
    tail = MetricsTail(folder)
    tail.read()
    assert (tail.steps, tail.last_step) == ({}, 0)
    line = '{"step": %d, "metrics": {"reward/mean": %s}}\n'
    with folder.metrics.open("w") as file:
        file.write(line % (1, 0.5) + '{"step": 2, "met')
        file.flush()
        tail.read()
        assert tail.steps == {1: {"reward/mean": 0.5}}
        file.write('rics": {"reward/mean": NaN}}\n' + line[:-1] % (3, 0.75))
        file.flush()
        tail.read()
        assert tail.last_step == 2
        assert tail.steps[2]["reward/mean"] != tail.steps[2]["reward/mean"]
        file.write("\n")
    tail.read()
    assert tail.last_step == 3


def test_the_tail_starts_over_when_the_file_was_cut_back_or_replaced(folder):
    line = '{"step": %d, "metrics": {"x": %d}, "non_finite": ["y"]}\n'
    folder.metrics.write_text("".join(line % (step, 1) for step in range(1, 5)))
    tail = MetricsTail(folder)
    tail.read()
    os.truncate(folder.metrics, len(line % (1, 1)) * 2)
    with folder.metrics.open("a") as file:
        file.write("not json\n" + line % (3, 7))
    tail.read()
    assert tail.steps[3] == {"x": 7}
    ledger.write_atomic(folder.metrics, "".join(line % (step, 9) for step in range(1, 9)))
    tail.read()
    assert tail.steps == {step: {"x": 9} for step in range(1, 9)}
    assert tail.non_finite[8] == ["y"]


def test_a_finished_cell_keeps_its_last_steps_and_its_totals(folder):
    line = '{"step": %d, "metrics": {"perf/step_s": %d, "reward/mean": 0.5}}\n'
    folder.metrics.write_text("".join(line % (step, step) for step in range(1, 101)))
    tail = MetricsTail(folder)
    tail.read()
    assert tail.recent("perf/step_s", 3) == [98, 99, 100]
    assert tail.total("perf/step_s") == 5050
    tail.forget()
    assert sorted(tail.steps) == [96, 97, 98, 99, 100]
    assert (tail.last_step, tail.total("perf/step_s"), tail.recent("perf/step_s", 3)) == (100, 5050, [98, 99, 100])


def test_requests_to_end_a_cell_stand_in_its_folder_until_they_are_cleared(tmp_path, cell):
    folder = ledger.cell_dir(tmp_path, cell)
    assert not ledger.stop_requested(folder)
    ledger.request_stop(folder)
    assert (ledger.stop_requested(folder), ledger.cancel_requested(folder)) == (True, False)
    ledger.request_cancel(folder)
    assert ledger.cancel_requested(folder)
    ledger.clear_requests(folder)
    assert not ledger.stop_requested(folder) and not ledger.cancel_requested(folder)


def test_the_micro_batch_is_halved_down_to_the_smallest_and_stays_so(folder, cell):
    assert ledger.max_tokens_per_micro_batch(cell, folder) == 4096
    assert [ledger.reduce_max_tokens_per_micro_batch(cell, folder) for _ in range(5)] == [2048, 1024, 512, 256, None]
    assert ledger.max_tokens_per_micro_batch(cell, folder) == 256
    folder.memory.write_text("{")
    assert ledger.max_tokens_per_micro_batch(cell, folder) == 4096
