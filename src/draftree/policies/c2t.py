"""Classifiers in policies: C2T's trees (Huo et al. 2025), and learned widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DEFAULT_NODES, Budget, check_fields
from ..errors import ConfigError
from ..tree import DraftTree
from .base import MAX_WIDTH, Frontier, Growth, GrowthPolicy, Provenance, best_per_row
from .classifier import Classifier
from .entropy import EntropyTree

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
        made_for: the models that ``score`` was trained on.

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


LEARNED_BETA = 0.1


@dataclass(frozen=True, slots=True)
class LearnedWidth:
    """A function of entropy for ``EntropyTree``: as many children as a classifier scores ``beta`` or more.

    A node with entropy H gets its first r candidates, r the number of ranks with C(H, rank) >= ``beta``: what B(H) sets
    by hand, learned.

    Attributes:
        classifier: of entropy and rank, given the parent.
        beta: least probability of acceptance.

    Raises:
        ConfigError: the classifier sees other features, or scores whole paths.
    """

    classifier: Classifier
    beta: float = LEARNED_BETA

    def __post_init__(self) -> None:
        check_fields(self)
        if set(self.classifier.features) != {"entropy", "rank"} or not self.classifier.given_parent:
            raise ConfigError(
                f"the classifier sees {','.join(self.classifier.features)}: for a width train one with "
                "'draftree train classifier --features entropy,rank --given-parent'"
            )
        if not 0 < self.beta <= 1:
            raise ConfigError(f"beta is {self.beta}: use a probability of acceptance above 0 and up to 1")

    def __call__(self, entropies: Tensor) -> Tensor:
        """[F] entropies in nats -> [F] numbers of children."""
        columns = {
            "entropy": entropies[:, None].expand(-1, MAX_WIDTH),
            "rank": torch.arange(MAX_WIDTH, dtype=torch.float32).expand(len(entropies), -1),
        }
        scores = self.classifier.scores(torch.stack([columns[name] for name in self.classifier.features], dim=-1))
        return (scores >= self.beta).cumprod(1).sum(1).float()


@dataclass(frozen=True, slots=True)
class LearnedTree(EntropyTree):
    """``EntropyTree`` with a learned width.

    Attributes:
        made_for: the models that the width was learned from.
    """

    made_for: Provenance | None = None

    @property
    def default_nodes(self) -> int:
        return DEFAULT_NODES
