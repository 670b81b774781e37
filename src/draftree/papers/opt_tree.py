"""OPT-Tree: Wang et al., "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure" (2024).

Of a budget of nodes it verifies the most probable paths, and it drafts layer by layer while that gains enough. Where we
differ: the threshold is by default what a draft pass costs (``OptTree.delta``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Annotated, cast

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from ..config import MAX_NODES, Budget, Checked, Count
from ..policies.base import Child, Frontier, GrowthPolicy, GrowthRule, Plan, read_number
from ..policies.best_paths import BestPaths
from ..request import Outcome, Request

_DECAY = 0.9
"""Exponential decay of the averages behind the automatic threshold, per step."""
_UNMEASURED = 0.5
"""The automatic threshold before a step has been measured, as in the authors' code."""


@dataclass(slots=True)
class OptTree(Checked, BestPaths):
    """The tree of n nodes with the largest expected acceptance length E(A) (Wang et al., "OPT-Tree", Algorithm 1).

    Each layer takes the n most probable candidates; drafting goes on while the best n-node subtree gains more than
    ``delta`` by a layer. A candidate outside the best n of all that has been drafted cannot come back in, so it is
    neither kept nor extended: the tree is the same and less is drafted.

    Attributes:
        delta: least gain in E(A) for one more draft pass; None sets it to rate x draft-pass time (tokens a
            second so far times the seconds of a pass), which is what the pass's time would have yielded otherwise.
        depth: deepest level; by default the node budget alone bounds it, as in the paper (D(T) < n).
    """

    delta: Annotated[float, Interval(gt=0, lt=1)] | None = None
    depth: Count = MAX_NODES
    _sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4), init=False, repr=False, compare=False)
    """Fading sums over steps: tokens, seconds, those of drafting, and layers."""

    @property
    def threshold(self) -> float:
        if self.delta is not None:
            return self.delta
        tokens, seconds, draft_seconds, layers = self._sums.tolist()
        return min(1.0, tokens / seconds * draft_seconds / layers) if layers and seconds else _UNMEASURED

    def pool(self, nodes: int) -> int:
        """At most n nodes a layer, less the d - 1 above layer d that stay among the best n with them."""
        depth = min(self.depth, nodes)
        return nodes * depth - depth * (depth - 1) // 2

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> Plan:
        return _BestSoFar(budgets, best=[[] for _ in budgets])

    def rule(self, plan: Plan) -> GrowthRule | None:
        return GrowthRule(max([budget.nodes for budget in plan.budgets]), self.depth, self.threshold)

    def grow(self, frontier: Frontier) -> list[Child]:
        """Keep the nodes that are among the best n so far; go on where E(A) has gained more than the threshold."""
        plan, requests = cast(_BestSoFar, frontier.plan), frontier.requests
        scores, gain = list[tuple[float, int, int]](), [0.0] * len(plan.best)
        for parent, candidates in enumerate(frontier.candidates):
            path, least = frontier.path_logprobs[parent], plan.least(requests[parent])
            for rank, logprob in enumerate(candidates.logprobs):
                if path + logprob <= least:
                    break
                scores.append((-path - logprob, parent, rank))
        entered = list[tuple[int, int, float]]()
        for negative, parent, rank in sorted(scores):  # of equal paths the earlier one stays
            request, score = requests[parent], -negative
            if score > plan.least(request):
                gain[request] += plan.enter(request, score)
                entered.append((parent, rank, score))
        threshold = self.threshold if frontier.depth + 1 < self.depth else math.inf
        return [
            # children of the least probable node of n are no more probable
            Child(parent, rank, gain[requests[parent]] > threshold and score > plan.least(requests[parent]))
            for parent, rank, score in sorted(entered)
        ]

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Learn the tokens a second and the seconds of a layer for the automatic threshold.

        The first step of a request is left out: a drafting model reads the prompt in it.
        """
        layers, taken = 0, 0
        for outcome in outcomes:
            if outcome.request.stats.steps == 0:
                return
            layers, taken = max(layers, outcome.tree.depth), taken + outcome.taken
        cost = outcomes[0].step
        seconds = cost.draft + cost.verify + cost.other
        self._sums = _DECAY * self._sums + (taken / len(outcomes), seconds, cost.draft, layers)


@dataclass(slots=True)
class _BestSoFar(Plan):
    """A plan of ``OptTree``.

    Attributes:
        best: for each request the path log-probabilities of its most probable nodes, a heap.
    """

    best: list[list[float]] = field(default_factory=list)

    def least(self, request: int) -> float:
        """Only paths above it come in."""
        best = self.best[request]
        return best[0] if len(best) == self.budgets[request].nodes else -math.inf

    def enter(self, request: int, score: float) -> float:
        """Take a path in; returns what E(A) gains."""
        best = self.best[request]
        if len(best) < self.budgets[request].nodes:
            heappush(best, score)
            return math.exp(score)
        return math.exp(score) - math.exp(heapreplace(best, score))


def opt_tree(delta: str = "auto", depth: int = MAX_NODES) -> GrowthPolicy:
    """The method ``opt-tree``."""
    way_out = "use a gain between 0 and 1, both excluded, or 'auto'"
    return OptTree(None if delta == "auto" else read_number(float, "delta", delta, way_out), depth)
