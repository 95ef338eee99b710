"""GRPO from top to bottom: sample groups, grade, weigh, update; one loop for every rule, engine and number of workers.

Where it departs from the first GRPO paper (arXiv 2402.03300) by default: no KL penalty and no reference model, separate
clip widths, a floored std in place of an epsilon, and the aggregation rule is a choice.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from evals.datasets import load_train
from evals.engines import Engine, TorchEngine, load_model
from evals.problems import Problem
from evals.prompts import TEMPLATES, Template
from evals.sources import LoadReport
from trainers import checkpoints
from trainers import metric_names as names
from trainers.adapters import add_adapters, merged_weights
from trainers.parallel import World, is_sharded, shard
from trainers.policy import Policy
from trainers.provenance import record_provenance
from trainers.recipe import Recipe
from trainers.rollout import Prompt, collect_rollout, rollout_metrics, write_rollout
from trainers.step_log import StepLog, best_checkpoint
from trainers.update import Learner, make_optimizer, update_policy

log = logging.getLogger(__name__)


def train(
    cell_dir: Path,
    cell: dict[str, Any],
    *,
    data_dir: Path | None = None,
    keep_steps: Collection[int] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train one cell to its last step, going on from its newest whole checkpoint.

    Writes metrics.jsonl, provenance.json, rollouts/ and checkpoints/ below `cell_dir`. On a CPU an interrupted run
    ends with the same parameters and metrics, bit for bit, as one that was not interrupted. Where torch.distributed
    is set up, every worker calls this, and `cell_dir` is a folder that all of them share.

    Args:
        cell: the resolved config: rule, scope, seed, model, dataset, train (see `Recipe`).
        data_dir: local data files, looked at before the hub.
        keep_steps: steps whose models are kept for evaluation; step 0 and the last always are.
        should_stop: asked after every step; if true, the run ends there, with a checkpoint.

    Raises:
        FileNotFoundError: model or data set cannot be loaded.
        ValueError: the config or the data do not fit together.
        FloatingPointError: a gradient is not finite.
    """
    recipe = Recipe(**cell["train"])
    world = World.current()
    learner, tokenizer = make_learner(cell, recipe, world)
    if world.is_first and 0 not in checkpoints.complete_steps(cell_dir):
        checkpoints.save_base(cell_dir, cell["model"])
    world.wait()
    done, counters = checkpoints.load_latest(cell_dir, learner)
    draws = counters.get("draws", 0)
    if done:
        log.info("resuming after step %d", done)
    template = TEMPLATES[cell["model"]["template"]]
    prompts = load_prompts(cell_dir, cell, template, tokenizer, recipe, data_dir)
    engine, shared = open_rollout_engine(cell["model"], learner, tokenizer)
    writer = checkpoints.Writer(cell_dir, learner, tokenizer)
    step_log = StepLog(cell_dir / "metrics.jsonl") if world.is_first else None
    keep = {*keep_steps, recipe.steps}

    for step in range(done + 1, recipe.steps + 1):
        start = time.perf_counter()
        if not shared:
            engine.update_weights(merged_weights(learner.policy.model))
        rollout = collect_rollout(engine, prompts, recipe, cell["seed"], draws, world, template.extractor)
        engine.sleep()
        draws += rollout.draws
        metrics = rollout_metrics(rollout, recipe, cell["scope"]) | update_policy(learner, rollout, step)
        metrics[names.STEP_SECONDS] = time.perf_counter() - start
        metrics[names.TOKENS_PER_SECOND] = float(rollout.lengths.sum()) / metrics[names.STEP_SECONDS]
        if step in (1, recipe.steps) or step % recipe.rollout_log_every == 0:
            write_rollout(rollout, cell_dir / "rollouts" / f"step-{step}.parquet", world)
        if step_log:
            step_log.append(step, metrics)
        log.info(
            "step %d/%d  reward %.3f  length %.1f  %.2f s",
            step, recipe.steps, metrics[names.REWARD_MEAN], metrics[names.LENGTH_MEAN], metrics[names.STEP_SECONDS],
        )  # fmt: skip
        writer.poll()
        stopping = world.first(should_stop())
        if stopping or step in keep or step % recipe.checkpoint_every == 0:
            writer.save(step, {"draws": draws})
            if world.is_first:
                best = best_checkpoint(cell_dir, checkpoints.complete_steps(cell_dir)) if recipe.keep_best else None
                checkpoints.remove_old(cell_dir, keep, recipe.keep_last, best)
        if stopping:
            log.info("stopping after step %d, as asked", step)
            break
    writer.finish()
    engine.close()


def make_learner(cell: dict[str, Any], recipe: Recipe, world: World) -> tuple[Learner, PreTrainedTokenizerBase]:
    """The base model ready for training: adapters put on, sharded over the workers, with its optimizer."""
    device = _device()
    sharded = is_sharded(recipe, world)
    # What is sharded goes to the device in parts.
    model, tokenizer = load_model(cell["model"], "cpu" if sharded else device)
    if recipe.lora_rank:
        add_adapters(model, recipe, cell["seed"])
    if recipe.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # Transformers checkpoints in training mode only; these models have no dropout
    policy = Policy(model)
    shard(policy, recipe, world, device)
    reference = None
    if recipe.kl_coef and not recipe.lora_rank:
        reference = Policy(load_model(cell["model"], "cpu" if sharded else device)[0]).requires_grad_(False)
        shard(reference, recipe, world, device)
    optimizer = make_optimizer(policy, recipe)
    return Learner(policy, optimizer, recipe, cell["rule"], cell["scope"], world, reference), tokenizer


def open_rollout_engine(
    model_spec: dict[str, Any], learner: Learner, tokenizer: PreTrainedTokenizerBase
) -> tuple[Engine, bool]:
    """The engine that samples, and whether it works on the very weights in training.

    A sharded model is not fit for decoding token by token: then every worker's engine has a whole copy.

    Raises:
        ValueError: the engine cannot read this kind of model.
        FileNotFoundError: vLLM is not installed.
    """
    recipe = learner.recipe
    if recipe.rollout_engine == "vllm":
        from evals.engines import open_engine

        engine = open_engine(
            "vllm",
            model_spec,
            max_tokens=min(
                recipe.max_prompt_tokens + recipe.max_response_tokens,
                learner.policy.model.config.max_position_embeddings,
            ),
            gpu_memory=recipe.engine_memory,
            may_sleep=True,
        )
        return engine, False
    if is_sharded(recipe, learner.world):
        return TorchEngine(*load_model(model_spec, _device())), False
    return TorchEngine(learner.policy.model, tokenizer), True


def load_prompts(
    cell_dir: Path,
    cell: dict[str, Any],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    data_dir: Path | None,
) -> list[Prompt]:
    """The training set as the model reads it; notes in the cell's folder what it was."""
    report = LoadReport()
    problems = load_train(cell["dataset"]["name"], data_dir=data_dir, report=report)
    if World.current().is_first:
        record_provenance(cell_dir, cell["dataset"]["name"], problems, report)
    return usable_prompts(problems, template, tokenizer, recipe)


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


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
