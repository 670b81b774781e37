"""Token paths of one proposal, and what a stage of a cascade predicts after them.

The trie belongs to the proposal: a node has one number in all stages of a cascade, whoever proposed or scored it.
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


@dataclass(slots=True)
class Distribution:
    """The most probable tokens after a node.

    Attributes:
        tokens, logprobs: [K], in descending order; -inf where there is no candidate.
        entropy: nats.
        origins: [K] which parts of an ensemble predict them; None: one source.
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


NO_CANDIDATES = Distribution(torch.zeros(1, dtype=torch.int64), torch.full((1,), -math.inf), 0.0)


@dataclass(slots=True)
class TokenTrie:
    """The token paths of one request that a proposal has looked at; ROOT is the empty path."""

    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _nodes: list[tuple[int, int, int]] = field(default_factory=list)
    """Parent, token and depth of each node."""

    def child(self, parent: int, token: int) -> int:
        """The child of a node by its token; new if there was none."""
        node = self._children.setdefault((parent, token), len(self._nodes))
        if node == len(self._nodes):
            self._nodes.append((parent, token, self.depth(parent) + 1))
        return node

    def find(self, parent: int, token: int) -> int | None:
        """The child of a node by its token, if there is one."""
        return self._children.get((parent, token))

    def depth(self, node: int) -> int:
        """0 for the root."""
        return 0 if node == ROOT else self._nodes[node][2]

    def parent(self, node: int) -> int:
        """Of a node that is not the root."""
        return self._nodes[node][0]

    def token(self, node: int) -> int:
        """Of a node that is not the root."""
        return self._nodes[node][1]

    def path(self, node: int, top: int = ROOT) -> list[int]:
        """The nodes from ``top``, left out, down to this one."""
        down: list[int] = []
        while node != top:
            down.append(node)
            node = self.parent(node)
        return down[::-1]

    def nodes_of(self, tree: DraftTree, anchor: int = ROOT) -> list[int]:
        """The nodes of a tree whose root is ``anchor``."""
        nodes: list[int] = []
        for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
            nodes.append(self.child(anchor if parent == ROOT else nodes[parent], token))
        return nodes


def candidates_of(distributions: Sequence[Distribution]) -> Candidates:
    """[F] distributions as candidates."""
    width = max(len(d.tokens) for d in distributions)
    origins = [d.origins for d in distributions if d.origins is not None]
    return Candidates(
        torch.stack([pad(d.tokens, (0, width - len(d.tokens))) for d in distributions]),
        torch.stack([pad(d.logprobs, (0, width - len(d.logprobs)), value=-math.inf) for d in distributions]),
        torch.tensor([d.entropy for d in distributions]),
        torch.stack([pad(o, (0, width - len(o))) for o in origins]) if len(origins) == len(distributions) else None,
    )


def distributions_of(found: Candidates) -> list[Distribution]:
    """[F] candidates as distributions."""
    origins = [None] * len(found.tokens) if found.origins is None else found.origins
    rows = zip(found.tokens, found.logprobs, found.entropies.tolist(), origins, strict=True)
    return [Distribution(*row) for row in rows]
