"""Draft forests and their depth."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import DraftreeError, DraftreeWarning
from ..models.base import LanguageModel
from ..models.cost_profile import Profile, kept_or_measured
from .beam_distributions import Chance, beam_distribution, draft_laws
from .forest import BeamRequest, Node
from .params import DEEPEST, DEFAULT_DEPTH
from .sources import BeamSource, Frontier
from .speculative import Forest, Layer, expected_layers

_PRIOR = 2.0
"""Layers that hope counts for. As the record fades, hope returns, and drafts are tried again."""
_MARGIN = 1.1
"""Drafts must promise to be so much faster than none: no profile has the costs of laws and draws, or its own error."""


@dataclass(slots=True)
class Plan:
    """Chooses depths.

    Attributes:
        target: judges drafts.
        source: makes them.
    """

    target: LanguageModel
    source: BeamSource
    _verify: Profile | None = None
    _unmeasurable: bool = False

    def prepare(self) -> None:
        """Find the costs, kept or measured now (seconds, once); warn where they cannot be measured."""
        if self._unmeasurable:
            return
        try:
            self._verify = self._verify or kept_or_measured(self.target)
            self.source.prepare()
        except DraftreeError as error:
            self._verify, self._unmeasurable = None, True
            message = f"passes cannot be measured ({error}): beams are drafted {DEFAULT_DEPTH} layers deep"
            warnings.warn(message, DraftreeWarning, stacklevel=2)

    def opens(self, request: BeamRequest) -> bool:
        """Whether all that drafts may save of a new request is worth having the source read its prompt."""
        self.prepare()
        if self._verify is None:
            return True
        depth, rate, undrafted = self._best(self._verify, request, request.beams.width, len(request.ids))
        return depth > 0 and request.limit * (1 / undrafted - 1 / rate) > self.source.reading(len(request.ids))

    def depth(self, request: BeamRequest) -> int:
        """Layers to draft in the next step, from 0 to ``DEEPEST``, at most as many as there is room for.

        A step that drafts d layers gains ``expected_layers`` of the probability a that a drafted layer goes on.
        """
        if not request.drafting:
            return 0
        self.prepare()
        best = DEFAULT_DEPTH
        if self._verify is not None:
            best, _, _ = self._best(self._verify, request, len(request.running), len(request.ids) + request.length)
        return min(best, self.source.room(request), request.limit - request.length - 1)

    def _best(self, verify: Profile, request: BeamRequest, beams: int, context: int) -> tuple[int, float, float]:
        """The depth that is likely to be fastest, and the layers a second of it and of none."""
        odds = request.odds
        a = (odds.went_on + _PRIOR * self.source.hope**beams) / (odds.reached + _PRIOR)
        nodes = (odds.nodes + _PRIOR * request.drafted) / (odds.layers + _PRIOR)
        undrafted = 1 / verify.seconds(beams, context)
        best, rate, drafting = 0, _MARGIN * undrafted, 0.0
        for depth in range(1, DEEPEST + 1):
            drafting += self.source.seconds(nodes if depth > 1 else beams, context)
            found = expected_layers(a, depth) / (drafting + verify.seconds(beams + depth * nodes, context))
            if found > rate:
                best, rate = depth, found
        return best, rate, undrafted


@dataclass(slots=True)
class _Growing:
    source: BeamSource
    at: Frontier  # whose nodes may get children
    layers: list[Layer] = field(default_factory=list)
    drafted: dict[tuple[Node, int], Node] = field(default_factory=dict)


def grow(
    source: BeamSource, requests: Sequence[BeamRequest], chances: Sequence[Chance], depths: Sequence[int]
) -> list[Forest]:
    """One forest for each request, of ``depths`` ([B]) layers where its room and its source allow."""
    growing = []
    for request, chance, depth in zip(requests, chances, depths, strict=True):
        layers = min(depth, request.limit - request.length - 1, source.room(request))
        counts = [beam.count for beam in request.running]
        draws = chance if request.params.temperature else None
        growing.append(_Growing(source, Frontier(request, request.ends, counts, 0, layers - 1, draws)))
    _grow(source, growing)
    return [Forest(g.layers, g.drafted) for g in growing]


def likely(source: BeamSource, below: Sequence[Frontier]) -> list[list[Node]]:
    """What is likely to be drafted below nodes in the layers that are left: for each, nodes with parents first.

    Where chance draws, these are what it would draw from this source's laws with the same noise, if it has any.
    """
    growing = [
        _Growing(source, replace(at, left=at.left - 1, chance=at.chance if source.gives_laws else None)) for at in below
    ]
    _grow(source, growing)
    return [list(g.drafted.values()) for g in growing]


def _grow(source: BeamSource, growing: Sequence[_Growing]) -> None:
    while asked := [g for g in growing if g.at.left >= 0 and g.at.nodes]:
        for g, rows in zip(asked, source.logits([g.at for g in asked]), strict=True):
            at, laws = g.at, draft_laws(rows, g.at.request.params, g.at.request.beams.warp)
            found = _chosen(g, laws) if at.chance is None else _drawn(g, at.chance, laws)
            nodes, counts = list(found), list(found.values())
            g.at = replace(at, nodes=nodes, counts=counts, depth=at.depth + 1, left=at.left - 1)


def _drawn(g: _Growing, chance: Chance, laws: Tensor) -> Mapping[Node, int]:
    """W_S independent draws from q_beam; those that go on, and how often each was drawn."""
    at, parents, request = g.at, g.at.nodes, g.at.request
    cells = beam_distribution([node.score for node in parents], at.counts, laws, request.params, request.beams.warp)
    drafts = []
    for row, token in chance.drafts(cells, request.drafted, at.depth):
        drafts.append(_node(g, parents[row], token, float(laws[row, token])))
    g.layers.append(Layer(parents, cells, drafts))
    return Counter(node for node in drafts if request.ended(node) is None)


def _chosen(g: _Growing, laws: Tensor) -> Mapping[Node, int]:
    """The W_S most probable of all continuations that do not end."""
    request, parents = g.at.request, g.at.nodes
    scores = laws + torch.tensor([node.score for node in parents]).to(laws.device, non_blocking=True)[:, None]
    scores[:, list(request.eos_ids)] = -math.inf
    scores.nan_to_num_(nan=-math.inf, neginf=-math.inf)  # after a node of which a source knows nothing
    top = scores.flatten().topk(min(request.drafted, scores.numel()))
    found = torch.stack([top.values.double(), top.indices.double()]).tolist()
    drafts = []
    for score, index in zip(*found, strict=True):
        if score > -math.inf:
            row, token = divmod(int(index), laws.shape[-1])
            drafts.append(_node(g, parents[row], token, score - parents[row].score))
    g.layers.append(Layer(parents, laws[:0], drafts))
    return dict.fromkeys(drafts, 1)


def _node(g: _Growing, parent: Node, token: int, log: float) -> Node:
    """The drafted node, new or drawn before."""
    key = parent, token
    if key not in g.drafted:
        g.drafted[key] = g.source.node(g.at.request, parent, token)
        g.drafted[key].score = parent.score + log
    return g.drafted[key]
