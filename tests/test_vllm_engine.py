"""The vLLM engine against the torch engine, where vLLM is installed (`make setup-vllm && make test-vllm`)."""

import math

import pytest
import torch

from evals.engines import SamplingParams, TorchEngine, load_model, open_engine
from evals.generated import generate
from tests import distributed_cases
from trainers.adapters import merged_weights
from trainers.batches import token_batch
from trainers.grpo import train
from trainers.policy import token_statistics
from trainers.step_log import read_steps

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs these")

KINDS = ("gen_chains", "gen_stories", "gen_functions")
PROMPTS = [f"Q: {p.question}\nA:" for kind in KINDS for p in generate(kind, "test", 12, seed=3)]


@pytest.fixture(scope="module", params=["models/tiny-qwen2", "models/tiny-qwen3"])
def engines(request):
    return open_engine("vllm", request.param), TorchEngine(*load_model(request.param))


def test_greedy_completions_are_equal(engines):
    ours, reference = (engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=90)) for engine in engines)
    for (mine,), (theirs,) in zip(ours, reference, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.text == theirs.text
        assert mine.truncated == theirs.truncated
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_samples_of_a_group_differ_and_repeat_with_the_seed(engines):
    engine, _ = engines
    params = SamplingParams(n=8, temperature=1.5, max_tokens=40, seed=4)
    (first,), (again,) = engine.generate(PROMPTS[:1], params), engine.generate(PROMPTS[:1], params)
    assert len({tuple(sample.token_ids) for sample in first}) > 4
    assert [sample.token_ids for sample in first] == [sample.token_ids for sample in again]
    assert all(math.isfinite(x) and x <= 0 for sample in first for x in sample.logprobs)


def test_new_weights_reach_the_engine(engines):
    engine, reference = engines
    before = engine.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=30))
    old = {name: weight.detach().clone() for name, weight in reference.model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in reference.model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    try:
        engine.update_weights(merged_weights(reference.model))
        groups = engine.generate(PROMPTS[:8], SamplingParams(n=4, temperature=0.8, max_tokens=40))
        assert [g[0].token_ids for g in groups[:4]] != [g[0].token_ids for g in before]
        for group in groups:
            for sample in group:
                with torch.no_grad():
                    trainer = token_statistics(reference.model, token_batch([sample]), 0.8).logprobs
                assert sample.logprobs == pytest.approx(trainer.tolist(), abs=1e-3)
    finally:
        with torch.no_grad():
            for name, weight in reference.model.named_parameters():
                weight.copy_(old[name])
        engine.update_weights(merged_weights(reference.model))
    assert engine.generate(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=30)) == before


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_training_reaches_the_same_reward_with_either_engine(tmp_path, model):
    rewards = {}
    for engine in ("torch", "vllm"):
        changes = {"rollout_engine": engine, "prompts_per_step": 16, "group_size": 8, "max_response_tokens": 96}
        changes |= {"prompts_per_update": 16, "importance_cap": 2.0, "learning_rate": 3e-4}
        spec = {"name": model, "path": f"models/{model}", "template": "qa"}
        cell = distributed_cases.cell(model=spec, **changes)
        train(tmp_path / engine, cell)
        rows = read_steps(tmp_path / engine / "metrics.jsonl")
        assert all(row["metrics"]["policy/engine_kl"] < 1e-6 for row in rows)
        assert all(row["metrics"]["policy/importance_capped"] == 0 for row in rows)
        rewards[engine] = [row["metrics"]["reward/mean"] for row in rows]
    late = {engine: sum(values[-3:]) / 3 for engine, values in rewards.items()}
    # 384 binary rewards in groups of 8 have a standard error of at most 0.05; three of them, for the difference.
    assert abs(late["torch"] - late["vllm"]) < 3 * 2**0.5 * 0.05
    assert late["vllm"] > rewards["vllm"][0]


def test_two_workers_sample_with_an_engine_each(tmp_path):
    distributed_cases.run(tmp_path, distributed_cases.cell(steps=3, rollout_engine="vllm"), 2)
    rows = read_steps(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["metrics"]["policy/engine_kl"] < 1e-6 for row in rows)
    assert len({row["metrics"]["length/mean"] for row in rows}) > 1
