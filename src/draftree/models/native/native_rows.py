"""Rows inside C: opened, forked, committed and closed, for models and draft heads alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import TypeVar

import numpy as np

from ...errors import CacheError
from ...scores import LastScores
from ..base import NO_NODES, Capabilities, FeatureSpec, Nodes, Row, exclusive, free_memory
from .binding import Loaded, Numbers


@dataclass(slots=True, eq=False, kw_only=True)
class NativeRow(Row):
    """A sequence inside a model, whose cells keep hidden states.

    Attributes:
        kept: which: those that were tracked when it, or the row that it was forked from, was opened.
    """

    kept: FeatureSpec

    def has_features(self, wanted: FeatureSpec) -> bool:
        return self.kept.covers(wanted)


R = TypeVar("R", bound=NativeRow)


class NativeRows:
    """What models and heads of the native engine have in common. One thread at a time can be inside one.

    Attributes:
        capabilities: what it can do.
        cache_bytes: memory that the cache may use (``holds``); by default half of what was free at load.
        pass_seconds: wall-clock seconds inside passes so far, first ones of a row not counted.

    Args:
        lock: whoever is inside holds it.
    """

    capabilities: Capabilities
    _loaded: Loaded
    _open: dict[int, NativeRow]

    def __init__(self, lock: RLock) -> None:
        self._lock, self._scores = lock, LastScores()
        self.cache_bytes = free_memory() // 2
        self.forget_rows()

    def forget_rows(self) -> None:
        """Begin without rows: those of the model that this is a copy of stay that model's."""
        self.pass_seconds = 0.0
        self._open = {}

    @property
    def rows(self) -> int:
        """How many rows are open."""
        return len(self._open)

    def reserve(self, rows: int, tokens: int) -> None:
        """Nothing: the cache grows by pages (``LanguageModel.reserve``)."""

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes``."""
        return sum(lengths) * self._loaded.token_bytes <= self.cache_bytes

    def _add(self, row: R) -> R:
        self._open[row.slot] = row
        return row

    def own(self, row: Row) -> NativeRow:
        """``row``, if it is open and this model's."""
        if (found := self._open.get(row.slot)) is row and found is not None:
            return found
        raise CacheError("the row is closed, or another model's: open its prompt again")

    def _pass(self, rows: Sequence[NativeRow], nodes: Sequence[Nodes], *sources: Numbers) -> list[int]:
        """One pass over new nodes of rows; of how many of each the scores are wanted."""
        counts = [len(new.tokens) for new in nodes]
        scored = [new.scored for new in nodes]
        self._check_memory(sum(counts))
        self._scores.expire()
        if len(nodes) == 1:
            tokens, parents = nodes[0].tokens, nodes[0].parents
        else:
            tokens = np.concatenate([new.tokens for new in nodes])
            parents = np.concatenate([new.parents for new in nodes])
        wanted = list[int]()
        for count, last in zip(counts, scored, strict=True):
            wanted += [0] * (count - last) + [1] * last
        began = time.perf_counter()
        self._loaded.extend([row.slot for row in rows], counts, tokens, parents, wanted, *sources)
        if any([row.length for row in rows]):
            self.pass_seconds += time.perf_counter() - began
        for row, new in zip(rows, nodes, strict=True):
            row.parents = np.append(row.parents, new.parents) if len(row.parents) else new.parents
        return scored

    def _check_memory(self, count: int) -> None:
        """Raise CacheError if the cache may not hold ``count`` tokens more."""
        needed = self._loaded.cache_bytes + count * self._loaded.token_bytes
        if needed > self.cache_bytes:
            raise CacheError(
                f"{count} tokens more of {self.capabilities.name} make {needed} bytes of cache, but {self.cache_bytes} "
                "may be used: use shorter prompts, or fewer requests at a time"
            )

    @exclusive
    def commit(self, row: Row, path: Sequence[int]) -> None:
        """Keep the uncommitted nodes of ``path`` and drop the others (``LanguageModel.commit``)."""
        self._loaded.commit(self.own(row).slot, path)
        row.length += len(path)
        row.parents = NO_NODES

    @exclusive
    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        """Keep some uncommitted nodes and commit the first of them (``ForestModel.prune``)."""
        slot, parents = self.own(row).slot, row.pruned(keep, trunk)
        self._loaded.prune(slot, keep, trunk)
        row.length += trunk
        row.parents = parents

    @exclusive
    def fork(self, row: Row, length: int | None = None) -> Row:
        """A new row with the first committed tokens of another, whose pages they share (``LanguageModel.fork``)."""
        own, length = self.own(row), row.length if length is None else length
        if not 0 <= length <= row.length:
            raise CacheError(f"cannot fork {length} tokens of a row of {row.length}")
        return self._add(replace(own, slot=self._loaded.fork(own.slot, length), length=length, parents=NO_NODES))

    def close(self, row: Row) -> None:
        """Forget a row (``LanguageModel.close``); another thread's pass is waited for, so that no row stays open."""
        with self._lock:
            self._loaded.close(self.own(row).slot)
            del self._open[row.slot]
            row.slot = -1
