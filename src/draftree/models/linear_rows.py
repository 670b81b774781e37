"""Rows that do not branch: tokens follow one another, and a model decodes without drafts.

A recurrent state is computed from all tokens of a sequence: it can be copied, but not cut. So rows keep their tokens,
and one that goes back, or begins with a part of another one, is read anew in its next pass.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Generic, TypeVar

from ..errors import CacheError
from ..scores import LastScores, Scores
from ..tree import ROOT
from .base import Nodes, OpenRows, Row, exclusive


@dataclass(slots=True, eq=False, kw_only=True)
class LinearRow(Row):
    """A sequence inside a model of ``LinearRows``.

    Attributes:
        tokens: committed ones, and behind them those that wait for a commit.
        read: of so many of them there is the state.
    """

    tokens: list[int] = field(default_factory=list)
    read: int = 0


L = TypeVar("L", bound=LinearRow)


class LinearRows(OpenRows[L], Generic[L]):
    """A model with forks, but no trees. One thread at a time can be inside it."""

    def __init__(self, lock: RLock) -> None:
        super().__init__(lock)
        self._scores = LastScores()

    @abstractmethod
    def _add(self, tokens: list[int]) -> L:
        """A new open row that has committed these tokens and not read them."""

    @abstractmethod
    def _make_room(self, tokens: int, rows: int) -> None:
        """Make sure that so many tokens more have room, and so many rows.

        Raises:
            CacheFullError: there is none; no row has changed.
        """

    @abstractmethod
    def _read(self, rows: Sequence[L], texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> Scores:
        """Read what rows have not read of their texts.

        Args:
            wanted: of so many last tokens of each text, none of which is read, the scores are wanted.
        """

    @abstractmethod
    def _forget(self, row: L) -> None:
        """Drop a row's state: it is read anew in its next pass."""

    @abstractmethod
    def _share(self, row: L, forked: L) -> None:
        """Give a row that has committed what another one has read a state like that one's."""

    @exclusive
    def open(self) -> Row:
        return self._add([])

    @exclusive
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        """Append tokens to each row in one pass (``LanguageModel.extend``).

        Raises:
            CacheError: they do not follow one another, behind those that wait; nothing has changed.
        """
        opened, can = [self.checked(row) for row in rows], self.capabilities
        self._scores.expire()
        texts = list[list[int]]()
        for row, new in zip(opened, nodes, strict=True):
            first = len(row.parents) + ROOT
            if new.parents != [*range(first, first + len(new.tokens))]:
                raise CacheError(f"{can.name} takes no trees: {can.no_trees}: give it tokens one after the other")
            texts.append(ids := [*row.tokens, *new.tokens])
            if len(ids) > can.max_length:
                raise CacheError(f"{len(ids)} tokens are more than the longest {can.max_length}: use fewer")
        self._make_room(sum(len(new.tokens) for new in nodes), 0)
        began = time.perf_counter()
        try:
            scores = self._read(opened, texts, [new.scored for new in nodes])
        except BaseException:  # it may have changed the states of some rows
            for row in opened:
                self._forget(row)
            raise
        if any(row.length for row in opened):
            self.pass_seconds += time.perf_counter() - began
        for row, new in zip(opened, nodes, strict=True):
            row.tokens += new.tokens
            row.parents += new.parents
        return self._scores.keep(scores)

    @exclusive
    def commit(self, row: Row, path: Sequence[int]) -> None:
        row = self.checked(row)
        row.check_path(path)
        self._cut(row, row.length + len(path))
        row.length, row.parents = len(row.tokens), []

    @exclusive
    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        row, parents = self.checked(row), row.pruned(keep, trunk)
        self._cut(row, row.length + len(keep))
        row.length, row.parents = row.length + trunk, parents

    def _cut(self, row: L, length: int) -> None:
        del row.tokens[length:]
        if row.read > length:
            self._forget(row)

    @exclusive
    def fork(self, row: Row, length: int | None = None) -> Row:
        """A new row with the first committed tokens of another (``LanguageModel.fork``).

        With all that it has read it shares the state, and with fewer of them it reads them itself in its next pass.
        """
        source, length = self.checked(row), row.prefix(length)
        forked = self._add(source.tokens[:length])
        if length == source.read:
            self._share(source, forked)
            forked.read = length
        return forked

    def close(self, row: Row) -> None:
        """Forget a row (``LanguageModel.close``); another thread's pass is waited for, so that no row stays open."""
        with self._lock:
            row = self.checked(row)
            self._forget(row)
            del self._open[row.number]
            row.number = -1
