"""C2T: Huo et al., "C2T: A Classifier-Based Tree Construction Method in Speculative Decoding" (2025).

Classifiers, their features and files, and the trees that they choose; ``train/`` makes them. Where we differ: a node
budget, which the paper has not, and the feature ln P (``DEFAULT_FEATURES``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Interval, Len
from numpy.typing import NDArray

from ..artifacts import JsonFormat, user_path
from ..config import Checked, Count, Probability, check_fields, typed
from ..errors import ConfigError, UnknownNameError
from ..policies.base import (
    Child,
    Frontier,
    GrowthPolicy,
    Plan,
    Pool,
    Provenance,
    Width,
    best_per_request,
    highest_in_budget,
    read_number,
)
from ..tree import DraftTree, Floats


class Columns(NamedTuple):
    """What features are computed from, [M] of as many candidates or nodes.

    Attributes:
        path_logprobs: sum of draft log-probs from the root down (nats).
        entropies: of the draft distribution that it was taken from (nats).
        depths: 1 for children of the root.
    """

    path_logprobs: Floats
    entropies: Floats
    depths: NDArray[np.integer]


FEATURES: dict[str, Callable[[Columns], NDArray[np.number]]] = {
    "probability": lambda c: np.exp(c.path_logprobs),
    "entropy": lambda c: c.entropies,
    "depth": lambda c: c.depths - 1,
    "log-probability": lambda c: np.maximum(c.path_logprobs, -20.0),
}
"""The first three are C2T's P, H and d (its depth counts the first layer as 0)."""


def features(columns: Columns, names: Sequence[str]) -> Floats:
    """[M, n] float32: the features of these names."""
    return np.stack([FEATURES[name](columns) for name in names], axis=-1).astype(np.float32)


def of_frontier(frontier: Frontier) -> Columns:
    """The candidates of a frontier, those of one node behind those of another."""
    scores = [*chain.from_iterable(frontier.scores)]
    counts = [len(candidates.tokens) for candidates in frontier.candidates]
    return Columns(
        path_logprobs=np.array(scores, np.float32),
        entropies=np.array([candidates.entropy for candidates in frontier.candidates], np.float32).repeat(counts),
        depths=np.full(len(scores), frontier.depth + 1),
    )


def of_tree(tree: DraftTree) -> Columns:
    """The nodes of a tree."""
    paths, entropies = np.array([tree.path_logprobs, tree.entropies], np.float32)
    return Columns(paths, entropies, np.array(tree.depths, np.int64))


DEFAULT_FEATURES = ("probability", "entropy", "depth", "log-probability")
"""C2T's P, H and d, and ln P, which helps where P spans orders of magnitude."""
MAX_HIDDEN = 1024
_LARGEST = float(np.finfo(np.float32).max)
Weight = Annotated[float, Interval(ge=-_LARGEST, le=_LARGEST)]


@dataclass(frozen=True, slots=True)
class Classifier:
    """Two layers over n features: C = sigmoid(output . relu(hidden x + bias) + threshold).

    C is the probability that the target accepts a node with all above it. Negatives that were left out of training are
    made up for in the last number.

    Attributes:
        features: their names, entries of ``FEATURES``.
        hidden: [h][n] weights of the first layer, on features as they are.
        bias: [h] of the first layer.
        output: [h] weights of the second layer.
        threshold: its bias.

    Raises:
        ConfigError: there is no such feature, or the numbers do not make such a net.
    """

    features: tuple[str, ...]
    hidden: Annotated[tuple[tuple[Weight, ...], ...], Len(1, MAX_HIDDEN)]
    bias: tuple[Weight, ...]
    output: tuple[Weight, ...]
    threshold: Weight
    _first: Floats = field(init=False, repr=False, compare=False)
    _last: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_features(self.features)
        size = len(self.hidden)
        if any(len(row) != len(self.features) for row in self.hidden) or {len(self.bias), len(self.output)} != {size}:
            raise ConfigError(f"the classifier's weights do not fit {len(self.features)} features and {size} units")
        first = np.array([[*row, b] for row, b in zip(self.hidden, self.bias, strict=True)], np.float32)
        object.__setattr__(self, "_first", np.ascontiguousarray(first.T))
        object.__setattr__(self, "_last", np.array([*self.output, self.threshold], np.float32))

    @property
    def parameters(self) -> int:
        """How many numbers it has: 241 as published."""
        return self._first.size + self._last.size

    def __call__(self, frontier: Frontier) -> list[list[float]]:
        """[F][K] C of the candidates of a frontier."""
        scores = iter(self.scores(features(of_frontier(frontier), self.features)).tolist())
        return [[*islice(scores, len(candidates.tokens))] for candidates in frontier.candidates]

    def scores(self, given: Floats) -> Floats:
        """[...] probabilities for features [..., n]."""
        units = np.maximum(given @ self._first[:-1] + self._first[-1], 0)
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-(units @ self._last[:-1] + self._last[-1]))))


def check_features(names: tuple[str, ...]) -> None:
    """Raise ConfigError unless there are such features, each named once."""
    for name in names:
        if name not in FEATURES:
            raise ConfigError(f"no feature {name!r}: choose from {', '.join(FEATURES)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"features are {','.join(names)!r}: name at least one, and each once")


SHIPPED = Path(__file__).parent.parent / "classifiers"
"""Folder of the classifiers that come with the package."""
DEFAULT = "smollm2-head"
"""The one for SmolLM2-135M-Instruct and its head."""


@dataclass(frozen=True, slots=True)
class ClassifierFile:
    """The contents of a classifier file.

    Attributes:
        made_for: the models whose drafts it learned from.
        trained_on: data and recipe, for people.
        held_out: figures on prompts kept apart, for people.
    """

    classifier: Classifier
    made_for: Provenance
    trained_on: dict[str, Any]
    held_out: dict[str, Any]

    def __post_init__(self) -> None:
        if not (self.made_for.target_weights and self.made_for.drafter_weights):
            raise ConfigError("a classifier needs target_weights and drafter_weights, the fingerprints of its models")


CLASSIFIER_FILE = JsonFormat(
    "draftree classifier", 2, "classifier file", "give a file that 'draftree train classifier' wrote", ClassifierFile
)


@typed
def read_classifier(name: str) -> ClassifierFile:
    """Read a classifier file, or one that comes with the package, by its name.

    Raises:
        UnknownNameError: there is no such file.
        ConfigError: it cannot be read, or is no classifier file of this version.
    """
    shipped = {path.stem: path for path in SHIPPED.glob("*.json")}
    try:
        return CLASSIFIER_FILE.read(shipped.get(name) or user_path(name))
    except FileNotFoundError:
        raise UnknownNameError(
            f"no classifier {name!r}: make one with 'draftree train classifier', or choose from "
            f"{', '.join(sorted(shipped))}"
        ) from None


Score = Callable[[Frontier], Sequence[Sequence[float]]]
"""[F][K] candidates of a frontier -> how probable each is to be accepted."""

BETA = 0.05
"""The default threshold, at which training compares epochs too."""


@dataclass(frozen=True, slots=True)
class ClassifierTree(Checked, GrowthPolicy):
    """Layer by layer: score each node's ``width`` most probable tokens, drop C < ``beta``, keep the ``top`` highest C.

    C is a node's own score, whatever the scores above it are (C2T, Algorithm 1). What is dropped is not expanded, so
    the rest is a tree though C may rise along a path.

    The node budget is not the paper's. Where it is smaller than the tree, the nodes whose least C on the path is
    highest stay, and what cannot be among them is not drafted.
    With ``width`` 1 it is a chain that ends where C falls below ``beta`` (chain mode).

    Attributes:
        score: a ``Classifier``, or any other function.
        beta: least C of a node that is verified.
        width: children of a node that are scored.
        top: most nodes of a layer, K of the paper's second top-K; None: no limit.
        depth: deepest level.
        made_for: the models that ``score`` was trained on.

    Raises:
        ConfigError: a value is out of range.
    """

    by_value = True

    score: Score
    beta: Probability = BETA
    width: Width = 15
    top: Count | None = 15
    depth: Count = 10
    made_for: Provenance | None = None

    def width_for(self, nodes: int) -> int:
        """How many children are scored, not how many stay."""
        return self.width

    def pool(self, nodes: int) -> int:
        """At most a budget, or ``top``, a layer."""
        return self.depth * (nodes if self.top is None else min(nodes, self.top))

    def grow(self, frontier: Frontier) -> list[Child]:
        """The layer's nodes with C >= ``beta``, of these the ``top`` highest, of these what the budget can take."""
        extend, layer, scores = frontier.depth + 1 < self.depth, list[Child](), list[float]()
        for parent, node_scores in enumerate(self.score(frontier)):
            above = frontier.tags[parent] if frontier.depth else 1.0
            for rank, score in enumerate(node_scores):
                if score >= self.beta:
                    layer.append(Child(parent, rank, extend, min(score, above)))
                    scores.append(score)
        if self.top is not None:
            requests = [frontier.requests[child.parent] for child in layer]
            layer = [*compress(layer, best_per_request(scores, requests, [self.top] * len(frontier.budgets)))]
        requests = [request for request, pool in enumerate(frontier.pools) for _ in pool.tags]
        requests += [frontier.requests[child.parent] for child in layer]
        tags = [*chain.from_iterable(pool.tags for pool in frontier.pools), *(child.tag for child in layer)]
        stay = best_per_request(tags, requests, frontier.budgets)
        return [*compress(layer, stay[len(stay) - len(layer) :])]

    def prune(self, plan: Plan, pools: Sequence[Pool]) -> list[list[bool] | None]:
        """The budget's best nodes by least C on the path: none exceeds its parent, so parents stay."""
        return highest_in_budget([pool.tags for pool in pools], plan.budgets)


def c2t(
    classifier: str = DEFAULT, beta: float = BETA, width: int = 15, top: str = "15", depth: int = 10
) -> GrowthPolicy:
    """The method ``c2t``."""
    most = None if top == "none" else read_number(int, "top", top, "use a whole number from 1, or 'none'")
    file = read_classifier(classifier)
    return ClassifierTree(file.classifier, beta, width, most, depth, file.made_for)
