"""The diagnosis in numpy computes what the trainers compute in torch, to 1e-12."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from analysis import diagnose_weights
from analysis.diagnose import mass_ratio, measure, negative_share, token_weight
from analysis.dumps import Responses
from trainers import aggregation, lengths, metric_names
from trainers.advantages import group_advantages

SCOPES = st.sampled_from(["group", "batch"])


@st.composite
def batches(draw):
    """Groups of ragged lengths over one step, in any order: mixed, one-signed and tied rewards, empty responses."""
    rewards, sizes, groups = [], [], []
    for group in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 8))
        rewards += draw(st.lists(st.sampled_from([0.0, 1.0, 0.25, -3.5]), min_size=size, max_size=size))
        sizes += draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))
        groups += [5 * group + 2] * size
    sizes[0] = max(sizes[0], 1)
    order = draw(st.permutations(range(len(groups))))
    return [np.array([column[i] for i in order]) for column in (rewards, sizes, groups)]


def as_responses(rewards, sizes, groups, step=1, truncated=None) -> Responses:
    nothing = np.full(len(groups), np.nan)
    return Responses(
        np.full(len(groups), step),
        groups.astype(np.uint64),
        sizes.astype(np.float64),
        rewards.astype(np.float64),
        nothing,
        nothing if truncated is None else truncated,
    )


def test_rules_are_the_trainers_rules():
    assert tuple(diagnose_weights.RULES) == tuple(aggregation.RULES) == metric_names.RULE_NAMES


@given(batches())
def test_advantages_agree(batch):
    rewards, _, groups = batch
    dense = np.unique(groups, return_inverse=True)[1]
    ours = diagnose_weights.group_advantages(rewards, dense)
    theirs = group_advantages(torch.tensor(rewards), torch.tensor(groups))
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-12, atol=1e-12)


def test_rewards_that_float32_made_unequal_are_tied():
    rewards = np.array([0.1 + 0.2, 0.3, float(np.float32(0.3)), 0.3])
    assert diagnose_weights.group_advantages(rewards, np.zeros(4, dtype=np.int64)).tolist() == [0, 0, 0, 0]


@given(batches(), SCOPES, st.sampled_from([None, 50]))
def test_weights_agree(batch, scope, max_length):
    rewards, sizes, groups = batch
    advantages = group_advantages(torch.tensor(rewards), torch.tensor(groups))
    kept = sizes > 0
    dense = np.unique(groups[kept], return_inverse=True)[1]
    for rule in metric_names.RULE_NAMES:
        ours = diagnose_weights.token_weights(
            rule,
            sizes[kept].astype(np.float64),
            advantages.numpy()[kept],
            dense,
            np.zeros_like(dense),
            scope,
            max_length,
        )
        theirs = aggregation.token_weights(
            torch.tensor(sizes), advantages, torch.tensor(groups), rule, scope, max_length
        )
        np.testing.assert_allclose(ours, theirs.numpy()[kept], rtol=1e-12)


def test_weights_of_several_steps_are_those_of_each_step_alone():
    rng = np.random.default_rng(0)
    steps = np.repeat([0, 1, 2], [6, 10, 4])
    groups = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 4])
    sizes, advantages = rng.integers(1, 90, 20).astype(float), rng.normal(size=20)
    for rule in metric_names.RULE_NAMES:
        for scope in ("group", "batch"):
            whole = diagnose_weights.token_weights(rule, sizes, advantages, groups, steps, scope)
            for step in range(3):
                at = steps == step
                alone = aggregation.token_weights(
                    torch.tensor(sizes[at]), torch.tensor(advantages[at]), torch.tensor(groups[at]), rule, scope
                )
                np.testing.assert_allclose(whole[at], alone.numpy(), rtol=1e-12)


@given(batches(), SCOPES)
def test_what_is_measured_is_what_a_run_would_log(batch, scope):
    rewards, sizes, groups = batch
    cut = sizes > 40
    advantages = group_advantages(torch.tensor(rewards), torch.tensor(groups))
    tensors = torch.tensor(sizes), advantages, torch.tensor(groups)
    logged = lengths.length_statistics(*tensors, torch.tensor(cut))
    measured = measure([as_responses(rewards, sizes, groups, truncated=cut.astype(float))], scope=scope)
    names = {
        "length": metric_names.LENGTH_MEAN,
        "group_cv": metric_names.GROUP_CV,
        "positive_length": metric_names.POS_LENGTH,
        "negative_length": metric_names.NEG_LENGTH,
        "sign_gap": metric_names.SIGN_GAP,
        "sign_gap_rel": metric_names.SIGN_GAP_REL,
        "truncated": metric_names.TRUNCATED,
    }
    for name, metric in names.items():
        np.testing.assert_allclose(measured.estimate(name).value, logged[metric], rtol=1e-12, atol=1e-12)
    for rule, mass in lengths.sign_mass(*tensors, scope).items():
        both = mass.positive + mass.negative
        share = mass.negative / both if both else np.nan
        np.testing.assert_allclose(measured.estimate(negative_share(rule)).value, share, rtol=1e-12)
        ratio = mass.positive / mass.negative if mass.negative else np.nan
        np.testing.assert_allclose(measured.estimate(mass_ratio(rule)).value, ratio, rtol=1e-12)


def test_token_weights_relative_to_the_average_token_by_hand():
    # One group: right responses of 2 and 4 tokens, wrong ones of 6 and 12. 24 tokens, G = 4.
    measured = measure([as_responses(np.array([1, 1, 0, 0]), np.array([2, 4, 6, 12]), np.zeros(4))])
    expected = {
        # sequence: w = 1 / (4 n), relative to 1/24: 6 / n.
        "sequence": {"shortest": 3.0, "longest": 0.5, "positive": 12 / 6, "negative": 12 / 18},
        "token": dict.fromkeys(("shortest", "longest", "positive", "negative"), 1.0),
        # balanced: w = (1/2) / 6 and (1/2) / 18, relative to 1/24.
        "balanced": {"shortest": 2.0, "longest": 12 / 18, "positive": 2.0, "negative": 12 / 18},
        "constant": dict.fromkeys(("shortest", "longest", "positive", "negative"), 1.0),
    }
    for rule, weights in expected.items():
        for tokens, weight in weights.items():
            assert measured.estimate(token_weight(rule, tokens)).value == pytest.approx(weight, rel=1e-12)
    assert measured.estimate(negative_share("token")).value == pytest.approx(18 / 24)
    assert measured.estimate(negative_share("balanced")).value == pytest.approx(1 / 2)


def test_graded_rewards_leave_balanced_the_covariance_within_a_sign():
    rng = np.random.default_rng(3)
    rewards, sizes = rng.normal(size=12), rng.integers(1, 200, 12).astype(float)
    advantages = torch.tensor(diagnose_weights.group_advantages(rewards, np.zeros(12, dtype=np.int64)))
    mass = lengths.sign_mass(torch.tensor(sizes), advantages, torch.zeros(12, dtype=torch.long))
    for sign, name in ((1, "positive"), (-1, "negative")):
        chosen = np.sign(advantages.numpy()) == sign
        n, size = sizes[chosen], np.abs(advantages.numpy()[chosen])
        covariance = np.mean(n * size) - n.mean() * size.mean()
        moved = getattr(mass["balanced"], name) - getattr(mass["sequence"], name)
        assert abs(moved) > 1e-3
        assert moved == pytest.approx(chosen.sum() / 12 * covariance / n.mean(), rel=1e-12)
