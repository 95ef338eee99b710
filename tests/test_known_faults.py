"""Faults that GRPO trainers are known to have had, one test each: none of them is here."""

import math
from typing import get_args

import pytest
import torch

from evals.engines import Sample, SamplingParams, TorchEngine, load_model
from evals.grading.math import grade_math
from tests import distributed_cases
from tests.test_recipe import a_rollout, flat, learner_and_engine, loss_and_gradient, recipe, scripted_prompts
from trainers import grpo
from trainers.advantages import group_advantages
from trainers.aggregation import RULES, aggregate, token_weights
from trainers.batches import Form, token_batch
from trainers.lengths import length_statistics
from trainers.rollout import Rollout, draw_prompts, sample_rollout
from trainers.step_log import read_steps

LENGTHS = torch.tensor([1, 9, 5, 1])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 1, 1])


@pytest.fixture(scope="module")
def rollout():
    learner, engine, tokenizer = learner_and_engine()
    prompts = grpo.usable_prompts(grpo.load_train("gen_chains")[:50], grpo.TEMPLATES["qa"], tokenizer, recipe())
    return a_rollout(engine, prompts, learner.recipe)


def with_facts(rollout: Rollout, **changes) -> Rollout:
    import dataclasses

    return dataclasses.replace(rollout, **changes)


@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_of_unequal_size_are_not_averaged_by_sample(rule):
    """Sequences of 1 and 9 tokens in micro-batches of their own add up to what they are together."""
    terms = torch.rand(4, 9, dtype=torch.float64)
    mask = torch.arange(9) < LENGTHS[:, None]
    whole = aggregate(terms, mask, ADVANTAGES, GROUPS, rule)
    weights = token_weights(LENGTHS, ADVANTAGES, GROUPS, rule)
    parts = [float(weights[row] * terms[row][mask[row]].sum()) for row in range(4)]
    assert sum(parts) == pytest.approx(float(whole), rel=1e-12)


def test_a_worker_with_few_tokens_does_not_weigh_them_more(rollout):
    """Responses are dealt to ranks of very unequal token counts: the sum of their gradients is the whole gradient."""
    learner, _, _ = learner_and_engine("token")
    _, whole = loss_and_gradient(learner, rollout)
    longest = max(rollout.samples, key=lambda row: len(rollout.samples[row].token_ids))
    summed = torch.zeros_like(whole)
    for part in ({longest}, {*rollout.samples} - {longest}):
        samples = {row: rollout.samples[row] for row in part}
        summed += loss_and_gradient(learner, with_facts(rollout, samples=samples))[1]
    assert whole.norm() > 1e-4
    assert (summed - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("max_tokens_per_micro_batch", [1, 100, 10**6])
def test_the_gradient_does_not_depend_on_how_often_it_is_accumulated(rollout, max_tokens_per_micro_batch):
    """Neither halved when accumulation and generation differ, nor divided again by the number of micro-batches."""
    whole, _, _ = learner_and_engine("sequence")
    cut, _, _ = learner_and_engine("sequence", max_tokens_per_micro_batch=max_tokens_per_micro_batch)
    expected, found = loss_and_gradient(whole, rollout)[1], loss_and_gradient(cut, rollout)[1]
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("rule", ["sequence", "token", "balanced"])
def test_truncated_responses_leave_numerator_and_denominator(rule):
    """Masked out whole, a response changes nothing: weights are those of the group without it."""
    kept = torch.tensor([True, True, False, True])
    lengths = torch.tensor([3, 5, 100, 4])
    advantages = torch.tensor([1.0, -0.5, -0.5, -0.5], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.long)
    weights = token_weights(torch.where(kept, lengths, 0), advantages, group, rule)
    alone = token_weights(lengths[kept], advantages[kept], group[kept], rule)
    assert weights[2] == 0
    torch.testing.assert_close(weights[kept], alone, rtol=0, atol=1e-15)


def test_a_masked_row_adds_no_token_to_the_count():
    weights = token_weights(torch.tensor([4, 0, 6]), torch.tensor([1.0, -1.0, -1.0]), torch.zeros(3), "token")
    assert weights.tolist() == pytest.approx([0.1, 0.0, 0.1])


def test_nan_at_a_masked_position_stays_there():
    terms = torch.ones(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    poisoned = torch.where(mask, terms, torch.full_like(terms, math.nan))
    loss = aggregate(poisoned, mask, torch.tensor([1.0, -1.0]), torch.zeros(2), "token")
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1.0)
    assert terms.grad.isfinite().all()


def test_an_empty_response_leaks_into_no_other(rollout):
    learner, _, _ = learner_and_engine("balanced")
    row = int((rollout.advantages < 0).nonzero()[0])
    gone = with_facts(rollout, mask=rollout.mask & (torch.arange(len(rollout.mask)) != row))
    _, expected = loss_and_gradient(learner, gone)
    old = rollout.samples[row]
    empty = with_facts(
        rollout,
        samples=rollout.samples | {row: Sample(old.prompt_ids, [], [], "", truncated=False)},
        lengths=rollout.lengths.clone().index_fill_(0, torch.tensor([row]), 0),
    )
    assert torch.equal(empty.advantages, rollout.advantages)
    _, found = loss_and_gradient(learner, empty)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    for form in get_args(Form):
        batch = token_batch([empty.samples[row], rollout.samples[row]], form)
        assert int(batch.predicts_BT.sum()) == len(batch.targets_N) == len(old.token_ids)


def test_rewards_equal_up_to_rounding_and_groups_of_one_have_no_advantage():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 1.0])
    assert group_advantages(rewards, torch.tensor([0, 0, 0, 1])).tolist() == [0, 0, 0, 0]
    nearly = group_advantages(torch.tensor([0.3, 0.3 + 1e-5]), torch.zeros(2, dtype=torch.long))
    assert nearly.abs().max() < 0.01


def test_lengths_are_logged_raw(rollout):
    masked = with_facts(rollout, mask=torch.arange(len(rollout.mask)) % 2 == 0)
    from trainers.rollout import rollout_metrics

    metrics = rollout_metrics(masked, recipe(), "group")
    assert metrics["length/min"] == float(rollout.lengths.min()) > 0
    assert metrics == rollout_metrics(rollout, recipe(), "group") | {
        name: value for name, value in metrics.items() if name.startswith("balance/")
    }
    statistics = length_statistics(LENGTHS, ADVANTAGES, GROUPS, torch.zeros(4, dtype=torch.bool))
    assert (statistics["length/min"], statistics["length/max"]) == (1, 9)


def test_the_overlong_penalty_is_applied_to_what_is_trained_on(rollout):
    learner, engine, _ = learner_and_engine(overlong_buffer=40)
    shaped = sample_rollout(engine, rollout.prompts, learner.recipe, seed=0, draw=1)
    assert torch.equal(shaped.lengths, rollout.lengths)
    assert float((shaped.rewards - rollout.rewards).abs().max()) > 0.1
    assert (loss_and_gradient(learner, shaped)[1] - loss_and_gradient(learner, rollout)[1]).norm() > 1e-4


def test_a_long_boxed_answer_is_read_whole():
    answer = " + ".join(f"x_{{{i}}}" for i in range(40))
    grade = grade_math(f"So the sum is \\boxed{{{answer}}}.", answer)
    assert (grade.correct, grade.extracted) == (True, answer)
    assert len(answer) > 100


@pytest.mark.parametrize("done", [1, 2, 3])
def test_resuming_at_an_epoch_boundary_does_the_steps_that_are_left(tmp_path, done, monkeypatch):
    """12 prompts are 3 steps an epoch; a run stopped after any of them ends at step 5."""
    problems = grpo.load_train("gen_chains")[:12]
    monkeypatch.setattr(grpo, "load_train", lambda *args, **kwargs: problems)
    cell = distributed_cases.cell(steps=5, checkpoint_every=1)
    stops = iter([False] * (done - 1) + [True])
    grpo.train(tmp_path, cell, should_stop=lambda: next(stops))
    grpo.train(tmp_path, cell)
    assert [row["step"] for row in read_steps(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    grpo.train(tmp_path, cell)
    assert len(read_steps(tmp_path / "metrics.jsonl")) == 5


def test_no_prompt_is_replayed_or_left_out_when_a_run_goes_on():
    pool = scripted_prompts(*range(12))
    epoch = [prompt.text for draw in (1, 2, 3) for prompt in draw_prompts(pool, draw, 0, 4)]
    assert sorted(epoch, key=int) == [str(i) for i in range(12)]
    # A function of the draw alone: asked again after a restart, it gives the same.
    assert [prompt.text for prompt in draw_prompts(pool, 2, 0, 4)] == epoch[4:8]


def test_no_rollout_is_lost_between_checkpoint_and_resume(tmp_path):
    """Several updates a rollout: the checkpoint lies behind the last of them, so nothing sampled is dropped."""
    cell = distributed_cases.cell(steps=3, prompts_per_update=1, epochs_per_rollout=2, checkpoint_every=1)
    grpo.train(tmp_path / "whole", cell)
    stops = iter([True])
    grpo.train(tmp_path / "parts", cell, should_stop=lambda: next(stops))
    grpo.train(tmp_path / "parts", cell)
    values = [
        [{k: v for k, v in row["metrics"].items() if not k.startswith("perf/")} for row in read_steps(path)]
        for path in (tmp_path / "whole" / "metrics.jsonl", tmp_path / "parts" / "metrics.jsonl")
    ]
    assert values[0] == values[1]


def test_one_seed_gives_a_group_of_different_responses():
    engine = TorchEngine(*load_model(distributed_cases.MODEL))
    (group,) = engine.generate(["Q: Compute 43 - 5 - 9.\nA:"], SamplingParams(n=8, max_tokens=48, seed=7))
    assert len({tuple(sample.token_ids) for sample in group}) > 3


def test_weights_follow_lengths_and_not_the_padding(rollout):
    """A row's weight is the same whatever it is padded with, and every token of a response has it."""
    weights = token_weights(rollout.masked_lengths, rollout.advantages, rollout.group_ids, "balanced")
    per_token = flat(rollout, weights)
    assert len(per_token) == int(rollout.lengths.sum())
    masses = torch.zeros(len(rollout.prompts)).index_add_(0, rollout.group_ids, weights * rollout.lengths)
    assert masses.tolist() == pytest.approx([1 / len(rollout.prompts)] * len(rollout.prompts))
