"""Keys and values of responses in the making, and attention over them: prompts are kept, and read, once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

FIRST_COLUMNS, GROWTH = 16, 1.5
"""A row's first columns, which are also the fewest that a pass looks at, and by what factor they grow: rows that lie
close together are read faster, and narrower products are several times slower on CPUs."""
MAX_PADDING = 8
"""Prompts are asked together, each by as many rows as the first, unless they have fewer by more than this factor."""


class SharedPromptCache:
    """A row for each response and a slot for each prompt, which all its responses share.

    A response's row begins with the last token of its prompt; the slot holds those before it. The model's attention
    calls it (`evals.engines.attention`), one token a row.
    """

    def __init__(self, rows: int, max_columns: int, slots: int, prompt_columns: int, device: torch.device) -> None:
        self.max_columns = max_columns
        self.shape, self.prompt_shape = (rows, self.least_columns), (slots, prompt_columns)
        self.rooms: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each layer, (rows, K, columns, D)."""
        self.prompt_rooms: list[tuple[Tensor, Tensor]] = []
        """Those of the prompts, (slots, K, prompt columns, D)."""
        self.prompts: list[tuple[int, ...]] = []
        """Token ids, by slot."""
        self.slots = torch.zeros(rows, dtype=torch.long, device=device)
        """The slot of each row's prompt."""

    @property
    def least_columns(self) -> int:
        """Fewest columns that a pass looks at."""
        return min(FIRST_COLUMNS, self.max_columns)

    @property
    def prompt_columns(self) -> int:
        """Those in use, and one if there are none."""
        return max(1, max(map(len, self.prompts)) - 1)

    def add_prompts(self, prompts: Sequence[tuple[int, ...]], states: DynamicCache) -> None:
        """Put prompts that a model has read, all but their last tokens, into the next slots."""
        layers: list[Any] = states.layers
        if not self.rooms:
            self.rooms = [_rooms(layer, self.shape) for layer in layers]
            self.prompt_rooms = [_rooms(layer, self.prompt_shape) for layer in layers]
        new = slice(len(self.prompts), len(self.prompts) + len(prompts))
        for rooms, layer in zip(self.prompt_rooms, layers, strict=True):
            for room, read in zip(rooms, (layer.keys, layer.values), strict=True):
                room[new, :, : read.shape[2]] = read
        self.prompts += prompts

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first columns of rows `source` over those of rows `target`."""
        for rooms in self.rooms:
            for room in rooms:
                room[target, :, :columns] = room[source, :, :columns]
        self.slots[target] = self.slots[source]

    def arrange(self, rows: int) -> None:
        """Rows have come or gone: give up prompts without any, put those with most first, note who asks which."""
        counts = self.slots[:rows].bincount(minlength=len(self.prompts))
        order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
        if order.tolist() != list(range(len(self.prompts))):
            for rooms in self.prompt_rooms:
                for room in rooms:
                    room[: len(order)] = room[order]
            renumbered = torch.empty_like(counts)
            renumbered[order] = torch.arange(len(order), device=order.device)
            self.slots[:rows] = renumbered[self.slots[:rows]]
            self.prompts = [self.prompts[slot] for slot in order.tolist()]
            counts = counts[order]
        by_slot, starts = self.slots[:rows].argsort(stable=True), counts.cumsum(0) - counts
        self._asked = torch.empty_like(by_slot)
        """Each row's place among the askers of all classes."""
        self._classes: list[tuple[slice, int, Tensor]] = []
        """Slots that are asked by similarly many rows: by how many at most, and by which, (slots * rows,)."""
        widths = counts.tolist()
        first, before = 0, 0
        while first < len(widths):
            width = widths[first]
            last = first + sum(MAX_PADDING * other >= width for other in widths[first:])
            places = torch.arange(width, device=by_slot.device).expand(last - first, width)
            real = places < counts[first:last, None]
            askers = by_slot[starts[first:last, None] + places.where(real, 0)]
            self._asked[askers[real]] = before + torch.arange(askers.numel(), device=by_slot.device)[real.flatten()]
            self._classes.append((slice(first, last), width, askers.flatten()))
            first, before = last, before + askers.numel()

    def expect(self, places: Tensor, columns: int, masks: Sequence[Tensor]) -> None:
        """Say what the next forward pass does.

        Args:
            places: (R,) column of each row's next token.
            columns: how many to look at; those behind a row's place must be masked.
            masks: by layer, 0 or -inf for what a row may see of its prompt's columns and then of its own,
                (R, 1, 1, prompt columns in use + columns).
        """
        self._places, self._columns, self._masks = places, columns, masks
        self._at: dict[int, Tensor] = {}
        if columns > self.shape[1]:
            more = min(self.max_columns, max(columns, round(GROWTH * self.shape[1])))
            for layer, (keys, values) in enumerate(self.rooms):  # one by one: old and new are there at a time
                self.rooms[layer] = _widened(keys, more), _widened(values, more)
            self.shape = (self.shape[0], more)

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `evals.engines.attention.Attend`: writes a token's key and value to each row, then attends.

        Args:
            query: (R, H, 1, D).
            key, value: (R, K, 1, D), K a divisor of H.

        Returns:
            (R, 1, H, D).
        """
        rows, heads, _, dim = query.shape
        shared = key.shape[1]
        layer = module.layer_idx
        for room, states in zip(self.rooms[layer], (key, value), strict=True):
            room.view(-1, room.shape[3]).index_copy_(0, self._newest(shared), states.reshape(rows * shared, -1))
        keys, values = (room[:rows, :, : self._columns].flatten(0, 1) for room in self.rooms[layer])
        prompt_keys, prompt_values = (room[:, :, : self.prompt_columns] for room in self.prompt_rooms[layer])
        query = query.view(rows, shared, -1, dim) * scale
        own = torch.bmm(query.flatten(0, 1), keys.transpose(1, 2)).view(rows, shared, -1, self._columns)
        asked = self._ask(query, prompt_keys.transpose(2, 3))
        weights = torch.cat([asked, own], -1).add_(self._masks[layer]).softmax(-1, dtype=torch.float32).to(value.dtype)
        of_prompt, of_own = weights.split([self.prompt_columns, self._columns], -1)
        attended = torch.bmm(of_own.flatten(0, 1), values).view(rows, shared, -1, values.shape[-1])
        attended += self._ask(of_prompt, prompt_values)
        return attended.view(rows, 1, heads, -1)

    def _newest(self, heads: int) -> Tensor:
        """Where the rows' newest keys go: one flat index, since indices in two places of four are far slower."""
        if heads not in self._at:
            starts = torch.arange(len(self._places) * heads, device=self._places.device) * self.shape[1]
            self._at[heads] = starts + self._places.repeat_interleave(heads)
        return self._at[heads]

    def _ask(self, states: Tensor, of_prompts: Tensor) -> Tensor:
        """Each row's (K, g, X) times its prompt's (K, X, Y): (R, K, g, Y)."""
        _, shared, queries, _ = states.shape
        answers = []
        for slots, width, askers in self._classes:
            by_slot = states.index_select(0, askers).unflatten(0, (-1, width)).transpose(1, 2)
            product = torch.bmm(by_slot.reshape(-1, width * queries, states.shape[3]), of_prompts[slots].flatten(0, 1))
            answers.append(product.view(-1, shared, width, queries, product.shape[-1]).transpose(1, 2).flatten(0, 1))
        together = answers[0] if len(answers) == 1 else torch.cat(answers)
        return together.index_select(0, self._asked)


def _rooms(layer: Any, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Room for keys and values like a layer's, with other rows and columns: (rows, K, columns, D)."""
    rows, columns = shape
    # Zeros: a masked column still takes part in the attention, with weight 0, and must not hold a NaN by accident.
    keys, values = (
        states.new_zeros(rows, states.shape[1], columns, states.shape[3]) for states in (layer.keys, layer.values)
    )
    return keys, values


def _widened(room: Tensor, columns: int) -> Tensor:
    wider = room.new_empty(*room.shape[:2], columns, room.shape[3])
    wider[:, :, : room.shape[2]] = room
    wider[:, :, room.shape[2] :] = 0
    return wider
