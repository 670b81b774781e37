"""C2T: a classifier ranks nodes (Huo et al. 2025)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..config import Budget
from ..errors import ConfigError, DraftreeWarning
from ..models.base import LanguageModel
from ..tree import DraftTree
from ..typed import check_fields
from .base import Frontier, Growth, GrowthPolicy, best_per_row, count_within
from .classifier import Classifier, Provenance
from .entropy import MAX_WIDTH

if TYPE_CHECKING:
    from ..drafters.source import Source


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


Score = Callable[[Frontier], Tensor]
"""[F, K] candidates of a frontier -> how probable each is to be accepted, 0 where there is none."""

BETA = 0.05
TOP = 15
DEPTH = 10


@dataclass(frozen=True, slots=True)
class ClassifierTree(GrowthPolicy):
    """Layer by layer: score each node's ``width`` most probable tokens, drop C < ``beta``, keep the ``top`` highest C.

    C is a node's own score, whatever the scores above it are (C2T, Algorithm 1). What is dropped is not expanded, so
    the rest is a tree though C may rise along a path. Scores given the parent are multiplied along the path first: then
    C is the probability that the whole path is accepted, as the paper's is.

    The node budget is not the paper's. Where it is smaller than the tree, the nodes whose least C on the path is
    highest stay, and what cannot be among them is not drafted.
    With ``width`` 1 it is a chain that ends where C falls below ``beta`` (chain mode).

    Attributes:
        score: a ``Classifier``, or any other function.
        beta: least C of a node that is verified.
        width: children of a node that are scored.
        top: most nodes of a layer, K of the paper's second top-K; None: no limit.
        depth: deepest level.
        given_parent: scores are of nodes given their parents.
        made_for: the models that ``score`` learned from; others are warned about.

    Raises:
        ConfigError: a value is out of range.
    """

    by_value = True

    score: Score
    beta: float = BETA
    width: int = 15
    top: int | None = TOP
    depth: int = DEPTH
    given_parent: bool = False
    made_for: Provenance | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta is {self.beta}: use a probability of acceptance from 0 to 1")
        for name, most in (("width", MAX_WIDTH), ("top", None), ("depth", None)):
            value = getattr(self, name)
            if name == "top" and value is None:
                continue
            if not isinstance(value, int) or value < 1 or (most is not None and value > most):
                none = ", or none" if name == "top" else ""
                raise ConfigError(f"{name} is {value}: use a whole number from 1{f' to {most}' if most else ''}{none}")
        if self.width == 1 and isinstance(self.score, Classifier) and "margin" in self.score.features:
            raise ConfigError("width is 1, and the classifier sees the margin to a second candidate: use at least 2")

    @property
    def partner(self) -> str | None:
        """The drafter of ``made_for``."""
        return None if self.made_for is None else self.made_for.drafter

    def prepare(self, target: LanguageModel, sources: Sequence[Source]) -> None:
        """Warn where the classifier learned from other models."""
        warn_of_others(self.made_for, target, sources)

    def width_for(self, nodes: int) -> int:
        """``width``, whatever the budget: how many children are scored, not how many stay."""
        return self.width

    def pool(self, nodes: int) -> int:
        """At most a budget, or ``top``, a layer."""
        return self.depth * (nodes if self.top is None else min(nodes, self.top))

    def grow(self, frontier: Frontier) -> Growth:
        """The layer's nodes with C >= ``beta``, of these the ``top`` highest, of these what the budget can take."""
        own, pool = self.score(frontier), frontier.pool
        least = own
        if frontier.depth:
            above = frontier.tags[:, None]
            own = own * above if self.given_parent else own
            least = torch.minimum(own, above)
        keep = (own >= self.beta) & (frontier.candidates.logprobs > float("-inf"))
        rows = frontier.rows[:, None].expand_as(keep)
        if self.top is not None:
            limits = torch.full_like(frontier.budgets, self.top)
            keep = keep.masked_scatter(keep, best_per_row(own[keep], rows[keep], limits))
        scores, owners = torch.cat([pool.tags, least[keep]]), torch.cat([pool.rows, rows[keep]])
        stay = best_per_row(scores, owners, frontier.budgets)[len(pool.rows) :]
        keep = keep.masked_scatter(keep, stay)
        return Growth(keep, torch.full_like(keep, frontier.depth + 1 < self.depth), least)

    def prune(
        self, pools: Sequence[DraftTree], tags: Sequence[Tensor], budgets: Sequence[Budget]
    ) -> list[Tensor | None]:
        """The budget's best nodes by least C on the path: none exceeds its parent, so parents stay."""
        kept: list[Tensor | None] = []
        for least, budget in zip(tags, budgets, strict=True):
            keep = torch.zeros(len(least), dtype=torch.bool)
            keep[least.argsort(descending=True, stable=True)[: budget.nodes]] = True
            kept.append(keep)
        return kept


def warn_of_others(made_for: Provenance | None, target: LanguageModel, sources: Sequence[Source]) -> None:
    """Warn where a classifier learned from a target or a drafter of other weights."""
    if made_for is None:
        return
    used = provenance(target, sources)
    if (used.target_weights, used.drafter_weights) != (made_for.target_weights, made_for.drafter_weights):
        warnings.warn(
            f"the classifier learned from {made_for}, not from {used}: drafts may be worse; train one for these with "
            "'draftree train classifier'",
            DraftreeWarning,
            stacklevel=3,
        )


def provenance(target: LanguageModel, sources: Sequence[Source]) -> Provenance:
    """What a classifier of these sources' drafts for this target learns from."""
    return Provenance(
        target=target.capabilities.name,
        target_weights=target.capabilities.fingerprint,
        drafter="+".join(source.name for source in sources),
        drafter_weights="+".join(source.fingerprint for source in sources),
    )
