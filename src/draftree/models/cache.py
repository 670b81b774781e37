"""TreeCache: the KV cache of many rows, written at slots, compacted by a gather over the accepted slots.

Storage per layer is [rows, heads, slots, head_dim]; a row's committed tokens fill its first slots, in order, and its
uncommitted nodes the slots behind them. Knows nothing of trees: who may attend to whom is the caller's mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GRAIN = 64
"""Slots are allotted in multiples of this."""


@dataclass(slots=True)
class Placement:
    """Where the next pass writes, shared by all layers.

    Attributes:
        rows, slots: allotted size of the storage.
        first: the pass covers rows from this on.
        starts: slot of each covered row's first new node.
        end: slots that the pass may attend to.
        index: [covered rows, new nodes] int64 slots on the device, or None when all rows start at the same slot.
    """

    rows: int = 1
    slots: int = GRAIN
    first: int = 0
    starts: Sequence[int] = (0,)
    end: int = 0
    index: Tensor | None = None


def write(
    keys: Tensor, values: Tensor, key: Tensor, value: Tensor, first: int, start: int, end: int, index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Write a pass's states and return views of all that it may attend to; TorchScript can take it as a part.

    Args:
        keys, values: [rows, heads, slots, head_dim], the storage of a layer.
        key, value: [B, heads, width, head_dim], for its rows from ``first`` on.
        start: slot of the first of them in each row, where ``index`` does not say otherwise.
        end: slots that the pass may attend to.
        index: as of ``Placement``.

    Returns:
        [B, heads, end, head_dim] keys and values.
    """
    count, width = key.shape[0], key.shape[2]
    if count < keys.shape[0]:
        keys, values = keys.narrow(0, first, count), values.narrow(0, first, count)
    if index is None:
        keys.narrow(2, start, width).copy_(key)
        values.narrow(2, start, width).copy_(value)
    else:
        row = torch.arange(count, device=keys.device)[:, None]
        keys[row, :, index] = key.transpose(1, 2)
        values[row, :, index] = value.transpose(1, 2)
    return keys.narrow(2, 0, end), values.narrow(2, 0, end)


class TreeLayer(CacheLayerMixin):
    """One layer's keys and values; see the module for the layout."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.placement = placement

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allot zeroed storage: masked slots take part in 0 x value, so they must never hold a NaN."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._allot(key_states)
        self.values = self._allot(value_states)
        self.is_initialized = True

    def _allot(self, like: Tensor) -> Tensor:
        shape = (self.placement.rows, like.shape[1], self.placement.slots, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def grow(self) -> None:
        """Reallocate to the placement's size, keeping what is there."""
        for name in ("keys", "values") if self.is_initialized else ():
            old: Tensor = getattr(self, name)
            if old.shape[0] >= self.placement.rows and old.shape[2] >= self.placement.slots:
                continue
            new = self._allot(old)
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's states at its slots and return views of all that it may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.placement
        return write(self.keys, self.values, key_states, value_states, at.first, at.starts[0], at.end, at.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.placement.end, 0

    def get_seq_length(self) -> int:
        return min(self.placement.starts)

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """The cache of one model: preallocated, grown by doubling.

    Attributes:
        placement: allotted size and where the next pass writes.
    """

    def __init__(self, layers: int) -> None:
        self.placement = Placement()
        self._layers = [TreeLayer(self.placement) for _ in range(layers)]
        super().__init__(layers=list(self._layers))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's states and return all that it may attend to."""
        return self._layers[layer_idx].update(key_states, value_states)

    def storage(self, layers: Iterable[tuple[int, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of some layers, for ``write``; allotted if they are not yet.

        Args:
            layers: number of each, and any tensor [..., heads, ..., head_dim] like its states.
        """
        keys, values = [], []
        for number, like in layers:
            layer = self._layers[number]
            if not layer.is_initialized:
                layer.lazy_initialization(like, like)
            keys.append(layer.keys)
            values.append(layer.values)
        return keys, values

    @property
    def nbytes(self) -> int:
        """Bytes that the storage takes."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._used)

    @property
    def _used(self) -> list[TreeLayer]:
        """The layers that have been written to: a model with fewer layers leaves the others out."""
        return [layer for layer in self._layers if layer.is_initialized]

    def reserve(self, rows: int, slots: int) -> None:
        """Allot at least ``rows`` x ``slots``: exactly (to the grain) at first, by doubling when it has to grow."""
        at = self.placement
        if rows <= at.rows and slots <= at.slots:
            return
        started = bool(self._used)
        size = at.rows, at.slots
        if rows > at.rows:
            at.rows = max(rows, 2 * at.rows) if started else rows
        if slots > at.slots:
            at.slots = -(-max(slots, 2 * at.slots if started else 0) // GRAIN) * GRAIN
        try:
            for layer in self._layers:
                layer.grow()
        except (RuntimeError, MemoryError):  # out of memory: layers that have grown are larger than need be
            at.rows, at.slots = size
            raise

    def place(self, first: int, starts: Sequence[int], width: int, device: torch.device) -> None:
        """Say where the next pass writes: rows from ``first`` on, each from its own start slot."""
        at = self.placement
        last, end = first + len(starts), max(starts) + width
        self.reserve(last, end)
        at.first, at.starts, at.end = first, starts, end
        ragged = min(starts) != max(starts)
        at.index = None
        if ragged:
            slots = torch.tensor(starts)[:, None] + torch.arange(width)
            at.index = slots.to(device, non_blocking=True)

    def compact(self, row: int, start: int, path: Sequence[int]) -> None:
        """Move slots ``start + p`` of a row, p in ``path`` (ascending), to ``start`` and on: one gather a layer."""
        moved = next((i for i, p in enumerate(path) if p != i), len(path))
        if moved == len(path):
            return
        source = torch.tensor([start + p for p in path[moved:]])
        for layer in self._used:
            source = source.to(layer.device, non_blocking=True)
            for states in (layer.keys.select(0, row), layer.values.select(0, row)):
                states.narrow(1, start + moved, len(source)).copy_(states.index_select(1, source))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of one row to another."""
        self.reserve(target + 1, length)
        for layer in self._used:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]
