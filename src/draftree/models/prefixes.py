"""Rows of texts that a model has read, kept for texts that begin as they do: the turns of a chat, a common preamble."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from operator import attrgetter
from weakref import WeakValueDictionary

from .base import LanguageModel, Row

WORTHWHILE = 16
"""Tokens in common from which on a row is used again: fewer are read as fast as they are copied."""


class PrefixCache:
    """Rows that nobody works on, the least recently used first: they take what others leave of the cache's memory.

    Attributes:
        most: rows that are kept; 0: none.

    Args:
        model: whose rows they are.
        before: tokens that a text has before those of its row: 1 where it is a draft head's.
    """

    def __init__(self, model: LanguageModel, most: int, before: int = 0) -> None:
        self._model, self.most, self._before = model, most, before
        self._rows: list[tuple[Sequence[int], Row]] = []  # rows, and the texts that they begin with

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [row.length for _, row in self._rows]

    def has(self, ids: Sequence[int]) -> bool:
        """``find`` goes on from one of these."""
        return any(self._shared(ids, *text_row) >= WORTHWHILE for text_row in self._rows)

    def find(self, ids: Sequence[int], live: Sequence[tuple[Sequence[int], Row]] = ()) -> Row:
        """A row with as much of a text as there is of it, but for its last token; an empty one where there is nothing.

        A kept row of nothing else is taken over, any other is forked.

        Args:
            live: texts that other rows hold the beginnings of, which somebody works on.
        """
        shared = [self._shared(ids, *text_row) for text_row in self._rows]
        live_shared = [self._shared(ids, *text_row) for text_row in live]
        length = max([*shared, *live_shared], default=0)
        if length < WORTHWHILE:
            return self._model.open()
        if length not in shared:
            return self._model.fork(live[live_shared.index(length)][1], length)
        at = _last(shared, length)
        text, row = self._rows[at]
        if length == row.length:
            del self._rows[at]
            return row
        forked = self._model.fork(row, length)
        del self._rows[at]
        if length + self._before == len(text):
            self._model.close(row)
        else:
            self._rows.append((text, row))
        return forked

    def make_room(
        self,
        lengths: Sequence[int],
        texts: Sequence[Sequence[int]] = (),
        live: Sequence[tuple[Sequence[int], Row]] = (),
    ) -> None:
        """Close rows, the least recently used first, until others have room beside those that stay.

        Args:
            lengths: tokens of each of the others.
            texts: of those among them for which ``find`` is called next. What it takes over for one is counted in
                ``lengths``, and so is what a fork shares with its origin: such rows stay.
            live: of ``find``.
        """
        going_on = {row for text in texts if (row := self._touched(text, live)) is not None}
        while others := [row for _, row in self._rows if row not in going_on]:
            if self._model.holds([*lengths, *map(attrgetter("length"), others)]):
                return
            self._close(others[0])

    def _touched(self, ids: Sequence[int], live: Sequence[tuple[Sequence[int], Row]]) -> Row | None:
        """Let the row that ``find`` goes on from be the last that is evicted.

        None: it goes on from none of these, or from a copy that takes memory of its own.
        """
        shared = [self._shared(ids, *text_row) for text_row in self._rows]
        length = max(shared, default=0)
        if length < WORTHWHILE or any(self._shared(ids, *text_row) > length for text_row in live):
            return None
        self._rows.append(self._rows.pop(_last(shared, length)))
        row = self._rows[-1][1]
        return row if length == row.length or self._model.grows_by_row else None

    def _shared(self, ids: Sequence[int], text: Sequence[int], row: Row) -> int:
        """How much of a text a row holds.

        Nothing where it lacks hidden states: a row that was opened before they were tracked has none; nor where the
        text goes on otherwise inside a row that cannot be cut, that of a model without trees.
        """
        if not row.has_features(self._model.tracked):
            return 0
        shared = min(common_prefix(text, ids) - self._before, row.length, len(ids) - 1 - self._before)
        return 0 if self._model.capabilities.no_trees and shared < row.length else shared

    def keep(self, ids: Sequence[int], row: Row) -> None:
        """Keep a row that begins as a text does, in place of the oldest where there are too many, or too large ones.

        It may go on otherwise: the text ended inside an accepted path, or its step was interrupted between the commit
        and the request's tokens.
        """
        self._model.commit(row, [])
        if row.length < WORTHWHILE or not self._model.holds([row.length]):
            self._model.close(row)
            return
        self._rows.append((ids[: row.length + self._before], row))
        while len(self._rows) > self.most or not self._model.holds(self.lengths):
            self.evict()

    def evict(self) -> None:
        """Close the row that was used least recently."""
        self._close(self._rows[0][1])

    def _close(self, row: Row) -> None:
        self._rows = [text_row for text_row in self._rows if text_row[1] is not row]
        self._model.close(row)

    def clear(self) -> None:
        while self._rows:
            self.evict()


def _last(lengths: Sequence[int], length: int) -> int:
    """Of rows that hold as much of a text the one that was used last."""
    return len(lengths) - 1 - lengths[::-1].index(length)


_SHARED: WeakValueDictionary[tuple[int, int], PrefixCache] = WeakValueDictionary()
"""By the id of their model, which they keep alive, and the rows that they keep at most."""


def shared_prefixes(model: LanguageModel, most: int, before: int = 0) -> PrefixCache:
    """The rows of a model that all its users keep together."""
    return _SHARED.setdefault((id(model), most), PrefixCache(model, most, before))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    most = min(len(one), len(other))
    # slices are compared in C: a handful of comparisons in place of one a token
    return bisect(range(1, most + 1), False, key=lambda n: one[:n] != other[:n])
