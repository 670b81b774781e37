"""Draft forests, grown from a draft source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..config import Budget
from ..drafters.base import BeamSource, UnscoredNode
from ..policies.base import Candidates, descending
from ..tree import ROOT, Drawing
from .forest import BeamNode, BeamRequest
from .speculative import BeamDraws, DraftForest, DraftLayer, beam_distribution


def layers_left(source: BeamSource, request: BeamRequest) -> int:
    """Most layers that can be drafted below the running beams: the one behind them is not drafted."""
    left = request.limit - request.length - 1
    depth = source.fit(request.trunk, Budget(request.beams.nodes)).depth
    uncommitted = request.length - (len(request.trunk.ids) - len(request.ids))
    return left if depth is None else max(0, min(left, depth - uncommitted))


@dataclass(slots=True)
class _Growing:
    """The forest of one request while it grows.

    Attributes:
        request: whose.
        draws: of the drafts; None: the most probable are taken.
        nodes: those whose children come next.
        counts: how often each of them was drawn.
        left: layers to go.
        numbers: of nodes in the target's row, of new ones those that they will have there.
    """

    request: BeamRequest
    draws: BeamDraws | None
    nodes: Sequence[BeamNode]
    counts: Sequence[int]
    left: int
    numbers: dict[BeamNode, int]
    layers: list[DraftLayer] = field(default_factory=list)
    drafted: dict[tuple[BeamNode, int], BeamNode] = field(default_factory=dict)


def grow(source: BeamSource, requests: Sequence[BeamRequest], draws: Sequence[BeamDraws]) -> list[DraftForest]:
    """One forest for each request, of as many layers as it wants and its length and its source allow."""
    growing = []
    for request, random in zip(requests, draws, strict=True):
        left = min(request.beams.depth, layers_left(source, request))
        counts = [beam.count for beam in request.running]
        own, numbers = random if request.params.temperature else None, dict(request.open_tree.numbers)
        growing.append(_Growing(request, own, request.ends, counts, left, numbers))
    if some := [g for g in growing if g.left > 0]:
        _grow(source, some)
    return [DraftForest(g.layers, g.drafted) for g in growing]


def _grow(source: BeamSource, growing: Sequence[_Growing]) -> None:
    sampled = any(g.draws for g in growing)
    drawing = Drawing.WITH_REPLACEMENT if sampled else Drawing.TOP
    scorer = source.begin([g.request.trunk for g in growing], drawing)
    width = max(1 if g.draws else g.request.beams.drafted + len(g.request.eos_ids) for g in growing)
    while any(g.left > 0 and g.nodes for g in growing):
        new, ends = list[UnscoredNode](), list[tuple[_Growing, int]]()
        for b, g in enumerate(growing):
            if g.left > 0 and g.nodes:
                new += _unread(source, g, b) if not g.layers else [_unscored(g, b, node) for node in g.nodes]
                ends.append((g, len(new)))
        found = scorer.score(new, width)
        for g, end in ends:
            own = found[end - len(g.nodes) : end]
            kept = _top(g, own) if g.draws is None else _drawn(g, g.draws, own)
            g.nodes, g.counts, g.left = list(kept), list(kept.values()), g.left - 1


def _unscored(g: _Growing, b: int, node: BeamNode) -> UnscoredNode:
    number = g.numbers.setdefault(node, len(g.numbers))
    return UnscoredNode(b, number, ROOT if node.parent is None else g.numbers.get(node.parent, ROOT), node.token)


def _unread(source: BeamSource, g: _Growing, b: int) -> list[UnscoredNode]:
    """The ends of the running beams, and before them what the source has not read above them."""
    trunk, base = g.request.trunk, g.request.open_tree.base
    above = dict.fromkeys(node for end in g.nodes for node in end.path(base)[:-1])
    unread = [node for node in above if not source.has_read(trunk, g.numbers[node])]
    root = [] if source.has_read(trunk, ROOT) else [UnscoredNode(b, ROOT, ROOT, trunk.ids[-1])]
    return root + [_unscored(g, b, node) for node in (*unread, *g.nodes)]


def _drawn(g: _Growing, draws: BeamDraws, found: Sequence[Candidates]) -> Mapping[BeamNode, int]:
    """W_S independent draws from q_beam; those that go on, and how often each was drawn."""
    parents, request, vocab_size = g.nodes, g.request, g.request.open_tree.vocab_size
    logprobs = np.stack([own.distribution.dense(vocab_size) for own in found if own.distribution])
    cells = beam_distribution([node.score for node in parents], g.counts, logprobs, request.params, request.beams.warp)
    drafts = []
    for row, token in draws.draft_cells(cells, request.beams.drafted, len(g.layers)):
        drafts.append(_node(g, parents[row], token, float(logprobs[row, token])))
    g.layers.append(DraftLayer(parents, cells, drafts))
    return Counter(node for node in drafts if request.ended(node) is None)


def _top(g: _Growing, found: Sequence[Candidates]) -> Mapping[BeamNode, int]:
    """The W_S most probable of all continuations that do not end."""
    every = [
        (parent, token, logprob)
        for parent, own in zip(g.nodes, found, strict=True)
        for token, logprob in zip(own.tokens, own.logprobs, strict=True)
        if token not in g.request.eos_ids
    ]
    best = descending([parent.score + logprob for parent, _, logprob in every])
    drafts = [_node(g, *every[at]) for at in best[: g.request.beams.drafted]]
    g.layers.append(DraftLayer(g.nodes, _NO_CELLS, drafts))
    return dict.fromkeys(drafts, 1)


_NO_CELLS = np.zeros(0)


def _node(g: _Growing, parent: BeamNode, token: int, logprob: float) -> BeamNode:
    key = parent, token
    if key not in g.drafted:
        node = g.drafted[key] = BeamNode(token, parent, parent.length + 1, parent.score + logprob)
        g.numbers[node] = len(g.numbers)
    return g.drafted[key]
