"""Trees and chains that entropy shapes, in nats of the draft distribution at the node whose children are chosen.

Sources: Gunjur & Waitz, "Dynamic Tree Speculative Decoding" (B(H), early stopping); Syu & Lee, *Hierarchical
Speculative Decoding with Dynamic Window* (HSDDW; Findings of NAACL 2025), whose threshold is learned ("self-verify").
Published thresholds are the defaults; ``docs/how-it-works/trees.md`` lists where we differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated
from weakref import WeakKeyDictionary

import numpy as np
from annotated_types import Ge

from ..config import MAX_NODES, Checked, Count, Entropy, NodeCount
from ..errors import ConfigError, call_named
from ..request import Outcome, Request
from .base import Child, Frontier, GrowthPolicy, Plan, Width, descending, read_number
from .fixed import StaticTree

EntropyFunction = Callable[[float], float]
"""Entropy in nats -> a number from 0 on: of children (a width) or levels (a depth). Fractions are cut off."""


@dataclass(frozen=True, slots=True)
class BranchingSteps(Checked):
    """The paper's branching function B(H) with its thresholds as settings (Section 4).

    B(H) = 1 if H < ``sure``; 2 if H < ``unsure``; else min(ceil(``slope`` H), ``width``); 0 if H > ``stop``.
    """

    sure: Entropy = 0.02
    unsure: Entropy = 1.0
    slope: Annotated[float, Ge(0)] = 4.0
    width: Width = 7
    stop: Entropy = math.inf

    def __call__(self, entropy: float) -> int:
        """The number of children."""
        if entropy > self.stop:
            return 0
        if entropy < self.sure:
            return 1
        if entropy < self.unsure:
            return 2
        return math.ceil(min(self.width, self.slope * entropy))


@dataclass(frozen=True, slots=True)
class EntropyTree(Checked, GrowthPolicy):
    """Each node gets as many children as a function of its entropy gives, as deep as another one allows.

    The paper bounds width and depth and leaves the number of nodes open (Section 5): with a budget of ``MAX_NODES`` the
    tree is the paper's, which may have thousands of nodes.

    Attributes:
        width_of: entropy -> number of children; the paper's B(H) by default.
        depth_of: entropy -> deepest level at which a node with this entropy may place children; None: ``depth``.
        width: most children of a node, an upper bound of ``width_of``.
        depth: deepest level, an upper bound of ``depth_of``.
    """

    width_of: EntropyFunction = BranchingSteps()
    depth_of: EntropyFunction | None = None
    width: Width = 7
    depth: Count = 4

    def width_for(self, nodes: int) -> int:
        return min(self.width, nodes)

    def grow(self, frontier: Frontier) -> list[Child]:
        counts = self.children(frontier)
        return frontier.likeliest(counts, [frontier.depth + 1 < self.depth] * len(counts))

    def children(self, frontier: Frontier) -> list[int]:
        """[F] numbers of children: ``width_of(H)``, none below level ``depth_of(H)``."""
        entropies = [found.entropy for found in frontier.candidates]
        counts = [_evaluate(self.width_of, "width", entropy) for entropy in entropies]
        if self.depth_of is not None:
            deepest = [_evaluate(self.depth_of, "depth", entropy) for entropy in entropies]
            counts = [count * (most > frontier.depth) for count, most in zip(counts, deepest, strict=True)]
        return counts


def _evaluate(function: EntropyFunction, what: str, entropy: float) -> int:
    """Run a user's function; ConfigError unless it gives a finite number from 0 on."""
    name = f"the {what} function at an entropy of {entropy:.4g} nats"
    value = call_named(name, function, entropy)
    if not isinstance(value, (int, float, np.number)) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} gave {value!r}: use a number from 0 on")
    return math.floor(value)


@dataclass(frozen=True, slots=True)
class BudgetTree(EntropyTree):
    """``EntropyTree`` whose width shrinks so that the node budget lasts to the last level.

    Gunjur & Waitz, Section 5: no children "when the desired branching factor exceeds our speculation budget". A level
    may use what is left of the budget less one node for every level below it. ``fit`` divides that among its parents.
    Where width functions give each node a child or more, the tree reaches ``depth`` (or uses one node a level, where
    the budget is smaller), and is the tree without a budget if that fits.
    """

    def children(self, frontier: Frontier) -> list[int]:
        """[F] numbers of children, within each request's share of this level."""
        pairs = zip(EntropyTree.children(self, frontier), frontier.candidates, strict=True)
        counts = [max(0, min(count, self.width, len(found.tokens))) for count, found in pairs]
        order = descending(frontier.path_logprobs)
        for request in {*frontier.requests}:
            left = frontier.budgets[request] - len(frontier.pools[request].tokens)
            below = max(0, min(frontier.limits[request], self.depth) - (frontier.depth + 1))
            own = [node for node in order if frontier.requests[node] == request]
            for node, count in zip(
                own, fit([counts[node] for node in own], min(max(1, left - below), left)), strict=True
            ):
                counts[node] = count
        return counts


def fit(wanted: Sequence[int], share: int) -> list[int]:
    """Numbers of children of nodes in order of path probability, with a sum of at most ``share``.

    A node gets all the children that it wants, or none where they exceed what the nodes before it have left. Where no
    node would get any, the first that wants children gets ``share``.
    """
    given, left = list[int](), share
    for children in wanted:
        given.append(children if children <= left else 0)
        left -= given[-1]
    if not any(given) and (first := next((i for i, n in enumerate(wanted) if n), None)) is not None:
        given[first] = share
    return given


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
        """Update tau by an outcome. Where a request ends inside its tree, no token was rejected."""
        if len(outcome.tree) and self._least == math.inf:
            self._least = float(outcome.tree.entropies.min())
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
        for request, found in zip(frontier.requests, frontier.candidates, strict=True):
            # a mean of a tree's entropies, which are float32
            tau = np.float32(self.threshold(frontier.plan.requests[request]).value)
            extend.append(frontier.depth + 1 < self.cap and bool(np.float32(found.entropy) <= tau))
        return frontier.likeliest([1] * len(extend), extend)

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Learn tau from each rejected token."""
        for outcome in outcomes:
            self.threshold(outcome.request).learn(outcome)
