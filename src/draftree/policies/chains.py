"""Chains that entropy ends: early stopping, and the dynamic window, whose threshold is learned ("self-verify").

Source: Syu & Lee, *Hierarchical Speculative Decoding with Dynamic Window* (HSDDW; Findings of NAACL 2025). Entropies
are in nats, of the draft distribution at the node whose children are chosen. Differences: ``docs/algorithms.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np

from ..config import MAX_NODES, Budget, Checked, Count, Entropy, Nodes, check_fields
from ..errors import ConfigError
from ..request import Outcome, Request
from .base import Child, Frontier, GrowthPolicy, Plan, Width, read_number
from .fixed import StaticTree

FIRST = "first"
"""In place of an initial threshold: the least entropy of the request's first draft."""
CHAIN = StaticTree(1, MAX_NODES)
"""A chain as long as its budget."""
_STARTS = f"use an entropy in nats, 0 or more, or {FIRST!r}"


@dataclass(frozen=True, slots=True)
class EntropyStop(Checked, GrowthPolicy):
    """A chain that ends with the first token whose entropy is above ``stop`` (Gunjur & Waitz, Section 3.1).

    That last position gets ``width`` alternatives instead of one when ``width`` > 1 ("naive width"). Depth is bounded
    by the node budget alone, as in the paper.
    """

    stop: Entropy = 1.0
    width: Width = 1

    def width_for(self, nodes: int) -> int:
        return min(self.width, nodes)

    def grow(self, frontier: Frontier) -> list[Child]:
        """One child below ``stop``; ``width`` leaves above."""
        sure = [found.entropy <= self.stop for found in frontier.candidates]
        return frontier.likeliest([1 if each else self.width for each in sure], sure)


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
        """Update tau by an outcome; the token behind which a request ended within its tree was not rejected."""
        if len(outcome.tree) and self._least == math.inf:
            self._least = float(outcome.tree.entropies.min())
        if outcome.taken == len(outcome.tokens) and (entropy := outcome.rejected_entropy) is not None:
            self._sum, self._rejected = self._sum + entropy, self._rejected + 1


@dataclass(frozen=True, slots=True)
class Window:
    """How far a draft goes; by default as published.

    Attributes:
        start: tau before any rejection in nats; None: the least entropy of the request's first draft.
        keep: the token whose distribution crossed tau is still drafted, as in the authors' code; else it is left out.
        floor: least tokens of a draft, whatever tau is: with 0 nothing might ever be rejected, and tau would be frozen.
        cap: most tokens of a draft.

    Raises:
        ConfigError: a value is out of range, or the cap lies below the floor.
    """

    start: Entropy | None = None
    keep: bool = True
    floor: Count = 1
    cap: Nodes = 10

    def __post_init__(self) -> None:
        check_fields(self)
        if self.floor > self.cap:
            raise ConfigError(f"cap is {self.cap} and floor {self.floor}: use a cap from the floor on")


def read_start(what: str, text: float | str) -> float | None:
    """An initial threshold as it is written: entropy in nats, or "first".

    Raises:
        ConfigError: it is neither.
    """
    return None if text == FIRST else read_number(float, what, text, _STARTS)


@dataclass(slots=True, kw_only=True)
class WindowPlan(Plan):
    """A plan of ``DynamicWindow``.

    Attributes:
        thresholds: [B] of the requests.
    """

    thresholds: Sequence[Threshold]


@dataclass(slots=True)
class DynamicWindow(Checked, GrowthPolicy):
    """A chain that ends where the entropy exceeds tau, the mean entropy of the request's rejected tokens."""

    window: Window = Window()
    _thresholds: WeakKeyDictionary[Request, Threshold] = field(
        default_factory=WeakKeyDictionary, repr=False, compare=False
    )

    def threshold(self, request: Request) -> Threshold:
        return self._thresholds.setdefault(request, Threshold(self.window.start))

    def width_for(self, nodes: int) -> int:
        return 1

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> WindowPlan:
        thresholds = [self.threshold(request) for request in requests]
        return WindowPlan(budgets, thresholds=thresholds)

    def grow(self, frontier: Frontier) -> list[Child]:
        """The most probable token, unless tau is crossed beyond the floor."""
        plan, depth, window = cast(WindowPlan, frontier.plan), frontier.depth + 1, self.window
        counts, extend = list[int](), list[bool]()
        for row, found in zip(frontier.rows, frontier.candidates, strict=True):
            tau = np.float32(plan.thresholds[row].value)  # a mean of a tree's entropies, which are float32
            crossed = depth >= window.floor and bool(np.float32(found.entropy) > tau)
            counts.append(int(window.keep or depth == window.floor or not crossed))
            extend.append(not crossed and depth < window.cap)
        return frontier.likeliest(counts, extend)

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Learn tau from each rejected token."""
        for outcome, tau in zip(outcomes, cast(WindowPlan, plan).thresholds, strict=True):
            tau.learn(outcome)
