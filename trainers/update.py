"""From a rollout to new weights: the loss of every token, weighed once over whole groups, summed, and stepped on."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from evals.engines import Sample
from trainers import metric_names as names
from trainers.adapters import without_adapters
from trainers.aggregation import Scope, token_weights
from trainers.batches import micro_batches, token_batch
from trainers.parallel import World, trainable, whole
from trainers.policy import Policy, TokenStatistics, clipped_surrogate, kl_terms
from trainers.recipe import Recipe
from trainers.rollout import Rollout
from trainers.schedule import learning_rate

_FILLER = Sample(prompt_ids=[0], token_ids=[0], logprobs=[0.0], text="", truncated=False)
"""What a worker computes, and throws away, while others still have micro-batches: sharded layers need all workers."""

TOTALS = ("loss", "tokens", "entropy", "kl", "low", "high", "engine_kl", "engine_tokens", "capped", "reference_kl")


@dataclass
class Learner:
    """What an update needs: the policy in training, its optimizer and how the loss is made."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    rule: str
    scope: Scope
    world: World = field(default_factory=World)
    reference: Policy | None = None
    """The frozen base model for the KL penalty; None with adapters, whose base model is beneath them."""

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return next(self.policy.parameters()).device


def make_optimizer(policy: Policy, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; the learning rate is set before each update."""
    return torch.optim.AdamW(
        trainable(policy),
        lr=recipe.learning_rate,
        betas=recipe.adam_betas,
        weight_decay=recipe.weight_decay,
        fused=True,
    )


def update_policy(learner: Learner, rollout: Rollout, step: int) -> dict[str, float]:
    """All optimizer updates of one rollout; returns the `policy/*` metrics, means over its updates or tokens.

    Raises:
        FloatingPointError: a gradient is not finite; the weights are those of before.
    """
    start = time.perf_counter()
    recipe = learner.recipe
    old, reference = {}, {}
    if recipe.importance_cap is not None:
        old = response_logprobs(learner, learner.policy, rollout)
    if recipe.kl_coef:
        reference = reference_logprobs(learner, rollout)
    per_update = recipe.update_prompts * recipe.group_size
    starts = [*range(0, len(rollout.lengths), per_update)] * recipe.epochs_per_rollout
    totals = dict.fromkeys(TOTALS, 0.0)
    norms = 0.0
    for number, first in enumerate(starts):
        rate = learning_rate(recipe, (step - 1) * len(starts) + number, recipe.steps * len(starts))
        for group in learner.optimizer.param_groups:
            group["lr"] = rate
        rows = range(first, first + per_update)
        accumulate_gradient(learner, rollout, rows, totals, old, reference, first_update=number == 0)
        norm = float(whole(torch.nn.utils.clip_grad_norm_(trainable(learner.policy), recipe.grad_clip)))
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradient norm is {norm} at step {step}; the run cannot go on")
        norms += norm
        learner.optimizer.step()
    totals = learner.world.sum(totals)
    tokens = totals["tokens"] or float("nan")
    metrics = {
        names.LOSS: totals["loss"] / len(starts),
        names.GRAD_NORM: norms / len(starts),
        names.ENTROPY: totals["entropy"] / tokens,
        names.APPROX_KL: totals["kl"] / tokens,
        names.CLIP_LOW: totals["low"] / tokens,
        names.CLIP_HIGH: totals["high"] / tokens,
        names.ENGINE_KL: totals["engine_kl"] / (totals["engine_tokens"] or float("nan")),
        names.LEARNING_RATE: rate,
        names.TRAIN_SECONDS: time.perf_counter() - start,
    }
    if recipe.importance_cap is not None:
        metrics[names.IMPORTANCE_CAPPED] = totals["capped"] / tokens
    if recipe.kl_coef:
        metrics[names.REFERENCE_KL] = totals["reference_kl"] / tokens
    return metrics


def accumulate_gradient(
    learner: Learner,
    rollout: Rollout,
    rows: range,
    totals: dict[str, float],
    old: dict[int, Tensor] | None = None,
    reference: dict[int, Tensor] | None = None,
    first_update: bool = True,
) -> None:
    """Leave in `.grad` the gradient of sum_i w_i sum_t l_it over the responses of `rows`, whole groups all.

    The weights are computed once, before the rows are cut into micro-batches or dealt out to workers. Responses that
    add nothing to the loss are not computed.

    Args:
        totals: the loss and the sums over tokens of this worker's responses are added to it.
        old: log-probabilities under the old policy, by row, where the engine's do not stand for them.
        reference: those under the reference model, for the KL penalty.
        first_update: nothing was updated since the rollout, so engine and policy can be compared.
    """
    recipe = learner.recipe
    at = slice(rows.start, rows.stop)
    weights = torch.zeros(len(rollout.lengths))
    weights[at] = token_weights(
        rollout.masked_lengths[at], rollout.advantages[at], rollout.group_ids[at], learner.rule, learner.scope,
        max_length=recipe.max_response_tokens,
    )  # fmt: skip
    for parameter in trainable(learner.policy):
        parameter.grad = torch.zeros_like(parameter)
    regularised = recipe.kl_coef or recipe.entropy_coef
    counts = weights > 0 if regularised else weights * rollout.advantages != 0
    live = [row for row in rows if row in rollout.samples and counts[row]]
    for batch, policy in _passes(learner, learner.policy, rollout.samples, live):
        lengths = rollout.lengths[batch]
        per_token = torch.stack([rollout.advantages[batch], weights[batch]]).repeat_interleave(lengths, dim=1)
        advantages_N, weights_N = per_token.to(learner.device)
        engine_N = _by_token([torch.tensor(rollout.samples[row].logprobs) for row in batch], learner.device)
        old_N = _by_token([old[row] for row in batch], learner.device) if old else engine_N
        surrogate = clipped_surrogate(
            policy.logprobs, old_N, advantages_N, recipe.clip_low, recipe.clip_high, recipe.dual_clip
        )
        terms = surrogate.terms
        if recipe.importance_cap is not None:
            ratio_N = (old_N - engine_N).exp()
            terms = terms * ratio_N.clamp(max=recipe.importance_cap)
            totals["capped"] += float((ratio_N > recipe.importance_cap).sum())
        if reference:
            divergence_N = kl_terms(
                policy.logprobs, _by_token([reference[row] for row in batch], learner.device), recipe.kl_estimator
            )
            terms = terms + recipe.kl_coef * divergence_N
            totals["reference_kl"] += float(divergence_N.detach().sum())
        if recipe.entropy_coef:
            terms = terms - recipe.entropy_coef * policy.entropies
        loss = (weights_N * terms).sum()
        loss.backward()
        with torch.no_grad():
            # In double precision, or the tiny divergence of an unchanged policy would be rounding alone.
            logprobs_N = policy.logprobs.double()
            totals["loss"] += float(loss)
            totals["tokens"] += len(logprobs_N)
            totals["entropy"] += float(policy.entropies.sum())
            totals["kl"] += float(kl_terms(old_N.double(), logprobs_N, "k3").sum())
            totals["low"] += float(surrogate.clipped_low.sum())
            totals["high"] += float(surrogate.clipped_high.sum())
            if first_update:
                totals["engine_kl"] += float(kl_terms(engine_N.double(), logprobs_N, "k3").sum())
                totals["engine_tokens"] += len(logprobs_N)


@torch.no_grad()
def response_logprobs(learner: Learner, policy: Policy, rollout: Rollout) -> dict[int, Tensor]:
    """Log-probabilities of this worker's responses under a policy: (n_i,) by row."""
    results: dict[int, Tensor] = {}
    for batch, statistics in _passes(learner, policy, rollout.samples, list(rollout.samples)):
        sizes = [len(rollout.samples[row].token_ids) for row in batch]
        results |= zip(batch, statistics.logprobs.cpu().split(sizes), strict=True)
    if isinstance(policy, FSDPModule):
        policy.reshard()  # what was gathered here is old after the next update
    return results


def reference_logprobs(learner: Learner, rollout: Rollout) -> dict[int, Tensor]:
    """Log-probabilities of this worker's responses under the base model: (n_i,) by row."""
    with ExitStack() as stack:
        if learner.reference is None:
            stack.enter_context(without_adapters(learner.policy.model))
        return response_logprobs(learner, learner.reference or learner.policy, rollout)


def _passes(
    learner: Learner, policy: Policy, samples: dict[int, Sample], rows: list[int]
) -> Iterator[tuple[list[int], TokenStatistics]]:
    """Run a policy over rows, a micro-batch at a time; workers with fewer end with empty ones."""
    batches = list(micro_batches(samples, rows, learner.recipe.max_tokens_per_micro_batch, policy.form))
    missing = max(learner.world.gather(len(batches))) - len(batches)
    for batch in [*batches, *([[]] * missing)]:
        inputs = token_batch([samples[row] for row in batch] or [_FILLER], policy.form, learner.device)
        statistics = policy(inputs, learner.recipe.temperature)
        yield batch, statistics if batch else TokenStatistics(statistics.logprobs[:0], statistics.entropies[:0])


def _by_token(rows: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(rows).to(device) if rows else torch.zeros(0, device=device)
