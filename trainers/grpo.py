"""GRPO from top to bottom: sample groups, grade, weigh, update; one loop for every aggregation rule.

Where it departs from the first GRPO paper (arXiv 2402.03300): no KL penalty and no reference model, separate clip
widths, a floored std in place of an epsilon, and the aggregation rule is a choice.
"""

import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evals.datasets import load_train
from evals.engines import TorchEngine, load_model
from evals.problems import Problem
from evals.prompts import TEMPLATES, Template
from evals.sources import LoadReport
from trainers import checkpoints
from trainers import metric_names as names
from trainers.aggregation import Scope, token_weights
from trainers.batches import micro_batches, padded
from trainers.policy import clipped_surrogate, token_statistics
from trainers.provenance import record_provenance
from trainers.recipe import Recipe
from trainers.rollout import Prompt, Rollout, rollout_metrics, sample_rollout, step_prompts, write_rollout
from trainers.schedule import learning_rate
from trainers.step_log import StepLog

log = logging.getLogger(__name__)


def train(
    cell_dir: Path, cell: dict[str, Any], *, data_dir: Path | None = None, keep_steps: Collection[int] = ()
) -> None:
    """Train one cell to its last step, going on from its newest whole checkpoint.

    Writes metrics.jsonl, provenance.json, rollouts/ and checkpoints/ below `cell_dir`. On a CPU an interrupted run
    ends with the same parameters and metrics, bit for bit, as one that was not interrupted.

    Args:
        cell: the resolved config: rule, scope, seed, model, dataset, train (see `Recipe`).
        data_dir: local data files, looked at before the hub.
        keep_steps: steps whose checkpoints are kept for evaluation; step 0 and the last always are.

    Raises:
        FileNotFoundError: model or data set cannot be loaded.
        ValueError: the config or the data do not fit together.
    """
    recipe = Recipe(**cell["train"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(cell["model"], device)
    optimizer = make_optimizer(model, recipe)
    if 0 not in checkpoints.complete_steps(cell_dir):
        checkpoints.save_base(cell_dir, cell["model"])
    done = checkpoints.load_latest(cell_dir, model, optimizer)
    if done:
        log.info("resuming after step %d", done)
    template = TEMPLATES[cell["model"]["template"]]
    report = LoadReport()
    problems = load_train(cell["dataset"]["name"], data_dir=data_dir, report=report)
    record_provenance(cell_dir, cell["dataset"]["name"], problems, report)
    prompts = usable_prompts(problems, template, tokenizer, recipe)
    engine = TorchEngine(model, tokenizer)
    step_log = StepLog(cell_dir / "metrics.jsonl")
    keep = {*keep_steps, recipe.steps}

    for step in range(done + 1, recipe.steps + 1):
        start = time.perf_counter()
        batch = step_prompts(prompts, step, cell["seed"], recipe.prompts_per_step)
        rollout = sample_rollout(engine, batch, recipe, cell["seed"], step, template.extractor)
        metrics = rollout_metrics(rollout, recipe, cell["scope"])
        metrics |= update_policy(model, optimizer, rollout, recipe, cell["rule"], cell["scope"], step)
        metrics[names.STEP_SECONDS] = time.perf_counter() - start
        metrics[names.TOKENS_PER_SECOND] = float(rollout.lengths.sum()) / metrics[names.STEP_SECONDS]
        if step in (1, recipe.steps) or step % recipe.rollout_log_every == 0:
            write_rollout(rollout, cell_dir / "rollouts" / f"step-{step}.parquet")
        step_log.append(step, metrics)
        if step in keep or step % recipe.checkpoint_every == 0:
            checkpoints.save_checkpoint(cell_dir, step, model, tokenizer, optimizer)
            checkpoints.remove_old(cell_dir, keep)
        log.info(
            "step %d/%d  reward %.3f  length %.1f  %.2f s",
            step, recipe.steps, metrics[names.REWARD_MEAN], metrics[names.LENGTH_MEAN], metrics[names.STEP_SECONDS],
        )  # fmt: skip


def update_policy(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    recipe: Recipe,
    rule: str,
    scope: Scope,
    step: int,
) -> dict[str, float]:
    """All optimizer updates of one rollout; returns the `policy/*` metrics, means over its updates or tokens."""
    start = time.perf_counter()
    per_update = recipe.update_prompts * recipe.group_size
    starts = [*range(0, len(rollout.samples), per_update)] * recipe.epochs_per_rollout
    totals: dict[str, float] = dict.fromkeys(("loss", "norm", "tokens", "entropy", "kl", "low", "high"), 0.0)
    for number, first in enumerate(starts):
        rate = learning_rate(recipe, (step - 1) * len(starts) + number, recipe.steps * len(starts))
        for group in optimizer.param_groups:
            group["lr"] = rate
        accumulate_gradient(model, rollout, range(first, first + per_update), recipe, rule, scope, totals)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        if not norm.isfinite():
            raise FloatingPointError(f"the gradient norm is {float(norm)} at step {step}; the run cannot go on")
        totals["norm"] += float(norm)
        optimizer.step()
    tokens = totals["tokens"] or float("nan")
    return {
        names.LOSS: totals["loss"] / len(starts),
        names.GRAD_NORM: totals["norm"] / len(starts),
        names.ENTROPY: totals["entropy"] / tokens,
        names.APPROX_KL: totals["kl"] / tokens,
        names.CLIP_LOW: totals["low"] / tokens,
        names.CLIP_HIGH: totals["high"] / tokens,
        names.LEARNING_RATE: rate,
        names.TRAIN_SECONDS: time.perf_counter() - start,
    }


def accumulate_gradient(
    model: PreTrainedModel,
    rollout: Rollout,
    rows: range,
    recipe: Recipe,
    rule: str,
    scope: Scope,
    totals: dict[str, float],
) -> None:
    """Leave in `.grad` the gradient of sum_i w_i sum_t l_it over the responses of `rows`, whole groups all.

    The weights are computed once, before the rows are cut into micro-batches. Responses with weight or advantage 0
    have no gradient and are not computed. Adds the loss and token sums to `totals`.
    """
    at = slice(rows.start, rows.stop)
    weights = token_weights(
        rollout.masked_lengths[at], rollout.advantages[at], rollout.group_ids[at], rule, scope,
        max_length=recipe.max_response_tokens,
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = [i for i in rows if weights[i - rows.start] * rollout.advantages[i] != 0]
    for batch in micro_batches(rollout.samples, live, recipe.micro_batch_tokens):
        samples = [rollout.samples[i] for i in batch]
        lengths = rollout.lengths[batch]
        ids_BT, mask_BT = padded(samples, pad_id=0, device=model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=recipe.dtype == "bfloat16"):
            policy = token_statistics(model, ids_BT, mask_BT, recipe.temperature)
        per_token = torch.stack([rollout.advantages[batch], weights[[i - rows.start for i in batch]]])
        advantages_N, weights_N = per_token.repeat_interleave(lengths, dim=1).to(model.device)
        old_logprobs_N = torch.tensor([x for sample in samples for x in sample.logprobs], device=model.device)
        surrogate = clipped_surrogate(policy.logprobs, old_logprobs_N, advantages_N, recipe.clip_low, recipe.clip_high)
        loss = (weights_N * surrogate.terms).sum()
        loss.backward()
        with torch.no_grad():
            log_ratio = policy.logprobs - old_logprobs_N
            totals["loss"] += float(loss)
            totals["tokens"] += len(log_ratio)
            totals["entropy"] += float(policy.entropies.sum())
            totals["kl"] += float((log_ratio.exp() - 1 - log_ratio).sum())
            totals["low"] += float(surrogate.clipped_low.sum())
            totals["high"] += float(surrogate.clipped_high.sum())


def make_optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over all parameters; the learning rate is set before each update."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=recipe.adam_betas,
        weight_decay=recipe.weight_decay,
        fused=True,
    )


def usable_prompts(
    problems: Sequence[Problem], template: Template, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> list[Prompt]:
    """The training problems as the model reads them, without those longer than `max_prompt_tokens`."""
    prompts = [Prompt(problem, template.render(problem, tokenizer)) for problem in problems]
    ids = tokenizer([prompt.text for prompt in prompts], add_special_tokens=False)["input_ids"]
    usable = [p for p, row in zip(prompts, ids, strict=True) if len(row) <= recipe.max_prompt_tokens]
    if len(usable) < len(prompts):
        log.info("left out %d of %d prompts: too long", len(prompts) - len(usable), len(prompts))
    return usable
