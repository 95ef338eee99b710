"""Cutting responses into micro-batches. Only memory and speed depend on how; the gradient does not."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evals.engines import Sample

Form = Literal["padded", "packed"]
"""How responses lie in a batch: one a row, or all in one row."""


class TokenBatch(NamedTuple):
    """Responses as a model reads them; a response's last token is no input, since nothing follows it."""

    ids_BT: Tensor
    """Token ids."""
    predicts_BT: Tensor
    """True where the next token is a response's, in the order of the responses."""
    targets_N: Tensor
    """The N response tokens."""
    position_ids_BT: Tensor | None = None
    """Place of each token in its sequence, where a row holds several; else None."""


def batch_form(model: PreTrainedModel) -> Form:
    """The cheapest form that the model's attention can read."""
    implementation = model.config._attn_implementation or ""
    return "packed" if "flash" in implementation or "flex" in implementation else "padded"


def micro_batches(
    samples: Mapping[int, Sample], rows: Sequence[int], max_tokens: int, form: Form = "padded"
) -> Iterator[list[int]]:
    """Rows whose batch holds at most `max_tokens` tokens, padding included; of similar length where there is padding.

    A response that alone exceeds the limit makes a batch of its own.
    """
    lengths = {row: len(samples[row].prompt_ids) + max(0, len(samples[row].token_ids) - 1) for row in rows}
    batch: list[int] = []
    tokens = 0
    for row in sorted(rows, key=lambda row: (lengths[row], row)):
        total = (len(batch) + 1) * lengths[row] if form == "padded" else tokens + lengths[row]
        if batch and total > max_tokens:
            yield batch
            batch, total = [], lengths[row]
        batch.append(row)
        tokens = total
    if batch:
        yield batch


def token_batch(samples: Sequence[Sample], form: Form = "padded", device: torch.device | str = "cpu") -> TokenBatch:
    """The responses with their prompts, as tensors on the device."""
    batch = {"padded": _padded, "packed": _packed}[form](samples)
    positions_BT = None if batch.position_ids_BT is None else batch.position_ids_BT.to(device)
    return TokenBatch(batch.ids_BT.to(device), batch.predicts_BT.to(device), batch.targets_N.to(device), positions_BT)


def _padded(samples: Sequence[Sample]) -> TokenBatch:
    rows = [sample.prompt_ids + sample.token_ids[:-1] for sample in samples]
    width = max(map(len, rows))
    # On the right, where a causal model does not look.
    ids_BT = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    places = torch.arange(width)
    starts = torch.tensor([[len(sample.prompt_ids) - 1] for sample in samples])
    ends = starts + torch.tensor([[len(sample.token_ids)] for sample in samples])
    return TokenBatch(ids_BT, (starts <= places) & (places < ends), _targets(samples))


def _packed(samples: Sequence[Sample]) -> TokenBatch:
    ids: list[int] = []
    predicts: list[bool] = []
    positions: list[int] = []
    for sample in samples:
        sequence = sample.prompt_ids + sample.token_ids[:-1]
        ids += sequence
        before = len(sample.prompt_ids) - 1
        predicts += [before <= place < before + len(sample.token_ids) for place in range(len(sequence))]
        positions += range(len(sequence))  # start over, which is how attention tells the sequences
    return TokenBatch(torch.tensor([ids]), torch.tensor([predicts]), _targets(samples), torch.tensor([positions]))


def _targets(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([token for sample in samples for token in sample.token_ids], dtype=torch.long)
