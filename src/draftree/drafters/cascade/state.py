"""What a hierarchy has learned about one request during one proposal: nodes, who said them, and the law after each.

Nodes are known by numbers of their own, ROOT for the root. Knows no sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...policies.base import Candidates
from ...tree import ROOT, DraftTree
from ..source import Asked

NOWHERE = -2
"""No node has this number."""


@dataclass(slots=True)
class Law:
    """What follows a node.

    Attributes:
        tokens, logprobs: [K], in descending order; -inf where there is no candidate.
        entropy: nats.
        origins: [K] which parts of a union say so; None: it is of no union.
    """

    tokens: Tensor
    logprobs: Tensor
    entropy: float
    origins: Tensor | None = None

    @property
    def best(self) -> int:
        """The most probable token; -1 where there is no candidate."""
        return int(self.tokens[0]) if len(self.tokens) and float(self.logprobs[0]) > -math.inf else -1

    def logprob(self, token: int) -> float:
        """Of a candidate; -inf for any other token."""
        at = (self.tokens == token).nonzero()[:, 0].tolist()
        return float(self.logprobs[at[0]]) if at else -math.inf


NO_LAW = Law(torch.zeros(1, dtype=torch.int64), torch.full((1,), -math.inf), 0.0)
"""After a token that nobody was asked about."""


@dataclass(slots=True)
class Known:
    """One request's nodes.

    Attributes:
        laws: node -> what follows it, by the upper drafter.
        told: node -> what follows it, by the lower drafter.
        ways: nodes that the lower drafter was asked about on the way to where it was to propose.
        level: node -> the level that was the first to say it.
        base: where the pending run begins: the root, or what the level above has said last.
        rounds: the tokens of the run below which further rounds were drafted.
        refused: least entropy of a law whose token was not drafted further, since it was too unsure.
    """

    laws: dict[int, Law] = field(default_factory=dict)
    told: dict[int, Law] = field(default_factory=dict)
    ways: set[int] = field(default_factory=set)
    level: dict[int, int] = field(default_factory=dict)
    base: int = ROOT
    rounds: list[int] = field(default_factory=list)
    refused: float = math.inf
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _places: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Node -> parent, token, depth."""

    def restart(self, base: int) -> None:
        """A new run begins below this node."""
        self.base, self.rounds, self.refused = base, [], math.inf

    def child(self, parent: int, token: int) -> int:
        """The child of a node by its token; new if there was none."""
        if (parent, token) not in self._children:
            node = len(self._places)
            self._children[parent, token] = node
            self._places[node] = (parent, token, self.depth(parent) + 1)
        return self._children[parent, token]

    def find(self, parent: int, token: int) -> int:
        """The same, NOWHERE if there is none."""
        return self._children.get((parent, token), NOWHERE)

    def depth(self, node: int) -> int:
        """0 for the root."""
        return 0 if node == ROOT else self._places[node][2]

    def parent(self, node: int) -> int:
        """Of a node that is not the root."""
        return self._places[node][0]

    def asked(self, row: int, node: int) -> Asked:
        """The node, to ask a scorer about."""
        if node == ROOT:
            return Asked(row, ROOT, ROOT, 0)
        parent, token, _ = self._places[node]
        return Asked(row, node, parent, token)

    def line(self, node: int, top: int = ROOT) -> list[int]:
        """The nodes from ``top``, left out, down to this one."""
        down: list[int] = []
        while node != top:
            down.append(node)
            node = self.parent(node)
        return down[::-1]

    def edges(self, node: int) -> list[float]:
        """The upper drafter's probabilities from the run's begin down to a node, each given the one before."""
        return [math.exp(self.laws[self.parent(n)].logprob(self._places[n][1])) for n in self.line(node, self.base)]

    def numbers(self, tree: DraftTree, below: int = ROOT) -> list[int]:
        """The numbers of a tree's nodes, whose root is ``below``; NOWHERE for those that are not known."""
        found: list[int] = []
        for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
            found.append(self.find(below if parent == ROOT else found[parent], token))
        return found


def answer(laws: Sequence[Law]) -> Candidates:
    """[F] laws as candidates."""
    width = max(len(law.tokens) for law in laws)
    told = [law.origins for law in laws if law.origins is not None]
    return Candidates(
        torch.stack([pad(law.tokens, (0, width - len(law.tokens))) for law in laws]),
        torch.stack([pad(law.logprobs, (0, width - len(law.logprobs)), value=-math.inf) for law in laws]),
        torch.tensor([law.entropy for law in laws]),
        torch.stack([pad(origins, (0, width - len(origins))) for origins in told]) if len(told) == len(laws) else None,
    )


def laws_of(found: Candidates) -> list[Law]:
    """[F] candidates as laws."""
    origins = [None] * len(found.tokens) if found.origins is None else found.origins
    rows = zip(found.tokens, found.logprobs, found.entropies.tolist(), origins, strict=True)
    return [Law(*row) for row in rows]
