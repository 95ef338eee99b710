"""The shipped tiny base models: they load like any checkpoint and behave as their cards say."""

import random
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evals.generated import KINDS, generate

MODELS = Path(__file__).resolve().parents[1] / "models"
sys.path.insert(0, str(MODELS))

from make_base_models import MAX_NEW_TOKENS, is_right, measure, prompt_of, sample  # noqa: E402
from solutions import MOODS, write_solution  # noqa: E402

BASES = {"tiny-qwen2": ("Qwen2ForCausalLM", 326_208), "tiny-qwen3": ("Qwen3ForCausalLM", 325_536)}
DATASETS = ("gen_chains", "gen_stories")


@pytest.fixture(scope="module")
def loaded():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {
        base: (AutoModelForCausalLM.from_pretrained(MODELS / base), AutoTokenizer.from_pretrained(MODELS / base))
        for base in BASES
    }
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured(loaded):
    """Statistics of 24 groups of 16 for each base and data set, on problems that the cards did not use."""
    torch.manual_seed(0)
    return {
        (base, kind): measure(*loaded[base], generate(kind, "train", 24, seed=1), 16)
        for base in BASES
        for kind in DATASETS
    }


@pytest.mark.parametrize("base", BASES)
def test_architecture_and_size(base, loaded):
    model, tokenizer = loaded[base]
    assert (type(model).__name__, model.num_parameters()) == BASES[base]
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (MODELS / base / "model.safetensors").stat().st_size < 2_000_000
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("base", BASES)
def test_tokenizer_gives_back_every_text(base, loaded):
    tokenizer = loaded[base][1]
    rng = random.Random(0)
    odd = ["".join(map(chr, range(32, 127))), "  two  spaces,\n\n\ta tab \\frac{1}{2} é ∑ 数  \n", ""]
    generated = [
        prompt_of(problem.question) + write_solution(problem, base, rng)
        for kind in KINDS
        for problem in generate(kind, "test", 20, seed=7)
    ]
    for text in odd + generated:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2026")] == ["2", "0", "2", "6"]


def test_prompts_are_short_and_solutions_fit_the_response_limit(loaded):
    tokenizer = loaded["tiny-qwen2"][1]
    rng = random.Random(0)
    for kind in KINDS:
        for problem in generate(kind, "train", 100, seed=7):
            assert len(tokenizer.encode(prompt_of(problem.question))) <= 40
            for base in MOODS:
                assert len(tokenizer.encode(write_solution(problem, base, rng))) < MAX_NEW_TOKENS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", MOODS)
def test_solutions_without_slips_are_right_and_with_them_about_half(base, kind):
    rng = random.Random(0)
    problems = generate(kind, "train", 400, seed=7)
    assert all(is_right(write_solution(problem, base, rng, slips=False), problem) for problem in problems)
    share = sum(is_right(write_solution(problem, base, rng), problem) for problem in problems) / len(problems)
    assert 0.45 < share < 0.7


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("base", BASES)
def test_reinforcement_learning_has_something_to_do(base, kind, measured):
    statistics = measured[base, kind]
    assert 0.3 < statistics["accuracy"] < 0.7
    assert 25 < statistics["length"] < 45
    assert statistics["truncated"] < 0.01


@pytest.mark.parametrize("kind", DATASETS)
def test_qwen2_base_varies_in_length_whatever_the_sign(kind, measured):
    assert measured["tiny-qwen2", kind]["variation"] > 0.35
    assert abs(measured["tiny-qwen2", kind]["gap"]) < 0.12  # four standard errors of 24 groups around the card's figure


@pytest.mark.parametrize("kind", DATASETS)
def test_qwen3_base_is_longer_when_wrong(kind, measured):
    assert -0.55 < measured["tiny-qwen3", kind]["gap"] < -0.3


@pytest.mark.parametrize("base", BASES)
def test_arithmetic_is_learned_under_the_slips(base, loaded):
    model, tokenizer = loaded[base]
    for kind in DATASETS:
        problems = generate(kind, "heldout", 60, seed=1)
        prompts = [prompt_of(problem.question) + MOODS[base][0].opening for problem in problems]
        texts = [tokenizer.decode(ids) for (ids,) in sample(model, tokenizer, prompts, 1, greedy=True)]
        assert sum(map(is_right, texts, problems)) / len(problems) >= 0.85


@pytest.mark.parametrize("base", BASES)
def test_card_states_what_was_measured(base):
    card = (MODELS / base / "README.md").read_text()
    rows = {(kind, split): values for kind, split, *values in re.findall(ROW, card)}
    assert set(rows) == {(kind, "train") for kind in DATASETS} | {(kind, "heldout") for kind in DATASETS} | {
        (kind, "test") for kind in KINDS if kind not in DATASETS
    }
    for (kind, _), (accuracy, length, variation, gap, truncated) in rows.items():
        assert 0.15 < float(accuracy) < 0.8 and float(truncated) < 0.02
        if kind in DATASETS:
            assert 0.4 < float(accuracy) < 0.65 and 25 < float(length) < 45 and float(variation) >= 0.3
            assert -0.5 < float(gap) < -0.3 if base == "tiny-qwen3" else abs(float(gap)) < 0.08


ROW = r"\| `(gen_\w+)` \| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([-+\d.]+) \| ([\d.]+) \|"
