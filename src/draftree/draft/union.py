"""A union of sources: one tree out of what all of them say, for one budget.

Every source is asked about every node, whoever proposed it. What a source's probabilities are worth is counted as
decoding goes on (``Calibration``: by probability and depth, and by whether another source says the same), so that those
of n-gram counts, a table and a model can be compared. Equal tokens under one parent are one candidate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..config import Budget
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..sequence import Sequence
from ..tree import ROOT
from .base import Outcome
from .calibration import Calibration
from .drawing import Drawing, Drawn
from .policy import Candidates
from .source import Grown, Scorer, Source

_LEAST = math.log(0.005)
"""Candidates that their source finds less probable than this (nats) are left out."""
_WIDTH = 8
"""Candidates of each source that are asked for at least: the entropy of the union is over these."""


@dataclass(slots=True)
class UnionSource(Source):
    """Says what its parts say, with the probabilities that they have earned.

    Attributes:
        parts: the sources, at least two.

    Raises:
        ConfigError: fewer, or two of one name.
    """

    learns: ClassVar[bool] = True

    parts: tuple[Source, ...] = field()
    _worth: list[tuple[Calibration, Calibration]] = field(init=False, repr=False)
    """Of each part: alone in what it says, and with another."""
    _limits: dict[Sequence, list[float]] = field(default_factory=dict, repr=False)
    """How deep each part drafts for the sequences of the proposal."""
    _scorer: _UnionScorer | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if len(names) < 2:
            raise ConfigError(f"a union of {names}: give at least two sources")
        if len(set(names)) < len(names):
            raise ConfigError(f"a union of {names}: give each source once")
        self._worth = [(Calibration(), Calibration()) for _ in self.parts]

    @property
    def name(self) -> str:
        """All names, joined by "+"."""
        return "+".join(part.name for part in self.parts)

    @property
    def passes(self) -> int:
        """See ``Source``."""
        return sum(part.passes for part in self.parts)

    @property
    def successors(self) -> int:
        """As many as the part that wants most."""
        return max(part.successors for part in self.parts)

    def prepare(self, target: LanguageModel) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.prepare(target)

    def open(self, sequence: Sequence) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.open(sequence)

    def fit(self, sequence: Sequence, budget: Budget) -> Budget:
        """What the part with the most room can draft within."""
        fits = [Budget(0) if part.resting else part.fit(sequence, budget) for part in self.parts]
        depths = [0 if not f.nodes else math.inf if f.depth is None else f.depth for f in fits]
        self._limits[sequence] = depths
        deepest = max(depths)
        return Budget(budget.nodes, budget.depth if deepest == math.inf else int(deepest))

    def begin(self, sequences: Many[Sequence], drawing: Drawing) -> Scorer:
        """Ask the parts that do not rest."""
        scorers = [None if part.resting else part.begin(sequences, drawing) for part in self.parts]
        limits = torch.tensor([self._limits[s] for s in sequences])
        self._scorer = _UnionScorer(self.parts, scorers, self._worth, limits)
        return self._scorer

    def settle(self, sequences: Many[Sequence], grown: Many[Grown]) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.settle(sequences, grown)

    def observe(self, outcomes: Many[Outcome]) -> None:
        """Learn what each part's candidates are worth, and tell all parts."""
        scorer, self._scorer = self._scorer, None
        if scorer is not None and scorer.layers:
            for calibration in (c for pair in self._worth for c in pair):
                calibration.fade()
            for row, outcome in enumerate(outcomes):
                self._learn(scorer.layers, row, outcome.tokens[: outcome.taken])
        for part in self.parts:
            part.observe(outcomes)

    def _learn(self, layers: Many[_Layer], row: int, tokens: Many[int]) -> None:
        """Walk down along what the target said: every candidate on the way was put to the test."""
        place: _Place = (row, ROOT, ROOT)
        for depth, (token, layer) in enumerate(zip(tokens, layers, strict=False), start=1):
            if place not in layer.places:
                return
            at, node = layer.places[place]
            for part, said in zip(self._worth, layer.said, strict=True):
                for calibration, mask in zip(part, (~said.shared[at], said.shared[at]), strict=True):
                    mask = mask & (said.probabilities[at] > 0)
                    found = said.tokens[at][mask].tolist()
                    hit = found.index(token) if token in found else None
                    calibration.learn(depth, said.probabilities[at][mask].tolist(), hit)
            place = (row, node, token)

    def close(self, sequence: Sequence) -> None:
        """Tell all parts."""
        self._limits.pop(sequence, None)
        for part in self.parts:
            part.close(sequence)


_Place = tuple[int, int, int]
"""Row, number of the parent and token of a node that was asked about; (row, ROOT, ROOT) for a root."""
_Places = dict[_Place, tuple[int, int]]
"""Where each node is among the F that were asked about, and its number."""


class _Said(NamedTuple):
    """What one part says after F nodes.

    Attributes:
        tokens: [F, K] int64.
        probabilities: [F, K] float32, 0 where there is no candidate.
        shared: [F, K] bool, another part says the same.
    """

    tokens: Tensor
    probabilities: Tensor
    shared: Tensor


class _Layer(NamedTuple):
    """What was said of one layer.

    Attributes:
        places: of its nodes.
        said: by each part.
    """

    places: _Places
    said: list[_Said]


class _UnionScorer:
    """Asks the parts and joins what they say.

    Attributes:
        layers: what was said, layer by layer.
    """

    def __init__(
        self,
        parts: Many[Source],
        scorers: Many[Scorer | None],
        worth: Many[tuple[Calibration, Calibration]],
        limits: Tensor,
    ) -> None:
        self._parts = list(zip(parts, scorers, limits.T, strict=True))
        self._worth = worth
        self.layers: list[_Layer] = []

    def score_roots(self, rows: Many[int], width: int) -> Candidates:
        """See ``Scorer``."""
        roots = torch.tensor(rows)
        places = {(b, ROOT, ROOT): (i, ROOT) for i, b in enumerate(rows)}
        found = self._ask(roots, lambda scorer, own: scorer.score_roots(roots[own].tolist(), max(width, _WIDTH)))
        return self._join(places, found, width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        asked = torch.stack([rows, parents, tokens, nodes])
        places = {(b, parent, token): (i, node) for i, (b, parent, token, node) in enumerate(asked.T.tolist())}

        def score(scorer: Scorer, own: Tensor) -> Candidates:
            row, parent, token, node = asked[:, own]
            return scorer.score(row, node, parent, token, max(width, _WIDTH))

        return self._join(places, self._ask(rows, score), width)

    def draw(self, counts: Tensor) -> Drawn:
        """Never asked for: schemes that need it refuse what ``learns``."""
        raise ConfigError("a union does not draw children: use verification match")

    def _ask(self, rows: Tensor, score: Callable[[Scorer, Tensor], Candidates]) -> list[tuple[Tensor, Tensor]]:
        """[F, K] tokens and probabilities of each part, 0 after the nodes that it is not asked about."""
        depth, found = len(self.layers), []
        for part, scorer, limits in self._parts:
            own = limits[rows] > depth
            tokens = torch.zeros((len(rows), 0), dtype=torch.int64)
            probabilities = torch.zeros((len(rows), 0))
            if scorer is not None and bool(own.any()):
                began = time.perf_counter()
                said = score(scorer, own)
                part.spent += time.perf_counter() - began
                likely = said.logprobs > _LEAST
                known = max(1, int(likely.any(0).sum()))  # in descending order: the rest of the columns is empty
                tokens = tokens.new_zeros((len(rows), known))
                probabilities = probabilities.new_zeros((len(rows), known))
                tokens[own] = said.tokens[:, :known]
                probabilities[own] = torch.where(likely, said.logprobs.exp(), 0.0)[:, :known]
            found.append((tokens, probabilities))
        return found

    def _join(self, places: _Places, found: list[tuple[Tensor, Tensor]], width: int) -> Candidates:
        """One law out of all; what none of them says counts as one outcome of its entropy."""
        tokens, probabilities = (torch.cat(columns, dim=1) for columns in zip(*found, strict=True))
        widths = [t.shape[1] for t, _ in found]
        bits = torch.tensor([1 << p for p, w in enumerate(widths) for _ in range(w)], dtype=torch.int64)
        same = (tokens[:, :, None] == tokens[:, None]) & (probabilities[:, None] > 0) & (probabilities[..., None] > 0)
        shared = (same.sum(-1) > 1).split(widths, dim=1)
        said = [_Said(t, p, s) for (t, p), s in zip(found, shared, strict=True)]
        self.layers.append(_Layer(places, said))
        accepted = [_accepted(x, *worth, len(self.layers)) for x, worth in zip(said, self._worth, strict=True)]
        law, origins = merge(same, torch.cat(accepted, dim=1), bits)
        entropies = torch.special.entr(law).sum(1) + torch.special.entr((1 - law.sum(1)).clamp(min=0))
        order = law.argsort(dim=1, descending=True, stable=True)[:, :width]
        return Candidates(tokens.gather(1, order), law.gather(1, order).log(), entropies, origins.gather(1, order))


def _accepted(said: _Said, alone: Calibration, together: Calibration, depth: int) -> Tensor:
    """[F, K] calibrated probabilities of what a part says."""
    p = said.probabilities
    found = torch.where(said.shared, together.acceptance(p, depth), alone.acceptance(p, depth))
    return torch.where(p > 0, found, 0.0)


def merge(same: Tensor, accepted: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Equal tokens become one candidate.

    Args:
        same: [F, M, M] bool, two candidates are the same token, true on the diagonal of those that are there.
        accepted: [F, M] the probability that the part that says so would give it.
        bits: [M] int64 of that part.

    Returns:
        ([F, M] the largest of the equal ones' probabilities at the first of them, 0 at the others; a law: the sum is
        at most 1; [F, M] the bits of all that say so.)
    """
    first = ~same.tril(-1).any(-1)
    best = torch.where(same, accepted[:, None], 0.0).amax(-1) * first
    return best / best.sum(1, keepdim=True).clamp(min=1), (same * bits).sum(-1)
