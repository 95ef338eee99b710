"""Attention over responses that lie behind one another in one row and share their groups' prompts.

A group's prompt is read once: its tokens, G times as many otherwise, go through every layer a single time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_PADDING = 1.25
"""Stretches of tokens whose lengths differ by no more than this factor are attended to in one call, padded."""

# The CPU kernels beneath `scaled_dot_product_attention`, which alone give and take the log-sums of the scores.
_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Group(NamedTuple):
    """Where a prompt lies in the row, and the responses to it, right behind it."""

    prompt: slice
    responses: Sequence[slice]


class SharedPrompts:
    """The groups of a row of N tokens, and attention over it: causal within each prompt, and of each response to its
    prompt and itself. A model's attention calls it (`evals.engines.attention`)."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.stretches = _Stretches([part for group in groups for part in (group.prompt, *group.responses)])
        self.crossings = [
            (slice(group.prompt.stop, group.responses[-1].stop), group.prompt)
            for group in groups
            if group.prompt.start < group.prompt.stop < group.responses[-1].stop
        ]
        """Responses to a prompt, and the prompt."""

    def __call__(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `evals.engines.attention.Attend`; query (1, H, N, D), key and value (1, K, N, D), K a divisor of H."""
        copies = query.shape[1] // key.shape[1]
        if copies > 1:
            key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        by_token = (states[0].transpose(0, 1) for states in (query, key, value))
        return _SharedPromptAttention.apply(*by_token, self, scale)[None]


class _Stretches:
    """Stretches of a row, copied to padded batches of similar length and back."""

    def __init__(self, stretches: Sequence[slice]) -> None:
        self.batches: list[tuple[int, int, int]] = []
        """Of each batch the place of its first token in the padded copy, and its shape."""
        take: list[int] = []
        back = [0] * max(stretch.stop for stretch in stretches)
        pads: list[int] = []
        for batch in _of_similar_length(stretches):
            width = batch[-1].stop - batch[-1].start
            self.batches.append((len(take), len(batch), width))
            for stretch in batch:
                start, length = len(take), stretch.stop - stretch.start
                back[stretch] = range(start, start + length)
                # Padding is on the right, where causal attention does not look; any token will do.
                take += [*range(stretch.start, stretch.stop), *[stretch.start] * (width - length)]
                pads += range(start + length, start + width)
        self.take, self.back, self.pads = (torch.tensor(indices, dtype=torch.long) for indices in (take, back, pads))

    def split(self, padded: Tensor) -> list[Tensor]:
        """Views of a padded copy (M, H, ...), a batch each: (B, H, L, ...)."""
        return [
            padded[start : start + rows * width].unflatten(0, (rows, width)).transpose(1, 2)
            for start, rows, width in self.batches
        ]


class _SharedPromptAttention(torch.autograd.Function):
    """Two softmaxes made one: that over a stretch's own tokens and that over its prompt's.

    With log-sums s and t of their scores, outputs x and y: the whole output is (x e^s + y e^t) / (e^s + e^t). The
    backward kernel takes any part of the keys together with the output and log-sum of the whole (as in ring attention,
    arXiv 2310.01889). Tensors are (N, H, D).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: SharedPrompts, scale: float) -> Tensor:
        stretches = layout.stretches
        states = [stretches.split(part.index_select(0, stretches.take)) for part in (query, key, value)]
        padded = query.new_empty(len(stretches.take), *query.shape[1:])
        padded_sums = query.new_empty(padded.shape[:2], dtype=torch.float32)
        for *inputs, place, sums in zip(*states, stretches.split(padded), stretches.split(padded_sums), strict=True):
            own, own_sums = _attention(*inputs, is_causal=True, scale=scale)
            place.copy_(own)
            sums.copy_(own_sums)
        output, sums = padded.index_select(0, stretches.back), padded_sums.index_select(0, stretches.back)
        for queries, keys in layout.crossings:
            crossed, crossed_sums = _attention(*_heads(query[queries], key[keys], value[keys]), scale=scale)
            whole = torch.logaddexp(sums[queries], crossed_sums[0].T)
            output[queries] *= (sums[queries] - whole).exp_().unsqueeze(-1)
            output[queries] += crossed[0].transpose(0, 1) * (crossed_sums[0].T - whole).exp_().unsqueeze(-1)
            sums[queries] = whole
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        stretches = ctx.layout.stretches
        query, key, value, output, sums = ctx.saved_tensors
        given = [part.index_select(0, stretches.take) for part in (grad_output, query, key, value, output, sums)]
        # No weight for padding: a copy of a token behind others would see keys that the token itself does not.
        given[-1][stretches.pads] = torch.inf
        padded = [query.new_empty(given[0].shape) for _ in range(3)]
        for *inputs, dq, dk, dv in zip(*map(stretches.split, [*given, *padded]), strict=True):
            parts = _attention_backward(*inputs, 0.0, is_causal=True, scale=ctx.scale)
            for place, part in zip((dq, dk, dv), parts, strict=True):
                place.copy_(part)
        grads = [part.index_select(0, stretches.back) for part in padded]
        for queries, keys in ctx.layout.crossings:
            inputs = _heads(grad_output[queries], query[queries], key[keys], value[keys], output[queries])
            parts = _attention_backward(*inputs, sums[queries].T[None], 0.0, is_causal=False, scale=ctx.scale)
            for grad, at, part in zip(grads, (queries, keys, keys), parts, strict=True):
                grad[at] += part[0].transpose(0, 1)
        return *grads, None, None


def _heads(*states: Tensor) -> list[Tensor]:
    """(T, H, D) each, as the kernels want them: (1, H, T, D)."""
    return [part.transpose(0, 1)[None] for part in states]


def _of_similar_length(stretches: Sequence[slice]) -> list[list[slice]]:
    """Batches of stretches, from short to long; empty ones are left out."""
    batches: list[list[slice]] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.stop - stretch.start):
        length = stretch.stop - stretch.start
        if batches and length <= MAX_PADDING * (batches[-1][0].stop - batches[-1][0].start):
            batches[-1].append(stretch)
        elif length:
            batches.append([stretch])
    return batches
