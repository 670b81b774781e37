"""A small net that tells how probable it is that the target accepts a candidate (Huo et al., *C2T*, Section 3).

Knows no trees and no files: features in, probabilities out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ConfigError
from .features import FEATURES, features, of_frontier
from .policy import Frontier

DEFAULT_FEATURES = ("probability", "entropy", "depth", "log-probability")
"""C2T's P, H and d, and ln P, which helps where P spans orders of magnitude."""
MAX_HIDDEN = 1024
_LARGEST = torch.finfo(torch.float32).max

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Provenance:
    """The models whose drafts a classifier learned from.

    Attributes:
        target, drafter: names.
        target_weights, drafter_weights: fingerprints; of a drafter ``Source.fingerprint``.
    """

    target: str
    target_weights: str
    drafter: str
    drafter_weights: str

    def __str__(self) -> str:
        return f"target {self.target} [{self.target_weights}] and drafter {self.drafter} [{self.drafter_weights}]"


@dataclass(frozen=True, slots=True)
class Classifier:
    """Two layers over n features: C = sigmoid(output . relu(hidden x + bias) + threshold).

    C is the probability that the target accepts a node with all above it, as in C2T, or the node alone where it has
    accepted the one above. Negatives that were left out of training are made up for in the last number.

    Attributes:
        features: their names, entries of ``FEATURES``.
        hidden: [h][n] weights of the first layer, on features as they are.
        bias: [h] of the first layer.
        output: [h] weights of the second layer.
        threshold: its bias.
        given_parent: C is the node's own, given its parent's acceptance.

    Raises:
        ConfigError: there is no such feature, or the numbers do not make such a net.
    """

    features: tuple[str, ...]
    hidden: tuple[Row, ...]
    bias: Row
    output: Row
    threshold: float
    given_parent: bool = False
    _first: Tensor = field(init=False, repr=False, compare=False)
    _last: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_features(self.features)
        size = len(self.hidden)
        if not 1 <= size <= MAX_HIDDEN:
            raise ConfigError(f"the classifier has {size} hidden units: use 1 to {MAX_HIDDEN}")
        if any(len(row) != len(self.features) for row in self.hidden) or {len(self.bias), len(self.output)} != {size}:
            raise ConfigError(f"the classifier's weights do not fit {len(self.features)} features and {size} units")
        numbers = [x for row in (*self.hidden, self.bias, self.output, (self.threshold,)) for x in row]
        if not all(abs(x) <= _LARGEST for x in numbers):  # nor is nan
            raise ConfigError("the classifier has weights that are no finite numbers")
        first = torch.tensor([[*row, b] for row, b in zip(self.hidden, self.bias, strict=True)])
        object.__setattr__(self, "_first", first.T.contiguous())
        object.__setattr__(self, "_last", torch.tensor([*self.output, self.threshold]))

    @property
    def parameters(self) -> int:
        """How many numbers it has: 241 as published."""
        return self._first.numel() + self._last.numel()

    def __call__(self, frontier: Frontier) -> Tensor:
        """[F, K] C of the candidates of a frontier; 0 where there is none.

        Raises:
            ConfigError: a feature is not a number.
        """
        given = features(of_frontier(frontier), self.features)
        return self.scores(given).masked_fill(frontier.candidates.logprobs == float("-inf"), 0.0)

    @torch.inference_mode()
    def scores(self, given: Tensor) -> Tensor:
        """[...] probabilities for features [..., n].

        Raises:
            ConfigError: one is not a number.
        """
        first, last, rows = self._first, self._last, given.reshape(-1, given.shape[-1])
        units = torch.addmm(first[-1], rows, first[:-1]).relu_()
        found = torch.addmv(last[-1:].expand(units.shape[0]), units, last[:-1]).sigmoid_()
        if bool(found.isnan().any()):
            bad = rows.isnan().any(0).nonzero().flatten().tolist()
            names = ", ".join(self.features[i] for i in bad) or "every feature"
            raise ConfigError(f"the drafter's law has {names} nan: its logits are no numbers, use another drafter")
        return found.view(given.shape[:-1])


def check_features(names: tuple[str, ...]) -> None:
    """Make sure that there are such features, each named once.

    Raises:
        ConfigError: there are not.
    """
    for name in names:
        if name not in FEATURES:
            raise ConfigError(f"no feature {name!r}: choose from {', '.join(FEATURES)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"features are {','.join(names)!r}: name at least one, and each once")
