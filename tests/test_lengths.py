"""Length statistics, the sign mass of each rule, and advantages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.advantages import group_advantages
from trainers.lengths import length_statistics, sign_mass


def test_length_statistics_by_hand():
    lengths = torch.tensor([2, 4, 6, 8, 10, 10])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    truncated = torch.tensor([False, False, False, False, True, False])
    statistics = length_statistics(lengths, advantages, groups, truncated)
    assert statistics == pytest.approx(
        {
            "length/mean": 40 / 6,
            "length/std": math.sqrt((4 + 16 + 36 + 64 + 200) / 6 - (40 / 6) ** 2),
            "length/min": 2,
            "length/max": 10,
            "length/group_cv": (math.sqrt(5) / 5 + 0) / 2,
            "length/pos_mean": 3,
            "length/neg_mean": 7,
            "length/sign_gap": -4,
            "length/sign_gap_rel": -4 / 5,
            "length/truncated": 1 / 6,
        }
    )


def test_gap_averages_over_groups_that_have_both_signs():
    lengths = torch.tensor([10, 20, 8, 2, 5, 50])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    statistics = length_statistics(lengths, advantages, torch.tensor([0, 0, 1, 1, 2, 2]), torch.zeros(6))
    assert statistics["length/sign_gap"] == pytest.approx((-10 + 6) / 2)
    assert statistics["length/sign_gap_rel"] == pytest.approx((-10 / 15 + 6 / 5) / 2)


def test_what_a_batch_does_not_define_is_nan():
    statistics = length_statistics(torch.tensor([3, 5]), torch.ones(2), torch.tensor([0, 0]), torch.zeros(2))
    assert math.isnan(statistics["length/sign_gap"])
    assert math.isnan(statistics["length/sign_gap_rel"])
    assert math.isnan(statistics["length/neg_mean"])
    assert statistics["length/pos_mean"] == 4


def test_masked_responses_do_not_show_as_length_zero():
    statistics = length_statistics(
        torch.tensor([0, 4, 6]), torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 0]), torch.zeros(3)
    )
    assert statistics["length/min"] == 4
    assert statistics["length/mean"] == 5
    with pytest.raises(ValueError, match="no response has a length above 0"):
        length_statistics(torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0]), torch.zeros(1))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 99)), min_size=2, max_size=16))
def test_binary_rewards_balance_the_mass_except_under_token(responses):
    rewards = torch.tensor([float(right) for right, _ in responses], dtype=torch.float64)
    lengths = torch.tensor([length for _, length in responses])
    groups = torch.zeros(len(responses), dtype=torch.long)
    advantages = group_advantages(rewards, groups)
    mass = sign_mass(lengths, advantages, groups)
    if rewards.min() == rewards.max():
        assert all(value == 0 for pair in mass.values() for value in pair)
        return
    for rule in ("sequence", "balanced"):
        assert mass[rule].positive == pytest.approx(mass[rule].negative, rel=1e-12)
        assert mass[rule].positive > 0
    means = lengths[rewards == 1].double().mean() / lengths[rewards == 0].double().mean()
    assert mass["token"].positive / mass["token"].negative == pytest.approx(float(means), rel=1e-12)


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 2.0, 5.0], dtype=torch.float64)
    groups = torch.tensor([3, 3, 3, 3, 8, 8, 1])
    std = math.sqrt(3) / 4
    expected = [0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std, 0, 0, 0]
    assert group_advantages(rewards, groups).tolist() == pytest.approx(expected, rel=1e-12)
    centred = group_advantages(rewards, groups, normalize="none")
    assert centred.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, 0, 0, 0])


def test_rewards_equal_up_to_rounding_have_no_advantage():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    assert group_advantages(rewards, torch.zeros(4, dtype=torch.long)).tolist() == [0, 0, 0, 0]
    same = torch.full((7,), 0.1)
    assert group_advantages(same, torch.zeros(7, dtype=torch.long)).tolist() == [0] * 7


def test_the_std_is_floored():
    rewards = torch.tensor([0.0, 1e-5], dtype=torch.float64)
    groups = torch.tensor([0, 0])
    assert group_advantages(rewards, groups, std_floor=1e-3).tolist() == pytest.approx([-5e-3, 5e-3])
    assert group_advantages(rewards, groups, std_floor=1e-9).tolist() == pytest.approx([-1, 1])


def test_bad_rewards_are_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="1-D"):
        group_advantages(torch.tensor([1.0, 2.0]), torch.tensor([0]))
