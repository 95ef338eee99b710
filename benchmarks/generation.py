"""How fast does the torch engine generate, beside `generate()` of Transformers?

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--model models/tiny-qwen2] [--rounds 7]

The same model, prompts, responses per prompt and length limit, plain sampling at temperature 1. Contenders take turns;
a round's ratio compares the tokens per second of processor time of that round alone, which also holds on a busy
machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from evals.engines import SamplingParams, TorchEngine, load_model
from evals.generated import generate
from evals.prompts import TEMPLATES

SETTINGS = {"256 responses of up to 48 tokens": (32, 8, 48), "128 responses of up to 96 tokens": (16, 8, 96)}
"""Prompts, responses per prompt, length limit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/tiny-qwen2")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model)
    engine = TorchEngine(model, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    print(f"{arguments.model}, {torch.get_num_threads()} thread, median of {arguments.rounds} rounds")
    for title, (num_prompts, group_size, max_tokens) in SETTINGS.items():
        problems = generate("gen_chains", "train", num_prompts, seed=0)
        prompts = [TEMPLATES["qa"].render(problem, tokenizer) for problem in problems]
        contenders = {
            "generate()": partial(transformers_tokens, plain, tokenizer, prompts * group_size, max_tokens),
            "torch engine": partial(engine_tokens, engine, prompts, group_size, max_tokens),
        }
        compare(title, contenders, arguments.rounds)


def compare(title: str, contenders: dict[str, Callable[[int], int]], rounds: int) -> None:
    """Time the contenders in turns, each returning its number of tokens; print rates and the ratio to the first."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(0)
    for seed in range(1, rounds + 1):
        for name, run in contenders.items():
            start = time.process_time()
            tokens = run(seed)
            rates[name].append(tokens / (time.process_time() - start))
    first = next(iter(rates.values()))
    print(title)
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        print(
            f"  {name:28} {statistics.median(values):8.0f} tokens/s   {statistics.median(ratios):5.2f} x "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


def engine_tokens(engine: TorchEngine, prompts: list[str], group_size: int, max_tokens: int, seed: int) -> int:
    """Generate; returns the number of tokens, end-of-sequence tokens included."""
    groups = engine.generate(prompts, SamplingParams(n=group_size, max_tokens=max_tokens, seed=seed))
    return sum(len(sample.token_ids) for group in groups for sample in group)


def transformers_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], max_tokens: int, seed: int
) -> int:
    """Generate; returns the number of tokens up to each end of sequence, that token included."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        top_k=0,
        max_new_tokens=max_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    responses = out[:, inputs["input_ids"].shape[1] :].tolist()
    eos = tokenizer.eos_token_id
    return sum(row.index(eos) + 1 if eos in row else len(row) for row in responses)


if __name__ == "__main__":
    main()
