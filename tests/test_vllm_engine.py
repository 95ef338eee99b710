"""The vLLM engine against the torch engine, where vLLM is installed (`make setup-vllm && make test-vllm`)."""

import math

import pytest

from evals.engines import SamplingParams, TorchEngine, load_model, open_engine
from evals.generated import generate

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
