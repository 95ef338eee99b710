"""Token weights and group-normalised advantages in numpy, for whole dumps at once.

These are the formulas of `trainers.aggregation` and `trainers.advantages`, over many steps instead of one batch and
without torch: the analysis shares nothing with the trainers but names, and a diagnosis should not wait for torch to
load. `tests/test_diagnose_weights.py` holds both to 1e-12.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Scope = Literal["group", "batch"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rule = Callable[[Floats, Ints, Ints, Floats], Floats]


def sequence(lengths: Floats, signs: Ints, units: Ints, longest: Floats) -> Floats:
    """w_i = 1 / (G n_i)."""
    return 1 / (count(units) * lengths)


def token(lengths: Floats, signs: Ints, units: Ints, longest: Floats) -> Floats:
    """w_i = 1 / sum_j n_j."""
    return 1 / total(lengths, units)


def balanced(lengths: Floats, signs: Ints, units: Ints, longest: Floats) -> Floats:
    """w_i = (|S| / G) / T_S, S the responses of i's advantage sign."""
    subsets = 3 * units + signs + 1
    return count(subsets) / (count(units) * total(lengths, subsets))


def constant(lengths: Floats, signs: Ints, units: Ints, longest: Floats) -> Floats:
    """w_i = 1 / (G L), L the length limit."""
    return 1 / (count(units) * longest)


RULES: dict[str, Rule] = {rule.__name__: rule for rule in (sequence, token, balanced, constant)}


def token_weights(
    rule: str,
    lengths: Floats,
    advantages: Floats,
    groups: Ints,
    steps: Ints,
    scope: Scope = "group",
    max_length: float | None = None,
) -> Floats:
    """Weight of every token of each response in its step's update.

    Args:
        rule: a name in `RULES`.
        lengths: (N,) tokens per response, all above 0.
        advantages: (N,) only the signs matter.
        groups: (N,) 0 .. num_groups - 1, each group inside one step.
        steps: (N,) 0 .. num_steps - 1.
        scope: "group" applies the rule within each group and averages over the groups of the step; "batch"
            applies it to the step as one group.
        max_length: the fixed length of `constant`; by default the longest response of the step.

    Returns:
        (N,) non-negative weights.
    """
    units = groups if scope == "group" else steps
    step_of_unit = np.zeros(int(units.max()) + 1, dtype=np.int64)
    step_of_unit[units] = steps
    if max_length is None:
        longest = np.zeros(int(steps.max()) + 1)
        np.maximum.at(longest, steps, lengths)
    else:
        longest = np.full(int(steps.max()) + 1, float(max_length))
    signs = np.sign(advantages).astype(np.int64)
    return RULES[rule](lengths, signs, units, longest[steps]) / np.bincount(step_of_unit)[steps]


def group_advantages(rewards: Floats, groups: Ints, std_floor: float = 1e-3) -> Floats:
    """A_i = (r_i - mean r) / std r in each group, with the std of the population floored at `std_floor`.

    Groups whose rewards are equal up to rounding get exactly 0. Dumps hold rewards that were mostly computed in
    float32, so that is the rounding that counts as equal.

    Args:
        rewards: (N,) finite.
        groups: (N,) 0 .. num_groups - 1.
    """
    sizes = np.bincount(groups)
    mean = np.bincount(groups, rewards) / sizes
    centred = rewards - mean[groups]
    std = np.sqrt(np.bincount(groups, centred**2) / sizes)
    rounding = 8 * np.finfo(np.float32).eps * np.maximum(np.abs(mean), 1e-30)
    return np.where((std <= rounding)[groups], 0.0, centred / np.maximum(std, std_floor)[groups])


def total(values: Floats, index: Ints) -> Floats:
    """(N,) for each entry, the sum of `values` over all entries that share its index."""
    return np.asarray(np.bincount(index, values)[index], dtype=np.float64)


def count(index: Ints) -> Floats:
    """(N,) for each entry, how many entries share its index."""
    return np.asarray(np.bincount(index)[index], dtype=np.float64)
