"""Fits a classifier to samples and evaluates it on held-out prompts (Huo et al., *C2T*, Section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..config import Count, LearningRate, check_fields, option
from ..errors import RunError
from ..papers.c2t import BETA, DEFAULT_FEATURES, MAX_HIDDEN, Classifier, check_features
from .c2t_samples import Samples

BETAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Thresholds that figures are given for."""
RECALL_TIE = 0.01
"""Recalls closer than this to the best one are equal: the standard error of a recall over 2,000 accepted nodes."""
_BINS = 10
_LEAST = 0.01
"""Least score whose calibration counts: most nodes of a full tree score next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierRecipe:
    """How a classifier is fitted; the defaults are C2T's, but for a fourth feature.

    Attributes:
        seed: of the first weights and of the order.

    Raises:
        ConfigError: a value is out of range.
    """

    features: tuple[str, ...] = option(
        f"What it sees of a node; may be repeated. {', '.join(DEFAULT_FEATURES)} by default.",
        DEFAULT_FEATURES,
        name="--feature",
        metavar="NAME",
    )
    hidden: Annotated[int, Interval(ge=1, le=MAX_HIDDEN)] = option("Units of its first layer.", 48, metavar="N")
    epochs: Count = option("Rounds over the samples.", 10, metavar="N")
    batch: Count = option("Samples of one training step.", 1024, metavar="N")
    learning_rate: LearningRate = option("Learning rate of Adam.", 1e-3, metavar="R")
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_features(self.features)


def fit(
    samples: Samples,
    recipe: ClassifierRecipe,
    negatives: float,
    progress: Callable[[int], None] = lambda epochs: None,
    validation: Samples | None = None,
) -> Classifier:
    """Minimise binary cross-entropy; the same samples and seed give the same classifier.

    After each epoch the net is tried on ``validation`` at ``BETA``, and ``best_of`` chooses among the epochs, by
    recall and then by low positive rate (C2T, Section 4).

    Features are scaled to mean 0 and deviation 1, and the scales are then folded into the first layer. Training on
    a share s of the negatives makes the odds of every score 1 / s too high: ln s is added to the last bias.

    Args:
        negatives: the share s that they have of what was not accepted.
        progress: called with how many epochs are done.
        validation: prompts kept apart; where it is None, or has no accepted node, the last epoch is taken.

    Raises:
        RunError: all labels are equal, or there are none.
    """
    positive, count = int(samples.accepted.sum()), len(samples.accepted)
    if positive in (0, count):
        raise RunError(
            f"there is nothing to learn from {count} drafted nodes, of which {positive} were accepted: use more "
            "prompts, larger --samples or --max-tokens, or another drafter"
        )
    given = samples.columns(recipe.features)
    mean, scale = given.mean(0), given.std(0).clamp(min=1e-6)
    x, y = (given - mean) / scale, samples.accepted.float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = nn.Sequential(nn.Linear(x.shape[1], recipe.hidden), nn.ReLU(), nn.Linear(recipe.hidden, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=recipe.learning_rate)
    generator = torch.Generator().manual_seed(recipe.seed)
    nets: list[Classifier] = []
    for epoch in range(1, recipe.epochs + 1):
        for chosen in torch.randperm(len(y), generator=generator).split(recipe.batch):
            optimizer.zero_grad(set_to_none=True)
            binary_cross_entropy_with_logits(net(x[chosen])[:, 0], y[chosen]).backward()
            optimizer.step()
        nets.append(_folded(net, recipe, mean, scale, negatives))
        progress(epoch)
    if validation is None or not bool(validation.accepted.any()):
        return nets[-1]
    return nets[best_of([_at(BETA, *_scored(net_of_epoch, validation, negatives))[1:] for net_of_epoch in nets])]


def best_of(figures: Sequence[tuple[float, float]]) -> int:
    """The net with the best recall; of those within ``RECALL_TIE`` of it the lowest positive rate, then the latest.

    Args:
        figures: recall and positive rate of each net, at one threshold.
    """
    best = max(recall for recall, _ in figures)
    tied = [i for i, (recall, _) in enumerate(figures) if recall > best - RECALL_TIE]
    return min(reversed(tied), key=lambda i: figures[i][1])


def _folded(net: nn.Sequential, recipe: ClassifierRecipe, mean: Tensor, scale: Tensor, negatives: float) -> Classifier:
    weight, bias, output, last = (p.detach().double() for p in net.parameters())
    hidden = weight / scale.double()
    return Classifier(
        features=recipe.features,
        hidden=tuple(map(tuple, hidden.float().tolist())),
        bias=tuple((bias - hidden @ mean.double()).float().tolist()),
        output=tuple(output[0].float().tolist()),
        threshold=float((last[0] + math.log(negatives)).float()),
    )


@dataclass(frozen=True, slots=True)
class ClassifierFigures:
    """How good a classifier is on samples; thinned nodes are weighted up, so that figures are about whole trees.

    Attributes:
        prompts, nodes, accepted: that it was held against.
        loss: binary cross-entropy of all nodes, nats for each accepted one.
        calibration_error: mean distance of a score from the share that was accepted, over ten bins of scores and the
            nodes that score at least 0.01.
        betas: beta -> precision, recall and positive rate of the nodes that score at least beta.
    """

    prompts: int
    nodes: int
    accepted: int
    loss: float
    calibration_error: float
    betas: dict[str, tuple[float, float, float]]


def evaluate(classifier: Classifier, samples: Samples, negatives: float) -> ClassifierFigures:
    """Hold a classifier against samples that it has not learned from.

    Args:
        negatives: share that the samples have of what was not accepted.
    """
    scores, y, weights = _scored(classifier, samples, negatives)
    loss = -(weights * torch.where(y, scores, 1 - scores).clamp(min=1e-12).log()).sum()
    return ClassifierFigures(
        prompts=len(samples.numbers.unique()),
        nodes=round(float(weights.sum())),
        accepted=int(y.sum()),
        loss=float(loss) / max(1, int(y.sum())),
        calibration_error=_calibration_error(scores, y, weights),
        betas={f"{beta:g}": _at(beta, scores, y, weights) for beta in BETAS},
    )


def _scored(classifier: Classifier, samples: Samples, negatives: float) -> tuple[Tensor, Tensor, Tensor]:
    """[M] scores, labels and weights; thinned nodes are weighted up."""
    scores = torch.from_numpy(classifier.scores(samples.columns(classifier.features).numpy())).double()
    return scores, samples.accepted, torch.where(samples.accepted, 1.0, 1 / negatives).double()


def _at(beta: float, scores: Tensor, accepted: Tensor, weights: Tensor) -> tuple[float, float, float]:
    """Precision, recall and positive rate of the nodes that score at least ``beta``."""
    above = scores >= beta
    hits, mass = float((above & accepted).sum()), float(weights[above].sum())
    return hits / mass if mass else 0.0, hits / max(1, int(accepted.sum())), mass / max(float(weights.sum()), 1e-9)


def _calibration_error(scores: Tensor, accepted: Tensor, weights: Tensor) -> float:
    counted = scores >= _LEAST
    scores, accepted, weights = scores[counted], accepted[counted], weights[counted]
    bins = (scores * _BINS).long().clamp(max=_BINS - 1)
    gaps = torch.bincount(bins, weights * (scores - accepted.double()))
    return float(gaps.abs().sum()) / max(1e-9, float(weights.sum()))
