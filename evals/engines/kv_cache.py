"""A key-value cache whose rows come and go one by one, each with a length of its own."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

ZEROED_AT_ONCE = 64
"""Columns made ready at a time."""


class RowCache(Cache):
    """Room for a fixed number of rows and columns; row r's token at position p lies in column p.

    Adding or dropping rows leaves the others where they are, so a batch can lose finished responses and take in new
    prompts without being copied.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(layers=[])
        self.shape = (rows, columns)
        self.rooms: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each layer, (rows, K, columns, D)."""
        self._zeroed = 0

    def add(self, row: int, prompts: DynamicCache, copies: Tensor) -> None:
        """Fill rows from `row` on: the i-th with the keys and values of prompt `copies[i]`."""
        layers: list[Any] = prompts.layers
        if not self.rooms:
            self.rooms = [(self._room(layer.keys), self._room(layer.values)) for layer in layers]
        width = prompts.get_seq_length()
        self._make_ready(width)
        for room, layer in zip(self.rooms, layers, strict=True):
            for place, states in zip(room, (layer.keys, layer.values), strict=True):
                place[row : row + len(copies), :, :width] = states[copies]

    def move(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first columns of rows `source` over those of rows `target`."""
        for room in self.rooms:
            for place in room:
                place[target, :, :columns] = place[source, :, :columns]

    def expect(self, rows: Tensor, positions: Tensor, columns: int) -> None:
        """Say where the next token of each of the first R rows goes, and how many columns will then be in use."""
        self._rows, self._positions, self._columns = rows, positions, columns
        self._make_ready(columns)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write one token's (R, K, 1, D) keys and values to each row; returns all columns in use, (R, K, T, D)."""
        for place, states in zip(self.rooms[layer_idx], (key_states, value_states), strict=True):
            place[self._rows, :, self._positions] = states[:, :, 0]
        keys, values = (place[: len(self._rows), :, : self._columns] for place in self.rooms[layer_idx])
        return keys, values

    def _room(self, states: Tensor) -> Tensor:
        return states.new_empty(self.shape[0], states.shape[1], self.shape[1], states.shape[3])

    def _make_ready(self, columns: int) -> None:
        # A masked column still takes part in the attention, with weight 0: it must not hold a NaN by accident.
        if columns > self._zeroed:
            end = columns + ZEROED_AT_ONCE
            for room in self.rooms:
                for place in room:
                    place[:, :, self._zeroed : end] = 0
            self._zeroed = end
