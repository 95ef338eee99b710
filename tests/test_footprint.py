"""The memory estimate against real models and against sums by hand."""

import json
from pathlib import Path

import pytest

from evals.engines import load_model
from trainers.adapters import add_adapters
from trainers.footprint import Shape, footprint
from trainers.recipe import Recipe

GIB = 2**30
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
def test_parameters_are_those_of_the_model(name):
    model, _ = load_model(f"models/{name}")
    shape = Shape.of(json.loads((Path("models") / name / "config.json").read_text()))
    assert shape.parameters == model.num_parameters()
    add_adapters(model, Recipe(lora_rank=3), seed=0)
    assert shape.adapter_parameters(3) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_known_model_of_seven_billion():
    shape = Shape.of(QWEN_7B)
    assert shape.parameters == 7_615_616_512
    eight = footprint(shape, Recipe(dtype="bfloat16", rollout_engine="vllm"), workers=8)
    assert eight.optimizer == 3 * 4 * 7_615_616_512 // 8
    assert eight.engine == 2 * 7_615_616_512
    # Keys and values in 2 bytes: 2 x 4 heads x 128 x 28 layers a token.
    assert eight.kv_cache == 2 * 1024 * 28 * (1024 + 8192) * 16
    assert eight.tokens_per_step == 512 * 9216
    assert footprint(shape, Recipe(dtype="bfloat16", rollout_engine="vllm"), workers=1).optimizer > 80 * GIB


def test_checkpointing_adapters_and_a_reference_change_what_they_should():
    shape = Shape.of(QWEN_7B)
    plain = footprint(shape, Recipe(), 1)
    saving = footprint(shape, Recipe(activation_checkpointing=True), 1)
    assert saving.activations < plain.activations / 5
    assert footprint(shape, Recipe(lora_rank=16), 1).optimizer < plain.optimizer / 100
    with_reference = footprint(shape, Recipe(kl_coef=0.1), 1)
    assert with_reference.weights == plain.weights + 4 * shape.parameters
    resident = plain.weights + plain.optimizer
    assert plain.needed == resident + max(plain.activations, plain.engine + plain.kv_cache)


def test_configs_without_the_numbers_are_refused():
    with pytest.raises(ValueError, match="has no hidden_size"):
        Shape.of({"model_type": "qwen2"})
    with pytest.raises(ValueError, match="no estimate for the architecture 'mamba'"):
        Shape.of({"model_type": "mamba"})
