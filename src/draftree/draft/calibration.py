"""How far a draft's probabilities can be trusted: learned from what the target then said.

The draft law says how probable the drafter finds a token; what counts is how often the target says it too, given that
it has said all before it on the path. Counts by draft probability and depth, as decoding goes on, turn the one into the
other (a histogram calibration; "algorithms", section 8, names isotonic regression by depth as a start).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_EDGES = torch.tensor([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
"""Bounds of the bins of draft probability."""
_BINS = len(_EDGES) + 1
_DEPTHS = 4
"""Depths 1, 2, ...; the last stands for all deeper ones."""
_PRIOR = 4.0
"""Trials that the draft's own probability counts for."""
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
    """Acceptance of a candidate, given that its parent was accepted, by draft probability and depth.

    Args:
        kinds: of candidates that are counted apart, such as those of different sources.
    """

    def __init__(self, kinds: int = 1) -> None:
        self._hits = torch.zeros(_DEPTHS, kinds, _BINS)
        self._trials = torch.zeros(_DEPTHS, kinds, _BINS)

    def acceptance(self, probabilities: Tensor, depth: int, kinds: Tensor | int = 0) -> Tensor:
        """Calibrated probabilities, in [0, 1], of candidates at ``depth``, 1 for children of the root.

        Args:
            probabilities: the draft's, any shape.
            depth: of the candidates.
            kinds: int64 of each of them, of a shape that broadcasts; or one for all.
        """
        level, bins = min(depth, _DEPTHS) - 1, torch.bucketize(probabilities, _EDGES) + kinds * _BINS
        hits, trials = self._hits[level].take(bins), self._trials[level].take(bins)
        return (hits + _PRIOR * probabilities) / (trials + _PRIOR)

    def learn(
        self, depth: int, probabilities: Sequence[float], hit: int | None, record: Record | None = None, kind: int = 0
    ) -> None:
        """All candidates of one accepted node have been put to the test.

        Args:
            depth: of the candidates.
            probabilities: the draft's.
            hit: which of them the target said; None for none.
            record: of the sequence, where one is kept.
            kind: of the candidates.
        """
        if not probabilities:
            return
        level, p = min(depth, _DEPTHS) - 1, torch.tensor(probabilities)
        bins = torch.bucketize(p, _EDGES)
        if record is not None:
            record.expected += float(self.acceptance(p, depth, kind).sum())
            record.hits += hit is not None
        self._trials[level, kind].index_add_(0, bins, torch.ones(len(p)))
        if hit is not None:
            self._hits[level, kind, bins[hit]] += 1

    def fade(self, record: Record | None = None) -> None:
        """One proposal has passed."""
        self._hits *= _MEMORY
        self._trials *= _MEMORY
        if record is not None:
            record.hits *= _NEAR
            record.expected *= _NEAR


def with_odds(probabilities: Tensor, odds: Tensor) -> Tensor:
    """Probabilities whose odds p / (1 - p) are multiplied by ``odds``."""
    return odds * probabilities / (1 - probabilities + odds * probabilities).clamp(min=1e-6)
