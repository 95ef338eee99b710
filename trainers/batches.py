"""Cutting an optimizer batch into micro-batches. Only memory and speed depend on how; the gradient does not."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from evals.engines import Sample


def micro_batches(samples: Sequence[Sample], indices: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of responses of similar length whose padded batch holds at most `max_tokens` tokens.

    A response that alone exceeds the limit makes a batch of its own.
    """
    by_length = sorted(indices, key=lambda i: (_total_length(samples[i]), i))
    batch: list[int] = []
    for index in by_length:
        if batch and (len(batch) + 1) * _total_length(samples[index]) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(samples: Sequence[Sample], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, T) token ids, prompt then response with padding on the right, and the (B, T) response mask."""
    width = max(map(_total_length, samples))
    ids_BT = torch.full((len(samples), width), pad_id, dtype=torch.long)
    mask_BT = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        end = _total_length(sample)
        ids_BT[row, :end] = torch.tensor(sample.prompt_ids + sample.token_ids)
        mask_BT[row, len(sample.prompt_ids) : end] = True
    return ids_BT.to(device), mask_BT.to(device)


def _total_length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.token_ids)
