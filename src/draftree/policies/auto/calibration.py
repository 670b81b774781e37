"""Draft probability -> acceptance probability, learned while decoding.

The draft distribution tells how probable a token is to the drafter; what counts is how often the target accepts it once
its parent is accepted. Lookups are of plain floats, which are faster than arrays for the few numbers of a layer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from .settings import DEFAULTS, AutoSettings


class Tried(NamedTuple):
    """A child of an accepted node, verified or not: the text shows whether it is right.

    Attributes:
        probability: the draft's.
        hit: it is the target's token.
        kind: candidates of one kind are counted together.
    """

    probability: float
    hit: bool
    kind: int = 0


class Calibration:
    """Acceptance by kind of candidate and bin of draft probability.

    The posterior of a bin has the draft's own probability as its prior, which stands for ``pseudo_count`` trials, its
    log-odds shifted by what the kind learns (one step of Newton's method an observation).

    Args:
        kinds: how many there are.
        settings: of ``auto``.
    """

    def __init__(self, kinds: int = 1, settings: AutoSettings = DEFAULTS) -> None:
        self._settings = settings
        self._hits = [[0.0] * (len(settings.bins) + 1) for _ in range(kinds)]
        self._trials = [[0.0] * (len(settings.bins) + 1) for _ in range(kinds)]
        self._shift = [0.0] * kinds
        self._prior = settings.pseudo_count / 4  # Fisher information of as many trials at p = 1/2
        self._information = [self._prior] * kinds

    def acceptance(self, probabilities: Iterable[float], kinds: Iterable[int]) -> list[float]:
        """Acceptance probabilities of candidates with these draft probabilities and kinds."""
        odds, count, bins = [math.exp(shift) for shift in self._shift], self._settings.pseudo_count, self._settings.bins
        found = []
        for p, kind in zip(probabilities, kinds, strict=True):
            at = bisect_left(bins, p)
            hits, trials = self._hits[kind][at], self._trials[kind][at]
            # at most 1, or by rounding a child would be likelier than its parent
            found.append(min(1.0, (hits + count * with_odds(p, odds[kind])) / (trials + count)))
        return found

    def learn(self, tried: Sequence[Tried]) -> None:
        keep, most = self._settings.slow_decay, self._settings.max_shift
        for p, hit, kind in tried:
            at, hits, trials = bisect_left(self._settings.bins, p), self._hits[kind], self._trials[kind]
            hits[at], trials[at] = keep * hits[at] + hit, keep * trials[at] + 1
            q = with_odds(p, math.exp(self._shift[kind]))
            self._information[kind] = self._prior + keep * (self._information[kind] - self._prior) + q * (1 - q)
            shift = self._shift[kind] + (hit - q) / self._information[kind]
            self._shift[kind] = min(most, max(-most, shift))


@cache
def first_or_not(count: int) -> tuple[int, ...]:
    """Kinds of candidates in descending order of probability: 0 for the first, 1 for all others."""
    return tuple(int(rank > 0) for rank in range(count))


def with_odds(probability: float, odds: float) -> float:
    """A probability p whose odds p / (1 - p) are multiplied by ``odds``."""
    return odds * probability / max(1 - probability + odds * probability, 1e-6)
