"""Draft forests: layer by layer, a source says what may follow the drafted beams, and W_S of them go on.

Searched beams: the W_S most probable paths. Sampled beams: W_S independent draws, with replacement, from the drafter's
own q_beam over (beam, next token), warped as the target's p_beam is; what was drawn twice is one node and counts twice
(Qin et al., Section 3.1, whose code draws without replacement, which is not lossless). Both rank beams by the target's
score up to the running beams and the drafter's from there. Drafted end tokens get no children.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .chance import Chance
from .laws import beam_distribution, draft_laws
from .nodes import Node
from .request import BeamRequest
from .rules import Forest, Layer
from .sources import BeamSource, Frontier


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
