"""The draft tree: drafted tokens with their parents, in level order.

Pure data and pure functions. Knows nothing of models, policies or caches.

Conventions: the root is the last committed token and is *not* a node; it has depth 0 and is written
as parent -1. Nodes are numbered in level order, so a parent's number is always smaller than its child's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count

import numpy as np
from numpy.typing import NDArray

ROOT = -1

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of N drafted nodes below a root.

    Attributes:
        tokens: [N] drafted token ids.
        parents: [N] number of the parent node, ROOT (-1) for children of the root.
        depths: [N] 1 for children of the root.
        path_logprobs: [N] sum of the draft log-probabilities (nats) from the root down to the node.
        entropies: [N] entropy (nats) of the draft distribution that the node is from; siblings share it.
        part: number of the source that drafted it in its ensemble.

    Raises:
        ValueError: a column is no list, or they do not describe a tree in level order.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    path_logprobs: list[float]
    entropies: list[float]
    part: int = 0

    def __post_init__(self) -> None:
        parents, depths = self.parents, self.depths
        columns: Sequence[Sequence[float]] = (self.tokens, parents, depths, self.path_logprobs, self.entropies)
        if {*map(type, columns)} != {list}:
            raise ValueError("the columns of a tree are not all lists: give arrays as array.tolist()")
        if len({*map(len, columns)}) > 1:
            raise ValueError(
                f"the columns of a tree of {len(self.tokens)} tokens have other lengths: give one entry for each node"
            )
        levels = [*depths, 0]  # ROOT reads the last
        for node, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
            if not (ROOT <= parent < node and depth == levels[parent] + 1 and depth >= levels[node - 1]):
                raise ValueError(
                    f"parents {parents} and depths {depths} are not in level order: a parent comes before its child, "
                    "one level up, and depths never fall"
                )

    @classmethod
    def empty(cls) -> DraftTree:
        """The tree without nodes: its verification is one AR step."""
        return _EMPTY

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node, 0 for the empty tree."""
        return self.depths[-1] if self.depths else 0

    @property
    def expected_acceptance_length(self) -> float:
        """E(A) = 1 + sum over nodes of exp(path log-prob) (OPT-Tree, Eq. 4; the root counts as 1)."""
        return 1.0 + sum(map(math.exp, self.path_logprobs))

    def children(self, node: int) -> list[int]:
        """Numbers of the children of ``node`` (ROOT for the root), in rank order."""
        return [*compress(count(), map(node.__eq__, self.parents))]

    def follow(self, drawn: Sequence[int]) -> tuple[list[int], list[int]]:
        """Walk down along what was drawn at the root and then at each node; of equal siblings to the first.

        Args:
            drawn: [N + 1] tokens.

        Returns:
            the nodes in order, and the tokens that were drawn at the root and at each of them.
        """
        node, path, tokens = ROOT, list[int](), [drawn[0]]
        for child, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent == node and token == tokens[-1]:
                node = child
                path.append(child)
                tokens.append(drawn[child - ROOT])
        return path, tokens


_EMPTY = DraftTree([], [], [], [], [])


def ancestors(parents: Sequence[int], start: int = 0) -> tuple[NDArray[np.bool_], list[int]]:
    """Which nodes each of the nodes ``start..M-1`` descends from, itself included, and how deep it is.

    Args:
        parents: [M], ROOT (-1) for children of the root.
        start: first node to compute them for.

    Returns:
        ([M - start, M] true where the column's node is the row's node or one of its ancestors;
        [M - start] depths, 1 for children of the root).
    """
    mask, depths = np.zeros((len(parents) - start, len(parents)), dtype=np.bool_), list[int]()
    for row, node in enumerate(range(start, len(parents))):
        parent, depth = parents[node], 1
        if parent >= start:
            mask[row], depth = mask[parent - start], depths[parent - start] + 1
        else:
            while parent >= 0:
                mask[row, parent] = True
                parent, depth = parents[parent], depth + 1
        mask[row, node] = True
        depths.append(depth)
    return mask, depths
