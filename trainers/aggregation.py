"""How token-level policy-gradient terms are aggregated in GRPO.

A rule is one weight per response: the weight w_i that every token of response i gets in the loss
``sum_i w_i sum_t l_it``. Weights are a pure function of lengths, advantage signs and group ids, computed once
over whole groups; the weighted sum may then be cut into micro-batches or spread over ranks freely.

Formulas: *Balanced Aggregation: Understanding and Fixing Aggregation Bias in GRPO* (arXiv 2605.04077).
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["group", "batch"]
Rule = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def sequence(lengths: Tensor, signs: Tensor, groups: Tensor, max_length: float) -> Tensor:
    """Standard GRPO: a mean over tokens, then over responses. w_i = 1 / (G n_i)."""
    return 1 / (_count(groups) * lengths)


def token(lengths: Tensor, signs: Tensor, groups: Tensor, max_length: float) -> Tensor:
    """DAPO: one mean over all tokens of the group. w_i = 1 / sum_j n_j."""
    return 1 / _total(lengths, groups)


def balanced(lengths: Tensor, signs: Tensor, groups: Tensor, max_length: float) -> Tensor:
    """Balanced aggregation: token means within each sign subset S, joined by its share. w_i = (|S|/G) / T_S."""
    subsets = 3 * groups + signs.long() + 1
    return _count(subsets) / (_count(groups) * _total(lengths, subsets))


def constant(lengths: Tensor, signs: Tensor, groups: Tensor, max_length: float) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): token sums over one fixed length. w_i = 1 / (G max_length)."""
    return 1 / (_count(groups) * max_length)


RULES: dict[str, Rule] = {rule.__name__: rule for rule in (sequence, token, balanced, constant)}


def token_weights(
    lengths: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    rule: str = "balanced",
    scope: Scope = "group",
    max_length: float | None = None,
) -> Tensor:
    """Weight of every token of each response, already divided by the number of groups.

    A response of length 0 is masked out whole: it gets weight 0 and leaves its group before any weight is
    computed, and a group that has lost all its responses no longer counts. A response with advantage 0
    contributes nothing to the loss but counts in its group's size; it forms a subset of its own.

    Args:
        lengths: (B,) generated tokens per response, the end-of-sequence token included; 0 masks a response out.
        advantages: (B,) only the signs matter; the result has its dtype (float32 for integers).
        group_ids: (B,) integers; responses of one prompt share one id. Any order.
        rule: a name in `RULES`.
        scope: "group" applies the rule within each group and averages over groups (the paper's); "batch"
            applies the same formula to the whole optimizer batch as one group.
        max_length: the fixed length of `constant`, in tokens; by default the longest response given.

    Returns:
        (B,) non-negative weights.

    Raises:
        ValueError: an unknown rule or scope, shapes that differ, negative lengths, NaN advantages, or
            max_length not above 0.
    """
    _check(lengths, advantages, group_ids, rule, scope, max_length)
    dtype = advantages.dtype if advantages.is_floating_point() else torch.float32
    weights = torch.zeros(lengths.shape, dtype=torch.float64, device=lengths.device)
    kept = lengths > 0
    if kept.any():
        kept_lengths = lengths[kept].double()
        groups = torch.unique(group_ids[kept], return_inverse=True)[1]
        if scope == "batch":
            groups = torch.zeros_like(groups)
        longest = float(kept_lengths.max()) if max_length is None else max_length
        in_group = RULES[rule](kept_lengths, advantages[kept].sign(), groups, longest)
        weights[kept] = in_group / (groups.max() + 1)
    return weights.to(dtype)


def aggregate(
    token_terms_BT: Tensor,
    mask_BT: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    rule: str = "balanced",
    scope: Scope = "group",
    max_length: float | None = None,
) -> Tensor:
    """Loss of whole groups held in one tensor: sum_i w_i sum_t l_it over the unmasked positions.

    Args:
        token_terms_BT: (B, T) policy-gradient terms, the advantage's sign and size inside. Values at masked
            positions are never read, so they may be NaN.
        mask_BT: (B, T) true where a generated token counts.
        advantages, group_ids, rule, scope, max_length: see `token_weights`.

    Returns:
        A scalar; its gradient reaches unmasked terms only.

    Raises:
        ValueError: as `token_weights`, or token_terms_BT and mask_BT differ in shape.
    """
    if token_terms_BT.shape != mask_BT.shape:
        raise ValueError(
            f"token_terms_BT {tuple(token_terms_BT.shape)} and mask_BT {tuple(mask_BT.shape)} differ in shape"
        )
    mask_BT = mask_BT.bool()
    weights = token_weights(mask_BT.sum(1), advantages, group_ids, rule, scope, max_length)
    # Select, do not multiply: 0 * NaN is NaN.
    kept_BT = torch.where(mask_BT, token_terms_BT, torch.zeros_like(token_terms_BT))
    return (weights.to(token_terms_BT.dtype) * kept_BT.sum(1)).sum()


def _total(values: Tensor, index: Tensor) -> Tensor:
    """(B,) for each entry, the sum of `values` over all entries that share its index."""
    sums = torch.zeros(int(index.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, index, values)[index]


def _count(index: Tensor) -> Tensor:
    """(B,) for each entry, how many entries share its index."""
    return torch.bincount(index).double()[index]


def _check(
    lengths: Tensor, advantages: Tensor, group_ids: Tensor, rule: str, scope: str, max_length: float | None
) -> None:
    if rule not in RULES:
        raise ValueError(f"unknown aggregation rule {rule!r}; known are {', '.join(RULES)}")
    if scope not in ("group", "batch"):
        raise ValueError(f"unknown scope {scope!r}; known are group, batch")
    if lengths.ndim != 1 or not lengths.shape == advantages.shape == group_ids.shape:
        raise ValueError(
            "lengths, advantages and group_ids must be 1-D and of one size, not "
            f"{tuple(lengths.shape)}, {tuple(advantages.shape)}, {tuple(group_ids.shape)}"
        )
    if (lengths < 0).any():
        raise ValueError("lengths must not be negative")
    if advantages.isnan().any():
        raise ValueError("advantages must not be NaN")
    if max_length is not None and not max_length > 0:
        raise ValueError(f"max_length must be above 0, not {max_length}")
