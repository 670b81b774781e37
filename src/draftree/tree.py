"""The draft tree: drafted tokens with their parents, in level order, on the host.

Pure data and pure functions. Knows nothing of models, policies or caches.

Conventions: the root is the last committed token and is *not* a node; it has depth 0 and is written
as parent -1. Nodes are numbered in level order, so a parent's number is always smaller than its child's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROOT = -1

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of N drafted nodes below a root.

    Attributes:
        tokens: [N] int32, drafted token ids.
        parents: [N] int32, number of the parent node, ROOT (-1) for children of the root.
        depths: [N] int32, 1 for children of the root.
        path_logprobs: [N] float32, sum of the draft log-probabilities (nats) from the root down to the node.
        entropies: [N] float32, entropy (nats) of the draft distribution that the node is from; siblings share it.
        part: number of the source that drafted it in its ensemble.

    Raises:
        ValueError: the columns do not describe a tree in level order.
    """

    tokens: Ints
    parents: Ints
    depths: Ints
    path_logprobs: Floats
    entropies: Floats
    part: int = 0

    def __post_init__(self) -> None:
        n = len(self.tokens)
        parents, depths, paths, entropies = self.parents, self.depths, self.path_logprobs, self.entropies
        if not (n,) == parents.shape == depths.shape == paths.shape == entropies.shape:
            raise ValueError(f"the columns of a tree of {n} tokens have other lengths: give one entry for each node")
        if n and not self._levels_fit():
            raise ValueError(
                f"parents {self.parents.tolist()} and depths {self.depths.tolist()} are not in level order: a parent "
                "comes before its child, one level up, and depths never fall"
            )

    def _levels_fit(self) -> bool:
        parents, depths = self.parents.tolist(), [*self.depths.tolist(), 0]  # ROOT reads the last
        for node, (parent, depth) in enumerate(zip(parents, depths, strict=False)):
            if not (ROOT <= parent < node and depth == depths[parent] + 1 and depth >= depths[node - 1]):
                return False
        return True

    @classmethod
    def of(
        cls,
        tokens: ArrayLike,
        parents: ArrayLike,
        depths: ArrayLike,
        path_logprobs: ArrayLike,
        entropies: ArrayLike,
        part: int = 0,
    ) -> DraftTree:
        """A tree of columns of any kind of numbers."""
        return cls(
            np.asarray(tokens, np.int32),
            np.asarray(parents, np.int32),
            np.asarray(depths, np.int32),
            np.asarray(path_logprobs, np.float32),
            np.asarray(entropies, np.float32),
            part,
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
        return int(self.depths[-1]) if len(self.depths) else 0

    @property
    def expected_acceptance_length(self) -> float:
        """E(A) = 1 + sum over nodes of exp(path log-prob) (OPT-Tree, Eq. 4; the root counts as 1)."""
        return 1.0 + sum(map(math.exp, self.path_logprobs.tolist()))

    def children(self, node: int) -> list[int]:
        """Numbers of the children of ``node`` (ROOT for the root), in rank order."""
        return [*(self.parents == node).nonzero()[0].tolist()]

    def follow(self, drawn: Sequence[int]) -> tuple[list[int], list[int]]:
        """Walk down along what was drawn at the root and then at each node; of equal siblings to the first.

        Args:
            drawn: [N + 1] tokens.

        Returns:
            the nodes in order, and the tokens that were drawn at the root and at each of them.
        """
        node, path, tokens = ROOT, list[int](), [drawn[0]]
        for child, (parent, token) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True)):
            if parent == node and token == tokens[-1]:
                node = child
                path.append(child)
                tokens.append(drawn[child - ROOT])
        return path, tokens


_EMPTY = DraftTree.of([], [], [], [], [])


def ancestors(parents: Ints, start: int = 0) -> tuple[NDArray[np.bool_], Ints]:
    """Which nodes each of the nodes ``start..M-1`` descends from, itself included, and how deep it is.

    Args:
        parents: [M], ROOT (-1) for children of the root.
        start: first node to compute them for.

    Returns:
        ([M - start, M] true where the column's node is the row's node or one of its ancestors;
        [M - start] depths, 1 for children of the root).
    """
    above = parents.tolist()
    mask = np.zeros((len(above) - start, len(above)), dtype=np.bool_)
    depths: list[int] = []
    for row, node in enumerate(range(start, len(above))):
        parent, depth = above[node], 1
        if parent >= start:
            mask[row], depth = mask[parent - start], depths[parent - start] + 1
        else:
            while parent >= 0:
                mask[row, parent] = True
                parent, depth = above[parent], depth + 1
        mask[row, node] = True
        depths.append(depth)
    return mask, np.array(depths, np.int32)
