"""The one growth loop: layer by layer, a scorer says what may follow and a policy says what does, within a budget.

Everything is flat over all sequences (no padding) and on the host; the scorer alone touches a model. The last layer is
never scored: a leaf costs no draft pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..config import Budget
from ..tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a scorer thinks may follow each of F nodes: its K most probable tokens.

    Attributes:
        tokens: [F, K] int64.
        logprobs: [F, K] float32, log-probabilities (nats) in descending order; -inf where there is no candidate.
        entropies: [F] float32, entropy (nats) of the whole draft law, not of the K.
    """

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes of one depth that may get children, over all sequences, in order of sequence and number.

    Attributes:
        depth: of these nodes; 0 for the roots.
        rows: [F] int64, which sequence.
        nodes: [F] int64, number in the sequence's tree, ROOT (-1) for roots.
        path_logprobs: [F] float32, 0 for roots.
        candidates: what may follow.
    """

    depth: int
    rows: Tensor
    nodes: Tensor
    path_logprobs: Tensor
    candidates: Candidates


class Growth(NamedTuple):
    """A policy's answer: which candidates become nodes, and which of those may get children in turn.

    Attributes:
        keep: [F, K] bool.
        extend: [F, K] bool; only read where ``keep`` is true.
    """

    keep: Tensor
    extend: Tensor


class GrowthPolicy(Protocol):
    """Shapes the tree (DESIGN, "The seams").

    Attributes:
        width: most children of a node: the K that scorers are asked for.
    """

    @property
    def width(self) -> int: ...

    def grow(self, frontier: Frontier) -> Growth:
        """Choose the children of a frontier."""


class Scorer(Protocol):
    """Says what may follow the nodes of the trees under construction."""

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """Candidates after the last token of these sequences (positions in the batch that is being drafted)."""

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """Candidates after new nodes, flat over sequences: their row, number, parent's number and token, [F] each."""


class _Layer(NamedTuple):
    rows: Tensor
    nodes: Tensor
    tokens: Tensor
    parents: Tensor
    path_logprobs: Tensor
    entropies: Tensor
    extend: Tensor
    counts: Tensor


def grow(scorer: Scorer, policy: GrowthPolicy, budgets: Sequence[Budget]) -> list[DraftTree]:
    """Grow one tree a sequence, each within its budget.

    Where a layer wants more nodes than a sequence's budget leaves, the most probable paths stay (ties: the earlier).
    """
    active = [b for b, budget in enumerate(budgets) if budget.nodes and budget.depth != 0]
    if not active:
        return [DraftTree.empty() for _ in budgets]
    limits = torch.tensor([budget.nodes if budget.depth is None else budget.depth for budget in budgets])
    room = torch.tensor([budget.nodes for budget in budgets])
    size = torch.zeros(len(budgets), dtype=torch.int64)
    roots = torch.tensor(active)
    frontier = Frontier(
        0,
        roots,
        torch.full_like(roots, ROOT),
        torch.zeros(len(active)),
        scorer.score_roots(active, policy.width),
    )
    layers: list[_Layer] = []
    while True:
        layer = _next_layer(frontier, policy.grow(frontier), room - size, size)
        layers.append(layer)
        size = size + layer.counts
        depth = frontier.depth + 1
        more = (layer.extend & ((limits > depth) & (room > size)).take(layer.rows)).nonzero()[:, 0]
        if not len(more):
            return _split(layers, len(budgets))
        columns = (layer.rows, layer.nodes, layer.parents, layer.tokens, layer.path_logprobs)
        rows, nodes, parents, tokens, paths = (x.take(more) for x in columns)
        scored = scorer.score(rows, nodes, parents, tokens, policy.width)
        frontier = Frontier(depth, rows, nodes, paths, scored)


def _next_layer(frontier: Frontier, growth: Growth, room: Tensor, size: Tensor) -> _Layer:
    """Turn a policy's choice into nodes, numbered on from ``size`` in each sequence."""
    found = frontier.candidates
    scores = frontier.path_logprobs[:, None] + found.logprobs
    chosen = (growth.keep & (scores > float("-inf"))).flatten().nonzero()[:, 0]  # flat over parents and ranks
    path_logprobs = scores.take(chosen)
    parent = chosen // scores.shape[1]
    rows = frontier.rows.take(parent)
    counts = torch.bincount(rows, minlength=room.shape[0])
    if bool((counts > room).any()):
        stay = best_per_row(path_logprobs, rows, room)
        chosen, parent, path_logprobs, rows = chosen[stay], parent[stay], path_logprobs[stay], rows[stay]
        counts = counts.minimum(room)
    return _Layer(
        rows=rows,
        nodes=size.take(rows) + _count_within(rows, counts),
        tokens=found.tokens.take(chosen),
        parents=frontier.nodes.take(parent),
        path_logprobs=path_logprobs,
        entropies=found.entropies.take(parent),
        extend=growth.extend.take(chosen),
        counts=counts,
    )


def best_per_row(scores: Tensor, rows: Tensor, limits: Tensor) -> Tensor:
    """[F] bool: the ``limits[row]`` highest scores of each row; ``rows`` ascends; ties go to the earlier entry."""
    order = scores.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]  # by row, then by score, then by index
    stay = torch.empty_like(rows, dtype=torch.bool)
    stay[order] = _count_within(rows, torch.bincount(rows, minlength=limits.shape[0])) < limits[rows]
    return stay


def _count_within(rows: Tensor, counts: Tensor) -> Tensor:
    """[F] how many entries of the same row come before each entry; ``rows`` ascends, ``counts`` is its histogram."""
    return torch.arange(rows.shape[0]) - (counts.cumsum(0) - counts).take(rows)


def _split(layers: list[_Layer], batch: int) -> list[DraftTree]:
    rows, tokens, parents = (torch.cat([getattr(x, n) for x in layers]) for n in ("rows", "tokens", "parents"))
    paths, entropies = (torch.cat([getattr(x, n) for x in layers]) for n in ("path_logprobs", "entropies"))
    depths = torch.cat([torch.full_like(x.rows, d) for d, x in enumerate(layers, start=1)])
    if batch == 1:
        return [DraftTree(tokens, parents, depths, paths, entropies)]
    own = [rows == b for b in range(batch)]
    return [DraftTree(tokens[m], parents[m], depths[m], paths[m], entropies[m]) for m in own]
