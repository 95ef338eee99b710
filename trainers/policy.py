"""What the policy says of responses already sampled, and the loss terms made of it.

Token log-probabilities and entropies without the full logits, the clipped surrogate, and estimators of the
divergence from a reference policy.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from trainers.batches import TokenBatch, batch_form
from trainers.recipe import KlEstimator

CHUNK_ELEMENTS = 2**24
"""Logits held at once, as tokens x vocabulary; if there are more, the backward pass computes them again."""

CHUNK_TOKENS = 512
"""Tokens of a chunk at most: the logits of a small vocabulary then stay in a CPU's cache."""


class TokenStatistics(NamedTuple):
    """Per response token, flat over the responses of a batch in row order: (N,) each."""

    logprobs: Tensor
    """Natural log-probability at the sampling temperature."""
    entropies: Tensor
    """Entropy of the distribution the token was drawn from, in nats."""


class Policy(nn.Module):
    """A causal language model as the trainer sees it: token ids in, statistics of response tokens out.

    A module, so that what wraps modules (sharding, mixed precision) covers the output layer too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.form = batch_form(model)
        """How batches for this model are to lie."""

    def forward(self, batch: TokenBatch, temperature: float = 1.0) -> TokenStatistics:
        """See `token_statistics`."""
        return token_statistics(self.model, batch, temperature)


def token_statistics(model: PreTrainedModel, batch: TokenBatch, temperature: float = 1.0) -> TokenStatistics:
    """Log-probabilities and entropies of the response tokens only; no logits for prompts or padding.

    Args:
        temperature: divides the logits, as in sampling.

    Returns:
        Statistics of the batch's N response tokens, both with gradient.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    hidden_BTH = decoder(input_ids=batch.ids_BT, position_ids=batch.position_ids_BT, use_cache=False).last_hidden_state
    hidden_NH = hidden_BTH[batch.predicts_BT]
    logprobs, entropies = _HeadStatistics.apply(
        hidden_NH, head.weight, head.bias, batch.targets_N, float(temperature), torch.is_grad_enabled()
    )
    return TokenStatistics(logprobs, entropies)


class _HeadStatistics(torch.autograd.Function):
    """log softmax(h W' + b) at the targets and the entropy of the same distribution, a chunk of tokens at a time.

    With logits z = (h W' + b) / temperature, p = softmax z and H = -sum_j p_j log p_j:
    ``d log p_target / d z_j = [j = target] - p_j`` and ``d H / d z_j = -p_j (log p_j + H)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        log_sums, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        keeps = wants_gradient and len(targets_N) * weight_VH.shape[0] <= CHUNK_ELEMENTS
        kept = []
        for part in _chunks(len(targets_N), weight_VH.shape[0]):
            logits_CV = _logits(hidden_NH[part], weight_VH, bias_V, temperature)
            targets_C1 = targets_N[part, None]
            logprobs_CV = logits_CV.log_softmax(-1)
            logprobs[part] = logprobs_CV.gather(1, targets_C1)[:, 0]
            log_sums[part] = logits_CV.gather(1, targets_C1)[:, 0] - logprobs[part]
            del logits_CV
            entropies[part] = -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
            if keeps:
                kept.append(logprobs_CV)
            del logprobs_CV
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_sums, entropies, *kept)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, log_sums, entropies, *kept = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_NH) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VH) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V) if wants_bias else None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        for number, part in enumerate(_chunks(len(targets_N), weight_VH.shape[0])):
            if kept:
                logprobs_CV = kept[number]
            else:
                logprobs_CV = _logits(hidden_NH[part], weight_VH, bias_V, ctx.temperature).sub_(log_sums[part, None])
            slope_C1 = grad_logprobs[part, None] / ctx.temperature
            scale_CV = slope_C1.neg()
            if grad_entropies is not None:
                entropy_slope_C1 = grad_entropies[part, None] / ctx.temperature
                scale_CV = logprobs_CV.add(entropies[part, None]).mul_(entropy_slope_C1).add_(slope_C1).neg_()
            grad_CV = (logprobs_CV.exp() if kept else logprobs_CV.exp_()).mul_(scale_CV)
            grad_CV.scatter_add_(1, targets_N[part, None], slope_C1)
            grad_CV = grad_CV.to(hidden_NH.dtype)
            if grad_hidden is not None:
                torch.matmul(grad_CV, weight_VH, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(grad_CV.T, hidden_NH[part])
            if grad_bias is not None:
                grad_bias.add_(grad_CV.sum(0))
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_CV = nn.functional.linear(hidden_CH, weight_VH, bias_V).float()
    return logits_CV if temperature == 1 else logits_CV.div_(temperature)


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, min(CHUNK_TOKENS, CHUNK_ELEMENTS // vocabulary))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


class Surrogate(NamedTuple):
    """Terms l_t of the loss and what clipping did, flat over tokens: (N,) each."""

    terms: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_surrogate(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """PPO's clipped surrogate (arXiv 1707.06347) with separate clip widths (DAPO, arXiv 2503.14476).

    ``l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``, ``rho = exp(logprob - old_logprob)``; with dual
    clipping (arXiv 1912.09729) also ``l <= -dual_clip A`` where A < 0.

    Args:
        logprobs_N, old_logprobs_N: (N,) under the policy in training and the one that sampled.
        advantages_N: (N,) each token's response advantage.
        dual_clip: bound above 1 on the ratio of tokens with negative advantage.

    Returns:
        Terms to minimise, with gradient through `logprobs_N`, and two boolean masks: the token's gradient is
        cut at the lower (negative advantage) or the upper (positive advantage) edge.
    """
    ratio = (logprobs_N - old_logprobs_N).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -torch.minimum(ratio * advantages_N, clipped * advantages_N)
    if dual_clip is not None:
        bounded = torch.minimum(terms, -dual_clip * advantages_N)
        terms = torch.where(advantages_N < 0, bounded, terms)
    with torch.no_grad():
        low = (ratio < 1 - clip_low) & (advantages_N < 0)
        high = (ratio > 1 + clip_high) & (advantages_N > 0)
    return Surrogate(terms, low, high)


def kl_terms(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """(N,) estimates of KL(policy || reference) from sampled tokens, to be minimised (Schulman, 2020).

    With d = logprob - reference_logprob: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d. k1 is unbiased as a number,
    but its gradient vanishes on average; k2's is that of the divergence; k3 is unbiased, never negative and
    steadier, and is the one GRPO used (arXiv 2402.03300).

    Raises:
        ValueError: an unknown estimator.
    """
    difference = logprobs_N - reference_logprobs_N
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return (-difference).exp() - 1 + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; known are k1, k2, k3")
