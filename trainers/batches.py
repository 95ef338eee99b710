"""Cutting responses into micro-batches. Only memory and speed depend on how; the gradient does not."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evals.engines import Sample
from evals.engines.attention import is_replaceable, layer_kinds
from trainers.shared_prompts import Group, SharedPrompts

Form = Literal["padded", "packed", "shared"]
"""How responses lie in a batch: one a row, all in one row, or all in one row with each group's prompt once."""


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
    shared_prompts: SharedPrompts | None = None
    """How attention finds its way, where responses share prompts."""


def batch_form(model: PreTrainedModel, device: torch.device) -> Form:
    """The cheapest form that the model's attention can read on that device."""
    implementation = model.config._attn_implementation or ""
    if "flash" in implementation or "flex" in implementation:
        return "packed"
    kinds = set(layer_kinds(model.config.get_text_config(decoder=True)))
    # On CPUs, whose kernel tells the log-sums of its scores.
    if device.type == "cpu" and kinds == {"full_attention"} and is_replaceable(model):
        return "shared"
    return "padded"


def micro_batches(
    samples: Mapping[int, Sample], rows: Sequence[int], max_tokens: int, form: Form = "padded"
) -> Iterator[list[int]]:
    """Rows whose batch holds at most `max_tokens` tokens, padding included; of similar length where there is padding.

    A response that alone exceeds the limit makes a batch of its own. A group cut in two has its prompt in both.
    """
    lengths = {row: len(samples[row].prompt_ids) + max(0, len(samples[row].token_ids) - 1) for row in rows}
    batch: list[int] = []
    tokens = 0
    for row in sorted(rows) if form == "shared" else sorted(rows, key=lambda row: (lengths[row], row)):
        if form == "padded":
            total = (len(batch) + 1) * lengths[row]
        elif form == "shared" and batch and samples[row].prompt_ids == samples[batch[-1]].prompt_ids:
            total = tokens + len(samples[row].token_ids)
        else:
            total = tokens + lengths[row]
        if batch and total > max_tokens:
            yield batch
            batch, total = [], lengths[row]
        batch.append(row)
        tokens = total
    if batch:
        yield batch


def token_batch(samples: Sequence[Sample], form: Form = "padded", device: torch.device | str = "cpu") -> TokenBatch:
    """The responses with their prompts, as tensors on the device."""
    batch = {"padded": _padded, "packed": _packed, "shared": _shared}[form](samples)
    ids_BT, predicts_BT, targets_N = batch.ids_BT.to(device), batch.predicts_BT.to(device), batch.targets_N.to(device)
    positions_BT = None if batch.position_ids_BT is None else batch.position_ids_BT.to(device)
    return TokenBatch(ids_BT, predicts_BT, targets_N, positions_BT, batch.shared_prompts)


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


def _shared(samples: Sequence[Sample]) -> TokenBatch:
    ids: list[int] = []
    predicts: list[bool] = []
    positions: list[int] = []
    groups: list[Group] = []
    for prompt, members in groupby(samples, key=lambda sample: sample.prompt_ids):
        # The last token of the prompt is each response's own: its state predicts the first one.
        *before, last = prompt
        start = len(ids)
        ids += before
        predicts += [False] * len(before)
        positions += range(len(before))
        responses = []
        for sample in members:
            responses.append(slice(len(ids), len(ids) + len(sample.token_ids)))
            ids += [last, *sample.token_ids][:-1]
            predicts += [True] * len(sample.token_ids)
            positions += range(len(before), len(before) + len(sample.token_ids))
        groups.append(Group(slice(start, start + len(before)), responses))
    return TokenBatch(
        torch.tensor([ids], dtype=torch.long), torch.tensor([predicts], dtype=torch.bool), _targets(samples),
        torch.tensor([positions], dtype=torch.long), SharedPrompts(groups),
    )  # fmt: skip


def _targets(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([token for sample in samples for token in sample.token_ids], dtype=torch.long)
