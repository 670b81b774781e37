"""Grammars in drafting: each node of a growing tree has a state, and no tree has a token that its state refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..policies.base import Candidates, Numbers
from ..request import Request
from ..sampling.constraint import ConstraintState
from ..tree import ROOT
from .base import Scorer, UnscoredNode
from .distributions import Drawn


class NodeStates:
    """The states of a proposal's nodes.

    Attributes:
        requests: of the proposal.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._states: dict[tuple[int, int], ConstraintState | None] = {}

    def of(self, nodes: Sequence[UnscoredNode]) -> list[ConstraintState | None]:
        """The states of nodes, each after its parent; None where the request has no constraint."""
        found = []
        for row, node, parent, token in nodes:
            if node == ROOT:
                state = self._requests[row].state
            else:
                above = self._states.get((row, parent))
                state = None if above is None else above.after(token)
            self._states[row, node] = state
            found.append(state)
        return found


class AllowedScorer(Scorer):
    """Another scorer's candidates without those that the constraints refuse, whatever that scorer knows of them."""

    def __init__(self, scorer: Scorer, requests: Sequence[Request]) -> None:
        self._scorer, self._states = scorer, NodeStates(requests)

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> Candidates:
        found = self._scorer.score(nodes, width)
        allowed = np.ones(found.tokens.shape, np.bool_)
        for row, state in enumerate(self._states.of(nodes)):
            if state is not None:
                allowed[row] = state.allows(found.tokens[row])
        return replace(found, logprobs=np.where(allowed, found.logprobs, np.float32(-np.inf)))

    def draw(self, counts: Numbers) -> Drawn:
        return self._scorer.draw(counts)
