"""What a rollout dump says about aggregation: length variation, the sign-length gap, and what each rule makes of them.

Everything reported is a ratio of two sums over groups: a mean over groups is sum(value) / sum(1), the share of the
update on negative responses is sum(negative mass) / sum(mass), the weight of a token in long responses is
sum(n_i w_i) / sum(n_i). Only these sums are kept, per training step, so memory does not grow with the dump; and one
formula gives the interval of all of them.

Definitions are those of `trainers.lengths` (arXiv 2605.04077): what a run logs and what its dump gives agree.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from analysis.diagnose_formats import DumpError
from analysis.diagnose_weights import RULES, Floats, Ints, Scope, group_advantages, token_weights
from analysis.dumps import Dump, Responses, concatenate

SIGNS = ("positive", "negative")
QUARTERS = ("shortest", "longest")
PROPORTIONS = ("truncated", "positive_truncated", "negative_truncated", "mixed_groups", "no_signal", "negative_share")
MOST_PENDING = 2**20
"""Responses that wait for their step to end. Below it steps may come in any order."""
MOST_IN_A_STEP = 2**22
PORTION = 2**17
"""Responses measured at once, about; it bounds the memory that takes."""
BLOCKS = 10
"""Few long blocks cover better than many short ones where neighbouring steps are alike (`benchmarks/diagnose.py`)."""
MIN_STEPS = 3
"""Below this many steps the interval is over groups, not over steps."""
MIN_STEPS_FOR_TREND = 6
LEVEL = 0.95
ROUNDING = 1e-9
"""Relative to the value: a smaller trend is none."""
LENGTH_BINS = np.concatenate([[0.0], 2 ** np.arange(0, 24.25, 0.25)])
"""Edges for the histogram of lengths: four bins per doubling."""


class Estimate(NamedTuple):
    """A value with its 95 % interval; NaN where the data do not define them."""

    value: float
    low: float = float("nan")
    high: float = float("nan")

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.value))

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and leaves out a value."""
        return self.low > value or self.high < value


UNKNOWN = Estimate(float("nan"))


@dataclass
class Measurements:
    """Sums over the groups of each step. Their ratio, `estimate`, is what a name stands for."""

    steps: Ints
    """(S,) increasing."""
    numerators: dict[str, Floats]
    """Name -> (S,)."""
    denominators: dict[str, Floats]
    moments: dict[str, Floats]
    """Name -> sums over groups of N, D, N N, N D, D D; empty where values came without groups."""
    num_responses: int = 0
    num_groups: int = 0
    empty_responses: int = 0
    """Responses of length 0, left out."""
    emptied_groups: int = 0
    """Groups that lost all their responses that way."""
    groups_of_one: int = 0
    repeated_steps: int = 0
    reward_values: list[float] = field(default_factory=list)
    """The distinct rewards while there are at most two; three of them where there are more."""
    lengths: dict[str, Ints] = field(default_factory=dict)
    """Sign -> responses in each of `LENGTH_BINS`."""
    longest: float = 0.0
    num_longest: int = 0
    has_advantages: bool = False
    """Whether advantages came from the dump; else they are group-normalised rewards."""
    scope: Scope = "group"

    @property
    def binary(self) -> bool:
        return len(self.reward_values) == 2

    @property
    def interval_over(self) -> str:
        return "steps" if len(self.steps) >= MIN_STEPS else "groups"

    def per_step(self, name: str) -> Floats:
        """(S,) the value of each step; NaN where a step does not define it."""
        if name not in self.numerators:
            return np.full(len(self.steps), np.nan)
        return _ratio(self.numerators[name], self.denominators[name])

    def estimate(self, name: str) -> Estimate:
        """The value over all steps, with its interval.

        Consecutive steps share most of their policy, so they are not independent: they are joined into up to
        `BLOCKS` blocks, and the interval is Student's t over the blocks' sums (the linearised ratio; batch means).
        With fewer than `MIN_STEPS` steps groups take the place of blocks.
        """
        if name not in self.numerators:
            return UNKNOWN
        numerators, denominators = self.numerators[name], self.denominators[name]
        total = denominators.sum()
        if not total:
            return UNKNOWN
        value = numerators.sum() / total
        if len(self.steps) >= MIN_STEPS:
            residuals = _blocks(numerators - value * denominators)
            count, squares = np.count_nonzero(_blocks(np.abs(denominators))), np.sum(residuals**2)
        elif name in self.moments:
            count, nn, nd, dd = self.moments[name]
            squares = max(nn - 2 * value * nd + value**2 * dd, 0.0)
        else:
            return Estimate(value)
        if count < 2:
            return Estimate(value)
        half = stdtrit(count - 1, (1 + LEVEL) / 2) * np.sqrt(count / (count - 1) * squares) / total
        low, high = value - half, value + half
        if name.startswith(PROPORTIONS):
            low, high = max(low, 0.0), min(high, 1.0)
        return Estimate(value, low, high)

    def trend(self, name: str) -> Estimate:
        """Change from the first to the last step of a straight line through the blocks' values, with its interval."""
        values = self.per_step(name)
        defined = np.isfinite(values)
        if defined.sum() < MIN_STEPS_FOR_TREND:
            return UNKNOWN
        numerators, denominators = self.numerators[name][defined], self.denominators[name][defined]
        y = _blocks(numerators) / _blocks(denominators)
        at = self.steps[defined].astype(np.float64)
        x = _blocks(at) / _blocks(np.ones_like(at))
        centred = x - x.mean()
        slope = centred @ y / (centred @ centred)
        residuals = y - y.mean() - slope * centred
        error = np.sqrt(residuals @ residuals / (len(x) - 2) / (centred @ centred))
        half = stdtrit(len(x) - 2, (1 + LEVEL) / 2) * error
        run = at[-1] - at[0]
        if abs(slope * run) <= ROUNDING * np.abs(y).max():
            return Estimate(0.0, 0.0, 0.0)
        return Estimate(slope * run, (slope - half) * run, (slope + half) * run)


def negative_share(rule: str) -> str:
    """Name of the share of the update's mass |sum w n A| that `rule` puts on negative responses."""
    return f"negative_share/{rule}"


def mass_ratio(rule: str) -> str:
    """Name of the positive mass over the negative mass under `rule`."""
    return f"mass_ratio/{rule}"


def token_weight(rule: str, tokens: str) -> str:
    """Name of the mean weight of tokens in some responses, over that of the average token of their group.

    `tokens` is in `QUARTERS` (the quarter of each group's responses that is shortest or longest) or `SIGNS`.
    """
    return f"token_weight/{rule}/{tokens}"


def measure(
    batches: Iterable[Responses],
    *,
    scope: Scope = "group",
    max_length: float | None = None,
    group_size: int | None = None,
    drop_repeats: bool = False,
) -> Measurements:
    """Reduce a stream of responses to `Measurements`.

    Args:
        scope, max_length: see `analysis.diagnose_weights.token_weights`.
        group_size: cut the responses to one prompt in a step into groups of so many, in the order of the dump.
        drop_repeats: leave out a step whose responses are all those of the step before.

    Raises:
        DumpError: a step's responses are too far apart or too many, or none has a length above 0.
    """
    parts: list[_Part] = []
    rewards: set[float] = set()
    last_signature = None
    for responses in whole_steps(batches):
        ordered, groups = _in_groups(responses, group_size)
        if drop_repeats:
            ordered, groups, last_signature, dropped = _without_repeats(ordered, groups, last_signature)
        else:
            dropped = 0
        if len(rewards) <= 2:
            known = ordered.reward[np.isfinite(ordered.reward)]
            rewards = set(sorted(rewards | set(np.unique(known).tolist()))[:3])
        parts.append(_measure_part(ordered, groups, scope, max_length, dropped))
    if not parts:
        raise DumpError("no responses to diagnose")
    return _join(parts, sorted(rewards), scope)


def measure_dump(
    dump: Dump,
    *,
    scope: Scope = "group",
    group_size: int | None = None,
    watch: Callable[[Iterator[Responses]], Iterator[Responses]] = iter,
) -> Measurements:
    """`measure` of files; `watch` sees the batches pass.

    Raises:
        DumpError: as `Dump.batches` and `measure`; or the groups or steps of the dump do not serve.
    """
    if scope == "batch" and dump.step_source is None:
        raise DumpError("--scope batch needs to know which responses share a step: --map step=COLUMN")
    measured = measure(
        watch(dump.batches()),
        scope=scope,
        max_length=dump.options.max_length,
        group_size=group_size,
        drop_repeats=dump.layout.format.repeats_steps,
    )
    if measured.groups_of_one == measured.num_groups:
        columns = dump.layout.roles["group" if "group" in dump.layout.roles else "prompt"]
        raise DumpError(
            f"{dump.files[0]}: every response is alone in its group, so nothing can be compared within groups. A group "
            f"is the responses with the same {' and '.join(map(repr, columns))} in one step; name another column with "
            "--map group=COLUMN or --map prompt=COLUMN"
        )
    return measured


def whole_steps(batches: Iterable[Responses]) -> Iterator[Responses]:
    """The responses of a stream in pieces of whole steps, a piece's in increasing order.

    Raises:
        DumpError: a step goes on after more than `MOST_PENDING` responses of others, or is too large to hold.
    """
    pending: list[Responses] = []
    size, limit = 0, MOST_PENDING
    finished: set[int] = set()
    for batch in batches:
        if not len(batch.step):
            continue
        again = finished.intersection(np.unique(batch.step).tolist())
        if again:
            raise DumpError(
                f"step {min(again)} goes on after more than {MOST_PENDING:,} responses of other steps: sort the dump "
                "by step"
            )
        pending.append(batch)
        size += len(batch.step)
        if size <= limit:
            continue
        held = concatenate(pending)
        current = held.step == batch.step[-1]
        if not current.all():
            yield from _portions(held.rows(~current))
            finished.update(np.unique(held.step[~current]).tolist())
        pending = [held.rows(current)]
        size = int(current.sum())
        limit = max(MOST_PENDING, 2 * size)
        if size > MOST_IN_A_STEP:
            raise DumpError(
                f"more than {MOST_IN_A_STEP:,} responses in one step ({batch.step[-1]}): name the column of the step "
                "with --map step=COLUMN, or give one file per step (12.jsonl)"
            )
    if pending:
        yield from _portions(concatenate(pending))


def _portions(responses: Responses) -> Iterator[Responses]:
    """Cut whole steps into pieces of about `PORTION` responses, for the sake of the memory that measuring takes."""
    ordered = responses.rows(np.argsort(responses.step, kind="stable"))
    ends = np.append(np.flatnonzero(np.diff(ordered.step)) + 1, len(ordered.step))
    start = 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - start > PORTION:
            yield ordered.rows(slice(start, end))
            start = end


class _Part(NamedTuple):
    """`Measurements` of some steps, before they are joined."""

    steps: Ints
    numerators: dict[str, Floats]
    denominators: dict[str, Floats]
    moments: dict[str, Floats]
    counts: dict[str, int]
    lengths: dict[str, Ints]
    longest: float
    num_longest: int
    has_advantages: bool


def _in_groups(responses: Responses, group_size: int | None) -> tuple[Responses, Ints]:
    """The responses ordered by step and group, and the index of each one's group."""
    ordered = responses.rows(np.lexsort((responses.group, responses.step)))
    starts = np.ones(len(ordered.step), dtype=bool)
    starts[1:] = (np.diff(ordered.step) != 0) | (ordered.group[1:] != ordered.group[:-1])
    if group_size is not None:
        first = np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))
        starts |= (np.arange(len(starts)) - first) % group_size == 0
    return ordered, np.cumsum(starts) - 1


def _without_repeats(
    responses: Responses, groups: Ints, last_signature: int | None
) -> tuple[Responses, Ints, int | None, int]:
    """Drop steps that hold exactly the responses of the step before."""
    steps, index = np.unique(responses.step, return_inverse=True)
    with np.errstate(over="ignore"):
        mixed = responses.group.copy()
        for values in (responses.length, responses.reward, responses.advantage):
            mixed = (mixed ^ (mixed >> np.uint64(31)) ^ values.view(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        starts = np.searchsorted(responses.step, steps)
        signatures = np.add.reduceat(mixed ^ (mixed >> np.uint64(32)), starts).tolist()
    repeated = np.array(
        [mine == before for mine, before in zip(signatures, [last_signature, *signatures], strict=False)]
    )
    kept = ~repeated[index]
    groups = np.unique(groups[kept], return_inverse=True)[1] if repeated.any() else groups
    return responses.rows(kept), groups, signatures[-1], int(repeated.sum())


def _measure_part(responses: Responses, groups: Ints, scope: Scope, max_length: float | None, repeated: int) -> _Part:
    has_advantages = bool(np.isfinite(responses.advantage).any())
    advantages = responses.advantage if has_advantages else group_advantages(responses.reward, groups)
    counts = {"repeated_steps": repeated, "empty_responses": int(np.sum(responses.length == 0))}
    kept = responses.length > 0
    num_before = int(groups[-1]) + 1 if len(groups) else 0
    responses, advantages = responses.rows(kept), advantages[kept]
    groups = np.unique(groups[kept], return_inverse=True)[1]
    steps, step_of = np.unique(responses.step, return_inverse=True)
    sizes = np.bincount(groups)
    counts |= {
        "num_responses": len(groups), "num_groups": len(sizes), "emptied_groups": num_before - len(sizes),
        "groups_of_one": int(np.sum(sizes == 1)),
    }  # fmt: skip
    longest = float(responses.length.max(initial=0))
    lengths = {
        name: np.histogram(responses.length[advantages * sign > 0], LENGTH_BINS)[0]
        for name, sign in zip(SIGNS, (1, -1), strict=True)
    }
    sums = _group_sums(responses, advantages, groups, step_of, scope, max_length) if len(groups) else {}
    step_of_group = np.zeros(len(sizes), dtype=np.int64)
    step_of_group[groups] = step_of
    numerators, denominators, moments = {}, {}, {}
    for name, (above, below) in sums.items():
        numerators[name] = _sums(above, step_of_group)
        denominators[name] = _sums(below, step_of_group)
        moments[name] = np.array([np.count_nonzero(below), above @ above, above @ below, below @ below])
    return _Part(
        steps, numerators, denominators, moments, counts, lengths, longest,
        int(np.sum(responses.length == longest)), has_advantages,
    )  # fmt: skip


def _group_sums(
    responses: Responses, advantages: Floats, groups: Ints, steps: Ints, scope: Scope, max_length: float | None
) -> dict[str, tuple[Floats, Floats]]:
    """Name -> numerator and denominator of every group, (num_groups,) each."""

    def add(values: Floats) -> Floats:
        return _sums(values, groups)

    n = responses.length
    is_sign = dict(zip(SIGNS, (advantages > 0, advantages < 0), strict=True))
    sizes, tokens = add(np.ones_like(n)), add(n)
    count = {sign: add(chosen.astype(np.float64)) for sign, chosen in is_sign.items()}
    sum_of = {sign: add(n * chosen) for sign, chosen in is_sign.items()}
    mean = tokens / sizes
    std = np.sqrt(np.maximum(add((n - mean[groups]) ** 2) / sizes, 0))
    both = ((count["positive"] > 0) & (count["negative"] > 0)).astype(np.float64)
    positive = both * _ratio(sum_of["positive"], count["positive"], empty=0.0)
    negative = both * _ratio(sum_of["negative"], count["negative"], empty=0.0)
    ones = np.ones_like(sizes)
    rewarded = np.isfinite(responses.reward)
    told = np.isfinite(responses.truncated)
    cut = np.nan_to_num(responses.truncated)
    sums = {
        "reward": (add(np.where(rewarded, responses.reward, 0)), add(rewarded.astype(np.float64))),
        "length": (tokens, sizes),
        "group_cv": (std / mean, ones),
        "sign_gap": (positive - negative, both),
        "sign_gap_rel": ((positive - negative) / mean, both),
        "length_ratio": (negative, positive),
        "truncated": (add(cut), add(told.astype(np.float64))),
        "mixed_groups": (both, ones),
        "no_signal_groups": (((count["positive"] == 0) & (count["negative"] == 0)).astype(np.float64), ones),
    }
    for sign, chosen in is_sign.items():
        sums[f"{sign}_length"] = (sum_of[sign], count[sign])
        sums[f"{sign}_truncated"] = (add(cut * chosen), add((told & chosen).astype(np.float64)))
    buckets = is_sign | _quarters(n, groups, sizes.astype(np.int64))
    for rule in RULES:
        weights = token_weights(rule, n, advantages, groups, steps, scope, max_length)
        masses = [add(np.where(chosen, weights * n * np.abs(advantages), 0)) for chosen in is_sign.values()]
        sums[negative_share(rule)] = (masses[1], masses[0] + masses[1])
        sums[mass_ratio(rule)] = (masses[0], masses[1])
        unit = groups if scope == "group" else steps
        average = (_sums(weights * n, unit) / _sums(n, unit))[unit]
        for bucket, chosen in buckets.items():
            sums[token_weight(rule, bucket)] = (add(np.where(chosen, n * weights / average, 0)), add(n * chosen))
    return sums


def _quarters(lengths: Floats, groups: Ints, sizes: Ints) -> dict[str, NDArray[np.bool_]]:
    """True where a response is in the shortest or longest quarter of its group; groups of one have neither."""
    order = np.lexsort((lengths, groups))
    rank = np.empty(len(lengths), dtype=np.int64)
    rank[order] = np.arange(len(lengths)) - (np.cumsum(sizes) - sizes)[groups[order]]
    quarter = np.where(sizes > 1, np.maximum(sizes // 4, 1), 0)[groups]
    return dict(zip(QUARTERS, (rank < quarter, rank >= sizes[groups] - quarter), strict=True))


def _join(parts: list[_Part], rewards: list[float], scope: Scope) -> Measurements:
    steps = np.concatenate([part.steps for part in parts])
    order = np.argsort(steps, kind="stable")
    counts = {name: sum(part.counts[name] for part in parts) for name in parts[0].counts}
    if not counts["num_responses"]:
        raise DumpError("every response has length 0")
    names = [name for part in parts for name in part.numerators]
    longest = max(part.longest for part in parts)
    measured = [part for part in parts if part.numerators]
    return Measurements(
        steps[order],
        {name: np.concatenate([part.numerators[name] for part in measured])[order] for name in dict.fromkeys(names)},
        {name: np.concatenate([part.denominators[name] for part in measured])[order] for name in dict.fromkeys(names)},
        {name: np.sum([part.moments[name] for part in measured], axis=0) for name in dict.fromkeys(names)},
        reward_values=rewards,
        lengths={sign: np.sum([part.lengths[sign] for part in parts], axis=0) for sign in SIGNS},
        longest=longest,
        num_longest=sum(part.num_longest for part in parts if part.longest == longest),
        has_advantages=any(part.has_advantages for part in parts),
        scope=scope,
        **counts,
    )


def _sums(values: Floats, index: Ints) -> Floats:
    """(max(index) + 1,) the sum of the values that share an index."""
    return np.asarray(np.bincount(index, values), dtype=np.float64)


def _blocks(values: Floats) -> Floats:
    """Sums over up to `BLOCKS` blocks of consecutive steps, of equal size but for one step."""
    edges = np.linspace(0, len(values), min(BLOCKS, len(values)) + 1).astype(np.int64)[:-1]
    return np.add.reduceat(values, edges)


def _ratio(above: Floats, below: Floats, empty: float = float("nan")) -> Floats:
    return np.divide(above, below, out=np.full(len(above), float(empty)), where=below != 0)
