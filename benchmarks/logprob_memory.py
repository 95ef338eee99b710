"""How much memory does the log-probability pass take, beside the full float32 logits?

    python benchmarks/logprob_memory.py [--tokens 4096] [--vocabulary 151936] [--hidden-size 64] [--naive]

One forward and backward pass over a random one-layer model, each way in a process of its own: the rise of the
process's resident memory at its highest, above weights and gradients, which are there before. `--naive` also runs the
textbook way, which takes several times the logits.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from evals.engines import Sample
from trainers.batches import TokenBatch, token_batch
from trainers.policy import token_statistics

PROMPT_TOKENS = 64
RESPONSE_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument(
        "--naive", action="store_true", help="run the full logits too, instead of only naming their size"
    )
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(peak_rise(arguments))
        return
    logits = arguments.tokens * arguments.vocabulary * 4
    print(f"{arguments.tokens:,} tokens, vocabulary {arguments.vocabulary:,}, hidden size {arguments.hidden_size}")
    print(f"  {'full float32 logits':28} {logits / 2**20:8.0f} MiB")
    for way in WAYS if arguments.naive else ["token_statistics", "token_statistics, no gradient"]:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        rise = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"  {way:28} {rise / 2**20:8.0f} MiB   1/{logits / rise:.1f} of the logits")


def peak_rise(arguments: argparse.Namespace) -> int:
    """Bytes by which resident memory rises at most during the pass."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=arguments.vocabulary, hidden_size=arguments.hidden_size, intermediate_size=arguments.hidden_size,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for rows in (1, arguments.tokens // RESPONSE_TOKENS):  # the first pass loads what every pass needs
        length = RESPONSE_TOKENS if rows > 1 else 8
        ids = torch.randint(arguments.vocabulary, (rows, PROMPT_TOKENS + length)).tolist()
        samples = [Sample(row[:PROMPT_TOKENS], row[PROMPT_TOKENS:], [], "", truncated=False) for row in ids]
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest value so far
        WAYS[arguments.way](model, token_batch(samples))
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes, from this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def chunked(model: Qwen2ForCausalLM, batch: TokenBatch) -> None:
    token_statistics(model, batch).logprobs.sum().backward()


@torch.no_grad()
def chunked_without_gradient(model: Qwen2ForCausalLM, batch: TokenBatch) -> None:
    token_statistics(model, batch)


def naive(model: Qwen2ForCausalLM, batch: TokenBatch) -> None:
    logprobs = model(batch.ids_BT, use_cache=False).logits.float().log_softmax(-1)[batch.predicts_BT]
    logprobs.gather(1, batch.targets_N[:, None]).sum().backward()


WAYS = {
    "token_statistics": chunked,
    "token_statistics, no gradient": chunked_without_gradient,
    "full logits": naive,
}


if __name__ == "__main__":
    main()
