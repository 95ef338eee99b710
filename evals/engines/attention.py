"""Attention that whoever calls a model may replace, for one forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

REPLACEABLE_SDPA = "sdpa_replaceable"
"""Name for `attn_implementation`."""

NO_MASK = torch.full((1, 1, 1, 1), torch.nan)
"""For a forward pass whose attention is replaced: a mask of four dimensions is left as it is, and without one
Transformers would make one of its own. Not a number, so that a layer that used it would be found out."""

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
        attend: a keyword argument of the model's forward pass, which many models hand on to here (`is_replaceable`).

    Returns:
        (B, Q, H, D) and None.

    Raises:
        ValueError: the layer made a mask of its own, of which `attend` would not know.
    """
    if attend is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.numel() > 1:
        raise ValueError(f"{type(module).__name__} makes a mask of its own; its attention cannot be replaced")
    scale = options.get("scaling")
    return attend(module, query, key, value, query.shape[-1] ** -0.5 if scale is None else scale), None


@torch.no_grad()
def is_replaceable(model: PreTrainedModel) -> bool:
    """Whether each layer leaves its attention to `attend`, in one call, with heads as they are cached. Tries it."""
    if model.config._attn_implementation != REPLACEABLE_SDPA:
        return False
    calls = []

    def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        calls.append((getattr(module, "layer_idx", None), key.shape, value.shape))
        return query.transpose(1, 2)

    cache = DynamicCache()
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    was_training = model.training
    model.eval()  # with activation checkpointing there is no cache
    try:
        model.get_decoder()(input_ids=ids, attention_mask=NO_MASK, past_key_values=cache, attend=attend)
        layers: list[Any] = cache.layers
        return calls == [(number, layer.keys.shape, layer.keys.shape) for number, layer in enumerate(layers)]
    except Exception:  # whatever such a model makes of arguments that it does not know
        return False
    finally:
        model.train(was_training)


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kind of attention that each layer has, `full_attention` and `sliding_attention` among others."""
    sliding = getattr(config, "sliding_window", None)
    same = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    return list(getattr(config, "layer_types", None) or same)


AttentionInterface.register(REPLACEABLE_SDPA, replaceable_sdpa)
AttentionMaskInterface.register(REPLACEABLE_SDPA, sdpa_mask)
