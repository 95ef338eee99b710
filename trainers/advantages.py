"""Group-normalised advantages, A_i = (r_i - mean r) / std r, as GRPO defines them (arXiv 2402.03300)."""

from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    std_floor: float = 1e-3,
    normalize: Literal["std", "none"] = "std",
) -> Tensor:
    """Advantage of each response against its own group.

    The std is the population's and is floored rather than padded with an epsilon. Groups whose rewards are
    equal up to rounding, and groups of one, get exactly 0, so that rounding never decides a sign.

    Args:
        rewards: (B,) one reward per response.
        group_ids: (B,) integers; responses of one prompt share one id. Any order.
        std_floor: the smallest std to divide by, in units of reward.
        normalize: "std" divides by the group's std, "none" only centres (Dr. GRPO).

    Returns:
        (B,) advantages, in the dtype of `rewards` (float32 for integers).

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be 1-D, of one size"
        )
    if not rewards.isfinite().all():
        raise ValueError("rewards must be finite")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    values = rewards.double()
    ids, groups = torch.unique(group_ids, return_inverse=True)
    sizes = torch.bincount(groups, minlength=len(ids)).double()
    mean = torch.zeros_like(sizes).index_add_(0, groups, values) / sizes
    centred = values - mean[groups]
    std = (torch.zeros_like(sizes).index_add_(0, groups, centred.square()) / sizes).sqrt()
    # Rounding in the storage type of the rewards, relative to their size.
    rounding = 8 * torch.finfo(dtype).eps * mean.abs().clamp(min=1e-30)
    flat = std <= rounding
    scale = std.clamp(min=std_floor) if normalize == "std" else torch.ones_like(std)
    advantages = torch.where(flat[groups], torch.zeros_like(centred), centred / scale[groups])
    return advantages.to(dtype)
