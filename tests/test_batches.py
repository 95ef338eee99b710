"""Micro-batches, and the forms in which a model reads them: padded and packed."""

from itertools import pairwise
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from evals.engines import Sample
from evals.engines.attention import REPLACEABLE_SDPA
from tests.sequences import plain_logprobs
from trainers import footprint, policy
from trainers.batches import Form, batch_form, micro_batches, token_batch
from trainers.policy import token_statistics

FORMS = get_args(Form)
SHAPE = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def sample(prompt_ids: list[int], length: int, first: int = 7) -> Sample:
    return Sample(prompt_ids, [(first + place) % 50 for place in range(length)], [-1.0] * length, "", False)


def groups(*prompt_lengths: int) -> list[Sample]:
    """Four responses to each prompt, of lengths that differ, the third one empty."""
    return [
        sample([(3 * number + place) % 50 for place in range(length)], 0 if i == 2 else 1 + 5 * i + number, i)
        for number, length in enumerate(prompt_lengths)
        for i in range(4)
    ]


def model(kind=Qwen3Config, **changes):
    torch.manual_seed(0)
    config = kind(**SHAPE | {"num_key_value_heads": 2} | changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=REPLACEABLE_SDPA).eval()


@pytest.mark.parametrize("max_tokens", [1, 30, 64, 10**6])
@pytest.mark.parametrize("form", FORMS)
def test_micro_batches_hold_every_response_once_within_the_budget(max_tokens, form):
    samples = {row: sample([row // 4] * (3 + row // 4), 1 + (7 * row) % 23) for row in range(40)}
    rows = [row for row in range(40) if row % 5]
    batches = list(micro_batches(samples, rows, max_tokens, form))
    assert sorted(row for batch in batches for row in batch) == rows
    for batch in batches:
        size = token_batch([samples[row] for row in batch], form).ids_BT.numel()
        assert len(batch) == 1 or size <= max_tokens
    if max_tokens == 10**6:
        assert len(batches) == 1
    # None could have been put into the one before.
    for batch, following in pairwise(batches):
        assert token_batch([samples[row] for row in [*batch, following[0]]], form).ids_BT.numel() > max_tokens


def test_padded_rows_hold_what_predicts_and_nothing_behind_it():
    batch = token_batch([sample([5, 5], 3), sample([5], 1)])
    assert batch.position_ids_BT is None
    assert batch.ids_BT.tolist() == [[5, 5, 7, 8], [5, 0, 0, 0]]
    assert batch.predicts_BT.int().tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.targets_N.tolist() == [7, 8, 9, 7]


def test_packed_positions_start_over():
    batch = token_batch([sample([5, 5], 3), sample([5], 1)], "packed")
    assert batch.ids_BT.tolist() == [[5, 5, 7, 8, 5]]
    assert batch.predicts_BT.int().tolist() == [[0, 1, 1, 1, 1]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 0]]


@pytest.mark.parametrize("prompt_lengths", [(6, 1, 9), (1,), (40, 2)])
@pytest.mark.parametrize("kind, heads", [(Qwen3Config, 2), (Qwen2Config, 4), (LlamaConfig, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_what_whole_sequences_give(form, kind, heads, prompt_lengths):
    net = model(kind, num_key_value_heads=heads)
    samples = groups(*prompt_lengths)
    weights = torch.linspace(-1, 1, sum(len(sample.token_ids) for sample in samples))
    gradients = []
    statistics = token_statistics(net, token_batch(samples, form), 0.7)
    expected = plain_logprobs(net, samples, 0.7)
    for logprobs in (statistics.logprobs, expected):
        net.zero_grad()
        (weights * logprobs).sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    torch.testing.assert_close(statistics.logprobs, expected, atol=1e-5, rtol=0)
    entropies = torch.cat([token_statistics(net, token_batch([sample]), 0.7).entropies for sample in samples])
    torch.testing.assert_close(statistics.entropies, entropies, atol=1e-5, rtol=0)
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()
    assert gradients[1].norm() > 1e-2


def test_the_form_fits_the_attention():
    net = model()
    assert batch_form(net) == "padded"
    net.config._attn_implementation = "flash_attention_2"
    assert batch_form(net) == "packed"


def test_the_estimate_of_memory_knows_the_size_of_a_chunk():
    assert footprint.LOGITS_HELD == 3 * policy.CHUNK_ELEMENTS
