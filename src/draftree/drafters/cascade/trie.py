"""Token paths of one proposal: a node has one number in all stages of a cascade, whoever proposed or scored it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...tree import ROOT, DraftTree
from ..base import UnscoredNode


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

    def unscored(self, row: int, node: int) -> UnscoredNode:
        """A node as scorers take it, for this row of the proposal."""
        if node == ROOT:
            return UnscoredNode(row, ROOT, ROOT, 0)
        return UnscoredNode(row, node, self.parent(node), self.token(node))

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
