"""Draft probability -> acceptance probability: a histogram by depth and kind of candidate, learned while decoding.

The draft distribution says how probable a token is to the drafter; what counts is how often the target accepts it once
its parent is accepted ("algorithms", section 8). Lookups are of plain floats, which
are faster than arrays for the few numbers of a layer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from .settings import DEFAULTS, AutoSettings


@dataclass(slots=True, eq=False)
class Record:
    """One request's own acceptance beside the common calibration.

    Attributes:
        hits: accepted candidates, decayed.
        expected: what the calibration expected of the same candidates.
    """

    hits: float = 0.0
    expected: float = 0.0

    @property
    def odds(self) -> float:
        """Factor on the odds of each candidate of this request."""
        return (self.hits + DEFAULTS.pseudo_count) / (self.expected + DEFAULTS.pseudo_count)


class Tried(NamedTuple):
    """A child of an accepted node, verified or not: the text tells whether it is right.

    Attributes:
        depth: 1 for children of the root.
        probability: the draft's.
        hit: it is the target's token.
        kind: candidates of one kind are counted together.
    """

    depth: int
    probability: float
    hit: bool
    kind: int = 0


class Calibration:
    """Acceptance by depth, kind and bin of draft probability.

    The posterior of a cell has the mean of its kind and bin over all depths as its prior, and this has the draft's own
    probability, its log-odds shifted by what the kind learns (one step of Newton's method an observation). Each prior
    stands for ``pseudo_count`` trials.

    Args:
        kinds: how many kinds of candidates there are, such as those of different drafters or ranks.
        settings: of ``auto``.
    """

    def __init__(self, kinds: int = 1, settings: AutoSettings = DEFAULTS) -> None:
        self._settings, self._bins = settings, len(settings.bins) + 1
        self._hits = np.zeros((settings.depths, kinds * self._bins))
        self._trials = np.zeros_like(self._hits)
        self._shift = [0.0] * kinds
        self._prior = settings.pseudo_count / 4  # Fisher information of as many trials at p = 1/2
        self._information = [self._prior] * kinds
        self._lines: tuple[list[float], list[float], list[float]] | None = None

    def begin(self, near: Sequence[bool]) -> None:
        """Set the prior of kinds in pairs, each drafter's first candidates and its others.

        Args:
            near: the drafter's distribution is nearly the target's, as that of quantized weights.
        """
        shift = self._settings.near_shift
        self._shift = [by for n in near for by in ((shift, -shift) if n else (0.0, 0.0))]
        self._lines = None

    def acceptance(self, probabilities: Iterable[float], depth: int, kinds: Iterable[int]) -> list[float]:
        """Acceptance probabilities of candidates at ``depth`` (1 for children of the root) with these draft
        probabilities and kinds.
        """
        return self._accepted((p, depth, kind) for p, kind in zip(probabilities, kinds, strict=True))

    def _accepted(self, candidates: Iterable[tuple[float, int, int]]) -> list[float]:
        """For draft probability, depth and kind; at most 1, or by rounding a child would be likelier than its parent"""
        offset, slope, odds = self._lines or self._fit()
        found = []
        for p, depth, kind in candidates:
            cell = self._cell(p, depth, kind)
            found.append(min(1.0, offset[cell] + slope[cell] * with_odds(p, odds[kind])))
        return found

    def _fit(self) -> tuple[list[float], list[float], list[float]]:
        """Per cell: acceptance = offset + slope x shifted probability; and per kind the odds of the shift."""
        count = self._settings.pseudo_count
        common, own = count / (self._trials.sum(0) + count), count / (self._trials + count)
        offset = own * (self._hits + common * self._hits.sum(0)) / count
        odds = [math.exp(shift) for shift in self._shift]
        self._lines = offset.ravel().tolist(), (own * common).ravel().tolist(), odds
        return self._lines

    def _cell(self, probability: float, depth: int, kind: int) -> int:
        level = min(depth, self._settings.depths) - 1
        return (level * len(self._shift) + kind) * self._bins + bisect_left(self._settings.bins, probability)

    def learn(self, tried: Sequence[Tried], record: Record | None = None) -> None:
        """Count candidates, and what was expected of them in the request's own record."""
        if record is not None:
            record.expected += sum(self._accepted((p, depth, kind) for depth, p, _, kind in tried))
            record.hits += sum(one.hit for one in tried)
        trials, hits = self._trials.reshape(-1), self._hits.reshape(-1)
        for depth, p, hit, kind in tried:
            cell = self._cell(p, depth, kind)
            trials[cell] += 1
            hits[cell] += hit
        self._learn_shift(tried)
        self._lines = None

    def _learn_shift(self, tried: Sequence[Tried]) -> None:
        """One step of Newton's method for the maximum-likelihood shift of the log-odds of each kind."""
        missed, most = [0.0] * len(self._shift), self._settings.max_shift
        odds = [math.exp(shift) for shift in self._shift]
        for _, p, hit, kind in tried:
            q = with_odds(p, odds[kind])
            self._information[kind] += q * (1 - q)
            missed[kind] += hit - q
        for kind, by in enumerate(missed):
            shift = self._shift[kind] + by / self._information[kind]
            self._shift[kind] = min(most, max(-most, shift))

    def fade(self, record: Record | None = None) -> None:
        """Decay all counts by one step."""
        slow, fast = self._settings.slow_decay, self._settings.fast_decay
        self._hits *= slow
        self._trials *= slow
        self._information = [self._prior + slow * (x - self._prior) for x in self._information]
        self._lines = None
        if record is not None:
            record.hits *= fast
            record.expected *= fast


@cache
def first_or_not(count: int) -> tuple[int, ...]:
    """Kinds of candidates in descending order of probability: 0 for the first, 1 for all others."""
    return tuple(int(rank > 0) for rank in range(count))


def with_odds(probability: float, odds: float) -> float:
    """A probability p whose odds p / (1 - p) are multiplied by ``odds``."""
    return odds * probability / max(1 - probability + odds * probability, 1e-6)
