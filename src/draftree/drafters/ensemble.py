"""An ensemble of sources: one merged tree of what all of them predict, for one budget.

Every source scores every node, whoever proposed it. Each source's probabilities are calibrated as decoding goes on
(``Calibration``), so that those of n-gram counts, a table and a model can be compared. Equal tokens under one parent
are one candidate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from ..config import Budget
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..policies.auto.calibration import Calibration, Tried, first_or_not
from ..policies.base import Candidates
from ..request import Outcome, Request
from ..tree import ROOT, DraftTree
from .distributions import Drawing, Drawn
from .source import Grown, Scorer, TokenSource

_LEAST = 0.005
"""Candidates that their source finds less probable than this are left out."""
_BACKED = 0.5
"""Share of a candidate's probability that a part must give it to be among its origins."""
_WIDTH = 8
"""Least candidates of each source: the entropy of the ensemble is over these."""


@dataclass(slots=True)
class EnsembleSource(TokenSource):
    """Predicts what its parts predict, with calibrated probabilities.

    Attributes:
        parts: the sources, at least two.

    Raises:
        ConfigError: fewer, or two of one name.
    """

    learns: ClassVar[bool] = True

    parts: tuple[TokenSource, ...] = field()
    _calibration: Calibration = field(init=False, repr=False)
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
        self._calibration = Calibration(2 * len(self.parts))

    @property
    def name(self) -> str:
        """All names, joined by "+"."""
        return "+".join(part.name for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """All fingerprints, joined by "+"."""
        return "+".join(part.fingerprint for part in self.parts)

    @property
    def passes(self) -> int:
        return sum(part.passes for part in self.parts)

    @property
    def successors(self) -> int:
        """As many as the part that wants most."""
        return max(part.successors for part in self.parts)

    def prepare(self, target: LanguageModel) -> None:
        """Notify all parts."""
        for part in self.parts:
            part.prepare(target)

    def open(self, request: Request) -> None:
        """Notify all parts."""
        for part in self.parts:
            part.open(request)

    def enable(self, parts: Sequence[bool]) -> None:
        """The others are not begun, and draft nothing."""
        self._enabled, self._scorer = list(parts), None

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of scoring, by each part."""
        return tuple(self._scorer.seconds) if self._scorer else ()

    def fit(self, request: Request, budget: Budget) -> Budget:
        """What the part with the most room can draft within."""
        parts = zip(self.parts, self._enabled, strict=True)
        fits = [part.fit(request, budget) if enabled else Budget(0) for part, enabled in parts]
        depths = [0 if not f.nodes else math.inf if f.depth is None else f.depth for f in fits]
        self._limits[request] = depths
        deepest = max(depths)
        return Budget(budget.nodes, budget.depth if deepest == math.inf else int(deepest))

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """Score by the parts that are enabled."""
        parts = zip(self.parts, self._enabled, strict=True)
        scorers = [part.begin(requests, drawing) if enabled else None for part, enabled in parts]
        self._scorer = _EnsembleScorer(self.parts, scorers, self._calibration, [self._limits[s] for s in requests])
        return self._scorer

    def is_stale(self, request: Request, node: int, parent: int) -> bool:
        """See ``TokenSource``; of the parts that score this proposal."""
        return self._scorer is not None and any(p.is_stale(request, node, parent) for p in self._scorer.active)

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Notify all parts; one that is disabled has numbered none of these nodes."""
        none = [Grown(DraftTree.empty(), torch.zeros(0, dtype=torch.int64)) for _ in grown]
        for part, enabled in zip(self.parts, self._enabled, strict=True):
            part.settle(requests, grown if enabled else none)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Calibrate each part by the target's tokens, and notify all parts."""
        scorer = self._scorer
        if scorer is not None and scorer.predicted:
            for row, outcome in enumerate(outcomes):
                self._learn(scorer.predicted, row, outcome.tokens[: outcome.taken])
        for part in self.parts:
            part.observe(outcomes)

    def _learn(
        self, known: Mapping[_Place, tuple[int, Sequence[_Prediction]]], row: int, tokens: Sequence[int]
    ) -> None:
        """Walk down along the target's tokens: every candidate on the way was tried."""
        place: _Place = (row, ROOT, ROOT)
        tried = list[Tried]()
        for token in tokens:
            if place not in known:
                break
            node, parts = known[place]
            tried += [Tried(p, guess == token, kind) for guess, p, kind in zip(*_flat(parts), strict=True)]
            place = (row, node, token)
        self._calibration.learn(tried)

    def close(self, request: Request) -> None:
        """Notify all parts."""
        self._limits.pop(request, None)
        for part in self.parts:
            part.close(request)


_Place = tuple[int, int, int]
"""Row, number of the parent and token of a scored node; (row, ROOT, ROOT) for a root."""
_Prediction = tuple[list[int], list[float]]
"""A part's candidates after one node, and the probabilities that it gives them."""
_NOTHING: _Prediction = ([], [])


class _EnsembleScorer:
    """Scores by all parts and merges their predictions.

    Attributes:
        predicted: of each scored node, its number and each part's prediction.
        active: the parts that score.
        seconds: that each part took.
    """

    def __init__(
        self,
        parts: Sequence[TokenSource],
        scorers: Sequence[Scorer | None],
        calibration: Calibration,
        limits: Sequence[Sequence[float]],
    ) -> None:
        self._parts = list(zip(parts, scorers, strict=True))
        self.active = [part for part, scorer in self._parts if scorer is not None]
        self._calibration = calibration
        self._limits = limits
        self.seconds = [0.0] * len(scorers)
        self.predicted: dict[_Place, tuple[int, list[_Prediction]]] = {}
        self._depths: dict[tuple[int, int], int] = {}

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        places = [((b, ROOT, ROOT), ROOT) for b in rows]

        def score(scorer: Scorer, own: list[int]) -> Candidates:
            return scorer.score_roots([rows[i] for i in own], _wide(width))

        return self._join(places, score, width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        asked = torch.stack([rows, nodes, parents, tokens])
        listed = asked.T.tolist()
        places = [((b, parent, token), node) for b, node, parent, token in listed]

        def score(scorer: Scorer, own: list[int]) -> Candidates:
            some = asked if len(own) == len(listed) else asked[:, own]
            row, node, parent, token = some
            return scorer.score(row, node, parent, token, _wide(width))

        return self._join(places, score, width)

    def draw(self, counts: Tensor) -> Drawn:
        """Never called: schemes that need it refuse what ``learns``."""
        raise ConfigError("an ensemble does not draw children: use verification match")

    def _join(
        self, places: Sequence[tuple[_Place, int]], score: Callable[[Scorer, list[int]], Candidates], width: int
    ) -> Candidates:
        """One distribution of all parts; what none of them predicts is one outcome of its entropy."""
        depths = []
        for (b, parent, _), node in places:
            depths.append(0 if node == ROOT else self._depths[b, parent] + 1)
            self._depths[b, node] = depths[-1]
        predictions: list[list[_Prediction]] = [[_NOTHING for _ in self._parts] for _ in places]
        for kind, (_, scorer) in enumerate(self._parts):
            own = [i for i, ((b, *_), _) in enumerate(places) if self._limits[b][kind] > depths[i]]
            if scorer is not None and own:
                began = time.perf_counter()
                found = score(scorer, own)
                self.seconds[kind] += time.perf_counter() - began
                for i, likely in zip(own, _likely(found), strict=True):
                    predictions[i][kind] = likely
        for (place, node), parts in zip(places, predictions, strict=True):
            self.predicted[place] = node, parts
        return self._merged(predictions, width)

    def _merged(self, predictions: Sequence[Sequence[_Prediction]], width: int) -> Candidates:
        """The merged candidates; lists are faster than tensors for so few numbers."""
        merged = []
        for parts in predictions:
            _, probabilities, kinds = _flat(parts)
            accepted = iter(self._calibration.acceptance(probabilities, kinds))
            merged.append(merge([(tokens, list(islice(accepted, len(tokens)))) for tokens, _ in parts]))
        width = min(width, max(1, *(len(m) for m in merged)))
        tokens, logprobs, origins = [], [], []
        for candidates in merged:
            best, none = candidates[:width], width - len(candidates)
            tokens.append([token for token, _, _ in best] + [0] * none)
            logprobs.append([math.log(p) for _, p, _ in best] + [-math.inf] * none)
            origins.append([bits for _, _, bits in best] + [0] * none)
        entropies = torch.tensor([_entropy([p for _, p, _ in candidates]) for candidates in merged])
        return Candidates(torch.tensor(tokens), torch.tensor(logprobs), entropies, torch.tensor(origins))


def _wide(width: int) -> int:
    return max(width, _WIDTH)


def _flat(parts: Sequence[_Prediction]) -> tuple[list[int], list[float], list[int]]:
    """Tokens, probabilities and kinds of all parts' candidates: each part's first is counted apart from its others."""
    tokens, probabilities, kinds = list[int](), list[float](), list[int]()
    for part, (own, given) in enumerate(parts):
        tokens += own
        probabilities += given
        kinds += [2 * part + kind for kind in first_or_not(len(own))]
    return tokens, probabilities, kinds


def _likely(found: Candidates) -> list[_Prediction]:
    """The candidates of each node that are likely enough: the first ones, since they descend."""
    probabilities = found.logprobs.exp()
    counts = (probabilities > _LEAST).sum(1).tolist()
    return [
        (tokens[:n], p[:n]) for tokens, p, n in zip(found.tokens.tolist(), probabilities.tolist(), counts, strict=True)
    ]


def merge(parts: Sequence[_Prediction]) -> list[tuple[int, float, int]]:
    """One distribution of several: equal tokens become one candidate.

    Args:
        parts: of each, its candidates after one node, and the probabilities that they are accepted.

    Returns:
        tokens, with the largest of their probabilities, scaled down where they sum to more than 1, and with the bits of
        the parts that give it at least half of that; in descending order.
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
    return [(token, best[token] / total, origins[token]) for token in sorted(best, key=best.__getitem__, reverse=True)]


def _entropy(probabilities: Sequence[float]) -> float:
    """In nats; what is missing from 1 is one outcome."""
    rest = 1 - sum(probabilities)
    return -sum(p * math.log(p) for p in probabilities) - (rest * math.log(rest) if rest > 0 else 0.0)
