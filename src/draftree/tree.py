"""The draft tree: drafted tokens with their parents, in level order, on the host.

Pure data and pure functions. Knows nothing of models, policies or caches.

Conventions: the root is the last committed token and is *not* a node; it has depth 0 and is written
as parent -1. Nodes are numbered in level order, so a parent's number is always smaller than its child's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """What the children of a node were drawn from: the softmax of ``logits``.

    Attributes:
        logits: [K] float, on the drafter's device; -inf where nothing is ever drawn.
        tokens: [K] int64, whose logits they are; None: tokens 0 to K - 1.
    """

    logits: Tensor
    tokens: Tensor | None = None

    def dense(self, vocab: int, device: torch.device | str = "cpu") -> Tensor:
        """[vocab] float64 logits on ``device``, -inf for the tokens that are left out."""
        full = torch.full((vocab,), float("-inf"), dtype=torch.float64, device=device)
        if self.tokens is None:
            full[: self.logits.shape[0]] = self.logits.to(full)
        else:
            full[self.tokens.to(device)] = self.logits.to(full)
        return full


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of N drafted nodes below a root.

    Attributes:
        tokens: [N] int64, drafted token ids.
        parents: [N] int64, number of the parent node, ROOT (-1) for children of the root.
        depths: [N] int64, 1 for children of the root.
        path_logprobs: [N] float32, sum of the draft log-probabilities (nats) from the root down to the node.
        entropies: [N] float32, entropy (nats) of the draft distribution that the node is from; siblings share it.
        distributions: node (ROOT for the root) -> what its children were drawn from, in the order of their numbers;
            empty where children were chosen and not drawn.
        origins: [N] int64, the drafters of an ensemble that proposed the node, bit i for drafter i; None: there is one.

    Raises:
        ValueError: the columns do not describe a tree in level order.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    path_logprobs: Tensor
    entropies: Tensor
    distributions: Mapping[int, DraftDistribution] = field(default_factory=dict, repr=False)
    origins: Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self)
        columns = (self.parents, self.depths, self.path_logprobs, self.entropies, self.origins)
        if any(x is not None and x.shape != (n,) for x in columns):
            raise ValueError(f"the columns of a tree of {n} tokens have other lengths: give one entry for each node")
        if n and not self._levels_fit():
            raise ValueError(
                f"parents {self.parents.tolist()} and depths {self.depths.tolist()} are not in level order: a parent "
                "comes before its child, one level up, and depths never fall"
            )

    def _levels_fit(self) -> bool:
        parents, depths = self.parents.tolist(), [*self.depths.tolist(), 0]  # ROOT reads the last
        return all(
            ROOT <= parent < node and depth == depths[parent] + 1 and depth >= depths[node - 1]
            for node, (parent, depth) in enumerate(zip(parents, depths, strict=False))
        )

    @classmethod
    def empty(cls) -> DraftTree:
        """The tree without nodes: its verification is one AR step."""
        ints, floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        return cls(ints, ints, ints, floats, floats)

    @classmethod
    def chain(cls, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> DraftTree:
        """A tree of width 1: ``tokens`` in order, each the child of the one before."""
        n = len(tokens)
        steps = torch.zeros(n) if logprobs is None else torch.tensor(logprobs, dtype=torch.float32)
        return cls(
            torch.tensor(tokens, dtype=torch.int64),
            torch.arange(n) - 1,
            torch.arange(n) + 1,
            steps.cumsum(0),
            torch.zeros(n),
        )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def depth(self) -> int:
        """Depth of the deepest node, 0 for the empty tree."""
        return int(self.depths[-1]) if len(self) else 0

    @property
    def expected_acceptance_length(self) -> float:
        """E(A) = 1 + sum over nodes of exp(path log-prob) (OPT-Tree, Eq. 4; the root counts as 1)."""
        return 1.0 + float(self.path_logprobs.exp().sum())

    def subset(self, keep: Tensor) -> DraftTree:
        """The tree of the nodes where ``keep`` ([N] bool) is true, in the same order.

        Raises:
            ValueError: a node would stay without its parent.
        """
        numbers = torch.cat([keep.cumsum(0) - 1, torch.tensor([ROOT])])  # ROOT reads the last
        if not bool(torch.cat([keep, torch.tensor([True])])[self.parents[keep]].all()):
            raise ValueError(f"nodes {keep.nonzero()[:, 0].tolist()} are not closed under parents: keep parents too")
        columns = (self.tokens, self.parents, self.depths, self.path_logprobs, self.entropies)
        tokens, parents, depths, paths, entropies = (x[keep] for x in columns)
        origins = None if self.origins is None else self.origins[keep]
        kept = {ROOT, *keep.nonzero()[:, 0].tolist()}
        distributions = {int(numbers[node]): q for node, q in self.distributions.items() if node in kept}
        return DraftTree(tokens, numbers[parents], depths, paths, entropies, distributions, origins)

    def children(self, node: int) -> list[int]:
        """Numbers of the children of ``node`` (ROOT for the root), in rank order."""
        return (self.parents == node).nonzero().flatten().tolist()


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """The trees of B requests, padded to one shape for verification.

    Attributes:
        tokens: [B, N] int64; padding is -1, which no draw equals.
        parents: [B, N] int64; padding is -2, which is nobody's parent.
        depth: depth of the deepest tree.
    """

    tokens: Tensor
    parents: Tensor
    depth: int

    @classmethod
    def pad(cls, trees: Sequence[DraftTree], device: torch.device | str = "cpu") -> TreeBatch:
        """Pad ``trees`` to the largest and bring them to ``device`` in one copy."""
        width = max(len(t) for t in trees)
        packed = torch.empty((2, len(trees), width), dtype=torch.int64)
        packed[0], packed[1] = -1, ROOT - 1
        for b, tree in enumerate(trees):
            packed[0, b, : len(tree)] = tree.tokens
            packed[1, b, : len(tree)] = tree.parents
        tokens, parents = packed.to(device, non_blocking=True)
        return cls(tokens, parents, max(t.depth for t in trees))


def ancestors(parents: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Which nodes each of the nodes ``start..M-1`` descends from, itself included, and how deep it is.

    Args:
        parents: [M] int64, ROOT (-1) for children of the root.
        start: first node to compute them for.

    Returns:
        ([M - start, M] bool, true where the column's node is the row's node or one of its ancestors;
        [M - start] int64 depths, 1 for children of the root).
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
    return torch.from_numpy(mask), torch.tensor(depths, dtype=torch.int64)
