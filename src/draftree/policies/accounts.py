"""What ``auto`` knows of its losses: accounts of drafting and of reading prompts, in passes of AR decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import Checked, Count, LearningRate, Positive

_EARNED = 2
"""Credits that the account of reading prompts holds at most, and owes at most: a prompt may take more than one."""


@dataclass(frozen=True, slots=True)
class AutoSettings(Checked):
    """What ``auto`` starts with and how fast it learns; docs/how-it-works/auto.md has what chose each number.

    Attributes:
        credit: AR passes that a drafter may lose before it is off, and as many by reading prompts for nothing.
        again: that it may lose each time it is tried again.
        pause, longest: steps until it is tried again, twice as many each time up to the longest. Once it has gained
            all of its credit, the first pause counts again. Reading prompts may lose what one try does, each
            ``longest`` steps.
        keep: share of what steps have shown that each further one leaves.
        prior: steps that the assumptions before the first one count as.
        onward: of these, how often first candidates are right.
        text_layer, model_layer: seconds of a layer that texts give, and of one beside its model's pass in a loop of its
            own, before any is measured.
    """

    credit: Positive = 4.0
    again: Positive = 1.0
    pause: Count = 8
    longest: Count = 128
    keep: LearningRate = 0.99
    prior: Positive = 10.0
    onward: LearningRate = 0.6
    text_layer: Positive = 1e-4
    model_layer: Positive = 5e-4


class Account:
    """AR passes that a drafter may still lose; without any it pauses.

    Attributes:
        balance: what it has gained and not spent, within the credit.
        pausing: steps until it is tried again; 0: it may draft.
    """

    def __init__(self, settings: AutoSettings, share: float) -> None:
        self._settings, self._share, self.pausing, self._pause = settings, share, 0, settings.pause
        self.balance = share * settings.credit

    def add(self, passes: float) -> None:
        """A step gained so many AR passes, or lost them."""
        settings, credit = self._settings, self._share * self._settings.credit
        self.balance = min(credit, self.balance + passes)
        if self.balance == credit:
            self._pause = settings.pause
        elif self.balance <= 0:
            self.balance, self.pausing = self._share * settings.again, self._pause
            self._pause = min(2 * self._pause, settings.longest)


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


def _size(reading: float) -> int:
    """Of which prompts one is that takes so many AR passes to read: up to 1, 2, 4, ..."""
    return max(0, math.ceil(math.log2(reading)))


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
        self._balances, self._asked, self._begun = dict[int, float](), 0, 0  # sizes of prompts, the last ones
        self._gained = self._steps = 0.0

    def pays(self, reading: float, left: float, assumed: float) -> bool:
        """Whether reading on, which takes so many AR passes, pays in ``left`` passes that draft.

        ``assumed``: AR passes that a step gains, before any has shown it.
        """
        gain = max(0.0, (self._prior * assumed + self._gained) / (self._prior + self._steps))
        return left * gain > (1 + gain) * reading

    def may_begin(self, reading: float, promised: float = 0.0) -> bool:
        """Whether there is credit for a prompt that takes so many AR passes to read.

        ``promised``: that others have yet to take, whose reading has begun.
        """
        self._asked = _size(reading)
        if self.balance(reading) <= promised:
            return False
        self._begun = self._asked
        return True

    def balance(self, reading: float) -> float:
        """AR passes that it may still lose by reading prompts that take about so many."""
        return self._balances.get(_size(reading), self._credit)

    def add(self, gained: float, share: float = 1.0) -> None:
        """It drafted for a share of a step's requests, and gained so many AR passes."""
        self._gained, self._steps = self._keep * self._gained + gained, self._keep * self._steps + share
        self._count(self._begun, gained)
        if self._asked != self._begun:
            self._allow()

    def spend(self, reading: float, read: float) -> None:
        """Reading a prompt, which takes ``reading`` AR passes in all, has taken so many."""
        self._count(_size(reading), -read)

    def _count(self, size: int, passes: float) -> None:
        most, balance = _EARNED * self._credit, self._balances.get(size, self._credit)
        self._balances[size] = max(-most, min(most, balance + passes))

    def rest(self) -> None:
        """A step without it is over: what is assumed counts again, in the end."""
        self._gained, self._steps = self._keep * self._gained, self._keep * self._steps
        self._allow()

    def _allow(self) -> None:
        """A step without prompts of the size that was asked for last."""
        balance = self._balances.get(self._asked, self._credit)
        self._balances[self._asked] = max(balance, min(self._credit, balance + self._allowance))
