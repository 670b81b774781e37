"""Draft probability -> acceptance probability, learned while decoding.

The draft distribution tells how probable a token is to the drafter; what counts is how often the target accepts it once
its parent is accepted.
"""

from __future__ import annotations

import math

_PRIOR = 1.5
"""Fisher information before any trial: of six trials at p = 1/2."""
_KEEP = 0.998
"""Share of it that each further trial leaves."""
_MOST = 4.0
"""Largest correction of log-odds."""


class Calibration:
    """The log-odds of draft probabilities, shifted by what trials show (one step of Newton's method a trial)."""

    def __init__(self) -> None:
        self._shift, self._odds, self._information = 0.0, 1.0, _PRIOR

    def acceptance(self, probability: float) -> float:
        """How probable it is that a candidate of this draft probability is accepted; no child exceeds its parent."""
        odds = self._odds * probability
        return odds / max(1.0 - probability + odds, 1e-6)

    def learn(self, probability: float, hit: bool) -> None:
        """A child of an accepted node, verified or not: the text shows whether it is right."""
        q = self.acceptance(probability)
        self._information = _PRIOR + _KEEP * (self._information - _PRIOR) + q * (1.0 - q)
        self._shift = min(_MOST, max(-_MOST, self._shift + (hit - q) / self._information))
        self._odds = math.exp(self._shift)
