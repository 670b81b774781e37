"""Drafters that grow trees out of a source's candidates, by the one growth loop.

Layer by layer, a scorer predicts what may follow and a policy chooses, within a budget.

A node's number in the pool is its index among the drafted nodes of its request, layer by layer. ``Grown.numbers`` maps
the nodes of the finished tree to it.

Everything is flat over all requests (no padding) and on the host; the scorer alone touches a model. The last layer is
never scored: a leaf costs no draft pass.

Where children are drawn at random (``Drawing``), the policy and the budget first settle how many each node of the
frontier gets. They know the most probable tokens of the draft distribution and what was drawn in the layers above. Only
then does the scorer draw them. So no choice depends on a drawn sibling, which is what the schemes that verify such
trees stand on. ``_Share`` keeps to that where requests share a node budget.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import Budget
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..policies.base import (
    DraftedNodes,
    Flags,
    Frontier,
    Growth,
    GrowthPolicy,
    Numbers,
    Plan,
    Tags,
    best_per_row,
    count_within,
    highest,
)
from ..request import Outcome, Request
from ..tree import ROOT, DraftDistribution, DraftTree, Drawing, Floats
from .base import NOTHING_GROWN, AllowedScorer, DraftSource, Grown, Scorer, UnscoredNode


@dataclass(slots=True)
class TreeDrafter:
    """Grows a tree for each request out of a source's candidates.

    Attributes:
        policy: shapes the trees.
        source: predicts what may follow.
        name: by default the source's.
        seconds: as in ``Drafter``.
    """

    policy: GrowthPolicy
    source: DraftSource
    name: str = ""
    seconds: float = field(default=0.0, init=False, repr=False)
    _learning: float = field(default=0.0, init=False, repr=False)
    """Seconds of learning since the last proposal."""
    _plan: Plan | None = field(default=None, init=False, repr=False)
    """Of the proposal whose outcomes are still to come."""

    def __post_init__(self) -> None:
        self.name = self.name or self.source.name

    @property
    def passes(self) -> int:
        return self.source.passes

    @property
    def parts(self) -> tuple[str, ...]:
        parts = self.source.parts
        return (self.name,) if len(parts) == 1 else tuple(part.name for part in parts)

    @property
    def reads_scores(self) -> bool:
        return self.source.reads_scores

    @property
    def learns(self) -> bool:
        return self.source.learns

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        self.source.prepare(target, prefixes)
        self.policy.prepare(target, self.source.parts)

    def open(self, request: Request) -> None:
        self.source.open(request)

    def propose(
        self,
        requests: Sequence[Request],
        budgets: Sequence[Budget],
        drawing: Drawing = Drawing.COUPLED,
        other_tokens: int = 0,
        reading: int | None = None,
    ) -> list[DraftTree]:
        """Plan, grow, and settle."""
        began = time.perf_counter()
        trees = self._propose(requests, budgets, drawing, other_tokens, reading)
        self.seconds, self._learning = self._learning + time.perf_counter() - began, 0.0
        return trees

    def _propose(
        self,
        requests: Sequence[Request],
        budgets: Sequence[Budget],
        drawing: Drawing,
        other_tokens: int,
        reading: int | None,
    ) -> list[DraftTree]:
        plan = self._plan = self.policy.plan(requests, budgets, other_tokens)
        if plan.enabled is not None:
            self.source.enable(plan.enabled)
        if not any(budget.nodes for budget in plan.budgets):
            return [DraftTree.empty() for _ in requests]
        fits = [self.source.fit(r, b) for r, b in zip(requests, plan.budgets, strict=True)]
        plan.budgets = [
            fit if reading is None or not fit.nodes or self.source.read(r, reading) else Budget(0)
            for r, fit in zip(requests, fits, strict=True)
        ]
        scorer = self.source.begin(requests, drawing)
        if any(request.state for request in requests):
            scorer = AllowedScorer(scorer, requests)
        grown = grow(scorer, self.policy, plan, drawing)
        self.source.settle(requests, grown)
        return [g.tree for g in grown]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Notify source and policy; the policy learns what each part of the source took."""
        began = time.perf_counter()
        self.source.observe(outcomes)
        if self.source.seconds:
            step = replace(outcomes[0].step, drafters=self.source.seconds)
            outcomes = [replace(outcome, step=step) for outcome in outcomes]
        if self._plan is not None:
            self.policy.observe(self._plan, outcomes)
        self._plan = None
        self._learning += time.perf_counter() - began

    def close(self, request: Request) -> None:
        self.source.close(request)


class _Layer(NamedTuple):
    chosen: Numbers  # which candidates of the frontier, flat over parents and ranks
    rows: Numbers
    nodes: Numbers
    tokens: NDArray[np.integer]
    parents: Numbers
    path_logprobs: Floats
    entropies: Floats
    extend: Flags
    tags: Tags
    origins: Numbers | None
    ranking: Floats  # in which requests share nodes (``_Share``)


@dataclass(frozen=True, slots=True)
class _Share:
    """Divides a pass's nodes among requests: the most probable paths of all trees are verified (``Plan.together``).

    What is not among the best so far cannot come back in, so that it is not extended. Where children are drawn, those
    of one node come in together or not at all, by the probability of the path to the most probable of them: it is known
    before they are drawn, and no path below them has a larger one.

    Attributes:
        most: nodes of all trees; None: each request has its own budget alone.
        weights: [B] logarithms of what the requests' tokens count.
        drawn: children are drawn at random.
    """

    most: int | None
    weights: Floats
    drawn: bool

    @classmethod
    def of(cls, plan: Plan, drawing: Drawing) -> _Share:
        weights = np.array([budget.weight for budget in plan.budgets], np.float32)
        return cls(plan.together, np.log(weights), drawing.random)

    def ranking(self, rows: Numbers, paths: Floats, best: Floats) -> Floats:
        """[N] weighted log-probabilities by which new nodes come in, of their own paths and of their best siblings'."""
        return paths if self.most is None else self.weights[rows] + (best if self.drawn else paths)

    def stay(self, layers: Sequence[_Layer], ranking: Floats, rows: Numbers, budgets: Numbers) -> Flags:
        """[N] bool: which nodes of a new layer may still be among the best, each request's own budget kept."""
        every = np.concatenate([*(layer.ranking for layer in layers), ranking])
        found = every[best_per_row(every, np.concatenate([*(layer.rows for layer in layers), rows]), budgets)]
        if self.most is None or len(found) <= self.most:
            return np.ones(len(rows), np.bool_)
        may_stay: Flags = ranking >= np.partition(found, -self.most)[-self.most]
        return may_stay

    def best(self, ranking: Floats, rows: Numbers, parents: Numbers) -> Flags:
        """[N] bool: the best nodes of all trees; in each, parents come before their children."""
        if self.most is None or len(rows) <= self.most:
            return np.ones(len(rows), np.bool_)
        keep = highest(ranking, self.most)
        if self.drawn:  # the budget may end among the children of one node
            cut = np.flatnonzero(~keep)
            first = cut[ranking[cut].argmax()]
            keep &= (rows != rows[first]) | (parents != parents[first])
        return keep

    def divide(
        self,
        kept: Sequence[Flags | None],
        own: Sequence[Flags | slice],
        ranking: Floats,
        rows: Numbers,
        parents: Numbers,
    ) -> list[Flags]:
        """What the policy has kept of each request's pool (``GrowthPolicy.prune``), of which the best nodes stay."""
        found = np.ones(len(rows), np.bool_)
        for of_row, keep in zip(own, kept, strict=True):
            if keep is not None:
                found[of_row] = keep
        found[found.nonzero()] = self.best(ranking[found], rows[found], parents[found])
        return [found[of_row] for of_row in own]


def grow(scorer: Scorer, policy: GrowthPolicy, plan: Plan, drawing: Drawing = Drawing.COUPLED) -> list[Grown]:
    """Grow one tree a request, each within its budget of the policy's plan.

    Raises:
        ConfigError: the policy kept more than the budget, or children to be drawn other than by their number.
    """
    budgets = plan.budgets
    active = [b for b, budget in enumerate(budgets) if budget.nodes and budget.depth != 0]
    if not active:
        return [NOTHING_GROWN for _ in budgets]
    nodes = [budget.nodes for budget in budgets]
    limits = [n if budget.depth is None else budget.depth for n, budget in zip(nodes, budgets, strict=True)]
    room = [policy.pool(n) for n in nodes]
    width = policy.width_for(max(nodes))
    share = _Share.of(plan, drawing)
    size = [0] * len(budgets)
    roots, none = np.array(active), np.zeros(len(active), np.float32)
    frontier = Frontier(
        plan=plan,
        depth=0,
        rows=roots,
        nodes=np.full_like(roots, ROOT),
        path_logprobs=none,
        tags=np.zeros_like(roots),
        candidates=scorer.score([UnscoredNode(b, ROOT, ROOT, 0) for b in active], width),
        budgets=np.array(nodes),
        limits=np.array(limits),
        layers=[DraftedNodes(roots[:0], none[:0], none[:0])],
    )
    layers: list[_Layer] = []
    drawn_from: list[dict[int, DraftDistribution]] = [{} for _ in budgets]
    while True:
        growth = policy.grow(frontier)
        if not layers and not growth.keep.any():
            return [NOTHING_GROWN for _ in budgets]
        layer = _next_layer(frontier, growth, room, size, share, layers)
        if not layers and not len(layer.rows):
            return [NOTHING_GROWN for _ in budgets]
        if drawing.random:
            layer = _drawn(layer, frontier, scorer, drawn_from)
        layers.append(layer)
        depth = frontier.depth + 1
        pairs = enumerate(zip(layer.rows.tolist(), layer.extend.tolist(), strict=True))
        more = [at for at, (row, extend) in pairs if extend and limits[row] > depth and room[row] > size[row]]
        if not more:
            return _finish(layers, drawn_from, policy, plan, share)
        where = slice(None) if len(more) == len(layer.rows) else np.array(more)
        rows, numbers = layer.rows[where], layer.nodes[where]
        columns = (rows, numbers, layer.parents[where], layer.tokens[where])
        unscored = map(UnscoredNode, *(column.tolist() for column in columns))
        frontier = Frontier(
            plan=plan,
            depth=depth,
            rows=rows,
            nodes=numbers,
            path_logprobs=layer.path_logprobs[where],
            tags=layer.tags[where],
            candidates=scorer.score([*unscored], width),
            budgets=frontier.budgets,
            limits=frontier.limits,
            layers=[*frontier.layers, DraftedNodes(layer.rows, layer.path_logprobs, layer.tags)],
        )


def _next_layer(
    frontier: Frontier,
    growth: Growth,
    room: Sequence[int],
    size: list[int],
    share: _Share,
    layers: Sequence[_Layer],
) -> _Layer:
    """Turn a policy's choice into nodes; in each request numbers go on from ``size``, which grows up to ``room``."""
    found, scores = frontier.candidates, frontier.scores
    chosen = np.flatnonzero(growth.keep & (scores > -np.inf))  # flat over parents and ranks
    path_logprobs, parent = scores.take(chosen), chosen // scores.shape[1]
    rows = frontier.rows[parent]
    left = [most - own for most, own in zip(room, size, strict=True)]
    if len(chosen) > min(left):
        stay = best_per_row(path_logprobs, rows, np.array(left))
        chosen, parent, path_logprobs, rows = chosen[stay], parent[stay], path_logprobs[stay], rows[stay]
    ranking = share.ranking(rows, path_logprobs, scores[parent, 0])
    if share.most is not None and len(rows):
        stay = share.stay(layers, ranking, rows, frontier.budgets)
        chosen, parent, path_logprobs, rows = chosen[stay], parent[stay], path_logprobs[stay], rows[stay]
        ranking = ranking[stay]
    nodes = []
    for row in rows.tolist():
        nodes.append(size[row])
        size[row] += 1
    return _Layer(
        chosen=chosen,
        rows=rows,
        nodes=np.array(nodes, np.int64),
        tokens=found.tokens.take(chosen),
        parents=frontier.nodes[parent],
        path_logprobs=path_logprobs,
        entropies=found.entropies[parent],
        extend=growth.extend.take(chosen),
        tags=np.zeros_like(rows) if growth.tags is None else growth.tags.take(chosen),
        origins=None if found.origins is None else found.origins.take(chosen),
        ranking=ranking,
    )


def _drawn(layer: _Layer, frontier: Frontier, scorer: Scorer, drawn_from: list[dict[int, DraftDistribution]]) -> _Layer:
    """The layer with drawn children in place of the most probable ones: as many for each node, and what from."""
    if not len(layer.chosen):
        return layer
    width = frontier.candidates.tokens.shape[1]
    parents, ranks = layer.chosen // width, layer.chosen % width
    counts = np.bincount(parents, minlength=len(frontier.rows))
    if not np.array_equal(ranks, count_within(parents, counts)):
        raise ConfigError("the policy passes over probable candidates: where children are drawn, keep the first ones")
    drawn = scorer.draw(counts)
    for row, node, q in zip(frontier.rows.tolist(), frontier.nodes.tolist(), drawn.distributions, strict=True):
        if q is not None:
            drawn_from[row][node] = q
    paths = frontier.path_logprobs[parents] + drawn.logprobs[parents, ranks]
    return layer._replace(tokens=drawn.tokens[parents, ranks], path_logprobs=paths)


def _finish(
    layers: list[_Layer],
    drawn_from: list[dict[int, DraftDistribution]],
    policy: GrowthPolicy,
    plan: Plan,
    share: _Share,
) -> list[Grown]:
    columns = ("rows", "tokens", "parents", "path_logprobs", "entropies", "tags", "ranking")
    rows, tokens, parents, paths, entropies, tags, ranking = (
        np.concatenate([getattr(x, n) for x in layers]) for n in columns
    )
    depths = np.arange(1, len(layers) + 1).repeat([len(x.rows) for x in layers])
    own: list[Flags | slice] = [rows == b for b in range(len(drawn_from))] if len(drawn_from) > 1 else [slice(None)]
    found = [x.origins for x in layers if x.origins is not None]
    every = np.concatenate(found) if found else None
    origins = [None if every is None else every[m] for m in own]
    pools = [
        DraftTree.of(tokens[m], parents[m], depths[m], paths[m], entropies[m], q, parts)
        for m, q, parts in zip(own, drawn_from, origins, strict=True)
    ]
    grown = []
    kept = policy.prune(plan, pools, [tags[m] for m in own])
    if share.most is not None:
        kept = share.divide(kept, own, ranking, rows, parents)
    for pool, keep, budget in zip(pools, kept, plan.budgets, strict=True):
        if keep is None:
            grown.append(Grown(pool, np.arange(len(pool))))
        elif not keep.any():
            grown.append(NOTHING_GROWN)
        else:
            grown.append(Grown(pool.subset(keep), np.flatnonzero(keep)))
        if len(grown[-1].tree) > budget.nodes:
            raise ConfigError(f"the policy kept {len(grown[-1].tree)} nodes of {budget.nodes}: prune to the budget")
    return grown
