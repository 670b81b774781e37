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
        """Count so many new answers; ``length`` is that of the earlier ones."""
        if answers and self._begun:
            self.length = self._written / self._begun
        for _ in range(answers):
            self._begun, self._written = self._keep * self._begun + 1, self._keep * self._written

    def write(self, tokens: int) -> None:
        """Count the tokens of a step."""
        self._written += tokens


class PromptAccount:
    """What one drafter gains a step, and what it may still lose by reading prompts: by long ones and short ones apart.

    Where a long prompt was read for nothing, a short one may still pay: prompts that take at most 1, 2, 4, ...
    AR passes to read have a balance each, to which the steps until another prompt count.

    Args:
        credit: AR passes that it may lose at first.
        allowance: that it may lose more with each step without it.
        keep: share of what steps have shown that each further one leaves.
        prior: steps that the assumption before the first one counts as.
    """

    def __init__(self, credit: float, allowance: float, keep: float, prior: float) -> None:
        self._credit, self._allowance, self._keep, self._prior = credit, allowance, keep, prior
        self._balances, self._size = dict[int, float](), 0
        self._gained = self._steps = 0.0

    def may_read(self, reading: float, left: float, assumed: float) -> bool:
        """Whether reading, which takes so many AR passes, pays in ``left`` tokens.

        ``assumed``: AR passes that a step gains, before any has shown it.
        """
        self._size = max(0, math.ceil(math.log2(reading)))
        gain = max(0.0, (self._prior * assumed + self._gained) / (self._prior + self._steps))
        return self._balances.get(self._size, self._credit) > 0 and left * gain > (1 + gain) * reading

    def add(self, gained: float, reading: float) -> None:
        """It drafted in a step that gained so many AR passes, beside what reading took."""
        self._gained, self._steps = self._keep * self._gained + gained, self._keep * self._steps + 1
        most, balance = _EARNED * self._credit, self._balances.get(self._size, self._credit)
        self._balances[self._size] = max(-most, min(most, balance + gained - reading))

    def rest(self) -> None:
        """A step without it is over: what is assumed counts again, in the end."""
        self._gained, self._steps = self._keep * self._gained, self._keep * self._steps
        balance = self._balances.get(self._size, self._credit)
        self._balances[self._size] = max(balance, min(self._credit, balance + self._allowance))
