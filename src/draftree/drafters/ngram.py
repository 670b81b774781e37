"""Prompt lookup by n-grams: continuations of earlier occurrences in the prompt and the output; no model.

A request's predicted output (``Request.prediction``) counts as a text that followed its prompt once before: it is
drafted from the first token on, and again wherever the answer comes back to it after an edit. Where a constraint forces
what comes next, such as the name of a JSON key, that is drafted.

Probabilities are those of an n-gram index (``indexes.py``); entropies mean what they mean for a model, so that every
growth policy works unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..errors import ConfigError
from ..policies.base import Candidates
from ..request import Request
from ..sampling.constraint import ConstraintState
from ..tree import ROOT, DraftDistribution, Drawing
from .base import BeamSource, NodeStates, Scorer, UnscoredNode
from .distributions import Drawn, candidates_of, draw_children
from .indexes import NgramIndex, Tail

_FORCED = 0.99
"""Probability of the token that begins what a constraint forces: right at all of 508 such places that ``python -m
benchmarks.grammars`` finds, but a target may spell the string in other tokens."""


@dataclass(slots=True)
class NgramSource(BeamSource):
    """Predicts what followed the n-gram matches in each request's own prompt and output.

    Attributes:
        shortest, longest: match lengths in tokens.

    Raises:
        ConfigError: lengths out of range.
    """

    shortest: int = 2
    longest: int = 6
    _indexes: dict[Request, NgramIndex] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(
                f"lookup match lengths are {self.shortest} to {self.longest}: use 1 <= shortest <= longest"
            )

    @property
    def name(self) -> str:
        return "lookup"

    def open(self, request: Request) -> None:
        self._indexes[request] = NgramIndex.begun(request.ids, request.prediction, self.shortest, self.longest)

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        indexes = [self._indexes[r] for r in requests]
        for index, request in zip(indexes, requests, strict=True):
            index.extend(request.ids[len(index) :])
        return NgramScorer(indexes, requests, drawing, self.longest)

    def close(self, request: Request) -> None:
        self._indexes.pop(request, None)


class Predictor(Protocol):
    """Knows what has followed in texts."""

    def predict(self, tail: Tail) -> dict[int, float]:
        """Probabilities of the next tokens, as ``blended``."""


class NgramScorer(Scorer):
    """Scores nodes of the trees under construction by the last tokens on their paths.

    Args:
        indexes: of each request, what knows successors.
        longest: tokens of the longest match.
    """

    def __init__(
        self, indexes: Sequence[Predictor], requests: Sequence[Request], drawing: Drawing, longest: int
    ) -> None:
        self._indexes = indexes
        self._requests = requests
        self._drawing = drawing
        self._longest = longest
        self._tails: dict[tuple[int, int], Tail] = {}
        self._states = NodeStates(requests)
        self._scored: list[tuple[int, int, dict[int, float]]] = []

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        for b, node, parent, token in nodes:
            last = self._requests[b].ids[-self._longest :]
            self._tails[b, node] = tuple(last) if node == ROOT else (*self._tails[b, parent], token)
        self._scored = [
            (b, node, self._predict(b, node, state))
            for (b, node, _, _), state in zip(nodes, self._states.of(nodes), strict=True)
        ]
        return [candidates_of(blend, width) for _, _, blend in self._scored]

    def _predict(self, b: int, node: int, state: ConstraintState | None) -> dict[int, float]:
        """What a constraint forces; else what has followed, as far as the constraint allows it."""
        if state is not None and (forced := state.forced) is not None:
            return {forced: _FORCED}
        blend = self._indexes[b].predict(self._tails[b, node])
        if state is None or not blend:
            return blend
        allowed = state.allows(np.array(list(blend))).tolist()
        return {token: p for (token, p), open_ in zip(blend.items(), allowed, strict=True) if open_}

    def draw(self, counts: Sequence[int]) -> list[Drawn]:
        """Draw from the blend, normalised over the tokens that it knows; see ``Scorer``."""
        nodes = [(self._requests[b], node) for b, node, _ in self._scored]
        blends = [
            DraftDistribution(np.log(np.array(list(blend.values()), np.float32)), np.array(list(blend)))
            for _, _, blend in self._scored
        ]
        return draw_children(nodes, blends, counts, self._drawing)
