"""What is kept of many rows: keys and values, written at slots and compacted by a gather over the accepted slots, and
hidden states, as draft heads read them.

Storage of a layer's keys, or values, is [rows, heads, slots, head_dim]. A row's committed tokens fill its first slots,
in order, and its uncommitted nodes the slots behind them. ``Rows`` makes the masks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...errors import CacheError
from ..base import FINAL_STATE, FeatureSpec, Nodes, Row
from .pass_inputs import GRAIN, Longs, PassInputs, Placement, on_device


def padded(states: Tensor, count: int, sources: Tensor | None) -> Tensor:
    """[1, heads, T, head_dim] of packed queries, keys or values -> [B, heads, width, head_dim] (``Placement``)."""
    if sources is None:
        return states
    lines: Tensor = states.index_select(2, sources)[0].unflatten(1, (count, -1))
    return lines.transpose(0, 1)


def packed(states: Tensor, index: Tensor | None) -> Tensor:
    """[B, width, heads, head_dim] -> [1, T, heads, head_dim], what ``padded`` has laid out."""
    return states if states.shape[0] == 1 or index is None else states[index[0], index[2]][None]


_Kind = tuple[int, int, torch.dtype, torch.device]
"""Of a layer's keys, or values: heads, head_dim, dtype and device."""


class TreeCache(Cache):
    """The cache of one model: preallocated, grown by doubling.

    Keys and values of one kind are in one tensor where it is known how many there are, so that moving a row's slots is
    one gather and one copy, not two a layer.

    Attributes:
        placement: allotted size and where the next pass writes.
        blocks: [n, rows, heads, slots, head_dim] each.
        moves: how often the blocks have moved.

    Args:
        former: a cache of the same model, whose layers' kinds are known.
        most: gives the slots, of all rows together, beyond which it allots no more than is wanted; None: no bound.
    """

    def __init__(self, former: TreeCache | None = None, most: Callable[[], int] | None = None) -> None:
        super().__init__(layers=[])
        self._most = most
        self.placement, self.blocks, self.moves = Placement(), list[Tensor](), 0
        self._expected: Mapping[_Kind, int] = {} if former is None else former._seen or former._expected
        self._seen: Counter[_Kind] = Counter()
        self._free: dict[_Kind, list[tuple[int, int]]] = {}
        self._places: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [rows, heads, slots, head_dim] each."""
        (first, key), (second, value) = self._places[layer]
        return self.blocks[first][key], self.blocks[second][value]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a pass's states, [1, heads, T, head_dim] each, and return views of all that it may attend to."""
        if layer_idx not in self._places:
            self._places[layer_idx] = self._place(key_states), self._place(value_states)
        keys, values = self.of(layer_idx)
        return self._written(keys, key_states), self._written(values, value_states)

    def _place(self, like: Tensor) -> tuple[int, int]:
        """A block for keys or values like a layer's first ones, and the next number in it."""
        at, kind = self.placement, (like.shape[-3], like.shape[-1], like.dtype, like.device)
        if not self._free.get(kind):
            count = max(1, self._expected.get(kind, 0) - self._seen[kind])
            self._free[kind] = [(len(self.blocks), number) for number in range(count)]
            self.blocks.append(_zeros(like, count, at.rows, at.slots))
        self._seen[kind] += 1
        return self._free[kind].pop(0)

    def _written(self, storage: Tensor, states: Tensor) -> Tensor:
        """[B, heads, end, head_dim] of one storage."""
        at = self.placement
        rows = storage.narrow(0, at.first, at.count)
        assert at.index is not None  # noqa: S101
        rows[at.index[0], :, at.index[1]] = states[0].transpose(0, 1)
        return rows.narrow(2, 0, at.end)

    @property
    def is_initialized(self) -> bool:
        return bool(self.blocks)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.placement.end, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.placement.start

    def reserve(self, rows: int, slots: int, *, gives_up: bool = False) -> None:
        """Allot at least ``rows`` x ``slots``: exactly (to the grain) at first, by doubling when it has to grow.

        Where that takes more than ``most`` slots it grows by what is wanted alone. Where memory ends, nothing has
        changed.

        Args:
            gives_up: where that takes more, too, give up all but what is wanted.
        """
        at, factor = self.placement, 2 if self.blocks else 0
        if rows <= at.rows and slots <= at.slots:
            return
        slots = -(-slots // GRAIN) * GRAIN
        grown = max(rows, at.rows), max(slots, at.slots)
        doubled = _doubled(rows, at.rows, factor), _doubled(slots, at.slots, factor)
        most = sys.maxsize if self._most is None else self._most()
        otherwise = (rows, slots) if gives_up else grown
        rows, slots = next((size for size in (doubled, grown) if size[0] * size[1] <= most), otherwise)
        same_rows, same_slots = min(rows, at.rows), min(slots, at.slots)
        blocks = [_zeros(block, len(block), rows, slots) for block in self.blocks]
        for new, old in zip(blocks, self.blocks, strict=True):
            new[:, :same_rows, :, :same_slots] = old[:, :same_rows, :, :same_slots]
        self.blocks, self.moves, at.rows, at.slots = blocks, self.moves + 1, rows, slots

    def place(self, first: int, starts: Sequence[int], counts: Sequence[int], order: Sequence[int]) -> Longs:
        """Set where the next pass writes.

        Args:
            first: first row that it covers.
            starts, counts: of each row that it covers, the slot of the first new token, and how many are new.
            order: of these rows those with new tokens, as their tokens come.

        Returns:
            [3, T] of each token its row among those covered, its slot, and its column of [B, width].
        """
        at = self.placement
        at.first, at.count, at.width = first, len(starts), max(counts)
        at.start, at.end = min(starts[b] for b in order), max(starts[b] + counts[b] for b in order)
        self.reserve(first + len(starts), at.end)
        rows, columns = [b for b in order for _ in range(counts[b])], [i for b in order for i in range(counts[b])]
        return np.array([rows, [starts[b] + i for b, i in zip(rows, columns, strict=True)], columns], np.int64)

    def compact(self, row: int, start: int, path: Sequence[int]) -> Tensor | None:
        """Move slots ``start + p`` of a row, p in ``path`` (ascending), to ``start`` and on.

        Returns:
            ``path`` on the device; None: they lie there.
        """
        moved = next((i for i, p in enumerate(path) if p != i), len(path))
        if moved == len(path):
            return None
        (order,) = on_device(self.blocks[0].device, np.array(path, np.int64))
        source = order[moved:] + start
        for block in self.blocks:
            row_slots = block[:, row]
            row_slots.narrow(2, start + moved, len(source)).copy_(row_slots.index_select(2, source))
        return order

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of one row to another."""
        self.reserve(target + 1, length)
        for block in self.blocks:
            block[:, target, :, :length] = block[:, source, :, :length]


def _doubled(wanted: int, had: int, factor: int) -> int:
    """As many as there were, where these are enough; else at least ``factor`` times as many."""
    return max(wanted, factor * had) if wanted > had else had


def _zeros(like: Tensor, count: int, rows: int, slots: int) -> Tensor:
    """Zeroed: masked slots take part in 0 x value, so they must never hold a NaN."""
    return like.new_zeros(count, rows, like.shape[-3], slots, like.shape[-1])


def long_row(counts: Sequence[int]) -> int | None:
    """Of rows with so many new tokens the one with far more than the others, such as a chunk of a prompt; None: there
    is none. Attention over all in one pass would pad them to more than twice its tokens."""
    longest = max(range(len(counts)), key=counts.__getitem__)
    second = max((n for b, n in enumerate(counts) if b != longest), default=0)
    padded_together = len(counts) * counts[longest] > 2 * (len(counts) * max(1, second) + counts[longest])
    return longest if padded_together else None


def bytes_of(lengths: Sequence[int], slot_bytes: int) -> int:
    """Bytes of a cache for rows of so many tokens, each of which takes ``slot_bytes``: all rows are as long."""
    return len(lengths) * -(-max(lengths, default=0) // GRAIN) * GRAIN * slot_bytes


R = TypeVar("R", bound=Row)


class Rows(Generic[R]):
    """Open rows of a model and their keys and values; rows are numbered without a gap, as they lie in the cache."""

    def __init__(self, former: TreeCache | None = None, most: Callable[[], int] | None = None) -> None:
        self.cache = TreeCache(former, most)
        self._open: list[R] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def longest(self) -> int:
        """Slots that the longest open row fills."""
        return max([row.length + len(row.parents) for row in self._open], default=0)

    def add(self, row: R) -> None:
        """Give a row the number behind the others."""
        row.number = len(self._open)
        self._open.append(row)

    def at(self, number: int) -> R:
        """The open row of a number."""
        return self._open[number]

    def checked(self, row: Row) -> R:
        """``row``, if it is open and this model's; else a ``CacheError``."""
        if 0 <= row.number < len(self._open) and (own_row := self._open[row.number]) is row:
            return own_row
        raise CacheError("the row is closed, or another model's: open its prompt again")

    def place(self, rows: Sequence[R], nodes: Sequence[Nodes]) -> tuple[list[list[int]], PassInputs]:
        """Room for a pass that appends uncommitted nodes to each of some rows, and its inputs.

        Returns:
            parents of the uncommitted nodes of each of ``rows``, the new ones included; the inputs.

        Raises:
            CacheError: a parent does not come before its child; nothing has changed.
        """
        grown = [row.parents + new.parents for row, new in zip(rows, nodes, strict=True)]
        for parents in grown:
            if any(parent >= node for node, parent in enumerate(parents)):
                raise CacheError(f"parents {parents} are not in order: a parent comes before its child")
        first, last = min(r.number for r in rows), max(r.number for r in rows) + 1
        starts = [r.length + len(r.parents) for r in self._open[first:last]]
        fresh = [0] * len(starts)
        for row, new in zip(rows, nodes, strict=True):
            fresh[row.number - first] = len(new.tokens)
        places = self.cache.place(first, starts, fresh, [row.number - first for row in rows])
        return grown, PassInputs.of(rows, nodes, grown, places)

    def commit(self, row: R, path: Sequence[int]) -> Tensor | None:
        """Keep the uncommitted nodes of ``path``, drop the others (``TreeCache.compact`` for what it returns)."""
        row.check_path(path)
        return self._keep(row, path, len(path), [])

    def prune(self, row: R, keep: Sequence[int], trunk: int) -> Tensor | None:
        return self._keep(row, keep, trunk, row.pruned(keep, trunk))

    def _keep(self, row: R, keep: Sequence[int], trunk: int, parents: list[int]) -> Tensor | None:
        order = self.cache.compact(row.number, row.length, keep)
        row.length, row.parents = row.length + trunk, parents
        return order

    def fork(self, row: R, forked: R) -> None:
        """Add a row with the first ``other.length`` of another's committed tokens."""
        self.add(forked)
        self.cache.copy_row(row.number, forked.number, forked.length)

    def close(self, row: R) -> None:
        """Forget a row; the last one in storage takes its place, so that open rows stay side by side."""
        moved = self._open.pop()
        if moved is not row:
            if filled := moved.length + len(moved.parents):
                self.cache.copy_row(moved.number, row.number, filled)
            moved.number = row.number
            self._open[row.number] = moved
        row.number = -1


_PIECES = 64
"""Most pieces that a row's hidden states are kept in: a step adds one, and a copy of all is paid once in so many."""


@dataclass(slots=True, eq=False, kw_only=True)
class FeatureRow(Row):
    """A sequence inside a model that can keep hidden states.

    Attributes:
        features: hidden states of committed tokens in order, in pieces [n, F], since the model tracks them.
        pending: [u, F] hidden states of the uncommitted nodes; None: there are none.
        tracked: which hidden states these are.
    """

    features: list[Tensor] = field(default_factory=list)
    pending: Tensor | None = None
    tracked: FeatureSpec = FINAL_STATE

    def add_features(self, states: Tensor, tracked: FeatureSpec) -> None:
        """Keep hidden states of new uncommitted nodes: the same ones that it keeps of its other tokens.

        Args:
            states: [n, F], those that the model tracks.
            tracked: which these are.
        """
        if not self.features and self.pending is None:
            self.tracked = tracked
        fresh = feature_part(tracked, states, self.tracked)
        self.pending = fresh if self.pending is None else torch.cat([self.pending, fresh])

    def last_features(self, count: int = 0, wanted: FeatureSpec | None = None) -> Tensor:
        """[count, F] hidden states of the last committed tokens, on the model's device.

        Args:
            count: 0: of all since the model tracks them.
            wanted: which; None: all that are kept.

        Raises:
            CacheError: the model does not track them, or fewer are kept.
        """
        pieces = self.features[-count:]  # each has at least one token
        if sum(map(len, pieces)) < max(count, 1):
            raise CacheError("hidden states are missing: call the model's track_features before the row is opened")
        return feature_part(self.tracked, torch.cat(pieces)[-count:], wanted or self.tracked)

    def first_features(self, length: int) -> list[Tensor]:
        """Hidden states of the first ``length`` committed tokens, in one piece, as far as they are tracked."""
        if len(self.features) > 1:
            self.features = [torch.cat(self.features)]
        untracked = self.length - sum(map(len, self.features))
        return [piece[: length - untracked] for piece in self.features if length > untracked]

    def has_features(self, wanted: FeatureSpec) -> bool:
        return not wanted or (self.tracked.covers(wanted) and sum(map(len, self.features)) == self.length)

    def keep_features(self, keep: Sequence[int], trunk: int, index: Tensor | None) -> None:
        """Follow a commit or a prune: of the uncommitted nodes' hidden states those of ``keep`` stay.

        The first ``trunk`` of them are those of committed tokens from now on.

        Args:
            index: ``keep`` on the device; None: they are the first ones.
        """
        pending, self.pending = self.pending, None
        if pending is None or not keep:
            return
        # a copy, not a view of the whole pass's
        states = pending[: len(keep)].clone() if index is None else pending.index_select(0, index)
        if trunk:
            self.features.append(states[:trunk])
            if len(self.features) > _PIECES:
                self.features = [torch.cat(self.features)]
        if trunk < len(keep):
            self.pending = states[trunk:]


def feature_row(row: Row) -> FeatureRow:
    """``row``, if it can keep hidden states; else a ``CacheError``."""
    if isinstance(row, FeatureRow):
        return row
    raise CacheError("the row keeps no hidden states: use a model that can track them")


def feature_part(given: FeatureSpec, states: Tensor, wanted: FeatureSpec) -> Tensor:
    """[..., F'] the wanted ones of [..., F] hidden states.

    Raises:
        CacheError: some of them are missing.
    """
    if wanted == given:
        return states
    if not given.covers(wanted):
        raise CacheError(
            f"hidden states {list(wanted.layers)} are missing, {list(given.layers)} are kept: call the model's "
            "track_features before the row is opened"
        )
    by_layer = dict(zip(given.layers, states.chunk(len(given.layers), dim=-1), strict=True))
    return torch.cat([by_layer[layer] for layer in wanted.layers], dim=-1)
