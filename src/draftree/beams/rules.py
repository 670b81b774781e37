"""How one layer of beams follows another: searched (the most probable) or sampled (independent draws).

A rule is told the laws of the running beams' next tokens and, if the layer was drafted, its drafts. It asks no model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .chance import Cell, Chance
from .laws import beam_distribution
from .layer import Residuals, verify, width_for
from .nodes import Node
from .request import Beam, BeamRequest


@dataclass(frozen=True, slots=True)
class Layer:
    """One drafted layer.

    Attributes:
        parents: [R] the nodes that its drafts follow.
        cells: [R, V] float64, the probability with which each (parent, token) was drawn; empty where drafts were
            chosen. With a joint warp it depends on all parents, accepted or not.
        drafts: in draw order, as often as they were drawn.
    """

    parents: Sequence[Node]
    cells: Tensor
    drafts: Sequence[Node]


@dataclass(frozen=True, slots=True)
class Forest:
    """What was drafted below the running beams of one request.

    Attributes:
        layers: from the top down.
        drafted: (parent, token) -> node: one for each drafted token, however often it was drawn.
    """

    layers: list[Layer] = field(default_factory=list)
    drafted: Mapping[tuple[Node, int], Node] = field(default_factory=dict)

    def child(self, parent: Node, token: int, score: float) -> Node:
        """The node below ``parent``: the drafted one, which the target has seen, if there is one."""
        node = self.drafted.get((parent, token)) or Node(token, parent, parent.length + 1)
        node.score = score
        return node


def search(request: BeamRequest, laws: Tensor, forest: Forest) -> None:
    """One layer of beam search, by transformers' rule (``GenerationMixin._beam_search``).

    Of the (1 + number of end tokens, at least 2) W most probable continuations those that end and are among the first W
    are finished; the first W of the others run on. All scores are float32.

    Args:
        request: its running beams are replaced.
        laws: [R, V] float32 log-laws after the running beams.
        forest: what was drafted.
    """
    beams, parents = request.beams, request.ends
    scores = laws + torch.tensor([n.score for n in parents]).to(laws.device, non_blocking=True)[:, None]
    count = max(2, 1 + len(request.eos_ids)) * beams.width
    top = scores.flatten().topk(min(count, scores.numel()))
    found = torch.stack([top.values.double(), top.indices.double()]).tolist()
    running, ended = list[Node](), list[Node]()
    for rank, (score, index) in enumerate(zip(*found, strict=True)):
        row, token = divmod(int(index), laws.shape[-1])
        if score == -math.inf:
            break
        node = forest.child(parents[row], token, score)
        if request.ended(node) is None:
            running.append(node)
        elif rank < beams.width:
            ended.append(node)
    full = len(request.finished) == beams.width and beams.early_stopping is True
    if request.improvable and not full:
        request.finish(ended)
    request.running = [Beam(node) for node in running[: beams.width]]
    request.improvable = request.improvable and _improvable(request)
    full = len(request.finished) == beams.width and beams.early_stopping is True
    request.done = not request.running or not request.improvable or full


def _improvable(request: BeamRequest) -> bool:
    """The best running beam, at its length or at the greatest it may reach, scores above the worst finished one."""
    beams = request.beams
    if len(request.finished) < beams.width or not request.running:
        return bool(request.running)
    longest = beams.early_stopping == "never" and beams.length_penalty > 0
    length = request.limit if longest else request.length
    best: float = request.ends[0].score / length**beams.length_penalty
    return best > request.finished[-1].score


def sample(request: BeamRequest, laws: Tensor, forest: Forest, depth: int, chance: Chance) -> None:
    """One layer of beam sampling (Eq. 1): independent draws from p_beam over (running beam, next token).

    A finished beam keeps its place: of W places those of running beams are drawn anew.

    Args:
        request: its running beams are replaced.
        laws: [R, V] float64 log-probabilities after the running beams (``laws.target_laws``).
        forest: what was drafted.
        depth: number of the layer below the step's root, from 0; beyond the drafts' last it is drawn plainly.
        chance: decides.
    """
    parents, counts = request.ends, [beam.count for beam in request.running]
    p = beam_distribution([n.score for n in parents], counts, laws, request.params, request.beams.warp)
    position = len(request.ids) + request.length
    if depth < len(forest.layers):
        cells = _verified(request, p, forest.layers[depth], position, chance)
    else:
        cells = chance.draws(p, range(request.slots), position)
    logs = laws[tuple(torch.tensor(cells).T.to(laws.device))].tolist()
    drawn: Counter[Node] = Counter()
    made: dict[Cell, Node] = {}
    for cell, log in zip(cells, logs, strict=True):
        parent = parents[cell[0]]
        if cell not in made:
            made[cell] = forest.child(parent, cell[1], parent.score + log)
        drawn[made[cell]] += 1
    request.running = [Beam(node, count) for node, count in drawn.items() if request.ended(node) is None]
    request.finish([node for node in drawn.elements() if request.ended(node) is not None])
    request.done = not request.running or not request.slots


def _verified(request: BeamRequest, p: Tensor, layer: Layer, position: int, chance: Chance) -> list[Cell]:
    """The beams of a drafted layer; p: [R, V] p_beam over the running beams."""
    beams, parents = request.beams, request.ends
    places = {parent: r for r, parent in enumerate(layer.parents)}
    rows = {parent: r for r, parent in enumerate(parents)}
    here = torch.tensor([places[parent] for parent in parents]).to(p.device)
    residuals = Residuals(p, layer.cells[here])
    width = request.slots
    if beams.threshold is not None:
        alphas = residuals.acceptance(len(layer.drafts))
        width = width_for(alphas, beams.threshold, min(beams.min_width, width), width)
    drafts = [(rows[n.parent] if n.parent in rows else -1, n.token) for n in layer.drafts]

    def draw(cells: Tensor, numbers: Sequence[int]) -> list[Cell]:
        return chance.draws(cells, numbers, position)

    return verify(residuals, drafts, width, chance.accepts, draw).cells
