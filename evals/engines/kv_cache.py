"""Keys and values of responses in the making, and attention over them: prompts are kept, and read, once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

FIRST_COLUMNS, GROWTH = 16, 1.5
"""A row's first columns, and by what factor they grow: rows that lie close together are read faster."""


class SharedPromptCache:
    """A row for each response and a slot for each prompt, which all its responses share.

    A response's row begins with the last token of its prompt; the slot holds those before it. Rows and slots come and
    go without the others being copied. The model's attention calls it (`evals.engines.attention`), one token a row.
    """

    def __init__(self, rows: int, max_columns: int, slots: int, prompt_columns: int, device: torch.device) -> None:
        self.max_columns = max_columns
        self.shape, self.prompt_shape = (rows, min(FIRST_COLUMNS, max_columns)), (slots, prompt_columns)
        self.rooms: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each layer, (rows, K, columns, D)."""
        self.prompt_rooms: list[tuple[Tensor, Tensor]] = []
        """Those of the prompts, (slots, K, prompt columns, D)."""
        self.num_slots = 0
        """The first ones are in use."""
        self.slots = torch.zeros(rows, dtype=torch.long, device=device)
        """The slot of each row's prompt."""

    def add_prompts(self, prompts: DynamicCache) -> None:
        """Put prompts that a model has read into the next slots."""
        layers: list[Any] = prompts.layers
        if not self.rooms:
            self.rooms = [_rooms(layer, self.shape) for layer in layers]
            self.prompt_rooms = [_rooms(layer, self.prompt_shape) for layer in layers]
        new = slice(self.num_slots, self.num_slots + len(layers[0].keys))
        for rooms, layer in zip(self.prompt_rooms, layers, strict=True):
            for room, states in zip(rooms, (layer.keys, layer.values), strict=True):
                room[new, :, : states.shape[2]] = states
        self.num_slots = new.stop

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first columns of rows `source` over those of rows `target`."""
        for rooms in self.rooms:
            for room in rooms:
                room[target, :, :columns] = room[source, :, :columns]
        self.slots[target] = self.slots[source]

    def drop_prompts(self, rows: int) -> list[int]:
        """Give up the slots that none of the first rows uses; returns the old numbers of those kept, by new number."""
        kept = self.slots[:rows].unique()
        for rooms in self.prompt_rooms:
            for room in rooms:
                room[: len(kept)] = room[kept]
        self.slots[:rows] = torch.searchsorted(kept, self.slots[:rows])
        self.num_slots = len(kept)
        return kept.tolist()

    def deal(self, rows: int) -> None:
        """Rows or slots have changed: put down which rows ask which prompt."""
        slots = self.slots[:rows]
        counts = slots.bincount(minlength=self.num_slots)
        order = slots.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(rows, device=order.device) - (counts.cumsum(0) - counts)[slots[order]]
        self._width = int(counts.max())
        self._asked = slots * self._width + places
        self._askers = torch.zeros(self.num_slots * self._width, dtype=torch.long, device=order.device)
        self._askers[self._asked] = torch.arange(rows, device=order.device)

    def expect(self, places: Tensor, masks: Sequence[Tensor]) -> None:
        """Say what the next forward pass does.

        Args:
            places: (R,) column of each row's next token.
            masks: by layer, 0 or -inf for what a row may see of its prompt's columns and then of its own,
                (R, 1, 1, prompt columns in use + columns in use).
        """
        self._places, self._masks = places, masks
        self._columns = int(places.max()) + 1
        self.calls = 0
        if self._columns > self.shape[1]:
            more = min(self.max_columns, max(self._columns, round(GROWTH * self.shape[1])))
            self.rooms = [(_widened(keys, more), _widened(values, more)) for keys, values in self.rooms]
            self.shape = (self.shape[0], more)

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `evals.engines.attention.Attend`: writes a token's key and value to each row, then attends.

        Args:
            query: (R, H, 1, D).
            key, value: (R, K, 1, D), K a divisor of H.

        Returns:
            (R, 1, H, D).
        """
        self.calls += 1
        rows, heads, _, dim = query.shape
        shared = key.shape[1]
        layer = module.layer_idx
        mask = self._masks[layer]
        in_prompt = mask.shape[-1] - self._columns
        # One flat index, since indices in two places of four are several times slower.
        at = torch.arange(rows * shared, device=query.device) * self.shape[1] + self._places.repeat_interleave(shared)
        for room, states in zip(self.rooms[layer], (key, value), strict=True):
            room.view(-1, room.shape[3]).index_copy_(0, at, states.reshape(rows * shared, -1))
        keys, values = (room[:rows, :, : self._columns].flatten(0, 1) for room in self.rooms[layer])
        prompt_keys, prompt_values = (
            room[: self.num_slots, :, :in_prompt].flatten(0, 1) for room in self.prompt_rooms[layer]
        )
        query = query.view(rows, shared, -1, dim) * scale
        own = torch.bmm(query.flatten(0, 1), keys.transpose(1, 2)).view(rows, shared, -1, self._columns)
        asked = self._to_rows(torch.bmm(self._to_slots(query), prompt_keys.transpose(1, 2)), query.shape[:3])
        scores = torch.cat([asked, own], -1).add_(mask)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        attended = torch.bmm(weights[..., in_prompt:].flatten(0, 1), values).view(rows, shared, -1, values.shape[-1])
        attended += self._to_rows(torch.bmm(self._to_slots(weights[..., :in_prompt]), prompt_values), query.shape[:3])
        return attended.view(rows, 1, heads, -1)

    def _to_slots(self, states: Tensor) -> Tensor:
        """(R, K, g, X) by row to (slots * K, askers * g, X), padded."""
        by_slot = states.index_select(0, self._askers).unflatten(0, (self.num_slots, self._width))
        return by_slot.transpose(1, 2).reshape(self.num_slots * states.shape[1], -1, states.shape[3])

    def _to_rows(self, states: Tensor, shape: Sequence[int]) -> Tensor:
        """The way back, to (R, K, g, X)."""
        by_slot = states.view(self.num_slots, shape[1], self._width, shape[2], -1).transpose(1, 2)
        return by_slot.flatten(0, 1).index_select(0, self._asked)


def _rooms(layer: Any, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Room for keys and values like a layer's, with other rows and columns: (rows, K, columns, D)."""
    rows, columns = shape
    # Zeros: a masked column still takes part in the attention, with weight 0, and must not hold a NaN by accident.
    keys, values = (
        states.new_zeros(rows, states.shape[1], columns, states.shape[3]) for states in (layer.keys, layer.values)
    )
    return keys, values


def _widened(room: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(room, (0, 0, 0, columns - room.shape[2]))
