"""An ensemble of sources: in each step one of them drafts a request's tree.

They are tried in the order of their cost, those without a model first: the first one that is sure of what follows the
root drafts, else the last one. A tree merged from all of them accepts no more, and takes passes of a model where
lookup alone would do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from ..config import Budget
from ..policies.base import NO_CANDIDATES, Candidates
from ..request import Request
from ..tree import ROOT
from .base import NOTHING_GROWN, DraftSource, Grown, Scorer, UnscoredNode

_SURE = math.log(0.5)
"""Log-probability of its first candidate from which on a part is sure."""


@dataclass(slots=True)  # a slot takes the place of the property ``parts``
class EnsembleSource(DraftSource):
    """Predicts what one of its parts predicts.

    Attributes:
        parts: the sources.
    """

    learns = True

    parts: tuple[DraftSource, ...] = field()

    def __post_init__(self) -> None:
        self.name, self.sources = "+".join(part.name for part in self.parts), self.parts
        self._enabled: Sequence[bool] = [True] * len(self.parts)
        self._limits: dict[Request, Sequence[float]] = {}  # how deep each part drafts for the requests of the proposal
        self._scorer: _EnsembleScorer | None = None

    def enable(self, parts: Sequence[bool]) -> None:
        """The others are not begun, and draft nothing."""
        self._enabled, self._scorer = list(parts), None

    @property
    def seconds(self) -> tuple[float, ...]:
        """[parts] seconds that each part took to score nodes in the last step."""
        return tuple(self._scorer.seconds) if self._scorer else ()

    def read(self, request: Request, most: int) -> bool:
        """By the parts that are enabled."""
        return all([part.read(request, most) for part in compress(self.parts, self._enabled)])

    def limits(self, request: Request, budget: Budget) -> Sequence[float]:
        """Those of its parts; 0 of the disabled ones."""
        parts = zip(self.parts, self._enabled, strict=True)
        return [part.limits(request, budget)[0] if enabled else 0 for part, enabled in parts]

    def fit(self, request: Request, budget: Budget) -> Budget:
        """What the part with the most room can draft within."""
        depths = self._limits[request] = self.limits(request, budget)
        deepest = max(depths)
        return Budget(budget.nodes, budget.depth if deepest == math.inf else int(deepest))

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        """Score by the parts that are enabled."""
        order = sorted(range(len(self.parts)), key=lambda part: self.parts[part].model is not None)
        scorers = {part: self.parts[part].scorer(requests, coupled) for part in order if self._enabled[part]}
        self._scorer = _EnsembleScorer(scorers, [self._limits[s] for s in requests], len(self.parts))
        return self._scorer

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Notify all parts; they have numbered the nodes of the trees that they drafted, and no others."""
        for number, part in enumerate(self.parts):
            part.settle(requests, [g if g.tree.part == number else NOTHING_GROWN for g in grown])

    def close(self, request: Request) -> None:
        self._limits.pop(request, None)
        self._scorer = None  # the scorers of a proposal hold its requests
        super(EnsembleSource, self).close(request)


class _EnsembleScorer(Scorer):
    """Scores each request's nodes by the part that drafts its tree.

    Args:
        scorers: of the parts that are enabled, by their number, in the order in which they are tried.
        limits: for each request, how deep each part drafts.

    Attributes:
        seconds: that each part took.
    """

    def __init__(self, scorers: Mapping[int, Scorer], limits: Sequence[Sequence[float]], parts: int) -> None:
        self._scorers, self._limits = scorers, limits
        self.seconds = [0.0] * parts
        self._part: dict[int, int] = {}
        """Request -> the one that drafts for it."""
        self._depths: dict[tuple[int, int], int] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        roots = [n for n in nodes if n.node == ROOT]
        found = self._choose(roots, width) if roots else {}
        groups: dict[int, list[UnscoredNode]] = {}
        for node in nodes:
            request, number, parent, _ = node
            if number != ROOT:
                depth = self._depths[request, number] = self._depths.get((request, parent), 0) + 1
                part = self._part.get(request)
                if part is not None and depth < self._limits[request][part]:
                    groups.setdefault(part, []).append(node)
        for part, own in groups.items():
            found |= zip(own, self._score(part, own, width), strict=True)
        return [found.get(node, NO_CANDIDATES) for node in nodes]

    def _choose(self, roots: Sequence[UnscoredNode], width: int) -> dict[UnscoredNode, Candidates]:
        """Choose who drafts: a part that is sure, or the last one that has candidates."""
        found: dict[UnscoredNode, Candidates] = {}
        for part in self._scorers:
            open_ = [n for n in roots if self._limits[n.request][part] and not _is_sure(found.get(n, NO_CANDIDATES))]
            if not open_:
                continue
            for root, candidates in zip(open_, self._score(part, open_, width), strict=True):
                if candidates.tokens:
                    found[root], self._part[root.request] = candidates, part
        return found

    def _score(self, part: int, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        began = time.perf_counter()
        found = self._scorers[part].score(nodes, width)
        if part:
            found = [candidates._replace(part=part) for candidates in found]
        self.seconds[part] += time.perf_counter() - began
        return found


def _is_sure(found: Candidates) -> bool:
    return bool(found.tokens) and found.logprobs[0] >= _SURE
