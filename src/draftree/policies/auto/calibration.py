"""How far a draft's probabilities can be trusted: learned from what the target then said.

The draft law says how probable the drafter finds a token; what counts is how often the target says it too, given that
it has said all before it on the path. Counts by draft probability and depth, as decoding goes on, turn the one into the
other (a histogram calibration; "algorithms", section 8, names isotonic regression by depth as a start).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
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
"""Hits as expected that each request's own record begins with."""
_MEMORY = 0.998
"""Share of the counts that each new proposal leaves: old texts fade."""
_NEAR = 0.95
"""The same for one request's own record."""


@dataclass(slots=True, eq=False)
class Record:
    """One request's own luck beside the common counts.

    Attributes:
        hits: candidates that came true, lately.
        expected: how many the common counts expected of the same candidates.
    """

    hits: float = 0.0
    expected: float = 0.0

    @property
    def odds(self) -> float:
        """Factor on the odds of each candidate of this request."""
        return min(4.0, max(0.1, (self.hits + _CALM) / (self.expected + _CALM)))


class Tried(NamedTuple):
    """A candidate below an accepted node: it has been put to the test.

    Attributes:
        depth: 1 for children of the root.
        probability: the draft's.
        hit: it is what the target said.
        kind: how it is counted.
    """

    depth: int
    probability: float
    hit: bool
    kind: int = 0


class Calibration:
    """Counts of candidates and of those that came true, by depth, kind and draft probability.

    A count starts from that of all depths together, and this from the draft's own probability, its odds times a factor
    that each kind learns first: that of a drafter which is right far more often than it is sure is large. Each prior
    stands for ``PRIOR`` trials.

    Few numbers are asked about at a time, between passes that leave nothing of ours in the processor's caches: plain
    ones take less time than arrays.

    Args:
        kinds: of candidates that are counted apart, such as those of different sources or ranks.
    """

    def __init__(self, kinds: int = 1) -> None:
        self._hits = np.zeros((_DEPTHS, kinds, _BINS))
        self._trials = np.zeros((_DEPTHS, kinds, _BINS))
        self._shift = [0.0] * kinds
        self._information = [_INFORMATION] * kinds
        self._line: tuple[list[float], list[float], list[float]] | None = None

    def begin(self, near: Sequence[bool]) -> None:
        """Before anything is learned: of kinds in pairs, a source's first candidates and its others, which are near.

        Args:
            near: what the source says is nearly what the target says (``TokenSource.near``), for each.
        """
        self._shift = [shift for n in near for shift in ((_NEAR_SHIFT, -_NEAR_SHIFT) if n else (0.0, 0.0))]
        self._line = None

    def _lines(self) -> tuple[list[float], list[float], list[float]]:
        """([D K B] offset, [D K B] slope of acceptance over the shifted probability, [K] odds that shift it), until
        something new is learned.
        """
        if self._line is None:
            known = PRIOR / (self._trials.sum(0) + PRIOR)
            own = PRIOR / (self._trials + PRIOR)
            offset = own * (self._hits + known * self._hits.sum(0)) / PRIOR
            self._line = offset.ravel().tolist(), (own * known).ravel().tolist(), [math.exp(x) for x in self._shift]
        return self._line

    def counts(self, depth: int) -> tuple[Floats, Floats, Floats]:
        """([B] middles of the bins, [B] trials, [B] hits) of all kinds together at a depth."""
        edges, level = np.array([0.0, *_EDGES, 1.0]), min(depth, _DEPTHS) - 1
        return (edges[1:] + edges[:-1]) / 2, self._trials[level].sum(0), self._hits[level].sum(0)

    def _cell(self, probability: float, depth: int, kind: int) -> int:
        """Where a candidate is counted."""
        return ((min(depth, _DEPTHS) - 1) * len(self._shift) + kind) * _BINS + bin_of(probability)

    def acceptance(self, probabilities: Iterable[float], depth: int, kinds: Iterable[int]) -> list[float]:
        """Calibrated probabilities, in [0, 1], of candidates at ``depth``, 1 for children of the root.

        Args:
            probabilities: the draft's.
            depth: of the candidates.
            kinds: of each of them.
        """
        return self._accepted((p, depth, kind) for p, kind in zip(probabilities, kinds, strict=True))

    def _accepted(self, candidates: Iterable[tuple[float, int, int]]) -> list[float]:
        """Calibrated probabilities of candidates: the draft's probability, depth and kind of each."""
        offset, slope, odds = self._lines()
        found = []
        for p, depth, kind in candidates:
            cell = self._cell(p, depth, kind)
            accepted = offset[cell] + slope[cell] * with_odds(p, odds[kind])
            found.append(min(1.0, accepted))  # rounded up, a child would be likelier than its parent
        return found

    def learn(self, tried: Sequence[Tried], record: Record | None = None) -> None:
        """Candidates of accepted nodes, of one source or of several, have been put to the test.

        Args:
            tried: all of them.
            record: of the request, where one is kept.
        """
        if record is not None:
            record.expected += sum(self._accepted((p, depth, kind) for depth, p, _, kind in tried))
            record.hits += sum(one.hit for one in tried)
        trials, hits = self._trials.reshape(-1), self._hits.reshape(-1)
        for depth, p, hit, kind in tried:
            cell = self._cell(p, depth, kind)
            trials[cell] += 1
            hits[cell] += hit
        self._shifted(tried)
        self._line = None

    def _shifted(self, tried: Sequence[Tried]) -> None:
        """One step of Newton's method for the likeliest shift of the log-odds of each kind."""
        missed, odds = [0.0] * len(self._shift), [math.exp(shift) for shift in self._shift]
        for _, p, hit, kind in tried:
            q = with_odds(p, odds[kind])
            self._information[kind] += q * (1 - q)
            missed[kind] += hit - q
        for kind, by in enumerate(missed):
            shift = self._shift[kind] + by / self._information[kind]
            self._shift[kind] = min(_MOST_SHIFT, max(-_MOST_SHIFT, shift))

    def fade(self, record: Record | None = None) -> None:
        """One proposal has passed."""
        self._hits *= _MEMORY
        self._trials *= _MEMORY
        self._information = [_INFORMATION + _MEMORY * (x - _INFORMATION) for x in self._information]
        self._line = None
        if record is not None:
            record.hits *= _NEAR
            record.expected *= _NEAR


def bin_of(probability: float) -> int:
    """The bin that a draft probability is counted in."""
    return bisect_left(_EDGES, probability)


@cache
def first_or_not(count: int) -> tuple[int, ...]:
    """Kinds of candidates in descending order: 0 for the first, 1 for all others.

    Of two of one probability the first of its law is more often right where the drafter is nearly the target.
    """
    return tuple(int(rank > 0) for rank in range(count))


def with_odds(probability: float, odds: float) -> float:
    """A probability p whose odds p / (1 - p) are multiplied by ``odds``."""
    return odds * probability / max(1 - probability + odds * probability, 1e-6)
