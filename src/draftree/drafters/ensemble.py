"""An ensemble of sources: one merged tree of what all of them predict, for one budget.

Every source scores every node, whoever proposed it. Each source's probabilities are calibrated as decoding goes on
(``Calibration``), so that those of n-gram counts, a table and a model can be compared. Equal tokens under one parent
are one candidate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter

from ..config import Budget
from ..errors import ConfigError
from ..policies.auto.calibration import Calibration
from ..policies.base import Candidates
from ..request import Outcome, Request
from ..tree import ROOT, Drawing
from .base import NOTHING_GROWN, DraftSource, Grown, Scorer, UnscoredNode
from .distributions import candidates_of

_LEAST = 0.005
"""Candidates that their source finds less probable than this are left out."""
_BACKED = 0.5
"""Share of a candidate's probability that a part must give it to be among its origins."""
_WIDTH = 8
"""Least candidates of each source: the entropy of the ensemble is over these."""


@dataclass(slots=True)
class EnsembleSource(DraftSource):
    """Predicts what its parts predict, with calibrated probabilities.

    Attributes:
        parts: the sources, at least two.

    Raises:
        ConfigError: fewer, or two of one name.
    """

    learns = True

    parts: tuple[DraftSource, ...] = field()
    _calibration: Sequence[Calibration] = field(init=False, repr=False)
    _limits: dict[Request, list[float]] = field(default_factory=dict, repr=False)
    """How deep each part drafts for the requests of the proposal."""
    _scorer: _EnsembleScorer | None = field(default=None, repr=False)
    _enabled: Sequence[bool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if len(names) < 2:
            raise ConfigError(f"an ensemble of {names}: give at least two sources")
        if len(set(names)) < len(names):
            raise ConfigError(f"an ensemble of {names}: give each source once")
        self._enabled = [True] * len(self.parts)
        self._calibration = [Calibration() for _ in range(2 * len(self.parts))]

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def fingerprint(self) -> str:
        return "+".join(part.fingerprint for part in self.parts)

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        return self.parts

    def enable(self, parts: Sequence[bool]) -> None:
        """The others are not begun, and draft nothing."""
        self._enabled, self._scorer = list(parts), None

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of scoring, by each part."""
        return tuple(self._scorer.seconds) if self._scorer else ()

    def read(self, request: Request, most: int) -> bool:
        """By the parts that are enabled."""
        parts = zip(self.parts, self._enabled, strict=True)
        return all([part.read(request, most) for part, enabled in parts if enabled])

    def fit(self, request: Request, budget: Budget) -> Budget:
        """What the part with the most room can draft within."""
        parts = zip(self.parts, self._enabled, strict=True)
        fits = [part.fit(request, budget) if enabled else Budget(0) for part, enabled in parts]
        depths = [0 if not f.nodes else math.inf if f.depth is None else f.depth for f in fits]
        self._limits[request] = depths
        deepest = max(depths)
        return replace(budget, depth=budget.depth if deepest == math.inf else int(deepest))

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """Score by the parts that are enabled."""
        parts = zip(self.parts, self._enabled, strict=True)
        scorers = [part.begin(requests, drawing) if enabled else None for part, enabled in parts]
        self._scorer = _EnsembleScorer(scorers, self._calibration, [self._limits[s] for s in requests])
        return self._scorer

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Notify all parts; one that is disabled has numbered none of these nodes."""
        none = [NOTHING_GROWN for _ in grown]
        for part, enabled in zip(self.parts, self._enabled, strict=True):
            part.settle(requests, grown if enabled else none)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Calibrate each part by the target's tokens, and notify all parts; one that is disabled learns no scores."""
        if self._scorer is not None:
            for row, outcome in enumerate(outcomes):
                self._scorer.learn(row, outcome.tokens[: outcome.taken])
        unscored = [replace(outcome, scores=None) for outcome in outcomes]
        for part, enabled in zip(self.parts, self._enabled, strict=True):
            part.observe(outcomes if enabled else unscored)

    def close(self, request: Request) -> None:
        self._limits.pop(request, None)
        self._scorer = None  # the scorers of a proposal hold its requests
        super(EnsembleSource, self).close(request)


_Prediction = tuple[list[int], list[float]]
"""A part's candidates after one node, and the probabilities that it gives them."""
_NOTHING: _Prediction = ([], [])


class _EnsembleScorer(Scorer):
    """Scores by all parts and merges their predictions.

    Attributes:
        seconds: that each part took.
    """

    def __init__(
        self, scorers: Sequence[Scorer | None], calibration: Sequence[Calibration], limits: Sequence[Sequence[float]]
    ) -> None:
        self._scorers = scorers
        self._calibration = calibration
        self._limits = limits
        self.seconds = [0.0] * len(scorers)
        self._predicted: dict[tuple[int, int], list[_Prediction]] = {}
        self._children: dict[tuple[int, int, int], int] = {}
        """Row, parent and token of each scored node but the roots -> its number."""
        self._depths: dict[tuple[int, int], int] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """One distribution of all parts; what none of them predicts is one outcome of its entropy."""
        depths = []
        for row, node, parent, token in nodes:
            depths.append(0 if node == ROOT else self._depths[row, parent] + 1)
            self._depths[row, node] = depths[-1]
            if node != ROOT:
                self._children[row, parent, token] = node
        predictions: list[list[_Prediction]] = [[_NOTHING for _ in self._scorers] for _ in nodes]
        for kind, scorer in enumerate(self._scorers):
            own = [i for i, n in enumerate(nodes) if self._limits[n.row][kind] > depths[i]]
            if scorer is not None and own:
                began = time.perf_counter()
                most = max(width, _WIDTH)
                found = scorer.score([nodes[i] for i in own], most)
                self.seconds[kind] += time.perf_counter() - began
                for i, each in zip(own, found, strict=True):
                    likely = [p for p in map(math.exp, each.logprobs) if p > _LEAST]
                    predictions[i][kind] = [*each.tokens[: len(likely)]], likely
        self._predicted |= {(n.row, n.node): parts for n, parts in zip(nodes, predictions, strict=True)}
        return self._merged(predictions, width)

    def _merged(self, predictions: Sequence[Sequence[_Prediction]], width: int) -> list[Candidates]:
        merged = []
        for parts in predictions:
            _, probabilities, kinds = _flat(parts)
            pairs = zip(probabilities, kinds, strict=True)
            accepted = iter([self._calibration[kind].acceptance(p) for p, kind in pairs])
            blend, bits = merge([(tokens, list(islice(accepted, len(tokens)))) for tokens, _ in parts])
            found = candidates_of(blend, width)
            merged.append(found._replace(origins=[bits[token] for token in found.tokens]))
        return merged

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Calibrate by the candidates of a request along the target's tokens."""
        node: int | None = ROOT
        for token in tokens:
            if node is None or (row, node) not in self._predicted:
                break
            for guess, p, kind in zip(*_flat(self._predicted[row, node]), strict=True):
                self._calibration[kind].learn(p, guess == token)
            node = self._children.get((row, node, token))


def _flat(parts: Sequence[_Prediction]) -> tuple[list[int], list[float], list[int]]:
    """Tokens, probabilities and kinds of all parts' candidates: each part's first is counted apart from its others."""
    tokens, probabilities, kinds = list[int](), list[float](), list[int]()
    for part, (own, given) in enumerate(parts):
        tokens += own
        probabilities += given
        kinds += [2 * part + (rank > 0) for rank in range(len(own))]
    return tokens, probabilities, kinds


def merge(parts: Sequence[_Prediction]) -> tuple[dict[int, float], dict[int, int]]:
    """One distribution of several: equal tokens become one candidate.

    Args:
        parts: of each, its candidates after one node, and the probabilities that they are accepted.

    Returns:
        (tokens in descending order, with the largest of their probabilities, scaled down where they sum to more than 1;
        the bits of the parts that give a token at least half of the largest).
    """
    best: dict[int, float] = {}
    for tokens, accepted in parts:
        for token, p in zip(tokens, accepted, strict=True):
            best[token] = max(p, best.get(token, 0.0))
    origins = dict.fromkeys(best, 0)
    for kind, (tokens, accepted) in enumerate(parts):
        for token, p in zip(tokens, accepted, strict=True):
            if p >= _BACKED * best[token]:
                origins[token] |= 1 << kind
    total = max(1.0, sum(best.values()))
    ranked = sorted(best.items(), key=itemgetter(1), reverse=True)
    return {token: p / total for token, p in ranked}, origins
