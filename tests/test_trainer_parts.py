"""The parts of the trainer that need no model: surrogate, prompt order, learning rate, step log."""

import math
import time

import pytest
import torch

from evals.problems import Problem
from trainers import checkpoints
from trainers.policy import clipped_surrogate
from trainers.recipe import Recipe
from trainers.rollout import Prompt, draw_prompts
from trainers.schedule import learning_rate
from trainers.step_log import StepLog, best_checkpoint, read_steps


def test_clipped_surrogate_by_hand():
    ratios = torch.tensor([0.5, 0.5, 1.0, 1.25, 2.0, 2.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 2.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    surrogate = clipped_surrogate(logprobs, torch.zeros(6, dtype=torch.float64), advantages, 0.2, 0.28)
    assert surrogate.terms.tolist() == pytest.approx([-0.5, 0.8, -2.0, -1.25, -1.28, 2.0])
    assert surrogate.clipped_low.tolist() == [False, True, False, False, False, False]
    assert surrogate.clipped_high.tolist() == [False, False, False, False, True, False]
    surrogate.terms.sum().backward()
    # d(-rho A)/d logprob = -rho A where the unclipped branch rules, 0 where the clip does.
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.0, -2.0, -1.25, 0.0, 2.0])


def test_surrogate_scales_with_the_advantage():
    logprobs, old = torch.randn(50), torch.randn(50)
    advantages = torch.randn(50)
    once = clipped_surrogate(logprobs, old, advantages, 0.2, 0.28).terms
    thrice = clipped_surrogate(logprobs, old, 3 * advantages, 0.2, 0.28).terms
    torch.testing.assert_close(thrice, 3 * once)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(Problem(id=str(i), question=str(i), answer=("0",)), str(i)) for i in range(count)]


def test_an_epoch_shows_every_prompt_once_and_the_next_one_in_another_order():
    pool = prompts(23)
    steps = [[p.text for p in draw_prompts(pool, step, 0, 5)] for step in range(1, 9)]
    first = [text for step in steps[:4] for text in step]
    second = [text for step in steps[4:] for text in step]
    assert len(set(first)) == len(set(second)) == 20
    assert first != second
    assert steps[5] == [p.text for p in draw_prompts(pool, 6, 0, 5)]
    assert steps[0] != [p.text for p in draw_prompts(pool, 1, 1, 5)]


def test_too_few_prompts_are_refused():
    with pytest.raises(ValueError, match=r"4 usable prompts, fewer than prompts_per_step \(5\)"):
        draw_prompts(prompts(4), 1, 0, 5)


def test_learning_rate_warms_up_then_follows_the_schedule():
    recipe = Recipe(learning_rate=1.0, warmup_steps=3, lr_schedule="linear", steps=13)
    rates = [learning_rate(recipe, update, 13) for update in range(13)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[8] == pytest.approx(0.5)
    assert rates[12] == pytest.approx(0.1)
    cosine = Recipe(learning_rate=1.0, warmup_steps=0, lr_schedule="cosine", steps=10)
    assert learning_rate(cosine, 5, 10) == pytest.approx(0.5)
    assert learning_rate(Recipe(learning_rate=0.3, warmup_steps=0), 99, 100) == 0.3


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("steps", 0, "steps must be above 0"),
        ("clip_low", -0.1, "clip_low must not be negative"),
        ("top_p", 1.5, "top_p must lie in"),
        ("prompts_per_update", 5, "must divide"),
        ("temperature", math.nan, "temperature must be above 0"),
    ],
)
def test_recipe_refuses_values_out_of_range(field, value, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**{field: value})


def test_step_log_keeps_the_first_record_of_each_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = StepLog(path)
    log.append(1, {"reward/mean": 0.5})
    log.append(2, {"reward/mean": 0.25, "length/sign_gap": math.nan, "policy/loss": math.inf})
    resumed = StepLog(path)
    assert resumed.last_step == 2
    resumed.append(2, {"reward/mean": 9.0})
    resumed.append(3, {"reward/mean": 0.75})
    rows = read_steps(path)
    times = [row.pop("time") for row in rows]
    assert times == sorted(times)
    assert 0 <= time.time() - times[0] < 3600
    assert rows == [
        {"step": 1, "metrics": {"reward/mean": 0.5}},
        {
            "step": 2,
            "metrics": {"reward/mean": 0.25},
            "non_finite": ["length/sign_gap", "policy/loss"],
        },
        {"step": 3, "metrics": {"reward/mean": 0.75}},
    ]


def test_step_log_cuts_a_line_torn_by_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    StepLog(path).append(1, {"reward/mean": 0.5})
    with path.open("a") as file:
        file.write('{"step": 2, "metr')
    assert [row["step"] for row in read_steps(path)] == [1]
    StepLog(path).append(2, {"reward/mean": 0.125})
    assert [row["metrics"]["reward/mean"] for row in read_steps(path)] == [0.5, 0.125]


def fake_checkpoints(cell_dir, *steps):
    for step in steps:
        folder = checkpoints.checkpoint_dir(cell_dir, step)
        (folder / checkpoints.TRAINER_STATE).mkdir(parents=True)
        (folder / checkpoints.MARKER).touch()


def kept(cell_dir):
    """Steps that are left, true for those that training can go on from."""
    steps = checkpoints.complete_steps(cell_dir)
    return {step: (checkpoints.checkpoint_dir(cell_dir, step) / checkpoints.TRAINER_STATE).exists() for step in steps}


def test_old_checkpoints_make_room_except_those_that_someone_needs(tmp_path):
    fake_checkpoints(tmp_path, 0, 10, 20, 30, 40, 50)
    checkpoints.remove_old(tmp_path, keep_steps=[20], keep_last=2, best=10)
    assert kept(tmp_path) == {0: True, 10: True, 20: False, 40: True, 50: True}
    checkpoints.remove_old(tmp_path, keep_steps=[20], keep_last=1)
    assert kept(tmp_path) == {0: True, 20: False, 50: True}


def test_the_best_checkpoint_is_that_of_the_best_stretch(tmp_path):
    step_log = StepLog(tmp_path / "metrics.jsonl")
    for step, reward in enumerate([0.9, 0.1, 0.4, 0.8, 0.7, 0.2], start=1):
        step_log.append(step, {"reward/mean": reward})
    assert best_checkpoint(tmp_path, [0, 2, 4, 6]) == 4
    assert best_checkpoint(tmp_path, [1, 2]) == 1
    assert best_checkpoint(tmp_path, []) is None


def test_a_resumed_run_says_which_checkpoint_was_cut_off(tmp_path, caplog):
    (tmp_path / "checkpoints" / "step-7.partial").mkdir(parents=True)
    assert checkpoints.load_latest(tmp_path, learner=None) == (0, {})
    assert "step-7.partial was cut off while it was written" in caplog.text
