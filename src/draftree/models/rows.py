"""The open rows of a model, side by side in one cache; knows nothing of what is stored there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from ..errors import CacheError
from ..tree import ROOT
from .base import Row
from .cache import TreeCache

NO_NODES = torch.zeros(0, dtype=torch.int64)
"""Parents of a row that has no uncommitted nodes."""

R = TypeVar("R", bound=Row)


class Rows(Generic[R]):
    """Open rows; the slot of each is its place in the cache's storage, and none between them is empty.

    Attributes:
        cache: keys and values of all of them.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        self.cache = TreeCache(layers)
        self._open: list[R] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, row: R) -> None:
        """Behind the others."""
        row.slot = len(self._open)
        self._open.append(row)

    def own(self, row: Row) -> R:
        """An open row of this model.

        Raises:
            CacheError: it is not.
        """
        if 0 <= row.slot < len(self._open) and (found := self._open[row.slot]) is row:
            return found
        raise CacheError("the row is closed, or another model's: open its prompt again")

    def place(
        self, rows: Sequence[R], counts: Sequence[int], device: torch.device
    ) -> tuple[int, list[R], list[int], int]:
        """Room for a pass that appends so many tokens to each of some rows.

        Rows between them ride along with padding, so that no keys or values are copied.

        Returns:
            slot of the first row; all rows that the pass covers; where the new slots of each of these start; and the
            width of the pass.
        """
        first, last = min(r.slot for r in rows), max(r.slot for r in rows) + 1
        covered, width = self._open[first:last], max(counts)
        starts = [r.length + r.parents.shape[0] for r in covered]
        self.cache.place(first, starts, width, device)
        return first, covered, starts, width

    def commit(self, row: R, path: Sequence[int]) -> int:
        """Keep the uncommitted nodes of ``path``, drop the others; the last of the path, or ROOT.

        Raises:
            CacheError: ``path`` is not a path from the last committed token down.
        """
        last = ROOT
        for node in path:
            if not 0 <= node < row.parents.shape[0] or int(row.parents[node]) != last:
                raise CacheError(f"cannot commit {list(path)}: node {node} is not a child of {last}")
            last = node
        self.cache.compact(row.slot, row.length, path)
        row.length += len(path)
        row.parents = NO_NODES
        return last

    def prune(self, row: R, keep: Sequence[int], trunk: int) -> None:
        """Keep some uncommitted nodes and commit the first of them (``ForestModel.prune``).

        Raises:
            CacheError: they are not closed under parents, or the trunk is no path that all others descend from.
        """
        parents = row.pruned(keep, trunk)
        self.cache.compact(row.slot, row.length, keep)
        row.length += trunk
        row.parents = parents

    def fork(self, row: R, other: R) -> None:
        """Add a row with another's committed tokens."""
        self.add(other)
        self.cache.copy_row(row.slot, other.slot, row.length)

    def close(self, row: R) -> None:
        """Forget a row; the last one in storage takes its place, so that open rows stay side by side."""
        moved = self._open.pop()
        if moved is not row:
            self.cache.copy_row(moved.slot, row.slot, moved.length + moved.parents.shape[0])
            moved.slot = row.slot
            self._open[row.slot] = moved
        row.slot = -1
