"""One rollout: groups of responses to a step's prompts, graded, with group-normalised advantages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evals.engines import Engine, Sample, SamplingParams
from evals.grading import grade_many
from evals.grading.verdict import UNJUDGED
from evals.problems import Problem
from trainers import metric_names as names
from trainers.advantages import group_advantages
from trainers.aggregation import Scope
from trainers.lengths import length_statistics, sign_mass
from trainers.recipe import Recipe


@dataclass(frozen=True)
class Prompt:
    """A problem with the text that the model reads."""

    problem: Problem
    text: str


@dataclass(frozen=True)
class Rollout:
    """B responses in groups; entry i of every field belongs to response i."""

    prompts: list[Prompt]
    samples: list[Sample]
    rewards: Tensor
    """(B,) 1 for a correct response, else 0."""
    advantages: Tensor
    """(B,) group-normalised."""
    group_ids: Tensor
    """(B,) place of the prompt in the step."""
    lengths: Tensor
    """(B,) generated tokens, raw."""
    mask: Tensor
    """(B,) false where the response is masked out whole."""
    truncated: Tensor
    """(B,) cut at the length limit."""
    seconds: dict[str, float]
    """Time spent, by metric name."""

    @property
    def masked_lengths(self) -> Tensor:
        """(B,) lengths as `token_weights` wants them: 0 where masked out."""
        return torch.where(self.mask, self.lengths, 0)


def step_prompts(prompts: Sequence[Prompt], step: int, seed: int, prompts_per_step: int) -> list[Prompt]:
    """The prompts of a step, a pure function of step and seed: nothing to save, nothing to replay.

    Every epoch is a new permutation; what is left over at its end is dropped, so no prompt occurs twice in a step.

    Raises:
        ValueError: fewer prompts than a step needs.
    """
    steps_per_epoch = len(prompts) // prompts_per_step
    if steps_per_epoch == 0:
        raise ValueError(
            f"the training set has {len(prompts)} usable prompts, fewer than prompts_per_step ({prompts_per_step})"
        )
    epoch, place = divmod(step - 1, steps_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
    return [prompts[i] for i in order[place * prompts_per_step : (place + 1) * prompts_per_step]]


def sample_rollout(
    engine: Engine, prompts: Sequence[Prompt], recipe: Recipe, seed: int, step: int, extractor: str = "any"
) -> Rollout:
    """Sample and grade a group for each prompt with the engine's current weights.

    Args:
        seed, step: together they seed the sampling.
        extractor: how the prompts' template says that answers are found (`evals.prompts`).
    """
    start = time.perf_counter()
    params = SamplingParams(
        n=recipe.group_size,
        max_tokens=recipe.max_response_tokens,
        temperature=recipe.temperature,
        top_p=recipe.top_p,
        seed=int(np.random.SeedSequence([seed, step]).generate_state(1)[0]),
    )
    groups = engine.generate([prompt.text for prompt in prompts], params)
    sampled = time.perf_counter()
    flat_samples = [sample for group in groups for sample in group]
    flat_prompts = [prompt for prompt in prompts for _ in range(recipe.group_size)]
    grades = grade_many([s.text for s in flat_samples], [p.problem for p in flat_prompts], extractor=extractor)
    graded = time.perf_counter()

    rewards = torch.tensor([float(grade.correct) for grade in grades])
    group_ids = torch.arange(len(prompts)).repeat_interleave(recipe.group_size)
    truncated = torch.tensor([sample.truncated for sample in flat_samples])
    judged = torch.tensor([grade.reason not in UNJUDGED for grade in grades])
    mask = judged & ~truncated if recipe.overlong_filtering else judged
    advantages = torch.zeros_like(rewards)
    advantages[judged] = group_advantages(
        rewards[judged], group_ids[judged], recipe.advantage_std_floor, recipe.normalize_advantages
    )
    return Rollout(
        prompts=flat_prompts,
        samples=flat_samples,
        rewards=rewards,
        advantages=advantages,
        group_ids=group_ids,
        lengths=torch.tensor([len(sample.token_ids) for sample in flat_samples]),
        mask=mask,
        truncated=truncated,
        seconds={names.ROLLOUT_SECONDS: sampled - start, names.GRADE_SECONDS: graded - sampled},
    )


def rollout_metrics(rollout: Rollout, recipe: Recipe, scope: Scope) -> dict[str, float]:
    """Rewards, raw lengths and the sign mass of every rule, under the names of `trainers.metric_names`."""
    groups = rollout.rewards.view(-1, recipe.group_size)
    metrics = {
        names.REWARD_MEAN: float(rollout.rewards.mean()),
        names.REWARD_STD: float(rollout.rewards.std(correction=0)),
        names.ZERO_VARIANCE_GROUPS: float((groups == groups[:, :1]).all(1).double().mean()),
    }
    metrics |= length_statistics(rollout.lengths, rollout.advantages, rollout.group_ids, rollout.truncated)
    masses = sign_mass(rollout.masked_lengths, rollout.advantages, rollout.group_ids, scope, recipe.max_response_tokens)
    for rule, mass in masses.items():
        metrics[names.positive_mass(rule)] = mass.positive
        metrics[names.negative_mass(rule)] = mass.negative
    return metrics | rollout.seconds


def write_rollout(rollout: Rollout, path: Path) -> None:
    """Save a rollout's responses as parquet, one row each; replaces the file as a whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "prompt_id": [prompt.problem.id for prompt in rollout.prompts],
            "group": rollout.group_ids.tolist(),
            "prompt": [prompt.text for prompt in rollout.prompts],
            "response": [sample.text for sample in rollout.samples],
            "length": rollout.lengths.tolist(),
            "reward": rollout.rewards.tolist(),
            "advantage": rollout.advantages.tolist(),
            "truncated": rollout.truncated.tolist(),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    pq.write_table(table, temporary)
    temporary.replace(path)
