"""Attention for decoding on CPUs: query heads share their key-value heads instead of copying them."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "sdpa_grouped"
"""Name for `attn_implementation`."""

Attend = Callable[[torch.nn.Module, Tensor, Tensor, Tensor, float], Tensor]
"""Attention of a layer: its module, query, key, value and the scale of the scores; returns (B, Q, H, D)."""


def grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attend: Attend | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Transformers' sdpa attention, except with a mask on CPUs.

    There Transformers copies the keys and values for every query head at each token, which takes several times as
    long as the attention itself; and PyTorch's kernel is made for many queries, not for one per row.

    Args:
        query: (B, H, Q, D).
        key, value: (B, K, T, D), K a divisor of H.
        attention_mask: broadcasts to (B, H, Q, T), or None.
        attend: computes the attention instead, given to the model's forward pass as a keyword argument.

    Returns:
        (B, Q, H, D) and None.
    """
    if attend is not None:
        scale = options.get("scaling")
        return attend(module, query, key, value, query.shape[-1] ** -0.5 if scale is None else scale), None
    if attention_mask is None or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if query.shape[2] == 1 and query.dtype == torch.float32 and not options.get("dropout"):
        return _one_query(query, key, value, attention_mask, options.get("scaling")), None
    attended = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None


def _one_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """The same for one query per row, as two batched matrix products: (B, 1, H, D)."""
    rows, heads, _, dim = query.shape
    shared = key.shape[1]
    mask = (
        mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    )
    scores = torch.baddbmm(
        mask.expand(rows, heads, 1, -1).reshape(rows * shared, heads // shared, -1),
        query.view(rows * shared, heads // shared, dim),
        key.flatten(0, 1).transpose(1, 2),
        alpha=dim**-0.5 if scale is None else scale,
    )
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view(rows, 1, heads, -1)


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
