"""One rollout: groups of responses to a step's prompts, graded, with group-normalised advantages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evals.engines import Engine, Request, Sample, SamplingParams
from evals.grading import grade_many
from evals.grading.verdict import UNJUDGED
from evals.problems import Problem
from trainers import metric_names as names
from trainers.advantages import group_advantages
from trainers.aggregation import Scope
from trainers.lengths import length_statistics, sign_mass
from trainers.parallel import World
from trainers.recipe import Recipe


@dataclass(frozen=True)
class Prompt:
    """A problem with the text that the model reads."""

    problem: Problem
    text: str


@dataclass(frozen=True)
class Rollout:
    """B responses in groups; entry i of every tensor belongs to response i, on every worker alike."""

    prompts: list[Prompt]
    """The B/G prompts."""
    samples: dict[int, Sample]
    """By response, those that this worker sampled and will train on."""
    correct: Tensor
    """(B,) 1 for a correct response, else 0."""
    rewards: Tensor
    """(B,) `correct` less the length penalty."""
    advantages: Tensor
    """(B,) group-normalised."""
    lengths: Tensor
    """(B,) generated tokens, raw."""
    mask: Tensor
    """(B,) false where the response is masked out whole."""
    truncated: Tensor
    """(B,) cut at the length limit."""
    draws: int
    """How many draws of prompts it took."""
    accuracy: float
    """Share of correct ones among all responses sampled, those of replaced groups included."""
    replaced: int
    """Groups left out because their rewards were all equal."""
    seconds: dict[str, float]
    """Time spent, by metric name."""

    @property
    def group_size(self) -> int:
        """Responses per prompt, G."""
        return len(self.lengths) // len(self.prompts)

    @property
    def group_ids(self) -> Tensor:
        """(B,) place of the response's prompt in `prompts`."""
        return torch.arange(len(self.prompts)).repeat_interleave(self.group_size)

    @property
    def masked_lengths(self) -> Tensor:
        """(B,) lengths as `token_weights` wants them: 0 where masked out."""
        return torch.where(self.mask, self.lengths, 0)


def draw_prompts(prompts: Sequence[Prompt], draw: int, seed: int, prompts_per_step: int) -> list[Prompt]:
    """The prompts of a draw, a pure function of its number (from 1) and the seed: nothing is replayed or left out.

    Every epoch is a new permutation; what is left over at its end is dropped, so no prompt occurs twice in a draw.

    Raises:
        ValueError: fewer prompts than a draw needs.
    """
    draws_per_epoch = len(prompts) // prompts_per_step
    if draws_per_epoch == 0:
        raise ValueError(
            f"the training set has {len(prompts)} usable prompts, fewer than prompts_per_step ({prompts_per_step})"
        )
    epoch, place = divmod(draw - 1, draws_per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
    return [prompts[i] for i in order[place * prompts_per_step : (place + 1) * prompts_per_step]]


def collect_rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    seed: int,
    draws_done: int,
    world: World,
    extractor: str = "any",
) -> Rollout:
    """Sample and grade the groups of one step.

    With dynamic sampling (arXiv 2503.14476) groups without any advantage make room for those of further draws, up to
    `recipe.max_draws` of them; if varied groups are still missing then, such groups fill the step in their order.

    Args:
        prompts: the whole training set.
        draws_done: draws that earlier steps took.
        extractor: how the prompts' template says that answers are found (`evals.prompts`).
    """
    draws: list[Rollout] = []
    varied: list[tuple[int, int]] = []
    flat: list[tuple[int, int]] = []
    while len(draws) < recipe.max_draws and len(varied) < recipe.prompts_per_step:
        number = draws_done + len(draws) + 1
        batch = draw_prompts(prompts, number, seed, recipe.prompts_per_step)
        draw = sample_rollout(engine, batch, recipe, seed, number, world, extractor)
        has_advantage = (draw.advantages.view(len(batch), -1) != 0).any(1).tolist()
        for group, useful in enumerate(has_advantage):
            (varied if useful else flat).append((len(draws), group))
        draws.append(draw)
    if len(draws) == 1:
        return draws[0]
    chosen = sorted((varied + flat)[: recipe.prompts_per_step])
    return _select(draws, chosen)


def sample_rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    seed: int,
    draw: int,
    world: World | None = None,
    extractor: str = "any",
) -> Rollout:
    """Sample and grade a group for each prompt with the engine's current weights.

    Responses are dealt out to the workers one by one, so a group may lie on several of them.

    Args:
        seed, draw: together they seed the sampling.
        extractor: see `collect_rollout`.
    """
    world = world or World()
    start = time.perf_counter()
    params = SamplingParams(
        max_tokens=recipe.max_response_tokens,
        temperature=recipe.temperature,
        top_p=recipe.top_p,
        seed=int(np.random.SeedSequence([seed, draw]).generate_state(1)[0]),
    )
    rows = range(world.rank, len(prompts) * recipe.group_size, world.size)
    problems = [prompts[row // recipe.group_size] for row in rows]
    requests = [Request(p.text, row % recipe.group_size) for p, row in zip(problems, rows, strict=True)]
    samples = engine.sample(requests, params)
    sampled = time.perf_counter()
    grades = grade_many([sample.text for sample in samples], [p.problem for p in problems], extractor=extractor)
    graded = time.perf_counter()

    facts_B4 = _deal_back(
        [
            (grade.correct, grade.reason not in UNJUDGED, len(sample.token_ids), sample.truncated)
            for grade, sample in zip(grades, samples, strict=True)
        ],
        world,
    )
    correct, lengths = facts_B4[:, 0].float(), facts_B4[:, 2]
    judged, truncated = facts_B4[:, 1].bool(), facts_B4[:, 3].bool()
    rewards = correct - length_penalty(lengths, recipe)
    group_ids = torch.arange(len(prompts)).repeat_interleave(recipe.group_size)
    advantages = torch.zeros_like(rewards)
    advantages[judged] = group_advantages(
        rewards[judged], group_ids[judged], recipe.advantage_std_floor, recipe.normalize_advantages
    )
    return Rollout(
        prompts=list(prompts),
        samples=dict(zip(rows, samples, strict=True)),
        correct=correct,
        rewards=rewards,
        advantages=advantages,
        lengths=lengths,
        mask=judged & ~truncated if recipe.overlong_filtering else judged,
        truncated=truncated,
        draws=1,
        accuracy=float(correct.mean()),
        replaced=0,
        seconds={names.ROLLOUT_SECONDS: sampled - start, names.GRADE_SECONDS: graded - sampled},
    )


def length_penalty(lengths: Tensor, recipe: Recipe) -> Tensor:
    """(B,) DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), as a positive number to take off the reward.

    0 up to `max_response_tokens - overlong_buffer` tokens, then linear to `overlong_penalty` at the limit.
    """
    if not recipe.overlong_buffer:
        return torch.zeros(len(lengths))
    free = recipe.max_response_tokens - recipe.overlong_buffer
    return recipe.overlong_penalty * ((lengths - free) / recipe.overlong_buffer).clamp(0, 1)


def _deal_back(facts: list[tuple[int, ...]], world: World) -> Tensor:
    """(B, F) facts of all responses, from those of this worker's."""
    parts = world.gather(facts)
    total = sum(map(len, parts))
    return torch.tensor([[int(value) for value in parts[row % world.size][row // world.size]] for row in range(total)])


def _select(draws: list[Rollout], chosen: list[tuple[int, int]]) -> Rollout:
    """The rollout of some groups, given as pairs of draw and group."""
    size = draws[0].group_size
    rows = [(draw, group * size + index) for draw, group in chosen for index in range(size)]

    def pick(name: str) -> Tensor:
        return torch.stack([getattr(draws[draw], name)[row] for draw, row in rows])

    return Rollout(
        prompts=[draws[draw].prompts[group] for draw, group in chosen],
        samples={new: draws[draw].samples[row] for new, (draw, row) in enumerate(rows) if row in draws[draw].samples},
        **{name: pick(name) for name in ("correct", "rewards", "advantages", "lengths", "mask", "truncated")},
        draws=len(draws),
        accuracy=sum(draw.accuracy for draw in draws) / len(draws),
        replaced=sum(len(draw.prompts) for draw in draws) - len(chosen),
        seconds={name: sum(draw.seconds[name] for draw in draws) for name in draws[0].seconds},
    )


def rollout_metrics(rollout: Rollout, recipe: Recipe, scope: Scope) -> dict[str, float]:
    """Rewards, raw lengths and the sign mass of every rule, under the names of `trainers.metric_names`."""
    groups = rollout.rewards.view(-1, rollout.group_size)
    metrics = {
        names.REWARD_MEAN: float(rollout.rewards.mean()),
        names.REWARD_STD: float(rollout.rewards.std(correction=0)),
        names.ZERO_VARIANCE_GROUPS: float((groups == groups[:, :1]).all(1).double().mean()),
    }
    if recipe.max_draws > 1:
        metrics[names.REPLACED_GROUPS] = float(rollout.replaced)
    if recipe.max_draws > 1 or recipe.overlong_buffer:
        metrics[names.ACCURACY] = rollout.accuracy
    metrics |= length_statistics(rollout.lengths, rollout.advantages, rollout.group_ids, rollout.truncated)
    masses = sign_mass(rollout.masked_lengths, rollout.advantages, rollout.group_ids, scope, recipe.max_response_tokens)
    for rule, mass in masses.items():
        metrics[names.positive_mass(rule)] = mass.positive
        metrics[names.negative_mass(rule)] = mass.negative
    return metrics | rollout.seconds


def write_rollout(rollout: Rollout, path: Path, world: World) -> None:
    """Save a rollout's responses as parquet, one row each; replaces the file as a whole. All workers must call it."""
    texts: dict[int, str] = {}
    for part in world.gather({row: sample.text for row, sample in rollout.samples.items()}):
        texts |= part
    if not world.is_first:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = [prompt for prompt in rollout.prompts for _ in range(rollout.group_size)]
    table = pa.table(
        {
            "prompt_id": [prompt.problem.id for prompt in prompts],
            "group": rollout.group_ids.tolist(),
            "prompt": [prompt.text for prompt in prompts],
            "response": [texts[row] for row in range(len(prompts))],
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
