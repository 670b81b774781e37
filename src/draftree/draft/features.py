"""What a classifier is told of a candidate: the same numbers while a tree grows and of a finished one.

Each feature is one function of the columns that a ``Frontier`` and a ``DraftTree`` both give.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from ..tree import DraftTree
from .policy import Frontier, count_within


class Columns(NamedTuple):
    """M candidates in any shape; all columns have it.

    Attributes:
        path_logprobs: sum of draft log-probs from the root down to the candidate (nats).
        logprobs: the candidate's own draft log-prob.
        entropies: of the draft law that it was taken from (nats).
        depths: 1 for children of the root.
        ranks: its place in that law, 0 for the most probable token.
    """

    path_logprobs: Tensor
    logprobs: Tensor
    entropies: Tensor
    depths: Tensor
    ranks: Tensor


FEATURES: dict[str, Callable[[Columns], Tensor]] = {
    "probability": lambda c: c.path_logprobs.exp(),
    "entropy": lambda c: c.entropies,
    "depth": lambda c: c.depths - 1,
    "log-probability": lambda c: c.path_logprobs.clamp(min=-20.0),
    "step": lambda c: c.logprobs.exp(),
    "rank": lambda c: c.ranks,
}
"""The first three are C2T's P, H and d (its depth counts the first layer as 0)."""


def features(columns: Columns, names: Many[str]) -> Tensor:
    """[..., n] float32: the features of these names."""
    return torch.stack([FEATURES[name](columns).float() for name in names], dim=-1)


def of_frontier(frontier: Frontier) -> Columns:
    """[F, K] the candidates of a frontier; what is no candidate has log-prob -inf."""
    found = frontier.candidates
    shape = found.logprobs.shape
    return Columns(
        path_logprobs=frontier.scores,
        logprobs=found.logprobs,
        entropies=found.entropies[:, None].expand(shape),
        depths=torch.full(shape, frontier.depth + 1),
        ranks=torch.arange(shape[1]).expand(shape),
    )


def of_tree(tree: DraftTree) -> Columns:
    """[N] the nodes of a tree in which nobody stands without the siblings that are more probable."""
    above = torch.cat([tree.path_logprobs, torch.zeros(1)])[tree.parents]  # ROOT reads the last
    logprobs = tree.path_logprobs - above
    families, own = torch.unique_consecutive(tree.parents, return_inverse=True)
    ranks = count_within(own, torch.bincount(own, minlength=len(families)))
    return Columns(tree.path_logprobs, logprobs, tree.entropies, tree.depths, ranks)
