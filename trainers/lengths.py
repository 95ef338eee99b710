"""Length statistics of a batch of groups, and the mass each aggregation rule puts on either sign.

Definitions: arXiv 2605.04077. Everything is computed from raw lengths, before any response is masked out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainers import metric_names as names
from trainers.aggregation import RULES, Scope, token_weights


class SignMass(NamedTuple):
    """|sum_S w_i n_i A_i| over the responses of positive and of negative advantage."""

    positive: float
    negative: float


def length_statistics(lengths: Tensor, advantages: Tensor, group_ids: Tensor, truncated: Tensor) -> dict[str, float]:
    """Length statistics under the names of `trainers.metric_names`.

    Group CV is the population std over the mean within a group, averaged over groups. The sign-length gap is
    the mean length of positive minus that of negative responses within each group that has both, averaged over
    those groups; the relative gap divides by the group's mean length first.

    Args:
        lengths: (B,) raw generated tokens per response; entries of 0 are left out.
        advantages: (B,) only the signs matter.
        group_ids: (B,) integers; responses of one prompt share one id. Any order.
        truncated: (B,) true where a response was cut at the length limit.

    Returns:
        Lengths and gap in tokens, the others as fractions. A value that the batch does not define (no group
        with both signs, no positive response) is NaN.

    Raises:
        ValueError: no response has a length above 0.
    """
    kept = lengths > 0
    if not kept.any():
        raise ValueError("no response has a length above 0: there are no lengths to describe")
    n, signs, cut = lengths[kept].double(), advantages[kept].sign(), truncated[kept].double()
    groups = torch.unique(group_ids[kept], return_inverse=True)[1]
    mean = _group_mean(n, groups, torch.ones_like(n))
    std = (_group_mean(n.square(), groups, torch.ones_like(n)) - mean.square()).clamp(min=0).sqrt()
    gap = _group_mean(n, groups, (signs > 0).double()) - _group_mean(n, groups, (signs < 0).double())
    return {
        names.LENGTH_MEAN: float(n.mean()),
        names.LENGTH_STD: float(n.std(correction=0)),
        names.LENGTH_MIN: float(n.min()),
        names.LENGTH_MAX: float(n.max()),
        names.GROUP_CV: float((std / mean).mean()),
        names.POS_LENGTH: float(n[signs > 0].mean()),
        names.NEG_LENGTH: float(n[signs < 0].mean()),
        names.SIGN_GAP: float(gap.nanmean()),
        names.SIGN_GAP_REL: float((gap / mean).nanmean()),
        names.TRUNCATED: float(cut.mean()),
    }


def sign_mass(
    lengths: Tensor,
    advantages: Tensor,
    group_ids: Tensor,
    scope: Scope = "group",
    max_length: float | None = None,
) -> dict[str, SignMass]:
    """What each rule would put on either sign for these responses, whichever rule trains.

    Args:
        lengths, advantages, group_ids, scope, max_length: see `trainers.aggregation.token_weights`.

    Returns:
        Rule name -> `SignMass`. With binary rewards the two are equal under `sequence` and `balanced`; under
        `token` their ratio is that of the mean lengths.
    """
    masses = {}
    for rule in RULES:
        weights = token_weights(lengths, advantages.double(), group_ids, rule, scope, max_length)
        signed = weights * lengths * advantages
        masses[rule] = SignMass(
            positive=float(signed.clamp(min=0).sum()), negative=float(signed.clamp(max=0).sum().abs())
        )
    return masses


def _group_mean(values: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """(num_groups,) weighted mean of `values` in each group; NaN where the weights sum to 0."""
    totals = torch.zeros(2, int(groups.max()) + 1, dtype=values.dtype, device=values.device)
    totals[0].index_add_(0, groups, weights * values)
    totals[1].index_add_(0, groups, weights)
    return totals[0] / totals[1]
