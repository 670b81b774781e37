"""How far a draft's probabilities can be trusted: learned from what the target then said.

The draft law says how probable the drafter finds a token; what counts is how often the target says it too, given that
it has said all before it on the path. Counts by draft probability and depth, as decoding goes on, turn the one into the
other (a histogram calibration; "algorithms", section 8, names isotonic regression by depth as a start).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

_EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
"""Bounds of the bins of draft probability."""
_BINS = len(_EDGES) + 1
_DEPTHS = 4
"""Depths 1, 2, ...; the last stands for all deeper ones."""
PRIOR = 4.0
"""Trials that the draft's own probability counts for."""
_INFORMATION, _MOST_SHIFT = 2.0, 4.0
"""Fisher information that a kind's shift of log-odds starts with, and the largest shift."""
_NEAR_SHIFT = 3.0
"""Of log-odds: a drafter that is nearly the target says first what the target says, however sure it is of it."""
_CALM = 4.0
"""Hits as expected that each sequence's own record begins with."""
_MEMORY = 0.998
"""Share of the counts that each new proposal leaves: old texts fade."""
_NEAR = 0.95
"""The same for one sequence's own record."""


@dataclass(slots=True, eq=False)
class Record:
    """One sequence's own luck beside the common counts.

    Attributes:
        hits: candidates that came true, lately.
        expected: how many the common counts expected of the same candidates.
    """

    hits: float = 0.0
    expected: float = 0.0

    @property
    def odds(self) -> float:
        """Factor on the odds of each candidate of this sequence."""
        return min(4.0, max(0.1, (self.hits + _CALM) / (self.expected + _CALM)))


class Calibration:
    """Counts of candidates and of those that came true, by depth, kind and draft probability.

    A count starts from that of all depths together, and this from the draft's own probability, its odds times a factor
    that each kind learns first: that of a drafter which is right far more often than it is sure is large. Each prior
    stands for ``PRIOR`` trials.

    Args:
        kinds: of candidates that are counted apart, such as those of different sources or ranks.
    """

    def __init__(self, kinds: int = 1) -> None:
        self._hits = np.zeros((_DEPTHS, kinds, _BINS))
        self._trials = np.zeros((_DEPTHS, kinds, _BINS))
        self._shift = np.zeros(kinds)
        self._information = np.full(kinds, _INFORMATION)
        self._line: tuple[Floats, Floats, Floats] | None = None

    def begin(self, near: Sequence[bool]) -> None:
        """Before anything is learned: of kinds in pairs, a source's first candidates and its others, which are near.

        Args:
            near: what the source says is nearly what the target says (``Source.near``), for each.
        """
        self._shift = np.array([shift for n in near for shift in ((_NEAR_SHIFT, -_NEAR_SHIFT) if n else (0.0, 0.0))])
        self._line = None

    def _lines(self) -> tuple[Floats, Floats, Floats]:
        """([D, K B] offset, [D, K B] slope of acceptance over the shifted probability, [K] odds that shift it), until
        something new is learned.
        """
        if self._line is None:
            known = PRIOR / (self._trials.sum(0) + PRIOR)
            own = PRIOR / (self._trials + PRIOR)
            offset = own * (self._hits + known * self._hits.sum(0)) / PRIOR
            self._line = offset.reshape(_DEPTHS, -1), (own * known).reshape(_DEPTHS, -1), np.exp(self._shift)
        return self._line

    @staticmethod
    def bins(probabilities: Floats) -> Ints:
        """Of each draft probability, the bin that it is counted in."""
        return _EDGES.searchsorted(probabilities)

    def counts(self, depth: int) -> tuple[Floats, Floats, Floats]:
        """([B] middles of the bins, [B] trials, [B] hits) of all kinds together at a depth."""
        edges, level = np.concatenate([[0.0], _EDGES, [1.0]]), min(depth, _DEPTHS) - 1
        return (edges[1:] + edges[:-1]) / 2, self._trials[level].sum(0), self._hits[level].sum(0)

    def acceptance(self, probabilities: ArrayLike, depth: int, kinds: ArrayLike = 0) -> Floats:
        """Calibrated probabilities, in [0, 1], of candidates at ``depth``, 1 for children of the root.

        Args:
            probabilities: the draft's, any shape.
            depth: of the candidates.
            kinds: of each of them, of a shape that broadcasts; or one for all.
        """
        p, kind = np.asarray(probabilities, np.float64), np.asarray(kinds, np.int64)
        offset, slope, odds = self._lines()
        level, bins = min(depth, _DEPTHS) - 1, self.bins(p) + kind * _BINS
        found: Floats = offset[level].take(bins) + slope[level].take(bins) * with_odds(p, odds[kind])
        return np.minimum(found, 1.0)  # rounded up, a child would be likelier than its parent

    def learn(
        self,
        depth: int,
        probabilities: Sequence[float],
        hits: Sequence[int],
        record: Record | None = None,
        kinds: ArrayLike = 0,
    ) -> None:
        """All candidates of one accepted node, of one source or of several, have been put to the test.

        Args:
            depth: of the candidates.
            probabilities: the draft's.
            hits: which of them are what the target said.
            record: of the sequence, where one is kept.
            kinds: of each candidate, or one for all.
        """
        if not probabilities:
            return
        level, p = min(depth, _DEPTHS) - 1, np.array(probabilities)
        kind = np.broadcast_to(np.asarray(kinds, np.int64), p.shape)
        if record is not None:
            record.expected += float(self.acceptance(p, depth, kind).sum())
            record.hits += len(hits)
        bins = self.bins(p) + kind * _BINS
        np.add.at(self._trials[level].reshape(-1), bins, 1)
        for hit in hits:
            self._hits[level].reshape(-1)[bins[hit]] += 1
        self._shifted(p, kind, hits)
        self._line = None

    def _shifted(self, p: Floats, kind: Ints, hits: Sequence[int]) -> None:
        """One step of Newton's method for the likeliest shift of the log-odds of each kind."""
        q = with_odds(p, np.exp(self._shift)[kind])
        missed = -q
        missed[list(hits)] += 1
        kinds = len(self._shift)
        self._information += np.bincount(kind, q * (1 - q), kinds)
        step = np.bincount(kind, missed, kinds) / self._information
        self._shift = (self._shift + step).clip(-_MOST_SHIFT, _MOST_SHIFT)

    def fade(self, record: Record | None = None) -> None:
        """One proposal has passed."""
        self._hits *= _MEMORY
        self._trials *= _MEMORY
        self._information = _INFORMATION + _MEMORY * (self._information - _INFORMATION)
        self._line = None
        if record is not None:
            record.hits *= _NEAR
            record.expected *= _NEAR


@cache
def first_or_not(count: int) -> Ints:
    """Kinds of candidates in descending order: 0 for the first, 1 for all others.

    Of two of one probability the first of its law is more often right where the drafter is nearly the target.
    """
    kinds = np.ones(count, np.int64)
    kinds[:1] = 0
    kinds.flags.writeable = False
    return kinds


def with_odds(probabilities: Floats, odds: Floats) -> Floats:
    """Probabilities whose odds p / (1 - p) are multiplied by ``odds``."""
    return odds * probabilities / np.maximum(1 - probabilities + odds * probabilities, 1e-6)
