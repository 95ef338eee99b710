"""Cutting responses into micro-batches. Only memory and speed depend on how; the gradient does not."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evals.engines import Sample


class TokenBatch(NamedTuple):
    """Sequences as a model reads them."""

    ids_BT: Tensor
    """Token ids."""
    response_mask_BT: Tensor
    """True at response tokens, which come in the order of the sequences."""
    position_ids_BT: Tensor | None
    """Place of each token in its sequence, where a row holds several; else None."""


def micro_batches(
    samples: Mapping[int, Sample], rows: Sequence[int], max_tokens: int, *, packed: bool = False
) -> Iterator[list[int]]:
    """Rows of similar length whose batch holds at most `max_tokens` tokens, padding included unless `packed`.

    A response that alone exceeds the limit makes a batch of its own.
    """
    by_length = sorted(rows, key=lambda row: (_total_length(samples[row]), row))
    batch: list[int] = []
    tokens = 0
    for row in by_length:
        length = _total_length(samples[row])
        if batch and (tokens if packed else len(batch) * length) + length > max_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += length
    if batch:
        yield batch


def padded(samples: Sequence[Sample], device: torch.device | str = "cpu", pad_id: int = 0) -> TokenBatch:
    """One row a sequence, prompt then response, padded on the right."""
    width = max(map(_total_length, samples))
    ids_BT = torch.full((len(samples), width), pad_id, dtype=torch.long)
    mask_BT = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        end = _total_length(sample)
        ids_BT[row, :end] = torch.tensor(sample.prompt_ids + sample.token_ids)
        mask_BT[row, len(sample.prompt_ids) : end] = True
    return TokenBatch(ids_BT.to(device), mask_BT.to(device), None)


def packed(samples: Sequence[Sample], device: torch.device | str = "cpu") -> TokenBatch:
    """All sequences end to end in one row, without padding. Positions start over, which is how attention tells them."""
    ids = [token for sample in samples for token in sample.prompt_ids + sample.token_ids]
    mask = [place >= len(sample.prompt_ids) for sample in samples for place in range(_total_length(sample))]
    positions = [place for sample in samples for place in range(_total_length(sample))]
    return TokenBatch(
        torch.tensor([ids], device=device),
        torch.tensor([mask], device=device),
        torch.tensor([positions], device=device),
    )


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether the model's attention kernel skips what lies between packed sequences, instead of masking it."""
    implementation = model.config._attn_implementation or ""
    return "flash" in implementation or "flex" in implementation


def _total_length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.token_ids)
