"""HSDDW: Syu & Lee, *Hierarchical Speculative Decoding with Dynamic Window* (Findings of NAACL 2025): the window.

Its hierarchy is ``cascade.py``. Over a cascade the method ``hsddw`` is the paper's whole; over any other drafter it is
its dynamic window alone ("self-verify"). ``docs/how-it-works/cascades.md`` lists where we differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from ..config import Checked, Entropy, NodeCount
from ..policies.base import Child, Frontier, GrowthPolicy, Plan, read_number
from ..policies.fixed import CHAIN
from ..request import Outcome, Request

FIRST = "first"
"""In place of an initial threshold: the least entropy of the request's first draft."""
_STARTS = f"use an entropy in nats, 0 or more, or {FIRST!r}"


@dataclass(slots=True)
class Threshold:
    """The threshold tau of one request: the mean entropy of its rejected tokens.

    Attributes:
        start: tau while nothing has been rejected; None: the least entropy of the first draft.
    """

    start: float | None = None
    _least: float = field(default=math.inf, repr=False)
    _sum: float = field(default=0.0, repr=False)
    _rejected: int = field(default=0, repr=False)

    @property
    def value(self) -> float:
        """Tau in nats; infinite during a first draft whose entropies are to set it."""
        if self._rejected:
            return self._sum / self._rejected
        return self._least if self.start is None else self.start

    def learn(self, outcome: Outcome) -> None:
        """Update tau by an outcome. Where a request ends inside its tree, no token was rejected."""
        if len(outcome.tree) and self._least == math.inf:
            self._least = min(outcome.tree.entropies)
        if outcome.taken == len(outcome.tokens) and (entropy := outcome.rejected_entropy) is not None:
            self._sum, self._rejected = self._sum + entropy, self._rejected + 1


def read_start(what: str, text: float | str) -> float | None:
    """An initial threshold as it is written: entropy in nats, or "first".

    Raises:
        ConfigError: it is neither.
    """
    return None if text == FIRST else read_number(float, what, text, _STARTS)


@dataclass(slots=True)
class DynamicWindow(Checked, GrowthPolicy):
    """A chain that ends where the entropy exceeds tau, the mean entropy of the request's rejected tokens.

    The token whose distribution crossed tau is still drafted, as in the authors' code: if a draft
    could be empty, nothing might ever be rejected, and tau would stay as it is. The defaults are as published.

    Attributes:
        start: tau before any rejection in nats; None: the least entropy of the request's first draft.
        cap: most tokens of a draft.

    Raises:
        ConfigError: a value is out of range.
    """

    over_cascade = CHAIN  # the threshold of the run is the last stage's (``LoopBack``)

    start: Entropy | None = None
    cap: NodeCount = 10
    _thresholds: WeakKeyDictionary[Request, Threshold] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def threshold(self, request: Request) -> Threshold:
        return self._thresholds.setdefault(request, Threshold(self.start))

    def width_for(self, nodes: int) -> int:
        return 1

    def grow(self, frontier: Frontier) -> list[Child]:
        """The most probable token, which gets a child in turn unless tau is crossed."""
        extend = list[bool]()
        for request, candidates in zip(frontier.requests, frontier.candidates, strict=True):
            # a mean of a tree's entropies, which are float32
            tau = np.float32(self.threshold(frontier.plan.requests[request]).value)
            extend.append(frontier.depth + 1 < self.cap and bool(np.float32(candidates.entropy) <= tau))
        return frontier.likeliest([1] * len(extend), extend)

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Learn tau from each rejected token."""
        for outcome in outcomes:
            self.threshold(outcome.request).learn(outcome)


def hsddw(start: str = FIRST, cap: int = 10) -> GrowthPolicy:
    """The method ``hsddw``."""
    return DynamicWindow(read_start("start", start), cap)
