"""A union of sources: one tree out of what all of them say, for one budget.

Every source is asked about every node, whoever proposed it. What each source's probabilities are worth is counted as
decoding goes on (``Calibration``), so that those of n-gram counts, a table and a model can be compared. Equal tokens
under one parent are one candidate.
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
_BACKED = 0.5
"""Share of a candidate's probability that a part must give it to be among those that say so."""
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
    _calibration: Calibration = field(init=False, repr=False)
    _limits: dict[Sequence, list[float]] = field(default_factory=dict, repr=False)
    """How deep each part drafts for the sequences of the proposal."""
    _scorer: _UnionScorer | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if len(names) < 2:
            raise ConfigError(f"a union of {names}: give at least two sources")
        if len(set(names)) < len(names):
            raise ConfigError(f"a union of {names}: give each source once")
        self._calibration = Calibration(len(self.parts))

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
        self._scorer = _UnionScorer(self.parts, scorers, self._calibration, [self._limits[s] for s in sequences])
        return self._scorer

    def settle(self, sequences: Many[Sequence], grown: Many[Grown]) -> None:
        """Tell all parts."""
        for part in self.parts:
            part.settle(sequences, grown)

    def observe(self, outcomes: Many[Outcome]) -> None:
        """Learn what each part's candidates are worth, and tell all parts."""
        scorer, self._scorer = self._scorer, None
        if scorer is not None and scorer.layers:
            self._calibration.fade()
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
            said, probabilities = layer.tokens[at].tolist(), layer.probabilities[at].tolist()
            for kind, own in enumerate(layer.parts):
                known = [(t, p) for t, p in zip(said[own], probabilities[own], strict=True) if p > 0]
                hit = next((i for i, (t, _) in enumerate(known) if t == token), None)
                self._calibration.learn(depth, [p for _, p in known], hit, kind=kind)
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


class _Layer(NamedTuple):
    """What was said of F nodes of one depth.

    Attributes:
        places: of the nodes.
        tokens: [F, M] int64, all parts' candidates side by side.
        probabilities: [F, M] float32 that their parts give them, 0 where there is no candidate.
        parts: the columns of each part.
    """

    places: _Places
    tokens: Tensor
    probabilities: Tensor
    parts: list[slice]


class _UnionScorer:
    """Asks the parts and joins what they say.

    Attributes:
        layers: what was said, layer by layer.
    """

    def __init__(
        self,
        parts: Many[Source],
        scorers: Many[Scorer | None],
        calibration: Calibration,
        limits: Many[Many[float]],
    ) -> None:
        self._parts = list(zip(parts, scorers, strict=True))
        self._calibration = calibration
        self._limits = limits
        self.layers: list[_Layer] = []

    def score_roots(self, rows: Many[int], width: int) -> Candidates:
        """See ``Scorer``."""
        places = {(b, ROOT, ROOT): (i, ROOT) for i, b in enumerate(rows)}

        def score(scorer: Scorer, own: list[int]) -> Candidates:
            return scorer.score_roots([rows[i] for i in own], _wide(width))

        return self._join(places, rows, score, width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        asked = torch.stack([rows, nodes, parents, tokens])
        listed = asked.T.tolist()
        places = {(b, parent, token): (i, node) for i, (b, node, parent, token) in enumerate(listed)}

        def score(scorer: Scorer, own: list[int]) -> Candidates:
            some = asked if len(own) == len(listed) else asked[:, own]
            row, node, parent, token = some
            return scorer.score(row, node, parent, token, _wide(width))

        return self._join(places, [b for b, *_ in listed], score, width)

    def draw(self, counts: Tensor) -> Drawn:
        """Never asked for: schemes that need it refuse what ``learns``."""
        raise ConfigError("a union does not draw children: use verification match")

    def _join(
        self, places: _Places, rows: Many[int], score: Callable[[Scorer, list[int]], Candidates], width: int
    ) -> Candidates:
        """One law out of all; what none of them says counts as one outcome of its entropy."""
        depth = len(self.layers)
        tokens, probabilities = [torch.zeros((len(rows), 1), dtype=torch.int64)], [torch.zeros((len(rows), 1))]
        kinds, columns = [0], list[slice]()
        for kind, (part, scorer) in enumerate(self._parts):
            own = [i for i, b in enumerate(rows) if self._limits[b][kind] > depth]
            start = len(kinds)
            if scorer is not None and own:
                began = time.perf_counter()
                said = score(scorer, own)
                part.spent += time.perf_counter() - began
                found, likely = _likely(said, own, len(rows))
                tokens.append(found)
                probabilities.append(likely)
                kinds += [kind] * found.shape[1]
            columns.append(slice(start, len(kinds)))
        self.layers.append(_Layer(places, torch.cat(tokens, dim=1), torch.cat(probabilities, dim=1), columns))
        return self._law(self.layers[-1], torch.tensor(kinds), width)

    def _law(self, layer: _Layer, kinds: Tensor, width: int) -> Candidates:
        accepted = self._calibration.acceptance(layer.probabilities, len(self.layers), kinds)
        accepted = torch.where(layer.probabilities > 0, accepted, 0.0)
        law, origins = merge(layer.tokens, accepted, 1 << kinds)
        entropies = torch.special.entr(law).sum(1) + torch.special.entr((1 - law.sum(1)).clamp(min=0))
        order = law.argsort(dim=1, descending=True, stable=True)[:, :width]
        tokens, law, origins = (x.gather(1, order) for x in (layer.tokens, law, origins))
        return Candidates(tokens, law.log(), entropies, origins)


def _wide(width: int) -> int:
    return max(width, _WIDTH)


def _likely(said: Candidates, own: list[int], count: int) -> tuple[Tensor, Tensor]:
    """[count, K] tokens and probabilities of the candidates that are likely enough; they are of the nodes ``own``."""
    likely = said.logprobs > _LEAST
    known = int(likely.any(0).sum())  # in descending order: what is right of the first columns is empty
    tokens, probabilities = said.tokens[:, :known], torch.where(likely, said.logprobs.exp(), 0.0)[:, :known]
    if len(own) == count:
        return tokens, probabilities
    return (
        tokens.new_zeros((count, known)).index_copy(0, torch.tensor(own), tokens),
        probabilities.new_zeros((count, known)).index_copy(0, torch.tensor(own), probabilities),
    )


def merge(tokens: Tensor, accepted: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Equal tokens become one candidate.

    Args:
        tokens: [F, M] int64 candidates.
        accepted: [F, M] the probability that the part that says so would give it; 0: it is none.
        bits: [M] int64 of that part.

    Returns:
        ([F, M] the largest of the equal ones' probabilities at the first of them, 0 at the others; a law: the sum is
        at most 1; [F, M] the bits of all that say so.)
    """
    same = tokens[:, :, None] == tokens[:, None]
    best = (same * accepted[:, None]).amax(-1).masked_fill(same.tril(-1).any(-1), 0.0)
    backed = (accepted[:, None] >= _BACKED * best[:, :, None]) & (accepted > 0)[:, None]
    origins = (same * torch.where(backed, bits, 0)).sum(-1)
    return best / best.sum(1, keepdim=True).clamp(min=1), origins
