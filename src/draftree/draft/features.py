"""What a classifier is told of a candidate: the same numbers while a tree grows and of a finished one.

Each feature is one function of the columns that a ``Frontier`` and a ``DraftTree`` both give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..tree import DraftTree
from .policy import Frontier, count_within

Column = Callable[[], Tensor]


class Columns(NamedTuple):
    """M candidates in any shape; all columns have it.

    Attributes:
        path_logprobs: sum of draft log-probs from the root down to the candidate (nats).
        logprobs: the candidate's own draft log-prob.
        entropies: of the draft law that it was taken from (nats).
        depths: 1 for children of the root.
        ranks: its place in that law, 0 for the most probable token.
        origins: int64, the parts of a union that offered it, bit i for part i; 0 where there is one source.
        margins: asked for where a feature needs them: of that law, the first token's probability less the second's.
        variances: asked for likewise: of the entropies of all laws that the path was taken from (nats squared).
    """

    path_logprobs: Tensor
    logprobs: Tensor
    entropies: Tensor
    depths: Tensor
    ranks: Tensor
    origins: Tensor
    margins: Column
    variances: Column


FEATURES: dict[str, Callable[[Columns], Tensor]] = {
    "probability": lambda c: c.path_logprobs.exp(),
    "entropy": lambda c: c.entropies,
    "depth": lambda c: c.depths - 1,
    "log-probability": lambda c: c.path_logprobs.clamp(min=-20.0),
    "step": lambda c: c.logprobs.exp(),
    "rank": lambda c: c.ranks,
    "margin": lambda c: c.margins(),
    "entropy-variance": lambda c: c.variances(),
    "source-1": lambda c: c.origins & 1,
    "source-2": lambda c: c.origins >> 1 & 1,
    "source-3": lambda c: c.origins >> 2 & 1,
}
"""The first three are C2T's P, H and d (its depth counts the first layer as 0); the last, a union's first parts."""


def features(columns: Columns, names: Sequence[str]) -> Tensor:
    """[..., n] float32: the features of these names."""
    return torch.stack([FEATURES[name](columns).float() for name in names], dim=-1)


def of_frontier(frontier: Frontier) -> Columns:
    """[F, K] the candidates of a frontier; what is no candidate has log-prob -inf."""
    found = frontier.candidates
    shape = found.logprobs.shape
    none = torch.zeros(1, 1, dtype=torch.int64)
    return Columns(
        path_logprobs=frontier.scores,
        logprobs=found.logprobs,
        entropies=found.entropies[:, None].expand(shape),
        depths=torch.full(shape, frontier.depth + 1),
        ranks=torch.arange(shape[1]).expand(shape),
        origins=(none if found.origins is None else found.origins).expand(shape),
        margins=lambda: _margins(found.logprobs)[:, None].expand(shape),
        variances=lambda: _entropies_along(frontier).var(0, correction=0)[:, None].expand(shape),
    )


def _margins(logprobs: Tensor) -> Tensor:
    """[F] of laws whose K first candidates are [F, K]; a second one that is not there has probability 0."""
    first = logprobs[:, :2].exp()
    return first[:, 0] - first[:, 1:].sum(1)


def _entropies_along(frontier: Frontier) -> Tensor:
    """[depth + 1, F] of the laws that the paths through each node's children are taken from, the own one first."""
    found, above = [frontier.candidates.entropies], torch.arange(len(frontier.rows))
    while frontier.above is not None:
        frontier, parents = frontier.above
        above = parents.take(above)
        found.append(frontier.candidates.entropies.take(above))
    return torch.stack(found)


def of_tree(tree: DraftTree) -> Columns:
    """[N] the nodes of a tree in which nobody stands without the siblings that are more probable.

    Margins are right where nobody stands without a less probable sibling either, as in trees that nothing has pruned.
    """
    above = torch.cat([tree.path_logprobs, torch.zeros(1)])[tree.parents]  # ROOT reads the last
    logprobs = tree.path_logprobs - above
    families, own = torch.unique_consecutive(tree.parents, return_inverse=True)
    ranks = count_within(own, torch.bincount(own, minlength=len(families)))
    return Columns(
        path_logprobs=tree.path_logprobs,
        logprobs=logprobs,
        entropies=tree.entropies,
        depths=tree.depths,
        ranks=ranks,
        origins=torch.zeros_like(ranks) if tree.origins is None else tree.origins,
        margins=lambda: _margins(_firsts(logprobs, own, ranks, len(families))).take(own),
        variances=lambda: _variances(tree),
    )


def _firsts(logprobs: Tensor, own: Tensor, ranks: Tensor, families: int) -> Tensor:
    """[families, 2] log-probs of the first two of each family."""
    found, first = torch.full((families, 2), float("-inf")), ranks < 2
    found[own[first], ranks[first]] = logprobs[first]
    return found


def _variances(tree: DraftTree) -> Tensor:
    """[N] of the entropies on each path; parents come before their children."""
    powers = torch.stack([tree.entropies, tree.entropies**2], 1).double()
    sums = torch.cat([powers, torch.zeros(1, 2).double()])  # ROOT reads the last
    for depth in range(2, int(tree.depths.max()) + 1 if len(tree) else 0):
        layer = (tree.depths == depth).nonzero()[:, 0]
        sums[layer] += sums[tree.parents[layer]]
    mean, square = (sums[:-1] / tree.depths[:, None]).unbind(1)
    return (square - mean**2).clamp(min=0.0)
