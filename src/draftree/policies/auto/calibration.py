"""Draft probability -> acceptance probability, learned while decoding.

The draft distribution tells how probable a token is to the drafter. What counts is how often the target accepts the
token where it has accepted the parent.
"""

from __future__ import annotations

import math

from ..base import Candidates

_PRIOR = 1.5
"""Fisher information before any trial: of six trials at p = 1/2."""
_KEEP = 0.998
"""Share of the information beyond it that each further trial leaves."""
_MOST = 4.0
"""Largest correction of log-odds."""
_LEAST = 0.01
"""Candidates that are less likely teach nothing."""
_ONWARD, _TRIALS, _KEEP_TRIALS = 0.6, 10.0, 0.98
"""How often first candidates are right: before any trial, which counts for so many, and what a further trial leaves."""


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


class Trust:
    """What has been learned of one drafter's probabilities: its first candidates and all others are judged apart."""

    def __init__(self) -> None:
        self._first, self._others = Calibration(), Calibration()
        self._right, self._trials = _ONWARD * _TRIALS, _TRIALS

    @property
    def onward(self) -> float:
        """How often a first candidate is right below a token that was."""
        return self._right / self._trials

    def acceptance(self, found: Candidates) -> list[float]:
        """[K] how probable it is that each of a node's candidates is accepted if the node is."""
        first, others = self._first.acceptance, self._others.acceptance
        return [(others if rank else first)(math.exp(logprob)) for rank, logprob in enumerate(found.logprobs)]

    def learn(self, found: Candidates, token: int) -> None:
        """What followed a node in the text was this token."""
        self._right = _KEEP_TRIALS * self._right + (found.tokens[0] == token)
        self._trials = _KEEP_TRIALS * self._trials + 1
        for rank, (guess, logprob) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
            if (p := math.exp(logprob)) > _LEAST:
                (self._others if rank else self._first).learn(p, guess == token)
