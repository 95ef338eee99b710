"""The diagnosis in plain words: what the numbers of `analysis.diagnose` mean for the choice of a rule.

Every sentence that says that something is so rests on an interval that excludes the opposite, and says how large it
is; where the data are too few, or have one sign, that is what is said.
"""

from analysis.diagnose import Estimate, Measurements, negative_share, token_weight

FEW_GROUPS = 20
"""With fewer groups of both signs no conclusion about signs is drawn."""
NOTABLE_SHARE = 0.02
"""Of the update: a tilt between the signs below it is called small."""
NOTABLE_WEIGHT = 0.8
"""A token that gets less than this part of the average token's weight is called down-weighted."""
NOTABLE_CUT = 0.05
"""Of the responses: truncation above it is called a caveat."""
CURVES_LACK = {
    "length_ratio": "how many times as long wrong responses are within a group",
    token_weight("sequence", "longest"): "which tokens each rule down-weights",
    negative_share("token"): "the mass of each sign under a rule (log balance/RULE_pos_mass and _neg_mass)",
    "sign_gap_rel": "the sign-length gap (log length/sign_gap_rel)",
    "group_cv": "the length variation within groups (log length/group_cv)",
    "truncated": "the share of truncated responses (log length/truncated)",
}
"""What curves may lack, in words."""


def conclude(measured: Measurements, unit: str = "tokens") -> list[str]:
    """The conclusion, one paragraph per list entry. `unit` is that of lengths."""
    if nothing := _no_signal(measured):
        return [nothing]
    sign, tilted = _sign_paragraph(measured)
    length, biased = _length_paragraph(measured)
    paragraphs = [sign, length, _advice(tilted, biased)]
    paragraphs += [text for text in (_truncation(measured), _drift(measured)) if text]
    if unit == "characters":
        paragraphs.append(
            "Lengths are in characters. Ratios and shares hold as far as right and wrong, long and short responses "
            "have as many characters per token; --tokenizer counts tokens."
        )
    return paragraphs


def not_computable(measured: Measurements) -> list[str]:
    """What logged curves leave unknown, in words."""
    return [words for name, words in CURVES_LACK.items() if not measured.estimate(name).known]


def percent(value: float) -> str:
    """ "61.3 %"."""
    return f"{100 * value:.1f} %"


def interval(estimate: Estimate, as_percent: bool = False) -> str:
    """ "1.55 to 1.69", or "no interval" where none is known."""
    if estimate.low != estimate.low:
        return "no interval"
    if as_percent:
        return f"{percent(estimate.low)} to {percent(estimate.high)}"
    return f"{estimate.low:.3g} to {estimate.high:.3g}"


def bad_and_good(measured: Measurements) -> tuple[str, str]:
    """What responses with negative and positive advantage are called."""
    if measured.binary:
        return "wrong responses", "right responses"
    return "responses with negative advantage", "those with positive advantage"


def _no_signal(measured: Measurements) -> str | None:
    """Why nothing can be concluded; None where there is something to."""
    if not measured.lengths:  # curves
        return None
    positive, negative = (int(measured.lengths[sign].sum()) for sign in ("positive", "negative"))
    if positive + negative == 0:
        return (
            "No response has an advantage: in every group all rewards are equal. Such groups do not train the policy, "
            "so no rule matters for them. If rewards do differ, groups are not what they should be: check the column "
            "that tells them apart."
        )
    if not positive or not negative:
        sign = "positive" if positive else "negative"
        return (
            f"Every advantage that is not 0 is {sign}: there is no other sign whose lengths could be compared, and "
            "balanced aggregation equals token aggregation here. Advantages within a group usually have both signs; "
            "check the column of the advantage."
        )
    return None


def _sign_paragraph(measured: Measurements) -> tuple[str, bool | None]:
    """On the sign-length gap and what token aggregation makes of it; whether it tilts the update."""
    token, sequence = (measured.estimate(negative_share(rule)) for rule in ("token", "sequence"))
    bad, good = bad_and_good(measured)
    mixed = round(measured.estimate("mixed_groups").value * measured.num_groups) if measured.num_groups else None
    if mixed is not None and mixed < FEW_GROUPS:
        return (
            f"Only {mixed} of {measured.num_groups} groups have responses of both signs, too few to say anything about "
            f"their lengths (at least {FEW_GROUPS} are needed). The numbers above describe these groups alone.",
            None,
        )
    ratio, gap = measured.estimate("length_ratio"), measured.estimate("sign_gap_rel")
    if ratio.known:
        first, differs = _ratio_sentence(ratio, bad, good)
    elif gap.known:
        first, differs = _gap_sentence(gap, bad)
    else:
        first, differs = "The sign-length gap is not known.", None
    if not token.known:
        return first, differs
    reference = sequence.value if sequence.known else 0.5
    tilt = token.value - reference
    spread = f" (95 % interval {interval(token, as_percent=True)})" if token.low == token.low else ""
    if abs(tilt) < NOTABLE_SHARE:
        return (
            f"{first} Token aggregation gives {bad} {percent(token.value)} of the update{spread}, and sequence "
            f"{percent(reference)}: {'a small tilt' if differs else 'no tilt to speak of'}.",
            False,
        )
    if not token.excludes(reference):
        return (
            f"{first} Token aggregation gives {bad} {percent(token.value)} of the update{spread}; sequence gives "
            f"{percent(reference)}, which the interval includes. More steps are needed to tell.",
            None,
        )
    return (
        f"{first} Token aggregation gives {bad} {percent(token.value)} of the update{spread}; sequence gives "
        f"{percent(reference)}{_balanced_clause(measured, reference, tilt)}.",
        True,
    )


def _balanced_clause(measured: Measurements, reference: float, tilt: float) -> str:
    balanced = measured.estimate(negative_share("balanced"))
    if not balanced.known:
        return ""
    if abs(balanced.value - reference) < abs(tilt) / 2:
        return f", and balanced brings it to {percent(balanced.value)}"
    return f", and balanced leaves it at {percent(balanced.value)}, since advantages differ within a sign"


def _ratio_sentence(ratio: Estimate, bad: str, good: str) -> tuple[str, bool]:
    """How lengths differ by sign, and whether they do."""
    times = f"{ratio.value:.2f} times as long as {good} of the same group"
    if not ratio.excludes(1.0):
        return f"{bad.capitalize()} are {times} ({interval(ratio)}): no difference that these data can show.", False
    return f"{bad.capitalize()} are {times} (95 % interval {interval(ratio)}).", True


def _gap_sentence(gap: Estimate, bad: str) -> tuple[str, bool]:
    """The same from the relative sign-length gap, for curves."""
    numbers = f"relative sign-length gap {gap.value:.2f}, 95 % interval {interval(gap)}"
    if not gap.excludes(0.0):
        return f"Lengths do not differ by sign as far as these curves can show ({numbers}).", False
    longer = "longer" if gap.value < 0 else "shorter"
    return f"{bad.capitalize()} are {longer} than the others of their group ({numbers}).", True


def _length_paragraph(measured: Measurements) -> tuple[str, bool | None]:
    """On length variation and what sequence aggregation makes of it; whether it down-weights long responses."""
    cv = measured.estimate("group_cv")
    if not cv.known:
        return "How much lengths vary within a group is not known.", None
    long, short = (measured.estimate(token_weight("sequence", quarter)) for quarter in ("longest", "shortest"))
    first = f"Within a group lengths have a coefficient of variation of {cv.value:.2f}"
    if not long.known:
        return f"{first}: the weight of a token under sequence aggregation varies by about as much.", cv.value > 0.25
    numbers = (
        f"sequence aggregation gives a token in the longest quarter of a group's responses {long.value:.2f} times the "
        f"weight of its average token, and one in the shortest quarter {short.value:.2f} times"
    )
    if long.value > NOTABLE_WEIGHT:
        return f"{first}, which is little: {numbers}.", False
    if not long.high < 1:
        return f"{first}: {numbers}. These are too few groups to tell it from chance.", None
    balanced = measured.estimate(token_weight("balanced", "longest")).value
    return (
        f"{first}: {numbers}. Under balanced aggregation a token of the longest quarter gets {balanced:.2f} times the "
        "average, under token and constant 1.",
        True,
    )


def _advice(tilted: bool | None, length_biased: bool | None) -> str:
    """Which rules avoid the biases that were found; None stands for what the data leave open."""
    if tilted is None and length_biased is None:
        return "These data do not favour any rule."
    if tilted and length_biased:
        return "Both biases are there: balanced aggregation is the rule that avoids the one and lessens the other."
    if tilted:
        return "The tilt between the signs is what to avoid here: sequence and balanced aggregation do."
    if tilted is None:
        bias = "is there" if length_biased else "is no concern here"
        return f"The length bias of sequence aggregation {bias}; whether token aggregation tilts the update is open."
    if length_biased:
        return "The length bias of sequence aggregation is what to avoid here: token and balanced aggregation do."
    if length_biased is None:
        return "Token aggregation does not tilt the update; whether sequence aggregation is biased by length is open."
    return "Nothing is to be fixed here: the rules weigh these responses nearly alike."


def _truncation(measured: Measurements) -> str | None:
    cut = measured.estimate("truncated")
    if cut.known and cut.value >= NOTABLE_CUT:
        bad, good = (measured.estimate(f"{sign}_truncated") for sign in ("negative", "positive"))
        by_sign = (
            f" ({percent(bad.value)} of A < 0, {percent(good.value)} of A > 0)" if bad.known and good.known else ""
        )
        return (
            f"{percent(cut.value)} of the responses are cut at the length limit{by_sign}. That caps the longer side: "
            "the gap and the variation would be larger without the limit."
        )
    return None


def _drift(measured: Measurements) -> str | None:
    changes = []
    for name, words, as_percent in (
        ("group_cv", "length variation", False),
        ("sign_gap_rel", "the relative sign-length gap", False),
        (negative_share("token"), "the negative share under token aggregation", True),
        ("length", "the mean length", False),
    ):
        trend, value = measured.trend(name), measured.estimate(name)
        if trend.excludes(0.0) and abs(trend.value) > 0.1 * abs(value.value):
            way = "grows" if trend.value > 0 else "falls"
            size = f"{100 * abs(trend.value):.1f} points" if as_percent else f"{abs(trend.value):.3g}"
            changes.append(f"{words} {way} by {size}")
    if not changes:
        return None
    return f"From step {measured.steps[0]} to step {measured.steps[-1]} " + ", ".join(changes) + "."
