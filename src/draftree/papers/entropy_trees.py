"""Entropy trees: Gunjur & Waitz, "Dynamic Tree Speculative Decoding": trees and chains that entropy shapes.

Entropies are nats of the draft distribution at the node whose children are chosen. Published thresholds are the
defaults. Where we differ: ``BudgetTree`` bounds what the paper leaves open, and ``docs/how-it-works/trees.md`` has the
rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from annotated_types import Ge

from ..config import MAX_NODES, Checked, Count, Entropy
from ..errors import ConfigError, call_named
from ..policies.base import Child, Frontier, GrowthPolicy, Width, descending

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
        entropies = [candidates.entropy for candidates in frontier.candidates]
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
        counts = [max(0, min(count, self.width, len(candidates.tokens))) for count, candidates in pairs]
        order = descending(frontier.path_logprobs)
        for request in {*frontier.requests}:
            left = frontier.budgets[request] - len(frontier.pools[request].tokens)
            below = max(0, min(frontier.limits[request], self.depth) - (frontier.depth + 1))
            nodes = [node for node in order if frontier.requests[node] == request]
            for node, count in zip(
                nodes, fit([counts[node] for node in nodes], min(max(1, left - below), left)), strict=True
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


@dataclass(frozen=True, slots=True)
class EntropyStop(Checked, GrowthPolicy):
    """A chain that ends with the first token whose entropy is above ``stop`` (Gunjur & Waitz, Section 3.1).

    That last position gets ``width`` alternatives instead of one when ``width`` > 1 ("naive width"). The paper names no
    bound of the depth: by default the node budget is all that bounds it.
    """

    stop: Entropy = 1.0
    width: Width = 1
    depth: Count = MAX_NODES

    def width_for(self, nodes: int) -> int:
        return min(self.width, nodes)

    def grow(self, frontier: Frontier) -> list[Child]:
        """One child below ``stop``; ``width`` leaves above; leaves alone at the last level."""
        sure = [candidates.entropy <= self.stop for candidates in frontier.candidates]
        goes_on = frontier.depth + 1 < self.depth
        return frontier.likeliest([1 if each else self.width for each in sure], [each and goes_on for each in sure])


def early_stop(stop: float = 1.0) -> GrowthPolicy:
    """The method ``early-stop``."""
    return EntropyStop(stop)


def naive_width(stop: float = 1.0, width: int = 4, depth: int = MAX_NODES) -> GrowthPolicy:
    """The method ``naive-width``."""
    return EntropyStop(stop, width, depth)


def dynamic_width(
    sure: float = 0.02,
    unsure: float = 1.0,
    slope: float = 4.0,
    width: int = 7,
    depth: int = 4,
    tree: type[EntropyTree] = EntropyTree,
) -> GrowthPolicy:
    """The method ``dynamic-width``, and with another tree ``dynamic-width-budget``."""
    return tree(BranchingSteps(sure, unsure, slope, width), None, width, depth)


dynamic_width_budget = partial(dynamic_width, tree=BudgetTree)


def dynamic_width_depth(
    sure: float = 0.02,
    unsure: float = 1.0,
    slope: float = 4.0,
    width: int = 7,
    depth: int = 8,
    stop: float = 1.75,
) -> GrowthPolicy:
    """The method ``dynamic-width-depth``."""
    return EntropyTree(BranchingSteps(sure, unsure, slope, width, stop), None, width, depth)
