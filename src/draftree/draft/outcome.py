"""What became of the draft trees of a step, and what the step cost: what drafters, policies and observers learn from."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Request
from ..tree import ROOT, DraftTree
from .successors import Successors


@dataclass(frozen=True, slots=True)
class StepCost:
    """Wall-clock seconds of one step, shared by its requests.

    Attributes:
        batch: requests in it.
        draft: proposing trees.
        verify: the target's pass, the draws and their transfer to the host.
        other: commits, text, bookkeeping.
        draft_passes: drafter model passes.
        beside: of verifying, what it took to find the successors that the drafter asked for.
        learned: what the drafter took to learn from the step before.
    """

    batch: int
    draft: float
    verify: float
    other: float
    draft_passes: int
    beside: float = 0.0
    learned: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request's draft tree.

    Attributes:
        request: the request.
        tree: the tree that was verified.
        path: accepted nodes in order, by number.
        tokens: what the verification gave: the accepted tokens and the target's own.
        taken: how many of them the request took before it ended.
        step: what the whole step cost.
        successors: of the root and then of each node, what the target found most probable, as many as the drafter asked
            for; None where it asked for none.
    """

    request: Request
    tree: DraftTree
    path: list[int]
    tokens: list[int]
    taken: int
    step: StepCost
    successors: Successors | None = None

    @property
    def rejected_entropy(self) -> float | None:
        """Entropy (nats) of the draft law whose tokens were all rejected; None when nothing was rejected."""
        end = self.path[-1] if self.path else ROOT
        children = self.tree.children(end)
        return float(self.tree.entropies[children[0]]) if children else None
