"""Whole responses as a textbook reads them, for comparison with what the trainer makes of them."""

import torch
from torch import Tensor


def padded(samples) -> tuple[Tensor, Tensor]:
    """Ids, a prompt and its response a row, padded on the right, and a mask that is true at response tokens."""
    rows = [sample.prompt_ids + sample.token_ids for sample in samples]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        ids[place, : len(row)] = torch.tensor(row)
        mask[place, len(sample.prompt_ids) : len(row)] = True
    return ids, mask


def plain_logprobs(model, samples, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the response tokens from the full logits, in the order of the samples."""
    ids, mask = padded(samples)
    logprobs = (model(ids).logits[:, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(2, ids[:, 1:, None])[..., 0][mask[:, 1:]]
