"""What is kept of many rows: keys and values, written at slots and compacted by a gather over the accepted slots, and
hidden states, as draft heads read them.

Storage of a layer's keys, or values, is [rows, heads, slots, head_dim]. A row's committed tokens fill its first slots,
in order, and its uncommitted nodes the slots behind them. ``Rows`` makes the masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import CacheError
from ...tree import Ints
from ..base import FINAL_STATE, NO_NODES, FeatureSpec, Nodes, Row
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


class Kind(NamedTuple):
    """Of a layer's keys, or values."""

    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, states: Tensor) -> Kind:
        """Of [..., heads, slots, head_dim]."""
        return cls(states.shape[-3], states.shape[-1], states.dtype, states.device)


class Storage:
    """Keys and values of a cache's layers: those of one kind in one tensor where it is known how many there are, so
    that moving a row's slots is one gather and one copy, not two a layer.

    Attributes:
        blocks: [n, rows, heads, slots, head_dim] each.
        expected: how many keys and values of each kind will come, as far as it is known.
        moves: how often a block has moved.
    """

    def __init__(self, placement: Placement, expected: Mapping[Kind, int]) -> None:
        self._placement, self.expected = placement, expected
        self.blocks, self.moves = list[Tensor](), 0
        self._kinds: Counter[Kind] = Counter()
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def seen(self) -> Mapping[Kind, int]:
        """How many keys and values of each kind have come; before the first, how many are expected."""
        return self._kinds or self.expected

    def allot(self, layer: int, *states: Tensor) -> None:
        """Make room for keys and values like a layer's first ones."""
        for number, like in enumerate(states):
            self._places[layer, number] = self._place(Kind.of(like), like)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [rows, heads, slots, head_dim] each."""
        (first, key), (second, value) = self._places[layer, 0], self._places[layer, 1]
        return self.blocks[first][key], self.blocks[second][value]

    def _place(self, kind: Kind, like: Tensor) -> tuple[int, int]:
        """A block, and the next number in it."""
        taken = self._kinds[kind]
        self._kinds[kind] += 1
        for number, block in enumerate(self.blocks):
            if Kind.of(block) == kind:
                if taken < len(block):
                    return number, taken
                taken -= len(block)
        count = max(1, self.expected.get(kind, 0) - taken)
        self.blocks.append(self._zeros(like.new_empty(count, 0, kind.heads, 0, kind.head_size)))
        return len(self.blocks) - 1, 0

    def _zeros(self, like: Tensor) -> Tensor:
        """Zeroed: masked slots take part in 0 x value, so they must never hold a NaN."""
        count, _, heads, _, size = like.shape
        return like.new_zeros(count, self._placement.rows, heads, self._placement.slots, size)

    def grow(self) -> None:
        """Reallocate to the placement's size, keeping what is there."""
        for number, old in enumerate(self.blocks):
            _, rows, _, slots, _ = old.shape
            if rows < self._placement.rows or slots < self._placement.slots:
                self.blocks[number] = self._zeros(old)
                self.moves += 1
                self.blocks[number][:, :rows, :, :slots] = old


class TreeLayer(CacheLayerMixin):
    """One layer's keys and values; see the module for the layout."""

    is_sliding = False

    def __init__(self, number: int, placement: Placement, storage: Storage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.placement, self._number, self._storage = placement, number, storage

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Its keys and values."""
        return self._storage.of(self._number)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for states like these."""
        self._storage.allot(self._number, key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's states, [1, heads, T, head_dim] each, and return views of all that it may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.stored
        return self._written(keys, key_states), self._written(values, value_states)

    def _written(self, storage: Tensor, states: Tensor) -> Tensor:
        """[B, heads, end, head_dim] of one storage."""
        at = self.placement
        rows = storage.narrow(0, at.first, at.count)
        assert at.index is not None  # noqa: S101
        rows[at.index[0], :, at.index[1]] = states[0].transpose(0, 1)
        return rows.narrow(2, 0, at.end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.placement.end, 0

    def get_seq_length(self) -> int:
        return self.placement.start

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """The cache of one model: preallocated, grown by doubling.

    Attributes:
        placement: allotted size and where the next pass writes.
        storage: keys and values of all layers.

    Args:
        former: a cache of the same model, whose layers' kinds are known.
    """

    def __init__(self, layers: int, former: TreeCache | None = None) -> None:
        self.placement = Placement()
        self.storage: Storage = Storage(self.placement, {} if former is None else former.storage.seen)
        super().__init__(layers=[TreeLayer(number, self.placement, self.storage) for number in range(layers)])

    def reserve(self, rows: int, slots: int) -> None:
        """Allot at least ``rows`` x ``slots``: exactly (to the grain) at first, by doubling when it has to grow."""
        at = self.placement
        if rows <= at.rows and slots <= at.slots:
            return
        used, size = bool(self.storage.blocks), (at.rows, at.slots)
        if rows > at.rows:
            at.rows = max(rows, 2 * at.rows) if used else rows
        if slots > at.slots:
            at.slots = -(-max(slots, 2 * at.slots if used else 0) // GRAIN) * GRAIN
        try:
            self.storage.grow()
        except (RuntimeError, MemoryError):  # out of memory: blocks that have grown are larger than need be
            at.rows, at.slots = size
            raise

    def place(
        self, first: int, starts: Sequence[int], counts: Sequence[int], order: Sequence[int] | None = None
    ) -> Longs:
        """Set where the next pass writes.

        Args:
            first: first row that it covers.
            starts, counts: of each row that it covers, the slot of the first new token, and how many are new.
            order: of these rows those with new tokens, as their tokens come; by default as they lie.

        Returns:
            [3, T] of each token its row among those covered, its slot, and its column of [B, width].
        """
        at, own = self.placement, list(range(len(starts))) if order is None else list(order)
        at.first, at.count, at.width = first, len(starts), max(counts)
        at.start, at.end = min(starts[b] for b in own), max(starts[b] + counts[b] for b in own)
        self.reserve(first + len(starts), at.end)
        rows, columns = [b for b in own for _ in range(counts[b])], [i for b in own for i in range(counts[b])]
        return np.array([rows, [starts[b] + i for b, i in zip(rows, columns, strict=True)], columns], np.int64)

    def compact(self, row: int, start: int, path: Sequence[int]) -> Tensor | None:
        """Move slots ``start + p`` of a row, p in ``path`` (ascending), to ``start`` and on.

        Returns:
            ``path`` on the device; None: they lie there.
        """
        moved, blocks = next((i for i, p in enumerate(path) if p != i), len(path)), self.storage.blocks
        if moved == len(path):
            return None
        (kept,) = on_device(blocks[0].device, np.array(path, np.int64))
        source = kept[moved:] + start
        for block in blocks:
            own = block[:, row]
            own.narrow(2, start + moved, len(source)).copy_(own.index_select(2, source))
        return kept

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of one row to another."""
        self.reserve(target + 1, length)
        for block in self.storage.blocks:
            block[:, target, :, :length] = block[:, source, :, :length]


def long_row(counts: Sequence[int]) -> int | None:
    """Of rows with so many new tokens the one with far more than the others, such as a chunk of a prompt; None: there
    is none. Attention over all in one pass would pad them to more than twice its tokens."""
    longest = max(range(len(counts)), key=counts.__getitem__)
    others = max((n for b, n in enumerate(counts) if b != longest), default=0)
    padded_together = len(counts) * counts[longest] > 2 * (len(counts) * max(1, others) + counts[longest])
    return longest if padded_together else None


def bytes_of(lengths: Sequence[int], slot_bytes: int) -> int:
    """Bytes of a cache for rows of so many tokens, each of which takes ``slot_bytes``: all rows are as long."""
    return len(lengths) * -(-max(lengths, default=0) // GRAIN) * GRAIN * slot_bytes


R = TypeVar("R", bound=Row)


class Rows(Generic[R]):
    """Open rows of a model and their keys and values; rows are numbered without a gap, as they lie in the cache."""

    def __init__(self, layers: int, former: TreeCache | None = None) -> None:
        self.cache = TreeCache(layers, former)
        self._open: list[R] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, row: R) -> None:
        """Give a row the number behind the others."""
        row.number = len(self._open)
        self._open.append(row)

    def at(self, number: int) -> R:
        """The open row of a number."""
        return self._open[number]

    def own(self, row: Row) -> R:
        """``row``, if it is open and this model's; else a ``CacheError``."""
        if 0 <= row.number < len(self._open) and (found := self._open[row.number]) is row:
            return found
        raise CacheError("the row is closed, or another model's: open its prompt again")

    def place(self, rows: Sequence[R], nodes: Sequence[Nodes]) -> tuple[list[Ints], PassInputs]:
        """Room for a pass that appends uncommitted nodes to each of some rows, and its inputs.

        Returns:
            parents of the uncommitted nodes of each of ``rows``, the new ones included; the inputs.

        Raises:
            CacheError: a parent does not come before its child; nothing has changed.
        """
        grown = [np.append(row.parents, new.parents) for row, new in zip(rows, nodes, strict=True)]
        for parents in grown:
            if (parents >= np.arange(len(parents))).any():
                raise CacheError(f"parents {parents.tolist()} are not in order: a parent comes before its child")
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
        kept = self.cache.compact(row.number, row.length, path)
        row.length += len(path)
        row.parents = NO_NODES
        return kept

    def prune(self, row: R, keep: Sequence[int], trunk: int) -> Tensor | None:
        """Keep some uncommitted nodes and commit the first of them (``LanguageModel.prune``)."""
        parents = row.pruned(keep, trunk)
        kept = self.cache.compact(row.number, row.length, keep)
        row.length += trunk
        row.parents = parents
        return kept

    def fork(self, row: R, other: R) -> None:
        """Add a row with the first ``other.length`` of another's committed tokens."""
        self.add(other)
        self.cache.copy_row(row.number, other.number, other.length)

    def close(self, row: R) -> None:
        """Forget a row; the last one in storage takes its place, so that open rows stay side by side."""
        moved = self._open.pop()
        if moved is not row:
            self.cache.copy_row(moved.number, row.number, moved.length + len(moved.parents))
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
        kept: which hidden states these are.
    """

    features: list[Tensor] = field(default_factory=list)
    pending: Tensor | None = None
    kept: FeatureSpec = FINAL_STATE

    def add_features(self, states: Tensor, tracked: FeatureSpec) -> None:
        """Keep hidden states of new uncommitted nodes: the same ones that it keeps of its other tokens.

        Args:
            states: [n, F], those that the model tracks.
            tracked: which these are.
        """
        if not self.features and self.pending is None:
            self.kept = tracked
        fresh = feature_part(tracked, states, self.kept)
        self.pending = fresh if self.pending is None else torch.cat([self.pending, fresh])

    def last_features(self, count: int | None = None, wanted: FeatureSpec | None = None) -> Tensor:
        """[count, F] hidden states of the last committed tokens, on the model's device.

        Args:
            count: at least 1; None: of all since the model tracks them.
            wanted: which; None: all that are kept.

        Raises:
            CacheError: the model does not track them, or fewer are kept.
        """
        pieces, left = list[Tensor](), self.length if count is None else count
        for piece in reversed(self.features):
            if left <= 0:
                break
            pieces.append(piece[-left:])
            left -= len(piece)
        if not pieces or (left > 0 and count is not None):
            raise CacheError("hidden states are missing: call the model's track_features before the row is opened")
        return feature_part(self.kept, torch.cat(pieces[::-1]), wanted or self.kept)

    def pending_feature(self, node: int, wanted: FeatureSpec | None = None) -> Tensor:
        """[F] hidden states of an uncommitted node (``last_features``), on the model's device.

        Raises:
            CacheError: the model does not track them, or there is no such node.
        """
        if self.pending is None or node >= len(self.pending):
            raise CacheError("the node has no hidden state: call the model's track_features before it is fed")
        return feature_part(self.kept, self.pending[node], wanted or self.kept)

    def first_features(self, length: int) -> list[Tensor]:
        """Hidden states of the first ``length`` committed tokens, in pieces, as far as they are tracked."""
        left = length - self.length + sum(map(len, self.features))
        pieces: list[Tensor] = []
        for piece in self.features:
            if left > 0:
                pieces.append(piece[:left])
            left -= len(piece)
        return pieces

    def has_features(self, wanted: FeatureSpec) -> bool:
        return not wanted or (self.kept.covers(wanted) and sum(map(len, self.features)) == self.length)

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
        kept = pending[: len(keep)].clone() if index is None else pending.index_select(0, index)
        if trunk:
            self.features.append(kept[:trunk])
            if len(self.features) > _PIECES:
                self.features = [torch.cat(self.features)]
        if trunk < len(keep):
            self.pending = kept[trunk:]


def feature_row(row: Row) -> FeatureRow:
    """``row``, if it can keep hidden states; else a ``CacheError``."""
    if isinstance(row, FeatureRow):
        return row
    raise CacheError("the row keeps no hidden states: use a model that can track them")


def feature_part(kept: FeatureSpec, states: Tensor, wanted: FeatureSpec) -> Tensor:
    """[..., F'] the wanted ones of [..., F] hidden states.

    Raises:
        CacheError: some of them are missing.
    """
    if wanted == kept:
        return states
    if not kept.covers(wanted):
        raise CacheError(
            f"hidden states {list(wanted.layers)} are missing, {list(kept.layers)} are kept: call the model's "
            "track_features before the row is opened"
        )
    each = dict(zip(kept.layers, states.chunk(len(kept.layers), dim=-1), strict=True))
    return torch.cat([each[layer] for layer in wanted.layers], dim=-1)
