"""A classifier in other policies: how many children entropy calls for, and what ``auto`` takes drafts to be worth.

Both classifiers score nodes given their parents ('draftree train classifier --given-parent').
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..config import DEFAULT_NODES
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..typed import check_fields
from .auto.policy import AutoTree
from .base import Frontier, Growth, SourceInfo
from .c2t import warn_of_others
from .classifier import Classifier, Provenance
from .entropy import MAX_WIDTH, EntropyTree

LEARNED_BETA = 0.1


@dataclass(frozen=True, slots=True)
class LearnedWidth:
    """A function of entropy for ``EntropyTree``: as many children as a classifier finds worth verifying.

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
        made_for: the models that the width was learned from; others are warned about.
    """

    made_for: Provenance | None = None

    @property
    def default_nodes(self) -> int:
        """As most methods."""
        return DEFAULT_NODES

    @property
    def partner(self) -> str | None:
        """The drafter of ``made_for``."""
        return None if self.made_for is None else self.made_for.drafter

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:
        """Warn where the width was learned from other models."""
        warn_of_others(self.made_for, target, sources)


@dataclass(slots=True)
class ScoredAuto(AutoTree):
    """``auto`` by what lies halfway between draft probabilities and scores, in log-odds; it counts what comes true.

    Attributes:
        classifier: of nodes given their parents.
        made_for: the models that it was trained for; others are warned about.

    Raises:
        ConfigError: the classifier scores whole paths.
    """

    classifier: Classifier = field(kw_only=True)
    made_for: Provenance | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        AutoTree.__post_init__(self)
        if not self.classifier.given_parent:
            raise ConfigError(
                "auto weighs nodes given their parents, and the classifier scores whole paths: train one with "
                "'draftree train classifier --given-parent --features step,entropy,depth,rank'"
            )

    @property
    def partner(self) -> str | None:
        """The drafter of ``made_for``."""
        return None if self.made_for is None else self.made_for.drafter

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:
        """See ``AutoTree``; warn where the classifier learned from other models."""
        AutoTree.prepare(self, target, sources)
        warn_of_others(self.made_for, target, sources)

    def grow(self, frontier: Frontier) -> Growth:
        """See ``AutoTree``; no candidate is likelier than one of a lower rank, whatever the classifier says."""
        said = frontier.candidates
        scores = halfway(said.logprobs.exp(), self.classifier(frontier)).cummin(1).values
        return AutoTree.grow(self, replace(frontier, candidates=replace(said, logprobs=scores.log())))


def halfway(one: Tensor, other: Tensor) -> Tensor:
    """Probabilities whose log-odds are the mean of both; 0 where one is 0."""
    below = 1 - torch.finfo(torch.float32).eps
    both = (one.clamp(max=below).logit() + other.clamp(max=below).logit()) / 2
    return both.sigmoid()
