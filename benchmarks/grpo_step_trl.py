"""TRL's side of `grpo_step.py`: a GRPOTrainer that makes a step whenever a line arrives on standard input.

Needs TRL, which the project itself does not; started by `grpo_step.py`. Prints one JSON line per step.
"""

import argparse
import json
import sys
import time

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from evals.generated import generate
from evals.grading import grade_many
from evals.prompts import TEMPLATES

SETTINGS = {
    "loss_type": "grpo",
    "num_iterations": 1,
    "beta": 0.0,
    "temperature": 1.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant",
}
"""The rest, and some of these, are TRL's defaults."""


class OnDemand(TrainerCallback):
    """Holds each step until a line arrives, then reports how long it took."""

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.times = {
            "seconds": time.perf_counter() - self.start,
            "cpu_seconds": time.process_time() - self.cpu_start,
        }

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "completions/mean_length" in logs:
            report(**self.times, length=logs["completions/mean_length"], reward=logs["reward"])


def report(**values: object) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("model", "dataset"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("prompts", "group-size", "max-tokens", "micro-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    responses = arguments.prompts * arguments.group_size
    micro_batch = min(arguments.micro_batch, responses)
    settings = SETTINGS | {
        "num_generations": arguments.group_size,
        "max_completion_length": arguments.max_tokens,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": responses // micro_batch,
        "learning_rate": arguments.learning_rate,
        "gradient_checkpointing": arguments.checkpointing,
        "bf16": arguments.bf16,
    }
    config = trl.GRPOConfig(
        output_dir="/tmp/unused", use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, max_steps=10_000, **settings,
    )  # fmt: skip
    problems = generate(arguments.dataset, "train", 2000, seed=0)
    prompts = [TEMPLATES["qa"].render(problem) for problem in problems]
    known = dict(zip(prompts, problems, strict=True))

    def correct(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return [float(grade.correct) for grade in grade_many(completions, [known[prompt] for prompt in prompts])]

    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[OnDemand()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    report(trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__, settings=settings)
    trainer.train()


if __name__ == "__main__":
    main()
