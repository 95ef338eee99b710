"""What is measured from a stream of responses: blocks, intervals, trends, pieces, repeats; and what is concluded."""

import json

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from analysis import diagnose
from analysis.diagnose import (
    LENGTH_BINS,
    UNKNOWN,
    Estimate,
    Measurements,
    mass_ratio,
    measure,
    negative_share,
    token_weight,
    whole_steps,
)
from analysis.diagnose_figure import diagnosis, draw
from analysis.diagnose_formats import DumpError
from analysis.diagnose_words import conclude
from analysis.dumps import Responses, concatenate
from analysis.style import RULE_STYLES

GROUP = 8


def rollouts(steps=30, prompts=8, ratio=1.6, spread=0.4, seed=0, drift=0.0, rewards=(0.0, 1.0), cut=None) -> Responses:
    """Groups whose responses with the lower reward are `ratio` times as long; `drift` is added to it by the end."""
    rng = np.random.default_rng(seed)
    num_groups = steps * prompts
    step = np.repeat(np.arange(1, steps + 1), prompts * GROUP)
    right = rng.random((num_groups, GROUP)) < rng.uniform(0.2, 0.8, (num_groups, 1))
    by_group = ratio + drift * np.repeat(np.arange(steps), prompts)[:, None] / max(steps - 1, 1)
    lengths = rng.lognormal(5, 0.3, (num_groups, 1)) * np.where(right, 1.0, by_group)
    lengths = np.ceil(lengths * rng.lognormal(0, spread, right.shape)).ravel()
    return Responses(
        step,
        np.repeat(np.arange(num_groups), GROUP).astype(np.uint64),
        lengths,
        np.where(right, rewards[1], rewards[0]).ravel(),
        np.full(len(step), np.nan),
        np.full(len(step), np.nan) if cut is None else (lengths >= cut).astype(float),
    )


def split(responses: Responses, size: int) -> list[Responses]:
    return [responses.rows(slice(start, start + size)) for start in range(0, len(responses.step), size)]


def same(a: Measurements, b: Measurements) -> None:
    assert a.steps.tolist() == b.steps.tolist()
    assert a.numerators.keys() == b.numerators.keys()
    for name in a.numerators:
        np.testing.assert_allclose(a.numerators[name], b.numerators[name], rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(a.denominators[name], b.denominators[name], rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(a.moments[name], b.moments[name], rtol=1e-9, err_msg=name)
    counts = ("num_responses", "num_groups", "longest", "num_longest", "reward_values", "groups_of_one")
    assert [getattr(a, name) for name in counts] == [getattr(b, name) for name in counts]


def test_pieces_and_order_do_not_matter(monkeypatch):
    responses = rollouts()
    whole = measure([responses])
    same(whole, measure(split(responses, 77)))
    shuffled = responses.rows(np.random.default_rng(1).permutation(len(responses.step)))
    same(whole, measure(split(shuffled, 300)))
    # Held no longer than their step needs, and measured in small portions.
    monkeypatch.setattr(diagnose, "MOST_PENDING", 100)
    monkeypatch.setattr(diagnose, "PORTION", 150)
    pieces = list(whole_steps(split(responses, 77)))
    assert len(pieces) > 10
    assert max(len(piece.step) for piece in pieces) <= 64 * 3
    assert concatenate(pieces).step.tolist() == responses.step.tolist()
    same(whole, measure(split(responses, 77)))


def test_steps_that_cannot_be_held_are_refused(monkeypatch):
    monkeypatch.setattr(diagnose, "MOST_PENDING", 100)
    responses = rollouts(steps=10)
    late = concatenate([responses, responses.rows(responses.step == 1)])
    with pytest.raises(DumpError, match="step 1 goes on after more than 100 responses of other steps: sort the dump"):
        list(whole_steps(split(late, 64)))
    monkeypatch.setattr(diagnose, "MOST_IN_A_STEP", 200)
    with pytest.raises(DumpError, match=r"more than 200 responses in one step \(0\): name the column of the step"):
        list(whole_steps(split(responses._replace(step=np.zeros_like(responses.step)), 64)))


def test_estimates_are_ratios_of_sums_over_all_groups():
    measured = measure([rollouts(steps=4)])
    name = "sign_gap_rel"
    per_step = measured.per_step(name)
    assert len(per_step) == 4
    weights = measured.denominators[name]
    assert measured.estimate(name).value == pytest.approx(np.average(per_step, weights=weights), rel=1e-12)
    assert measured.estimate("nothing") == UNKNOWN
    assert not measured.estimate("truncated").known


def test_the_interval_over_blocks_is_students_t_of_block_means():
    # Equal denominators: the ratio is a mean of block means, and its interval the textbook one.
    values = np.random.default_rng(0).normal(3, 1, 40)
    measured = Measurements(np.arange(40), {"x": values}, {"x": np.ones(40)}, {})
    blocks = values.reshape(10, 4).mean(1)
    half = 2.2621571627 * blocks.std(ddof=1) / np.sqrt(10)  # t quantile of 9 degrees of freedom
    low, high = values.mean() - half, values.mean() + half
    assert measured.estimate("x") == pytest.approx((values.mean(), low, high), rel=1e-9)


def test_the_interval_over_groups_is_students_t_of_groups():
    responses = rollouts(steps=1, prompts=30)
    measured = measure([responses])
    assert measured.interval_over == "groups"
    lengths = responses.length.reshape(30, GROUP)
    cv = lengths.std(1) / lengths.mean(1)
    half = 2.0452296421 * cv.std(ddof=1) / np.sqrt(30)
    assert measured.estimate("group_cv") == pytest.approx((cv.mean(), cv.mean() - half, cv.mean() + half), rel=1e-8)


@pytest.mark.parametrize(("steps", "correlation"), [(3, 0.0), (10, 0.0), (40, 0.0), (100, 0.6)])
def test_intervals_hold_the_truth_in_about_95_percent_of_runs(steps, correlation):
    rng = np.random.default_rng(steps)
    draws, truth, covered = 2000, -0.3, 0
    drift = np.empty((draws, steps))
    drift[:, 0] = rng.normal(size=draws)
    for step in range(1, steps):
        fresh = rng.normal(size=draws)
        drift[:, step] = correlation * drift[:, step - 1] + np.sqrt(1 - correlation**2) * fresh
    counts = rng.integers(5, 9, (draws, steps)).astype(float)
    gaps = counts * (truth + 0.1 * drift) + np.sqrt(counts) * rng.normal(0, 0.2, (draws, steps))
    for gap, count in zip(gaps, counts, strict=True):
        estimate = Measurements(np.arange(steps), {"gap": gap}, {"gap": count}, {}).estimate("gap")
        covered += estimate.low <= truth <= estimate.high
    assert 0.93 <= covered / draws <= 0.97


def test_trends_are_found_with_their_size_and_not_where_there_is_none():
    steady, drifting = measure([rollouts(steps=60)]), measure([rollouts(steps=60, drift=1.0)])
    assert not steady.trend("length_ratio").excludes(0.0)
    trend = drifting.trend("length_ratio")
    assert trend.excludes(0.0)
    assert trend.low < 1.0 < trend.high
    assert not measure([rollouts(steps=5, drift=1.0)]).trend("length_ratio").known
    # Under sequence the share is one half at every step, up to rounding.
    assert drifting.trend(negative_share("sequence")) == Estimate(0.0, 0.0, 0.0)


def test_counts_of_what_is_left_out_or_says_nothing():
    responses = Responses(
        step=np.array([1] * 9),
        group=np.array([0, 0, 1, 1, 2, 2, 3, 3, 4], dtype=np.uint64),
        length=np.array([5.0, 0, 0, 0, 6, 8, 4, 4, 9]),
        reward=np.array([1.0, 0, 1, 0, 1, 1, 1, 0, 0]),
        advantage=np.full(9, np.nan),
        truncated=np.array([0, 0, 0, 0, 1, 0, 0, 0, 0.0]),
    )
    measured = measure([responses])
    assert measured.empty_responses == 3
    assert measured.emptied_groups == 1
    assert measured.groups_of_one == 2  # the one that lost its mate, and the one that never had any
    assert measured.num_groups == 4
    assert measured.num_responses == 6
    assert measured.reward_values == [0.0, 1.0]
    assert measured.binary
    assert measured.estimate("mixed_groups").value == 1 / 4
    # The advantage is the group's before empty responses left; tied and lone responses have none.
    assert measured.estimate("no_signal_groups").value == 2 / 4
    assert measured.estimate("truncated").value == 1 / 6
    assert (measured.longest, measured.num_longest) == (9, 1)


def test_the_histogram_counts_every_response_with_a_sign():
    measured = measure([rollouts()])
    signs = {sign: counts.sum() for sign, counts in measured.lengths.items()}
    responses = rollouts()
    rewards = responses.reward.reshape(-1, GROUP)
    mixed = rewards.min(1) < rewards.max(1)
    assert signs == {"positive": (rewards[mixed] == 1).sum(), "negative": (rewards[mixed] == 0).sum()}
    assert len(measured.lengths["positive"]) == len(LENGTH_BINS) - 1


def test_a_repeated_step_is_dropped_only_where_that_is_asked():
    responses = rollouts(steps=3)
    again = responses.rows(responses.step == 3)._replace(step=np.full(64, 4))
    stream = [responses, again]
    assert measure(stream, drop_repeats=True).repeated_steps == 1
    same(measure([responses]), measure(stream, drop_repeats=True))
    assert len(measure(stream).steps) == 4
    other = again._replace(reward=1 - again.reward)
    assert measure([responses, other], drop_repeats=True).repeated_steps == 0


def text_of(responses: Responses, unit: str = "tokens") -> str:
    return " ".join(conclude(measure([responses]), unit))


def test_both_biases_are_named_with_their_numbers():
    measured = measure([rollouts(steps=60)])
    text = " ".join(conclude(measured))
    ratio, share = measured.estimate("length_ratio"), measured.estimate(negative_share("token"))
    assert 1.5 < ratio.value < 1.7
    assert f"Wrong responses are {ratio.value:.2f} times as long as right responses" in text
    assert f"gives wrong responses {100 * share.value:.1f} % of the update" in text
    assert "sequence gives 50.0 %, and balanced brings it to 50.0 %" in text
    weight = measured.estimate(token_weight("sequence", "longest")).value
    assert f"a token in the longest quarter of a group's responses {weight:.2f} times" in text
    assert "Both biases are there: balanced aggregation is the rule" in text


def test_longer_right_responses_tilt_the_other_way():
    text = text_of(rollouts(ratio=0.6))
    assert "Wrong responses are 0.6" in text
    assert "gives wrong responses 3" in text


def test_nothing_is_to_be_fixed_where_lengths_are_alike():
    text = text_of(rollouts(ratio=1.0, spread=0.05))
    assert "no difference that these data can show" in text
    assert "which is little" in text
    assert "Nothing is to be fixed here: the rules weigh these responses nearly alike." in text


def test_length_variation_alone_speaks_against_sequence_only():
    text = text_of(rollouts(steps=100, ratio=1.0, seed=1))
    assert "no tilt to speak of" in text
    assert "token and balanced aggregation do." in text


def test_graded_rewards_are_not_called_right_and_wrong():
    responses = rollouts()
    graded = responses._replace(reward=responses.reward + np.random.default_rng(0).uniform(0, 0.1, len(responses.step)))
    text = text_of(graded)
    assert "Responses with negative advantage are" in text
    assert "rong" not in text.replace("wrong responses, long", "")


def test_few_groups_give_no_conclusion_about_signs():
    text = text_of(rollouts(steps=1, prompts=5))
    assert "too few to say anything about their lengths (at least 20 are needed)" in text
    assert "whether token aggregation tilts the update is open" in text or "do not favour any rule" in text


def test_one_sign_or_none_is_said():
    responses = rollouts(steps=3)
    assert text_of(responses._replace(reward=np.ones_like(responses.reward))).startswith("No response has an advantage")
    one_sign = text_of(responses._replace(advantage=np.ones_like(responses.reward)))
    assert one_sign.startswith("Every advantage that is not 0 is positive")
    assert "balanced aggregation equals token aggregation here" in one_sign


def test_truncation_and_characters_are_caveats():
    cut = rollouts(cut=250)
    assert "of the responses are cut at the length limit (" in text_of(cut)
    assert "the gap and the variation would be larger without the limit" in text_of(cut)
    assert "Lengths are in characters." in text_of(cut, "characters")
    assert "cut at the length limit" not in text_of(rollouts(cut=1e9))


def test_drift_is_told_with_its_steps():
    assert "From step 1 to step 60" in text_of(rollouts(steps=60, drift=1.5))
    assert "From step" not in text_of(rollouts(steps=60))


def panel(figure, title):
    return next(ax for ax in figure.axes if ax.get_title(loc="left") == title)


def test_the_figure_shows_what_was_measured():
    measured = measure([rollouts(steps=20, cut=400)])
    figure = diagnosis(measured, "Diagnosis of a test", "tokens")
    shares = panel(figure, "Share of the update on A < 0")
    for rule, style in RULE_STYLES.items():
        line = next(line for line in shares.lines if to_rgb(line.get_color()) == to_rgb(style.color))
        np.testing.assert_allclose(line.get_ydata(), measured.per_step(negative_share(rule)))
    gap = panel(figure, "Relative sign-length gap").lines[0]
    np.testing.assert_allclose(gap.get_ydata(), measured.per_step("sign_gap_rel"))
    assert gap.get_xdata().tolist() == list(range(1, 21))
    weights = panel(figure, "Token weight by response")
    shown = {float(y) for container in weights.containers for y in container.lines[0].get_ydata()}
    assert measured.estimate(token_weight("sequence", "longest")).value in shown
    caption = " ".join(text.get_text() for text in figure.texts)
    assert "Lengths in tokens" in caption


def test_the_figure_says_where_nothing_is_known():
    figure = diagnosis(Measurements(np.arange(3), {}, {}, {}), "Nothing", "tokens")
    assert all(any(text.get_text() == "no values" for text in ax.texts) for ax in figure.axes)


def test_redrawing_gives_the_same_bytes(tmp_path):
    measured = measure([rollouts(steps=5)])
    first = [path.read_bytes() for path in draw(measured, "Diagnosis", "tokens", tmp_path / "a")]
    second = [path.read_bytes() for path in draw(measured, "Diagnosis", "tokens", tmp_path / "b")]
    assert first == second


def test_mass_ratio_is_that_of_the_shares():
    measured = measure([rollouts()])
    share = measured.estimate(negative_share("token")).value
    assert measured.estimate(mass_ratio("token")).value == pytest.approx((1 - share) / share)
    assert json.dumps(measured.reward_values) == "[0.0, 1.0]"
