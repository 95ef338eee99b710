"""How long does a whole GRPO step take, beside TRL's GRPOTrainer, and where does the time go?

    OMP_NUM_THREADS=1 python benchmarks/grpo_step.py [--trl-python ../trl-venv/bin/python] [--steps 5]

The same model, prompts, group size, length limit, grader and loss (`sequence`, TRL's `grpo`) on the CPU: sampling,
grading, advantages, log-probabilities, gradient and optimizer step. TRL runs in processes of its own: as it comes, in
bfloat16 with small batches and gradient checkpointing; the same in float32, which our side computes in; and in float32
with all responses in one batch and no checkpointing. The sides take turns, step by step. A ratio compares neighbouring
steps by tokens per second, since each side samples responses of its own; by processor time it also holds on a busy
machine. Without `--trl-python` only our side runs. An environment with TRL:

    python3 -m venv ../trl-venv
    ../trl-venv/bin/pip install --constraint constraints.txt trl==1.16.0 torch transformers math-verify pebble
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from evals.datasets import load_train
from evals.prompts import TEMPLATES
from trainers import grpo
from trainers import metric_names as names
from trainers.aggregation import token_weights
from trainers.parallel import World
from trainers.recipe import Recipe
from trainers.rollout import Rollout, collect_rollout, rollout_metrics
from trainers.update import update_policy

ROOT = Path(__file__).resolve().parent.parent
DATASET = "gen_chains"
WARM_UP = 2
"""Steps of each side that do not count."""
SHARES = {
    "sampling": names.ROLLOUT_SECONDS,
    "grading": names.GRADE_SECONDS,
    "update": names.TRAIN_SECONDS,
    "aggregation weights, within update": "aggregation",
}


TRL_WAYS = {
    "TRL, its defaults": ["--micro-batch", "8", "--checkpointing", "--bf16"],
    "TRL, float32": ["--micro-batch", "8", "--checkpointing"],
    "TRL, float32, one batch": ["--micro-batch", "256"],
}


class Step(NamedTuple):
    """What one step took."""

    seconds: float
    cpu_seconds: float
    tokens: float
    """Of the responses."""
    reward: float
    parts: dict[str, float]
    """Seconds, by metric name."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--trl-python", help="interpreter of an environment that has TRL")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="our side's")
    parser.add_argument("--model", default="models/tiny-qwen2")
    parser.add_argument("--steps", type=int, default=5, help="that count, of each side")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    arguments = parser.parse_args()
    print(f"{arguments.prompts} prompts x {arguments.group_size} responses of up to {arguments.max_tokens} tokens, "
          f"{arguments.model}, {torch.get_num_threads()} thread")  # fmt: skip
    print(f"ours: torch {torch.__version__}, transformers {transformers.__version__}")
    sides = {"ours": our_steps(arguments)}
    if arguments.trl_python:
        sides |= {name: trl_steps(arguments, name) for name in TRL_WAYS}
    seen: dict[str, list[Step]] = {name: [] for name in sides}
    for _ in range(WARM_UP + arguments.steps):
        for name, steps in sides.items():
            seen[name].append(next(steps))
    counted = {name: steps[WARM_UP:] for name, steps in seen.items()}
    for name, steps in counted.items():
        show(name, steps)
    ours = counted.pop("ours")
    show_shares(ours)
    for name, steps in counted.items():
        show_ratio(name, ours, steps)


def our_steps(arguments: argparse.Namespace) -> Iterator[Step]:
    """The body of the loop in `trainers.grpo.train`."""
    recipe = Recipe(
        prompts_per_step=arguments.prompts,
        group_size=arguments.group_size,
        max_response_tokens=arguments.max_tokens,
        learning_rate=arguments.learning_rate,
        warmup_steps=0,
        max_tokens_per_micro_batch=arguments.micro_batch_tokens,
    )
    spec, scope, world = {"path": arguments.model}, "group", World()
    learner, tokenizer = grpo.make_learner(
        {"model": spec, "rule": "sequence", "scope": scope, "seed": 0}, recipe, world
    )
    engine, _ = grpo.open_rollout_engine(spec, learner, tokenizer)
    prompts = grpo.usable_prompts(load_train(DATASET), TEMPLATES["qa"], tokenizer, recipe)
    draws = 0
    while True:
        start, cpu_start = time.perf_counter(), time.process_time()
        rollout = collect_rollout(engine, prompts, recipe, 0, draws, world)
        draws += rollout.draws
        metrics = rollout_metrics(rollout, recipe, scope) | update_policy(learner, rollout, draws)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        parts = metrics | {"aggregation": weighing_seconds(rollout)}
        yield Step(seconds, cpu_seconds, float(rollout.lengths.sum()), metrics[names.REWARD_MEAN], parts)


def weighing_seconds(rollout: Rollout) -> float:
    """Time of the aggregation weights of one rollout under the balanced rule, the costliest."""
    start = time.perf_counter()
    token_weights(rollout.masked_lengths, rollout.advantages, rollout.group_ids, "balanced", "group")
    return time.perf_counter() - start


def trl_steps(arguments: argparse.Namespace, way: str) -> Iterator[Step]:
    """Steps of a GRPOTrainer in a process of its own, which waits between them."""
    command = [arguments.trl_python, str(Path(__file__).with_name("grpo_step_trl.py")), "--dataset", DATASET]
    for name in ("model", "prompts", "group_size", "max_tokens", "learning_rate"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += TRL_WAYS[way]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdin and process.stdout
        print(f"{way}:", process.stdout.readline().strip())
        while True:
            process.stdin.write("step\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                sys.exit("TRL's side ended early; its messages are above")
            row = json.loads(answer)
            tokens = row["length"] * arguments.prompts * arguments.group_size
            yield Step(row["seconds"], row["cpu_seconds"], tokens, row["reward"], {})


def show(name: str, steps: list[Step]) -> None:
    rates = [step.tokens / step.seconds for step in steps]
    print(
        f"{name:23} {statistics.median(step.seconds for step in steps):6.2f} s a step, "
        f"{statistics.median(step.cpu_seconds for step in steps):.2f} s of processor time   "
        f"{statistics.median(rates):6.0f} completion tokens/s ({min(rates):.0f} to {max(rates):.0f})   "
        f"{statistics.mean(step.tokens for step in steps):.0f} tokens a step   "
        f"reward {statistics.mean(step.reward for step in steps):.2f}"
    )


def show_shares(steps: list[Step]) -> None:
    for title, metric in SHARES.items():
        share = statistics.median(step.parts[metric] / step.seconds for step in steps)
        print(f"{share:23.2%} {title}")


def show_ratio(name: str, ours: list[Step], theirs: list[Step]) -> None:
    for clock in ("seconds", "cpu_seconds"):
        ratios = [
            (mine.tokens / getattr(mine, clock)) / (other.tokens / getattr(other, clock))
            for mine, other in zip(ours, theirs, strict=True)
        ]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"ours / {name}, tokens by {clock}: {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
