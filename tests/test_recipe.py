"""Every recipe field does what it says, on a real tiny model."""

import math

import pytest
import torch

from evals.engines import Engine, Sample, TorchEngine, load_model
from tests import distributed_cases
from tests.sequences import padded, plain_logprobs
from trainers import grpo
from trainers.adapters import merged_weights, without_adapters
from trainers.aggregation import token_weights
from trainers.parallel import World, is_sharded
from trainers.policy import clipped_surrogate, kl_terms
from trainers.recipe import Recipe
from trainers.rollout import Prompt, collect_rollout, length_penalty, rollout_metrics, sample_rollout
from trainers.step_log import read_steps
from trainers.update import TOTALS, accumulate_gradient, reference_logprobs, response_logprobs, update_policy

WORLD = World()


def recipe(**changes):
    return Recipe(**distributed_cases.RECIPE | changes)


def learner_and_engine(rule="balanced", **changes):
    cell = distributed_cases.cell(rule, **changes)
    learner, tokenizer = grpo.make_learner(cell, Recipe(**cell["train"]), WORLD)
    sharded = is_sharded(learner.recipe, WORLD)  # not fit for decoding
    return learner, None if sharded else TorchEngine(learner.policy.model, tokenizer), tokenizer


@pytest.fixture(scope="module")
def prompts():
    _, tokenizer = load_model(distributed_cases.MODEL)
    return grpo.usable_prompts(grpo.load_train("gen_chains")[:200], grpo.TEMPLATES["qa"], tokenizer, recipe())


def a_rollout(engine, prompts, settings):
    rollout = sample_rollout(engine, prompts[: settings.prompts_per_step], settings, seed=0, draw=1)
    assert (rollout.advantages != 0).any()
    return rollout


def gradient(learner):
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None]).clone()


def loss_and_gradient(learner, rollout, **extra):
    totals = dict.fromkeys(TOTALS, 0.0)
    accumulate_gradient(learner, rollout, range(len(rollout.lengths)), totals, **extra)
    return totals["loss"], gradient(learner)


def flat(rollout, values):
    """(N,) per-response values for every token."""
    return values.repeat_interleave(rollout.lengths)


def by_row(rollout, rows):
    return torch.cat([rows[row] for row in range(len(rollout.lengths))])


def expected_gradient(learner, rollout, terms_of):
    """Gradient of sum_i w_i sum_t terms over all responses at once, terms from one plain forward pass."""
    model = learner.policy.model
    ids, mask = padded([rollout.samples[row] for row in range(len(rollout.lengths))])
    model.zero_grad()
    logits = model(ids).logits[:, :-1]
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(2, ids[:, 1:, None])[..., 0][mask[:, 1:]]
    entropies = -(distribution.exp() * distribution).sum(-1)[mask[:, 1:]]
    weights = token_weights(rollout.masked_lengths, rollout.advantages, rollout.group_ids, learner.rule, max_length=48)
    loss = (flat(rollout, weights) * terms_of(logprobs, entropies)).sum()
    loss.backward()
    return float(loss.detach()), gradient(learner)


def assert_same(ours, expected):
    assert ours[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    assert expected[1].norm() > 1e-4
    assert (ours[1] - expected[1]).norm() <= 1e-4 * expected[1].norm()


def surrogate(rollout, logprobs, old=None):
    engine = torch.cat([torch.tensor(rollout.samples[row].logprobs) for row in range(len(rollout.lengths))])
    old = engine if old is None else old
    return clipped_surrogate(logprobs, old, flat(rollout, rollout.advantages), 0.2, 0.28).terms


def test_entropy_bonus_enters_the_loss_with_its_gradient(prompts):
    learner, engine, _ = learner_and_engine(entropy_coef=0.1)
    rollout = a_rollout(engine, prompts, learner.recipe)
    expected = expected_gradient(
        learner, rollout, lambda logprobs, entropies: surrogate(rollout, logprobs) - 0.1 * entropies
    )
    assert_same(loss_and_gradient(learner, rollout), expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_pulls_towards_the_base_model(prompts, estimator):
    learner, engine, _ = learner_and_engine(kl_coef=0.5, kl_estimator=estimator)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in learner.policy.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    rollout = a_rollout(engine, prompts, learner.recipe)
    reference = reference_logprobs(learner, rollout)
    base, _ = load_model(distributed_cases.MODEL)
    with torch.no_grad():
        plain = plain_logprobs(base, [rollout.samples[row] for row in range(len(rollout.lengths))])
    torch.testing.assert_close(by_row(rollout, reference), plain, atol=1e-5, rtol=0)
    expected = expected_gradient(
        learner, rollout,
        lambda logprobs, _: surrogate(rollout, logprobs) + 0.5 * kl_terms(logprobs, plain, estimator),
    )  # fmt: skip
    assert_same(loss_and_gradient(learner, rollout, reference=reference), expected)
    assert update_policy(learner, rollout, 1)["policy/reference_kl"] > 0


def test_kl_estimators_by_hand():
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_terms(logprobs, reference, "k1").tolist() == [0.5, -1.0]
    assert kl_terms(logprobs, reference, "k2").tolist() == [0.125, 0.5]
    assert kl_terms(logprobs, reference, "k3").tolist() == pytest.approx(
        [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    )
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_terms(logprobs, reference, "k4")


def test_dual_clip_bounds_what_a_bad_token_costs():
    logprobs = torch.tensor([3.0, 3.0, -3.0]).requires_grad_()
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    terms = clipped_surrogate(logprobs, torch.zeros(3), advantages, 0.2, 0.28, dual_clip=10.0).terms
    assert terms.tolist() == pytest.approx([10.0, -1.28, 0.8])
    terms.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    plain = clipped_surrogate(logprobs, torch.zeros(3), advantages, 0.2, 0.28).terms
    assert float(plain.detach()[0]) == pytest.approx(math.exp(3))


def test_importance_weights_are_truncated_and_counted(prompts):
    learner, engine, _ = learner_and_engine(importance_cap=2.0)
    rollout = a_rollout(engine, prompts, learner.recipe)
    true = response_logprobs(learner, learner.policy, rollout)
    # An engine that thinks half of the tokens e times, the others a tenth, less likely than they are.
    shift = [torch.arange(len(true[row])) % 2 * 0.9 + 0.1 for row in range(len(true))]
    shifted = {
        row: Sample(s.prompt_ids, s.token_ids, (true[row] - shift[row]).tolist(), s.text, s.truncated)
        for row, s in rollout.samples.items()
    }
    object.__setattr__(rollout, "samples", shifted)
    ratio = torch.cat(shift).exp().clamp(max=2.0)
    old = by_row(rollout, true)
    expected = expected_gradient(learner, rollout, lambda logprobs, _: surrogate(rollout, logprobs, old) * ratio)
    assert_same(loss_and_gradient(learner, rollout, old=true), expected)
    learner.recipe = recipe(importance_cap=2.0, learning_rate=1e-9, prompts_per_update=4)
    metrics = update_policy(learner, rollout, 1)
    live = flat(rollout, rollout.advantages) != 0
    assert metrics["policy/importance_capped"] == pytest.approx(float((torch.cat(shift)[live] > 0.7).double().mean()))
    drift = torch.cat(shift)[live]
    assert metrics["policy/engine_kl"] == pytest.approx(float((drift.exp() - 1 - drift).mean()), rel=1e-3)
    # The ratio that is clipped is that of the policy to the trainer's own old policy.
    assert metrics["policy/clip_high"] == metrics["policy/clip_low"] == 0


def test_length_penalty_grows_over_the_buffer():
    settings = recipe(max_response_tokens=100, overlong_buffer=20, overlong_penalty=0.5)
    lengths = torch.tensor([1, 80, 85, 90, 100])
    assert length_penalty(lengths, settings).tolist() == pytest.approx([0, 0, 0.125, 0.25, 0.5])
    assert length_penalty(lengths, recipe()).tolist() == [0] * 5


def test_length_penalty_reaches_the_rewards_and_the_advantages(prompts):
    _, engine, _ = learner_and_engine()
    settings = recipe(overlong_buffer=30)
    plain = sample_rollout(engine, prompts[:4], recipe(), seed=0, draw=1)
    shaped = sample_rollout(engine, prompts[:4], settings, seed=0, draw=1)
    assert torch.equal(shaped.lengths, plain.lengths)
    assert torch.equal(shaped.correct, plain.rewards)
    penalty = length_penalty(plain.lengths, settings)
    assert 0 < float(penalty.max()) <= 1
    assert torch.equal(shaped.rewards, plain.rewards - penalty)
    assert not torch.equal(shaped.advantages, plain.advantages)
    metrics = rollout_metrics(shaped, settings, "group")
    assert metrics["reward/accuracy"] == pytest.approx(float(plain.rewards.mean()))
    assert metrics["reward/mean"] == pytest.approx(float(shaped.rewards.mean()))


class Scripted(Engine):
    """Answers a group's first responses right, as many as its prompt says, and the rest wrong."""

    def sample(self, requests, params):
        self.seeds = [*getattr(self, "seeds", []), params.seed]
        answers = ["\\boxed{1}" if r.index < int(r.prompt) else "\\boxed{2}" for r in requests]
        return [Sample([5], [6], [-1.0], text, truncated=False) for text in answers]

    def update_weights(self, weights):
        raise AssertionError("not asked for")


def scripted_prompts(*numbers_right):
    from evals.problems import Problem

    return [
        Prompt(Problem(id=f"{i}", question="?", answer=("1",)), str(right)) for i, right in enumerate(numbers_right)
    ]


def test_dynamic_sampling_replaces_groups_without_variance():
    engine = Scripted()
    pool = scripted_prompts(*[0, 1, 2, 3, 4, 4, 0, 2] * 3)
    settings = recipe(max_draws=20, prompts_per_step=4)
    rollout = collect_rollout(engine, pool, settings, 0, 0, WORLD)
    assert len(rollout.prompts) == 4
    assert all(0 < int(prompt.text) < 4 for prompt in rollout.prompts)
    assert len({prompt.problem.id for prompt in rollout.prompts}) == 4
    assert (rollout.advantages.view(4, 4) != 0).any(1).all()
    assert rollout.replaced == 4 * rollout.draws - 4 > 0
    assert len(set(engine.seeds)) == rollout.draws
    # The next step goes on where the draws ended.
    following = collect_rollout(Scripted(), pool, settings, 0, rollout.draws, WORLD)
    if rollout.draws < 6:  # still in the same epoch
        assert not {p.problem.id for p in following.prompts} & {p.problem.id for p in rollout.prompts}
    metrics = rollout_metrics(rollout, settings, "group")
    assert metrics["reward/replaced_groups"] == rollout.replaced
    assert metrics["reward/zero_variance_groups"] == 0


def test_dynamic_sampling_is_bounded():
    pool = scripted_prompts(*[0] * 11, 2)
    settings = recipe(max_draws=3, prompts_per_step=4)
    rollout = collect_rollout(Scripted(), pool, settings, 0, 0, WORLD)
    assert rollout.draws == 3
    assert sorted(int(prompt.text) for prompt in rollout.prompts) == [0, 0, 0, 2]
    assert rollout.replaced == 8
    assert rollout.accuracy == pytest.approx(2 / 48)


def test_lora_trains_the_adapters_only_and_exports_merged_weights(tmp_path, prompts):
    cell = distributed_cases.cell(lora_rank=4, learning_rate=5e-3, steps=3, checkpoint_every=1)
    grpo.train(tmp_path / "cell", cell)
    base, _ = load_model(distributed_cases.MODEL)
    tuned, tokenizer = load_model(tmp_path / "cell" / "checkpoints" / "step-3")
    changed = {n for n, p in tuned.named_parameters() if not torch.equal(p, base.get_parameter(n))}
    assert changed == {n for n, p in base.named_parameters() if n.endswith("_proj.weight")}
    # Going on from the checkpoint, the adapted model computes what the merged one does.
    learner, _ = grpo.make_learner(cell, Recipe(**cell["train"]), WORLD)
    from trainers import checkpoints

    assert checkpoints.load_latest(tmp_path / "cell", learner) == (3, {"draws": 3, "step": 3})
    rollout = sample_rollout(TorchEngine(tuned, tokenizer), prompts[:2], learner.recipe, seed=0, draw=1)
    samples = list(rollout.samples.values())
    with torch.no_grad():
        merged = plain_logprobs(tuned, samples)
        torch.testing.assert_close(plain_logprobs(learner.policy.model, samples), merged, atol=2e-4, rtol=0)
        with without_adapters(learner.policy.model):
            plain = plain_logprobs(learner.policy.model, samples)
        torch.testing.assert_close(plain, plain_logprobs(base, samples), atol=1e-5, rtol=0)
        assert float((merged - plain).abs().max()) > 1e-3
    names = {name for name, _ in merged_weights(learner.policy.model)}
    assert names == {name for name, _ in base.named_parameters()}


@pytest.mark.parametrize("changes", [{"lora_rank": 2}, {"max_draws": 3, "kl_coef": 0.01}])
def test_adapters_and_draws_resume_bit_for_bit(tmp_path, changes):
    cell = distributed_cases.cell(steps=4, checkpoint_every=2, **changes)
    grpo.train(tmp_path / "whole", cell)
    asked = iter([False, True])
    grpo.train(tmp_path / "parts", cell, should_stop=lambda: next(asked))
    assert [row["step"] for row in read_steps(tmp_path / "parts" / "metrics.jsonl")] == [1, 2]
    grpo.train(tmp_path / "parts", cell)
    told = [read_steps(tmp_path / name / "metrics.jsonl")[-1]["metrics"] for name in ("whole", "parts")]
    for name, value in told[0].items():
        assert name.startswith("perf/") or told[1][name] == value
    final = [load_model(tmp_path / name / "checkpoints" / "step-4")[0] for name in ("whole", "parts")]
    for name, parameter in final[0].named_parameters():
        assert torch.equal(parameter, final[1].get_parameter(name)), name


def test_activation_checkpointing_changes_nothing(prompts):
    plain, engine, _ = learner_and_engine()
    saving, _, _ = learner_and_engine(activation_checkpointing=True)
    assert saving.policy.model.is_gradient_checkpointing
    rollout = a_rollout(engine, prompts, plain.recipe)
    assert_same(loss_and_gradient(saving, rollout), loss_and_gradient(plain, rollout))


def test_bfloat16_computes_in_half_and_keeps_whole_weights(prompts):
    """Mixed precision wraps the model even on one worker, so it runs in a process of its own."""
    import json
    import subprocess
    import sys

    program = """
import json, sys, torch, torch.distributed as dist
from tests import test_recipe as t
learner, engine, tokenizer = t.learner_and_engine(dtype="bfloat16")
whole, reference_engine, _ = t.learner_and_engine()
prompts = t.grpo.usable_prompts(t.grpo.load_train("gen_chains")[:50], t.grpo.TEMPLATES["qa"], tokenizer, whole.recipe)
rollout = t.a_rollout(reference_engine, prompts, whole.recipe)
half, full = t.loss_and_gradient(learner, rollout)[1], t.loss_and_gradient(whole, rollout)[1]
half = torch.cat([p.grad.full_tensor().flatten() for p in learner.policy.parameters()])
cosine = torch.nn.functional.cosine_similarity(half, full, dim=0)
kinds = {str(p.dtype) for p in learner.policy.parameters()} | {str(half.dtype)}
print(json.dumps([float(cosine), float(half.norm() / full.norm()), sorted(kinds), torch.equal(half, full)]))
dist.destroy_process_group()
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    cosine, size, kinds, equal = json.loads(told.stdout.splitlines()[-1])
    assert cosine > 0.98
    assert size == pytest.approx(1, abs=0.05)
    assert kinds == ["torch.float32"]
    assert not equal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"importance_cap": 0.5}, "importance_cap must be at least 1"),
        ({"overlong_buffer": 48}, "overlong_buffer .48. must be below max_response_tokens"),
        ({"max_draws": 0}, "max_draws must be above 0"),
        ({"kl_coef": -1.0}, "kl_coef must not be negative"),
        ({"engine_memory": 1.0}, "engine_memory must be below 1"),
        ({"prompts_per_update": 3}, "prompts_per_update .3. must divide"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(**changes)
