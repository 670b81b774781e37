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
from .base import NOTHING_GROWN, DraftSource, Grown, Scorer, UnscoredNode, fitted_depth

_SURE = math.log(0.5)
"""Log-probability of its first candidate from which on a part is sure."""


@dataclass
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
        self._left_out: Sequence[Sequence[Request]] = [()] * len(self.parts)
        self._limits: dict[Request, Sequence[float]] = {}  # how deep each part drafts for the requests of the proposal

    def enable(self, parts: Sequence[bool], left_out: Sequence[Sequence[Request]] = ()) -> None:
        """The others are not begun, and draft nothing."""
        self._enabled, self.seconds = list(parts), ()
        self._left_out = left_out or [()] * len(self.parts)

    def read(self, request: Request, most: int) -> bool:
        """By the parts that draft for it."""
        return all([part.read(request, most) for part in compress(self.parts, self._draft_for(request))])

    def _draft_for(self, request: Request) -> list[bool]:
        parts = zip(self._enabled, self._left_out, strict=True)
        return [enabled and request not in others for enabled, others in parts]

    def fit(self, request: Request, budget: Budget) -> Budget:
        """What the part that can draft deepest for it can draft within."""
        parts = zip(self.parts, self._draft_for(request), strict=True)
        depths = [fitted_depth(part, request, budget) if drafts else 0 for part, drafts in parts]
        self._limits[request], deepest = depths, max(depths)
        return Budget(budget.nodes, budget.depth if deepest == math.inf else int(deepest))

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        """Score by the parts that are enabled."""
        order = sorted(range(len(self.parts)), key=lambda part: self.parts[part].model is not None)
        scorers = {part: self.parts[part].scorer(requests, coupled) for part in order if self._enabled[part]}
        scorer = _EnsembleScorer(scorers, [self._limits[s] for s in requests], len(self.parts))
        self.seconds = scorer.seconds
        return scorer

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Notify all parts; they have numbered the nodes of the trees that they drafted, and no others."""
        self._left_out = [()] * len(self.parts)
        for number, part in enumerate(self.parts):
            part.settle(requests, [g if g.tree.part == number else NOTHING_GROWN for g in grown])

    def close(self, request: Request) -> None:
        self._limits.pop(request, None)
        self.seconds = ()
        super().close(request)


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
        candidates = self._choose(roots, width) if roots else {}
        groups: dict[int, list[UnscoredNode]] = {}
        for node in nodes:
            request, number, parent, _ = node
            if number != ROOT:
                depth = self._depths[request, number] = self._depths.get((request, parent), 0) + 1
                part = self._part.get(request)
                if part is not None and depth < self._limits[request][part]:
                    groups.setdefault(part, []).append(node)
        for part, members in groups.items():
            candidates |= zip(members, self._score(part, members, width), strict=True)
        return [candidates.get(node, NO_CANDIDATES) for node in nodes]

    def _choose(self, roots: Sequence[UnscoredNode], width: int) -> dict[UnscoredNode, Candidates]:
        """Choose who drafts: a part that is sure, or the last one that has candidates."""
        chosen: dict[UnscoredNode, Candidates] = {}
        for part in self._scorers:
            open_ = [n for n in roots if self._limits[n.request][part] and not _is_sure(chosen.get(n, NO_CANDIDATES))]
            if not open_:
                continue
            for root, candidates in zip(open_, self._score(part, open_, width), strict=True):
                if candidates.tokens:
                    chosen[root], self._part[root.request] = candidates, part
        return chosen

    def _score(self, part: int, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        began = time.perf_counter()
        scored = self._scorers[part].score(nodes, width)
        if part:
            scored = [candidates._replace(part=part) for candidates in scored]
        self.seconds[part] += time.perf_counter() - began
        return scored


def _is_sure(candidates: Candidates) -> bool:
    return bool(candidates.tokens) and candidates.logprobs[0] >= _SURE
