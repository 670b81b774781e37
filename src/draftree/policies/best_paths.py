"""Trees of the most probable paths, which draft more than they verify and keep the best of it; EAGLE-2's is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ..config import Checked, Count
from .base import Child, Frontier, GrowthPolicy, Plan, Pool, best_per_request, highest_in_budget


class BestPaths(GrowthPolicy):
    """A policy that verifies the most probable of the paths that it has drafted, as many as the budget has nodes.

    They are closed under parents, and of all subtrees of that size have the largest E(A) (OPT-Tree, Theorem 3.1).
    """

    by_value = True

    def prune(self, plan: Plan, pools: Sequence[Pool]) -> list[list[bool] | None]:
        return highest_in_budget([*map(attrgetter("path_logprobs"), pools)], plan.budgets)


@dataclass(frozen=True, slots=True)
class Eagle2Tree(Checked, BestPaths):
    """EAGLE-2's tree (Li et al., 2024, Section 4): a beam of ``width`` nodes a layer, the best of all their children.

    Each layer's ``width`` most probable nodes get their ``width`` most probable children; all of these are drafted and
    the budget's most probable nodes of the pool are verified. Published with width 10, depth 6 and 60 nodes.
    """

    width: Count = 10
    depth: Count = 6

    def width_for(self, nodes: int) -> int:
        return self.width

    def pool(self, nodes: int) -> int:
        return self.width + (self.depth - 1) * self.width**2

    def grow(self, frontier: Frontier) -> list[Child]:
        scores = frontier.scores
        paths, requests = list[float](), list[int]()
        for request, row in zip(frontier.requests, scores, strict=True):
            paths += row
            requests += [request] * len(row)
        width = self.width if frontier.depth + 1 < self.depth else 0
        beam = iter(best_per_request(paths, requests, [width] * len(frontier.budgets)))
        return [Child(parent, rank, next(beam)) for parent, row in enumerate(scores) for rank in range(len(row))]
