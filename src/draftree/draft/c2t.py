"""Trees of the candidates that a classifier finds worth verifying (Huo et al., *C2T*, 2025)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Budget
from ..errors import ConfigError, DraftreeWarning
from ..tree import DraftTree
from .classifier import Classifier
from .entropy import MAX_WIDTH
from .policy import Frontier, Growth, GrowthPolicy, best_per_row
from .static import Pair, short_name

Score = Callable[[Frontier], Tensor]
"""[F, K] candidates of a frontier -> how probable each is to be accepted, 0 where there is none."""

BETA = 0.05
DEPTH = 10


@dataclass(frozen=True, slots=True)
class ClassifierTree(GrowthPolicy):
    """Layer by layer: score each node's ``width`` most probable tokens, drop those below ``beta``, keep the ``top``.

    What is dropped is not expanded, so the rest is a tree whatever the scores are (C2T, Algorithm 1). A path is worth
    the least score on it, or the product of scores that are of nodes given their parents. Where the budget has no room
    for all, the most valuable paths stay; what cannot be among them is not drafted.
    With ``width`` 1 it is a chain that ends where the score falls below ``beta`` (chain mode).

    Attributes:
        score: a ``Classifier``, or any other function.
        beta: least worth of a path that is verified.
        width: children of a node that are scored.
        top: most nodes of a layer; 0: as many as the budget has.
        depth: deepest level.
        given_parent: scores are of nodes given their parents.
        made_for: the models that ``score`` was trained for; others are warned about.

    Raises:
        ConfigError: a value is out of range.
    """

    by_value = True

    score: Score
    beta: float = BETA
    width: int = 15
    top: int = 15
    depth: int = DEPTH
    given_parent: bool = False
    made_for: Pair | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta is {self.beta}: use a probability of acceptance from 0 to 1")
        for name, least, most in (("width", 1, MAX_WIDTH), ("top", 0, None), ("depth", 1, None)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least or (most is not None and value > most):
                raise ConfigError(f"{name} is {value}: use a whole number from {least}{f' to {most}' if most else ''}")
        if self.width == 1 and isinstance(self.score, Classifier) and "margin" in self.score.features:
            raise ConfigError("width is 1, and the classifier sees the margin to a second candidate: use at least 2")

    @property
    def partner(self) -> str | None:
        """The drafter of ``made_for``."""
        return None if self.made_for is None else self.made_for.drafter

    def check(self, target: str, drafter: str) -> None:
        """Warn where the classifier was trained for other models; the shipped head has one target only."""
        warn_of_others(self.made_for, target, drafter)

    def width_for(self, nodes: int) -> int:
        """``width``, whatever the budget: how many children are scored, not how many stay."""
        return self.width

    def pool(self, nodes: int) -> int:
        """At most a budget, or ``top``, a layer."""
        return self.depth * min(nodes, self.top or nodes)

    def grow(self, frontier: Frontier) -> Growth:
        """The layer's best candidates that are worth ``beta`` and that the budget has room for."""
        worth = self.score(frontier)
        if frontier.depth:
            above = frontier.tags[:, None]
            worth = worth * above if self.given_parent else torch.minimum(worth, above)
        keep = (worth >= self.beta) & (frontier.candidates.logprobs > float("-inf"))
        rows = frontier.rows[:, None].expand_as(keep)[keep]
        budgets, own, pool = frontier.budgets, worth[keep], frontier.pool
        layer = budgets.clamp(max=self.top) if self.top else budgets
        stay = best_per_row(own, rows, layer)
        if len(pool.rows):
            every = best_per_row(torch.cat([pool.tags, own]), torch.cat([pool.rows, rows]), budgets)
            stay &= every[len(pool.rows) :]
        keep = keep.masked_scatter(keep, stay)
        return Growth(keep, torch.full_like(keep, frontier.depth + 1 < self.depth), worth)

    def prune(self, pools: Many[DraftTree], tags: Many[Tensor], budgets: Many[Budget]) -> list[Tensor | None]:
        """The budget's best nodes: none is worth more than its parent, so parents stay."""
        kept: list[Tensor | None] = []
        for worth, budget in zip(tags, budgets, strict=True):
            keep = torch.zeros(len(worth), dtype=torch.bool)
            keep[worth.argsort(descending=True, stable=True)[: budget.nodes]] = True
            kept.append(keep)
        return kept


def warn_of_others(made_for: Pair | None, target: str, drafter: str) -> None:
    """Warn where a classifier was trained for other models; the shipped head has one target only."""
    if made_for is None:
        return
    same = short_name(made_for.drafter) == short_name(drafter)
    if not (same and (drafter == "head" or short_name(made_for.target) == short_name(target))):
        warnings.warn(
            f"the classifier was trained for target {made_for.target} and drafter {made_for.drafter}, "
            f"not {target} and {drafter}: drafts may be worse; train one with 'draftree train classifier'",
            DraftreeWarning,
            stacklevel=3,
        )
