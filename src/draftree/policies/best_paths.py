"""Trees of the most probable paths: OPT-Tree and EAGLE-2. Both draft more than they verify and keep the best of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from ..config import MAX_NODES, Checked, Count
from ..request import Outcome
from ..tree import DraftTree, Floats
from .base import (
    Flags,
    Frontier,
    Growth,
    GrowthPolicy,
    Numbers,
    Plan,
    Pool,
    Tags,
    best_per_row,
    highest_in_budget,
)

_DECAY = 0.9
"""Exponential decay of the averages behind the automatic threshold, per step."""
_UNMEASURED = 0.5
"""The automatic threshold before a step has been measured, as in the authors' code."""


class BestPaths(GrowthPolicy):
    """A policy that verifies the most probable of the paths that it has drafted, as many as the budget has nodes.

    They are closed under parents, and of all subtrees of that size have the largest E(A) (OPT-Tree, Theorem 3.1).
    """

    by_value = True

    def prune(self, plan: Plan, pools: Sequence[DraftTree], tags: Sequence[Tags]) -> list[Flags | None]:
        return highest_in_budget([pool.path_logprobs for pool in pools], plan.budgets)


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
    _seconds: float = field(default=0.0, repr=False, compare=False)
    _tokens: float = field(default=0.0, repr=False, compare=False)
    _draft_seconds: float = field(default=0.0, repr=False, compare=False)
    _layers: float = field(default=0.0, repr=False, compare=False)

    @property
    def threshold(self) -> float:
        if self.delta is not None:
            return self.delta
        if not self._layers or not self._seconds:
            return _UNMEASURED
        return min(1.0, self._tokens / self._seconds * self._draft_seconds / self._layers)

    def pool(self, nodes: int) -> int:
        """At most n nodes a layer, less the d - 1 above layer d that stay among the best n with them."""
        depth = min(self.depth, nodes)
        return nodes * depth - depth * (depth - 1) // 2

    def grow(self, frontier: Frontier) -> Growth:
        """What enters the best n so far; go on where that has gained more than the threshold, or takes no pass."""
        pool, scores = frontier.pool, frontier.scores
        before = best_per_row(pool.path_logprobs, pool.rows, frontier.budgets)
        flat, rows = scores.ravel(), frontier.rows.repeat(scores.shape[1])
        rising = np.flatnonzero(flat > _least_of_the_best(frontier, before)[rows])
        risen = flat[rising]
        every = pool.plus(rows[rising], risen, np.zeros_like(risen))
        after = best_per_row(every.path_logprobs, every.rows, frontier.budgets)
        keep = np.zeros(scores.shape, np.bool_)
        keep.flat[rising] = after[len(pool.rows) :]
        if frontier.depth + 1 >= self.depth:
            return Growth(keep, np.zeros_like(keep))
        gain = _mass(every, after, frontier.budgets) - _mass(pool, before, frontier.budgets)
        return Growth(keep, keep & (gain > self.threshold)[frontier.rows, None])

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Learn the tokens a second and the seconds of a layer for the automatic threshold.

        The first step of a request is left out: a drafting model reads the prompt in it.
        """
        if any(o.request.stats.steps == 0 for o in outcomes):
            return
        layers = max((o.tree.depth for o in outcomes), default=0)
        cost = outcomes[0].step
        gained = sum(o.taken for o in outcomes) / len(outcomes)
        self._seconds = _DECAY * self._seconds + cost.draft + cost.verify + cost.other
        self._tokens = _DECAY * self._tokens + gained
        self._draft_seconds = _DECAY * self._draft_seconds + cost.draft
        self._layers = _DECAY * self._layers + layers


def _mass(pool: Pool, keep: Flags, budgets: Numbers) -> NDArray[np.float64]:
    """[B] sum of the path probabilities of the entries to keep."""
    return np.bincount(pool.rows, np.exp(pool.path_logprobs) * keep, len(budgets)).astype(np.float64)


def _least_of_the_best(frontier: Frontier, best: Flags) -> Floats:
    """[B] path log-prob that a newcomer must exceed: of the least of ``best``, -inf while budget is left."""
    rows, scores = frontier.pool.rows[best], frontier.pool.path_logprobs[best]
    full = np.bincount(rows, minlength=len(frontier.budgets)) >= frontier.budgets
    least = np.full(len(full), np.inf, np.float32)
    np.minimum.at(least, rows, scores)
    return np.where(full, least, np.float32(-np.inf))


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

    def grow(self, frontier: Frontier) -> Growth:
        scores = frontier.scores
        keep = np.ones(scores.shape, np.bool_)
        if frontier.depth + 1 >= self.depth:
            return Growth(keep, ~keep)
        rows = frontier.rows.repeat(scores.shape[1])
        beam = best_per_row(scores.ravel(), rows, np.full_like(frontier.budgets, self.width))
        return Growth(keep, beam.reshape(scores.shape))
