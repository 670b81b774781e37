"""Draft forests: layer by layer, a source says what may follow the drafted beams, and W_S of them go on.

Searched beams: the W_S most probable paths. Sampled beams: W_S independent draws, with replacement, from the drafter's
own joint law of (beam, next token); what was drawn twice is one node and counts twice (Qin et al., Section 3.1, whose
code draws without replacement, which is not lossless). Both rank beams by the target's score up to the running beams
and the drafter's from there. Drafted end tokens get no children.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .chance import Chance
from .laws import draft_laws
from .layer import row_weights
from .nodes import Node
from .request import Request
from .rules import Forest, Layer
from .sources import BeamSource


@dataclass(slots=True)
class _Growing:
    request: Request
    chance: Chance
    frontier: list[tuple[Node, int]]  # nodes that may get children, and how often each was drawn
    layers: list[Layer] = field(default_factory=list)
    drafted: dict[tuple[Node, int], Node] = field(default_factory=dict)


def grow(
    source: BeamSource, requests: Sequence[Request], chances: Sequence[Chance], depths: Sequence[int]
) -> list[Forest]:
    """One forest for each request, of ``depths`` ([B]) layers where its room and its source allow."""
    growing = [
        _Growing(request, chance, [(beam.node, beam.count) for beam in request.running])
        for request, chance in zip(requests, chances, strict=True)
    ]
    depths = [min(d, r.limit - r.length - 1, source.room(r)) for r, d in zip(requests, depths, strict=True)]
    for depth in range(max(depths, default=0)):
        asked = [g for g, most in zip(growing, depths, strict=True) if depth < most and g.frontier]
        if not asked:
            break
        logits = source.logits([g.request for g in asked], [[node for node, _ in g.frontier] for g in asked])
        for g, rows in zip(asked, logits, strict=True):
            laws = draft_laws(rows, g.request.params)
            (_draw if g.request.params.temperature else _choose)(g, laws, depth)
    return [Forest(g.layers, g.drafted) for g in growing]


def _draw(g: _Growing, laws: Tensor, depth: int) -> None:
    """W_S independent draws from q_beam."""
    parents = [node for node, _ in g.frontier]
    weights = row_weights([node.score for node in parents], [count for _, count in g.frontier], laws.device)
    drafts = []
    for row, token in g.chance.drafts(weights, laws, g.request.beams.drafted, depth):
        drafts.append(_node(g, parents[row], token, float(laws[row, token])))
    g.layers.append(Layer(parents, weights, laws, drafts))
    g.frontier = [(node, count) for node, count in Counter(drafts).items() if g.request.ended(node) is None]


def _choose(g: _Growing, laws: Tensor, depth: int) -> None:
    """The W_S most probable of all continuations that do not end."""
    parents = [node for node, _ in g.frontier]
    scores = laws + torch.tensor([node.score for node in parents]).to(laws.device, non_blocking=True)[:, None]
    scores[:, list(g.request.eos_ids)] = -math.inf
    top = scores.flatten().topk(min(g.request.beams.drafted, scores.numel()))
    found = torch.stack([top.values.double(), top.indices.double()]).tolist()
    drafts = []
    for score, index in zip(*found, strict=True):
        if score > -math.inf:
            row, token = divmod(int(index), laws.shape[-1])
            drafts.append(_node(g, parents[row], token, score - parents[row].score))
    g.layers.append(Layer(parents, laws[:0, 0], laws[:0], drafts))
    g.frontier = [(node, 1) for node in drafts]


def _node(g: _Growing, parent: Node, token: int, log: float) -> Node:
    """The drafted node, new or drawn before."""
    key = parent, token
    if key not in g.drafted:
        g.drafted[key] = Node(token, parent, parent.length + 1, parent.score + log)
    return g.drafted[key]
