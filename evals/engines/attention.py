"""Attention that whoever calls a model may replace, for one forward pass."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

REPLACEABLE_SDPA = "sdpa_replaceable"
"""Name for `attn_implementation`."""

NO_MASK = torch.zeros(1, 1, 1, 1)
"""For a forward pass whose attention is replaced: a mask of four dimensions is left as it is, and without one
Transformers would make one of its own."""

Attend = Callable[[torch.nn.Module, Tensor, Tensor, Tensor, float], Tensor]
"""Attention of a layer: its module, query (B, H, Q, D), key and value (B, K, Q, D) with K a divisor of H, and the
scale of the scores; returns (B, Q, H, D)."""


def replaceable_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attend: Attend | None = None,
    **options,
) -> tuple[Tensor, None]:
    """What `attend` makes of query, key and value, else Transformers' sdpa attention.

    Args:
        attend: a keyword argument of the model's forward pass, which models whose `_supports_attention_backend` is
            true hand on to here.

    Returns:
        (B, Q, H, D) and None.
    """
    if attend is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale = options.get("scaling")
    return attend(module, query, key, value, query.shape[-1] ** -0.5 if scale is None else scale), None


AttentionInterface.register(REPLACEABLE_SDPA, replaceable_sdpa)
AttentionMaskInterface.register(REPLACEABLE_SDPA, sdpa_mask)
