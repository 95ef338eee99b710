"""What the policy says of responses already sampled: token log-probabilities, entropies and the clipped surrogate."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK_ELEMENTS = 2**23
"""Logits held at once, as tokens x vocabulary; longer batches are cut into chunks that are recomputed backward."""


class TokenStatistics(NamedTuple):
    """Per response token, flat over the responses of a batch in row order: (N,) each."""

    logprobs: Tensor
    """Natural log-probability at the sampling temperature, with gradient."""
    entropies: Tensor
    """Entropy of the distribution the token was drawn from, in nats, without gradient."""


def token_statistics(
    model: PreTrainedModel, ids_BT: Tensor, response_mask_BT: Tensor, temperature: float = 1.0
) -> TokenStatistics:
    """Log-probabilities and entropies of the response tokens only; no logits for prompts or padding.

    Args:
        ids_BT: (B, T) prompt then response, padded on the right. A causal model never looks at padding there,
            so no attention mask is needed.
        response_mask_BT: (B, T) true at response tokens; never at position 0.
        temperature: divides the logits, as in sampling.

    Returns:
        Statistics of the N true positions of the mask, in row-major order.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    hidden_BTH = decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
    # The state before a token predicts it.
    hidden_NH = hidden_BTH[:, :-1][response_mask_BT[:, 1:]]
    targets_N = ids_BT[response_mask_BT]
    chunk = max(1, CHUNK_ELEMENTS // head.weight.shape[0])
    if len(targets_N) <= chunk:
        return TokenStatistics(*_head_statistics(hidden_NH, head.weight, head.bias, targets_N, temperature))
    parts = [
        checkpoint(_head_statistics, hidden, head.weight, head.bias, targets, temperature, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return TokenStatistics(torch.cat(logprobs), torch.cat(entropies))


def _head_statistics(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits_NV = torch.nn.functional.linear(hidden_NH, weight_VH, bias_V).float() / temperature
    logprobs_NV = logits_NV.log_softmax(-1)
    with torch.no_grad():
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropies_N


class Surrogate(NamedTuple):
    """Terms l_t of the loss and what clipping did, flat over tokens: (N,) each."""

    terms: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_surrogate(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> Surrogate:
    """PPO's clipped surrogate (arXiv 1707.06347) with separate clip widths (DAPO, arXiv 2503.14476).

    ``l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``, ``rho = exp(logprob - old_logprob)``.

    Args:
        logprobs_N, old_logprobs_N: (N,) under the policy in training and the one that sampled.
        advantages_N: (N,) each token's response advantage.

    Returns:
        Terms to minimise, with gradient through `logprobs_N`, and two boolean masks: the token's gradient is
        cut at the lower (negative advantage) or the upper (positive advantage) edge.
    """
    ratio = (logprobs_N - old_logprobs_N).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -torch.minimum(ratio * advantages_N, clipped * advantages_N)
    with torch.no_grad():
        low = (ratio < 1 - clip_low) & (advantages_N < 0)
        high = (ratio > 1 + clip_high) & (advantages_N > 0)
    return Surrogate(terms, low, high)
