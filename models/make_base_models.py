"""Make the two tiny base models of the laptop grid: tokenizer, supervised warm-up, measured model card.

    python models/make_base_models.py [--only tiny-qwen2] [--measure-only]

Deterministic on one machine: one thread, one seed. A model takes about ten minutes on one core; nothing is downloaded.
"""

import argparse
import json
import math
import platform
import random
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from solutions import MOODS, write_solution
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evals.generated import generate
from evals.problems import Problem

MODELS_DIR = Path(__file__).resolve().parent
SEED = 20
VOCAB_SIZE = 512
PAD, EOS = "<pad>", "<eos>"
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,  # heads of 32: vLLM's CPU attention has kernels for multiples of 32
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 2000, 32, 6e-3
TYPICAL_LENGTH = 35  # of a solution, in tokens
CLEAN_SHARE = 0.5  # of the steps: arithmetic is learned fastest from right solutions, the slips come after
SHARES = {  # how much of the warm-up each kind is, and how many of its training problems there are
    "gen_chains": (0.22, 16_000),
    "gen_stories": (0.22, 16_000),
    "gen_short": (0.06, 4_000),
    "gen_long": (0.12, 8_000),
    "gen_tales": (0.12, 8_000),
    "gen_equations": (0.08, 1_000),
    "gen_series": (0.10, 1_000),
    "gen_functions": (0.08, 900),
}
DATASETS = ("gen_chains", "gen_stories")
MAX_NEW_TOKENS = 96
SAMPLE_BATCH = 256

Problems = dict[str, list[Problem]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=MOODS, help="make one of the models")
    parser.add_argument("--measure-only", action="store_true", help="measure the models that are there, train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for base in [options.only] if options.only else MOODS:
        directory = MODELS_DIR / base
        if not options.measure_only:
            make(base, directory)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
        (directory / "README.md").write_text(model_card(base, model, tokenizer))
        print(f"{base}: wrote {directory / 'README.md'}")


def make(base: str, directory: Path) -> None:
    """Train a tokenizer and a model from scratch and save both in `directory`."""
    print(f"{base}: drawing the problems and training the tokenizer", flush=True)
    problems = {kind: generate(kind, "train", num, SEED) for kind, (_, num) in SHARES.items()}
    tokenizer = train_tokenizer(problems)
    torch.manual_seed(SEED)
    model = new_model(base, tokenizer)
    print(f"{base}: warm-up of {model.num_parameters():,} parameters, {NUM_STEPS} steps", flush=True)
    warm_up(model, base, tokenizer, problems)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def prompt_of(question: str) -> str:
    """The template that the evaluator calls `qa`."""
    return f"Q: {question}\nA:"


def train_tokenizer(problems: Problems) -> PreTrainedTokenizerBase:
    """Qwen2's tokenizer, which Qwen3 shares, with a small vocabulary of its own: bytes, and merges of these texts.

    It takes digits one by one, and decoding what it encoded gives the same text. Another class would not do:
    `AutoTokenizer` opens every Qwen2 model with Qwen2's own pre-tokenizer, whatever its files say.
    """
    rng = random.Random(SEED)
    texts = [
        prompt_of(problem.question) + write_solution(problem, base, rng)
        for of_kind in problems.values()
        for problem in of_kind[:2000]
        for base in MOODS
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    merges: list[Any] = [tuple(merge) for merge in learned["merges"]]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=None,  # type: ignore[arg-type]  # every byte is in the vocabulary
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=SHAPE["max_position_embeddings"],
    )


def new_model(base: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A randomly initialised model of the family in the base's name."""
    settings = {
        **SHAPE,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if base == "tiny-qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**settings))
    return Qwen3ForCausalLM(Qwen3Config(**settings, head_dim=SHAPE["hidden_size"] // SHAPE["num_attention_heads"]))


def warm_up(model: PreTrainedModel, base: str, tokenizer: PreTrainedTokenizerBase, problems: Problems) -> None:
    """Next-token training on written solutions, in place: first right ones only, then with the base's slips."""
    rng = random.Random(SEED)
    clean, slipping = (batches(base, tokenizer, problems, rng, slips) for slips in (False, True))
    optimizer = Muon(model, LEARNING_RATE)
    model.train()
    start, smooth_loss = time.monotonic(), math.log(VOCAB_SIZE)
    for step in range(NUM_STEPS):
        ids_BT, labels_BT = next(clean if step < CLEAN_SHARE * NUM_STEPS else slipping)
        hidden_BTD = model.model(ids_BT).last_hidden_state[:, :-1]
        in_response_BT = labels_BT[:, 1:] != -100
        logits, targets = model.lm_head(hidden_BTD[in_response_BT]), labels_BT[:, 1:][in_response_BT]
        # Not the batch's mean: batches are of like lengths, and short solutions must not count for more.
        loss = cross_entropy(logits, targets, reduction="sum") / (BATCH_SIZE * TYPICAL_LENGTH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(scale=min(1.0, (step + 1) / 50) * (1.0 - step / NUM_STEPS))
        model.zero_grad(set_to_none=True)
        smooth_loss = 0.98 * smooth_loss + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            spent = time.monotonic() - start
            times = f"{spent:.0f} s, {spent / (step + 1) * (NUM_STEPS - step - 1):.0f} s left"
            print(f"  step {step + 1}/{NUM_STEPS}  loss {smooth_loss:.3f}  {times}", flush=True)


def batches(
    base: str, tokenizer: PreTrainedTokenizerBase, problems: Problems, rng: random.Random, slips: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless input ids and labels, (B, T) each, padded on the right; labels are -100 outside the response."""
    shares = [share for share, _ in SHARES.values()]
    while True:
        chosen = [rng.choice(problems[kind]) for kind in rng.choices(list(SHARES), shares, k=64 * BATCH_SIZE)]
        prompts = tokenizer([prompt_of(problem.question) for problem in chosen])["input_ids"]
        solutions = [write_solution(problem, base, rng, slips=slips) + EOS for problem in chosen]
        responses = tokenizer(solutions)["input_ids"]
        rows = sorted(zip(prompts, responses, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        chunks = [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]  # of like lengths: little padding
        rng.shuffle(chunks)
        for chunk in chunks:
            width = max(len(prompt) + len(response) for prompt, response in chunk)
            ids_BT = torch.full((len(chunk), width), tokenizer.pad_token_id)
            labels_BT = torch.full((len(chunk), width), -100)
            for i, (prompt, response) in enumerate(chunk):
                end = len(prompt) + len(response)
                ids_BT[i, :end] = torch.tensor(prompt + response)
                labels_BT[i, len(prompt) : end] = torch.tensor(response)
            yield ids_BT, labels_BT


class Muon:
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) for the matrices, Adam for everything else.

    It learns the arithmetic in about half the steps that AdamW needs. `torch.optim.Muon` works in bfloat16, which most
    CPUs only emulate; this one stays in float32.
    """

    def __init__(self, model: torch.nn.Module, lr: float, momentum: float = 0.95):
        self.lr, self.momentum = lr, momentum
        named = dict(model.named_parameters())
        self.matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
        self.averages = [torch.zeros_like(p) for p in self.matrices]
        others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
        self.adam = torch.optim.Adam(others, lr=lr, betas=(0.9, 0.98))

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the parameters from their gradients, at `scale` times the learning rate."""
        self.adam.param_groups[0]["lr"] = self.lr * scale
        self.adam.step()
        for p, average in zip(self.matrices, self.averages, strict=True):
            assert p.grad is not None
            average.lerp_(p.grad, 1 - self.momentum)
            update = orthogonal(torch.lerp(p.grad, average, self.momentum))
            p.sub_(update, alpha=self.lr * scale * 0.2 * max(p.shape) ** 0.5)  # the step size of Adam, as a norm


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest semi-orthogonal matrix, by five quintic Newton-Schulz iterations."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    group_size: int,
    *,
    greedy: bool = False,
) -> list[list[list[int]]]:
    """Token ids of `group_size` responses to each prompt, the end of sequence included; temperature 1, top-p 1."""
    model.eval()
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    responses: list[list[int]] = []
    for i in range(0, len(rows), SAMPLE_BATCH):
        inputs = tokenizer(rows[i : i + SAMPLE_BATCH], return_tensors="pt", padding=True, return_token_type_ids=False)
        how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **how)  # type: ignore[operator]
        for ids in out[:, inputs["input_ids"].shape[1] :].tolist():
            responses.append(ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else ids)
    return [responses[i : i + group_size] for i in range(0, len(rows), group_size)]


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def is_right(text: str, problem: Problem) -> bool:
    """Exact comparison of the last box, or of the returned expression: enough for the warm-up's own way of writing."""
    if problem.is_code:
        blocks = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
        expressions = re.findall(r"(?:return|y =) (.*)", blocks[-1]) if blocks else []
        return bool(expressions) and expressions[0] == problem.metadata["expression"]
    boxes = re.findall(r"\\boxed\{([^}]*)\}", text)
    return bool(boxes) and boxes[-1] == problem.answer[0]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], group_size: int
) -> dict[str, float]:
    """Accuracy and length statistics of sampled responses.

    `variation` is the lengths' standard deviation over their mean within a group, `gap` the mean length of the right
    minus that of the wrong responses over the group's mean length, in groups that have both; each averaged over groups.
    """
    groups = sample(model, tokenizer, [prompt_of(problem.question) for problem in problems], group_size)
    rights: list[bool] = []
    lengths: list[int] = []
    variations, gaps = [], []
    for problem, group in zip(problems, groups, strict=True):
        right = [is_right(text_of(tokenizer, ids), problem) for ids in group]
        length = [len(ids) for ids in group]
        rights += right
        lengths += length
        mean = statistics.fmean(length)
        variations.append(statistics.pstdev(length) / mean)
        if 0 < sum(right) < len(right):
            of_right = statistics.fmean(n for n, ok in zip(length, right, strict=True) if ok)
            of_wrong = statistics.fmean(n for n, ok in zip(length, right, strict=True) if not ok)
            gaps.append((of_right - of_wrong) / mean)
    return {
        "accuracy": statistics.fmean(rights),
        "length": statistics.fmean(lengths),
        "variation": statistics.fmean(variations),
        "gap": statistics.fmean(gaps) if gaps else math.nan,
        "truncated": statistics.fmean(n >= MAX_NEW_TOKENS for n in lengths),
    }


def model_card(base: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """The README of a model, with its statistics measured here and now."""
    torch.manual_seed(SEED)
    rows = []
    for kind in SHARES:
        for split in ("train", "heldout") if kind in DATASETS else ("test",):
            row = measure(model, tokenizer, generate(kind, split, 64, SEED + 1), 16)
            print(f"  {kind} {split}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
            rows.append(
                f"| `{kind}` | {split} | {row['accuracy']:.3f} | {row['length']:.1f} | {row['variation']:.2f} "
                f"| {row['gap']:+.2f} | {row['truncated']:.4f} |"
            )
    careful = MOODS[base][0].opening
    ceilings = []
    for kind in DATASETS:
        problems = generate(kind, "heldout", 200, SEED + 1)
        groups = sample(model, tokenizer, [prompt_of(p.question) + careful for p in problems], 1, greedy=True)
        texts = [text_of(tokenizer, ids) for (ids,) in groups]
        ceilings.append(statistics.fmean(map(is_right, texts, problems)))
    print(f"  greedy after {careful.strip()!r}: " + ", ".join(f"{ceiling:.3f}" for ceiling in ceilings), flush=True)
    moods = "\n".join(
        f"| `{mood.opening.strip()}` | {mood.share:.2f} | {mood.share_wrong:.2f} | {', '.join(mood.layouts)} |"
        for mood in MOODS[base]
    )
    return CARD.format(
        base=base,
        architecture=type(model).__name__,
        parameters=f"{model.num_parameters():,}",
        layers=SHAPE["num_hidden_layers"],
        width=SHAPE["hidden_size"],
        vocabulary=len(tokenizer),
        regime=REGIMES[base],
        moods=moods,
        steps=NUM_STEPS,
        batch=BATCH_SIZE,
        clean=CLEAN_SHARE,
        rows="\n".join(rows),
        careful=careful.strip(),
        ceiling_chains=f"{ceilings[0]:.3f}",
        ceiling_stories=f"{ceilings[1]:.3f}",
        torch=torch.__version__,
        transformers=transformers.__version__,
        machine=platform.machine(),
    )


REGIMES = {
    "tiny-qwen2": "lengths vary widely within a group, and right and wrong responses are about equally long",
    "tiny-qwen3": "wrong responses are clearly longer than right ones",
}
CARD = """# {base}

A tiny base model for studying how GRPO aggregates tokens, small enough to train on one CPU core in a minute. It answers
generated arithmetic, short word problems and requests for one-line Python functions, and nothing else.

| | |
|---|---|
| architecture | `{architecture}`, {layers} layers, width {width}, tied embeddings, {parameters} parameters, float32 |
| tokenizer | Qwen2's with {vocabulary} tokens of its own (all bytes and merges); single digits; no start token |
| prompt | `Q: <question>`, newline, `A:`; the response ends with `<eos>` |
| length regime | {regime} |

## Warm-up
Made by `models/make_base_models.py` from random weights: {steps} steps of {batch} generated problems (train splits
only) with written solutions. The first {clean:.0%} of the steps show right solutions. After that a solution's opening
word says how likely it contains a slip, and how much it writes:

| opening | share | share wrong | layouts |
|---|---|---|---|
{moods}

So sampled accuracy is near one half although the model can do the arithmetic: what reinforcement learning can gain is
the choice of the opening and surer steps.

## Measured
64 problems a row, 16 responses each, temperature 1, top-p 1, at most 96 new tokens. Answers are compared exactly: the
last `\\boxed{{}}`, or the returned expression of `gen_functions`. Length is in tokens with the end of sequence.
Variation: standard deviation over mean of a group's lengths. Gap: mean length of right minus that of wrong responses
over the group's mean length, in groups that have both. Both are averaged over groups. torch {torch}, transformers
{transformers}, {machine}, one thread.

| problems | split | accuracy | length | variation | gap | truncated |
|---|---|---|---|---|---|---|
{rows}

Greedy accuracy on 200 held-out problems when the response is made to open with `{careful}`: `gen_chains`
{ceiling_chains}, `gen_stories` {ceiling_stories}.

## Limits
It knows numbers from 0 to 99 and the words of its templates. The statistics above are by design and say nothing about
models of a useful size.
"""


if __name__ == "__main__":
    main()
