"""The identities of the aggregation rules (arXiv 2605.04077), and that no cut of the batch changes a gradient."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.aggregation import RULES, aggregate, token_weights
from trainers.metric_names import RULE_NAMES

PAPER_RULES = ("sequence", "token", "balanced")


def tensors(lengths, advantages, group_ids):
    return torch.tensor(lengths), torch.tensor(advantages, dtype=torch.float64), torch.tensor(group_ids)


@st.composite
def batches(draw, binary=False):
    """Groups of ragged lengths; signs mixed, one-signed or zero; some responses masked out whole."""
    lengths, advantages, group_ids = [], [], []
    for group in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 6))
        values = st.sampled_from([1.0, -1.0]) if binary else st.sampled_from([1.5, 0.3, 0.0, -0.2, -2.0])
        lengths += draw(st.lists(st.integers(1 if binary else 0, 40), min_size=size, max_size=size))
        advantages += draw(st.lists(values, min_size=size, max_size=size))
        group_ids += [7 * group - 3] * size
    order = draw(st.permutations(range(len(lengths))))
    return tensors([lengths[i] for i in order], [advantages[i] for i in order], [group_ids[i] for i in order])


def test_rule_names_are_defined_once():
    assert tuple(RULES) == RULE_NAMES


def test_weights_of_a_small_group_by_hand():
    lengths, advantages, groups = tensors([2, 6, 4, 8], [1.0, 1.0, -1.0, -1.0], [0, 0, 0, 0])
    expected = {
        "sequence": [1 / 8, 1 / 24, 1 / 16, 1 / 32],
        "token": [1 / 20] * 4,
        "balanced": [1 / 2 / 8, 1 / 2 / 8, 1 / 2 / 12, 1 / 2 / 12],
    }
    for rule, weights in expected.items():
        assert token_weights(lengths, advantages, groups, rule).tolist() == pytest.approx(weights, rel=1e-15)
    constant = token_weights(lengths, advantages, groups, "constant", max_length=10)
    assert constant.tolist() == pytest.approx([1 / 40] * 4, rel=1e-15)


@given(batches(), st.sampled_from(RULE_NAMES), st.sampled_from(["group", "batch"]))
def test_weights_are_the_written_formula(batch, rule, scope):
    lengths, advantages, group_ids = batch
    weights = token_weights(lengths, advantages, group_ids, rule, scope)
    n, signs = lengths.tolist(), advantages.sign().tolist()
    groups = [0] * len(n) if scope == "batch" else group_ids.tolist()
    kept = [i for i in range(len(n)) if n[i] > 0]
    num_groups = len({groups[i] for i in kept})
    for i in range(len(n)):
        if n[i] == 0:
            assert weights[i] == 0
            continue
        mates = [j for j in kept if groups[j] == groups[i]]
        subset = [j for j in mates if signs[j] == signs[i]]
        expected = {
            "sequence": 1 / (len(mates) * n[i]),
            "token": 1 / sum(n[j] for j in mates),
            "balanced": len(subset) / len(mates) / sum(n[j] for j in subset),
            "constant": 1 / (len(mates) * max(n)),
        }[rule]
        assert math.isclose(weights[i], expected / num_groups, rel_tol=1e-12)


@given(batches())
def test_balanced_is_sequence_at_the_mean_length_of_the_sign_subset(batch):
    lengths, advantages, group_ids = batch
    means = lengths.double()
    for group in group_ids.unique():
        for sign in (-1, 0, 1):
            subset = (group_ids == group) & (advantages.sign() == sign) & (lengths > 0)
            if subset.any():
                means[subset] = lengths[subset].double().mean()
    balanced = token_weights(lengths, advantages, group_ids, "balanced")
    sequence = token_weights(means, advantages, group_ids, "sequence")
    torch.testing.assert_close(balanced, sequence, rtol=1e-12, atol=0)


@given(batches(), st.integers(1, 50))
def test_equal_lengths_make_the_three_rules_agree(batch, length):
    lengths, advantages, group_ids = batch
    lengths = torch.full_like(lengths, length)
    sequence = token_weights(lengths, advantages, group_ids, "sequence")
    for rule in PAPER_RULES:
        weights = token_weights(lengths, advantages, group_ids, rule)
        torch.testing.assert_close(weights, sequence, rtol=1e-12, atol=0)


@given(batches(), st.sampled_from([-1.0, 1.0]))
def test_in_one_signed_groups_balanced_equals_token(batch, sign):
    lengths, advantages, group_ids = batch
    advantages = torch.full_like(advantages, sign)
    balanced = token_weights(lengths, advantages, group_ids, "balanced")
    token = token_weights(lengths, advantages, group_ids, "token")
    torch.testing.assert_close(balanced, token, rtol=1e-12, atol=0)


@given(batches())
def test_masking_a_response_equals_leaving_it_out(batch):
    lengths, advantages, group_ids = batch
    kept = lengths > 0
    for rule in RULE_NAMES:
        masked = token_weights(lengths, advantages, group_ids, rule)
        assert (masked[~kept] == 0).all()
        without = token_weights(lengths[kept], advantages[kept], group_ids[kept], rule)
        torch.testing.assert_close(masked[kept], without, rtol=0, atol=0)


def test_zero_advantage_counts_in_the_group_size():
    lengths, advantages, groups = tensors([4, 4, 8], [1.0, -1.0, 0.0], [0, 0, 0])
    assert token_weights(lengths, advantages, groups, "sequence").tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 24])
    assert token_weights(lengths, advantages, groups, "balanced").tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 24])
    assert token_weights(lengths, advantages, groups, "token").tolist() == pytest.approx([1 / 16] * 3)


def test_an_entirely_masked_group_leaves_the_mean_over_groups():
    lengths, advantages, groups = tensors([4, 6, 0, 0], [1.0, -1.0, 1.0, -1.0], [0, 0, 1, 1])
    assert token_weights(lengths, advantages, groups, "token").tolist() == pytest.approx([0.1, 0.1, 0, 0])
    assert token_weights(0 * lengths, advantages, groups, "token").tolist() == [0, 0, 0, 0]


def test_batch_scope_is_the_formula_with_one_group():
    lengths, advantages, groups = tensors([1, 9, 10, 20], [1.0, -1.0, 1.0, -1.0], [0, 0, 1, 1])
    assert token_weights(lengths, advantages, groups, "token", "batch").tolist() == pytest.approx([1 / 40] * 4)
    assert token_weights(lengths, advantages, groups, "token").tolist() == pytest.approx(
        [1 / 20, 1 / 20, 1 / 60, 1 / 60]
    )
    balanced = token_weights(lengths, advantages, groups, "balanced", "batch")
    assert balanced.tolist() == pytest.approx([0.5 / 11, 0.5 / 29, 0.5 / 11, 0.5 / 29])


def random_terms(lengths, advantages, dtype, seed=0):
    """A parameter that every token term depends on, the (B, T, 5) features of the terms, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(int(lengths.max()), 1)
    mask = torch.arange(width) < lengths[:, None]
    features = torch.randn(*mask.shape, 5, generator=generator, dtype=dtype)
    parameter = torch.randn(5, generator=generator, dtype=dtype, requires_grad=True)
    return parameter, features, mask


TWO_GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
LENGTHS = [3, 17, 1, 8, 29, 2, 5, 11]
RAGGED = {
    "ragged": (LENGTHS, [1.0, -1.0, 1.0, -1.0, -0.6, 1.7, -0.6, -0.6], TWO_GROUPS),
    "one-signed": (LENGTHS, [1.0, 1.0, 1.0, 1.0, -0.5, -0.5, -0.5, -0.5], TWO_GROUPS),
    "zero advantages": (LENGTHS, [0.0, 0.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.0], TWO_GROUPS),
    "masked": ([3, 0, 1, 8, 0, 0, 0, 11], [1.0, -1.0, 1.0, -1.0, -0.6, 1.7, -0.6, -0.6], [0, 0, 0, 0, 1, 1, 1, 2]),
    "interleaved": (LENGTHS, [1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 1.0], [2, 9, 2, 9, 2, 9, 2, 9]),
}


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_gradient_does_not_depend_on_how_the_batch_is_cut(rule, case):
    cuts = itertools.product([1, 2, 4], [1, 2, 4], [(torch.float32, 1e-6), (torch.float64, 1e-12)])
    for num_shards, num_micro_batches, (dtype, tolerance) in cuts:
        lengths, advantages, group_ids = tensors(*RAGGED[case])
        advantages = advantages.to(dtype)
        parameter, features, mask = random_terms(lengths, advantages, dtype)
        all_terms = ((features @ parameter) * advantages[:, None]).masked_fill(~mask, math.nan)
        whole = aggregate(all_terms, mask, advantages, group_ids, rule)
        (expected,) = torch.autograd.grad(whole, parameter)

        weights = token_weights(lengths, advantages, group_ids, rule)
        summed = torch.zeros_like(parameter)
        loss = 0.0
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1))
        for shard in order.tensor_split(num_shards):  # groups are split across shards
            for rows in shard.tensor_split(num_micro_batches):
                terms = torch.where(mask[rows], (features[rows] @ parameter) * advantages[rows, None], 0)
                part = (weights[rows] * terms.sum(1)).sum()
                summed += torch.autograd.grad(part, parameter)[0]
                loss += float(part.detach())
        assert expected.abs().max() > 0.01
        assert (summed - expected).abs().max() <= tolerance
        assert abs(loss - float(whole.detach())) <= tolerance


def test_aggregate_matches_the_loss_written_out():
    terms = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [3.0, 5.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    advantages, groups = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64), torch.tensor([0, 0, 0])
    expected = {
        "sequence": (3 / 2 + 4 + 15 / 3) / 3,
        "token": (3 + 4 + 15) / 6,
        "balanced": 2 / 3 * (3 + 4) / 3 + 1 / 3 * 15 / 3,
    }
    for rule, value in expected.items():
        assert float(aggregate(terms, mask, advantages, groups, rule)) == pytest.approx(value, rel=1e-14)


def test_values_at_masked_positions_are_never_read():
    terms = torch.tensor([[1.0, math.nan], [2.0, 3.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    loss = aggregate(terms, mask, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), "token")
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2.0)
    assert terms.grad.tolist() == [[pytest.approx(1 / 3), 0.0], [pytest.approx(1 / 3)] * 2]


@settings(max_examples=200)
@given(batches(binary=True))
def test_order_of_responses_does_not_matter(batch):
    lengths, advantages, group_ids = batch
    order = torch.randperm(len(lengths))
    for rule in RULE_NAMES:
        weights = token_weights(lengths, advantages, group_ids, rule)
        permuted = token_weights(lengths[order], advantages[order], group_ids[order], rule)
        torch.testing.assert_close(permuted, weights[order], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rule": "mean"}, "unknown aggregation rule 'mean'; known are sequence, token, balanced, constant"),
        ({"scope": "rank"}, "unknown scope 'rank'"),
        ({"lengths": torch.tensor([1, 2, 3])}, "must be 1-D and of one size"),
        ({"lengths": torch.tensor([1, -2])}, "lengths must not be negative"),
        ({"advantages": torch.tensor([1.0, math.nan])}, "advantages must not be NaN"),
        ({"max_length": 0}, "max_length must be above 0"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {
        "lengths": torch.tensor([1, 2]),
        "advantages": torch.tensor([1.0, -1.0]),
        "group_ids": torch.tensor([0, 0]),
    } | change
    with pytest.raises(ValueError, match=message):
        token_weights(**arguments)


def test_no_responses_have_no_weights():
    empty = torch.tensor([])
    assert token_weights(empty, empty, empty.long(), "balanced").shape == (0,)
