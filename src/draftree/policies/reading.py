"""Whether a draft model reads a prompt: where what it has lately gained a step pays for that in an answer."""

from __future__ import annotations

import math

_EARNED = 2
"""Credits that the account of reading prompts holds at most, and owes at most: a prompt may take more than one."""


class Answers:
    """How long answers are.

    Attributes:
        length: mean tokens of those so far; infinite before the first has ended.
    """

    def __init__(self, keep: float) -> None:
        self._keep, self.length, self._begun, self._written = keep, math.inf, 0.0, 0.0

    def begin(self, answers: int) -> None:
        """So many begin."""
        if answers and self._begun:
            self.length = self._written / self._begun
        for _ in range(answers):
            self._begun, self._written = self._keep * self._begun + 1, self._keep * self._written

    def write(self, tokens: int) -> None:
        """A step of so many tokens is over."""
        self._written += tokens


class PromptAccount:
    """What one drafter gains a step, and what it may still lose by reading prompts.

    Args:
        credit: AR passes that it may lose at first.
        allowance: that it may lose more with each step without it.
        keep: share of what steps have shown that each further one leaves.
        prior: steps that the assumption before the first one counts as.
    """

    def __init__(self, credit: float, allowance: float, keep: float, prior: float) -> None:
        self._balance = self._credit = credit
        self._allowance, self._keep, self._prior = allowance, keep, prior
        self._gained = self._steps = 0.0

    def may_read(self, reading: float, left: float, assumed: float) -> bool:
        """Whether reading, which takes so many AR passes, pays in ``left`` tokens.

        ``assumed``: AR passes that a step gains, before any has shown it.
        """
        gain = max(0.0, (self._prior * assumed + self._gained) / (self._prior + self._steps))
        return self._balance > 0 and left * gain > (1 + gain) * reading

    def add(self, gained: float, reading: float) -> None:
        """It drafted in a step that gained so many AR passes, beside what reading took."""
        self._gained, self._steps = self._keep * self._gained + gained, self._keep * self._steps + 1
        most = _EARNED * self._credit
        self._balance = max(-most, min(most, self._balance + gained - reading))

    def rest(self) -> None:
        """A step without it is over: what is assumed counts again, in the end."""
        self._gained, self._steps = self._keep * self._gained, self._keep * self._steps
        self._balance = max(self._balance, min(self._credit, self._balance + self._allowance))
