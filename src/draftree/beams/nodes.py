"""The beams of one request as paths of one tree, and that tree in one row of a model's cache.

A token that beams share is one node and takes one slot. Tokens that all running beams share are committed; the others
wait uncommitted, and those that no running beam goes through any more are dropped. Knows nothing of laws or drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CacheError
from ..models.base import ForestModel, Nodes, Row
from ..tree import ROOT


@dataclass(slots=True, eq=False)
class Node:
    """One token of the tree; the root is the last token of the prompt.

    Attributes:
        token: its id.
        parent: what it follows; None for the root.
        length: generated tokens on its path, itself included; 0 for the root.
        score: log-probability (nats) of these tokens: the target's once it has judged the node, before that the
            drafter's from the last judged node on.
        hidden: [H] the target's hidden state, where it tracks them and has seen the node.
    """

    token: int
    parent: Node | None = None
    length: int = 0
    score: float = 0.0
    hidden: Tensor | None = None

    def path(self, above: Node | None = None) -> list[Node]:
        """The nodes from just below ``above``, one of its ancestors, down to it; None: from below the root."""
        nodes, node = list[Node](), self
        while node is not above and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def tokens(self) -> list[int]:
        """Generated tokens on its path."""
        return [node.token for node in self.path()]


class TreeRow:
    """One request's tree in one row of a model.

    Attributes:
        row: the model's.
        base: the last committed node.
        numbers: uncommitted nodes -> their numbers in the row, ascending.
        logits: [V] after nodes that the model has been asked about; only running beams' ends outlive ``keep``.

    Args:
        row: holds the prompt.
        root: the last token of it.
    """

    def __init__(self, row: Row, root: Node) -> None:
        self.row = row
        self.base = root
        self.numbers: dict[Node, int] = {}
        self.logits: dict[Node, Tensor] = {root: row.logits}

    @property
    def slots(self) -> int:
        """Tokens that it holds in the cache."""
        return self.row.length + len(self.numbers)

    def beside(self) -> TreeRow:
        """Another tree in the same row, that goes on from the same nodes and the logits after them."""
        other = TreeRow(self.row, self.base)
        other.numbers, other.logits = dict(self.numbers), dict(self.logits)
        return other

    def unfed(self, ends: Iterable[Node]) -> list[Node]:
        """Nodes on the paths to ``ends`` that the row lacks, parents first."""
        missing: dict[Node, None] = {}
        for end in ends:
            path, node = list[Node](), end
            while node is not self.base and node not in self.numbers and node not in missing:
                path.append(node)
                node = _above(node)
            missing |= dict.fromkeys(reversed(path))
        return list(missing)

    def asked(self, nodes: Sequence[Node]) -> Nodes:
        """New nodes, parents first, as the model takes them; from now on they are in the row."""
        start = len(self.numbers)
        self.numbers |= {node: start + i for i, node in enumerate(nodes)}
        parents = [self.numbers.get(_above(node), ROOT) for node in nodes]
        tokens = [node.token for node in nodes]
        return Nodes(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64))

    def keep(self, model: ForestModel, ends: Sequence[Node]) -> None:
        """Drop what is not on the paths to ``ends``, which are all of one length; commit what all of these share."""
        paths = [end.path(self.base) for end in ends]
        alive = {node for path in paths for node in path}
        kept = [node for node in self.numbers if node in alive]
        trunk = 0
        for level in zip(*paths, strict=False):
            if len(set(level)) > 1 or level[0] not in self.numbers:
                break
            trunk += 1
        model.prune(self.row, [self.numbers[node] for node in kept], trunk)
        if trunk:
            self.base = kept[trunk - 1]
        self.numbers = {node: i for i, node in enumerate(kept[trunk:])}
        self.logits = {end: self.logits[end] for end in ends if end in self.logits}


Pass = Callable[[Sequence[Row], Sequence[Nodes], Sequence[Sequence[Node]]], Tensor]
"""(rows, their new nodes as the model takes them, the same nodes) -> [B, n, V] logits."""


def feed(trees: Sequence[TreeRow], nodes: Sequence[Sequence[Node]], extend: Pass) -> int:
    """One pass over new nodes, parents first; trees without any take no part.

    Returns:
        the number of passes that it took, 0 or 1.
    """
    asked = [(tree, new) for tree, new in zip(trees, nodes, strict=True) if new]
    asked.sort(key=lambda pair: pair[0].row.slot)  # storage order: no logits are copied
    if not asked:
        return 0
    known = [len(tree.row.pending) for tree, _ in asked]
    found = extend([tree.row for tree, _ in asked], [tree.asked(new) for tree, new in asked], [new for _, new in asked])
    for (tree, new), logits, before in zip(asked, found, known, strict=True):
        tree.logits |= dict(zip(new, logits, strict=False))
        if len(tree.row.pending) > before:  # this model tracks them
            for node, hidden in zip(new, tree.row.pending[-1], strict=True):
                node.hidden = hidden
    return 1


def _above(node: Node) -> Node:
    if node.parent is None:
        raise CacheError("the end of a beam is not below the last committed token of its row")
    return node.parent
