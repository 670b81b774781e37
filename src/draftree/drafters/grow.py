"""Drafters that grow trees out of a source's candidates, by the one growth loop.

Layer by layer, a scorer predicts what may follow and a policy chooses, within a budget.

A node's number in the pool is its index among the drafted nodes of its request, layer by layer. ``Grown.numbers`` maps
the nodes of the finished tree to it.

Layers are small lists, flat over all requests; the scorer alone touches a model. The last layer is never scored: a leaf
costs no draft pass.

Where children are drawn at random (``Drawing``), the policy and the budget first settle how many each node of the
frontier gets. They know the most probable tokens of the draft distribution and what was drawn in the layers above. Only
then are they drawn. So no choice depends on a drawn sibling, which is what the schemes that verify such
trees stand on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from ..config import Budget, check_fields
from ..errors import ConfigError, call_named
from ..models.base import LanguageModel
from ..policies.base import Candidates, Child, Frontier, GrowthPolicy, Plan, Pool, best_per_request
from ..request import Outcome, Request
from ..tree import ROOT, DraftDistribution, DraftTree, Drawing
from .base import (
    NOTHING_GROWN,
    AllowedScorer,
    Drafter,
    DraftSource,
    DrawChildren,
    Drawn,
    Grown,
    Scorer,
    UnscoredNode,
    draw_children,
)


@dataclass
class TreeDrafter(Drafter):
    """Grows a tree for each request out of a source's candidates.

    Attributes:
        policy: shapes the trees.
        source: predicts what may follow.
        name: by default the source's.
    """

    policy: GrowthPolicy = field()
    source: DraftSource
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        parts = self.source.parts
        self.name = self.name or self.source.name
        self.parts = (self.name,) if len(parts) == 1 else tuple(part.name for part in parts)
        self.learns = self.source.learns
        self._learning = 0.0
        """Seconds of learning since the last proposal."""
        self._plan: Plan | None = None
        """Of the proposal whose outcomes are still to come."""

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        self.source.prepare(target, prefixes)
        call_named(f"policy {type(self.policy).__name__}: prepare", self.policy.prepare, target, self.source.parts)

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
        began, passes = time.perf_counter(), self.source.passes
        name = f"policy {type(self.policy).__name__}: plan"
        plan = self._plan = call_named(name, self.policy.plan, requests, budgets, other_tokens)
        if not isinstance(plan, Plan) or len(plan.budgets) != len(budgets):
            raise ConfigError(f"{name} returned {plan!r}: return a Plan with a budget a request")
        if plan.enabled is not None:
            self.source.enable(plan.enabled)
        if any([budget.nodes for budget in plan.budgets]):
            trees = self._grown(plan, requests, drawing, reading)
        else:
            trees = [DraftTree.empty() for _ in requests]
        self.passes, self.part_seconds = self.source.passes - passes, self.source.seconds
        self.seconds, self._learning = self._learning + time.perf_counter() - began, 0.0
        return trees

    def _grown(self, plan: Plan, requests: Sequence[Request], drawing: Drawing, reading: int | None) -> list[DraftTree]:
        fits, constrained = list[Budget](), False
        for request, budget in zip(requests, plan.budgets, strict=True):
            fit = self.source.fit(request, budget)
            reads = reading is not None and fit.nodes and not self.source.read(request, reading)
            fits.append(Budget(0) if reads else fit)
            constrained |= request.state is not None
        plan.budgets = fits
        scorer = self.source.scorer(requests, drawing)
        if not isinstance(scorer, Scorer):
            raise ConfigError(f"drafter {self.name}: scorer returned {scorer!r}: return a Scorer")
        if constrained:
            scorer = AllowedScorer(scorer, requests)
        draw = partial(draw_children, requests, drawing) if drawing.random else None
        grown = grow(scorer, self.policy, plan, f"drafter {self.name}", draw)
        self.source.settle(requests, grown)
        return [g.tree for g in grown]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Notify source and policy."""
        began = time.perf_counter()
        self.source.observe(outcomes)
        if self._plan is not None:
            call_named(f"policy {type(self.policy).__name__}: observe", self.policy.observe, self._plan, outcomes)
        self._plan = None
        self._learning += time.perf_counter() - began

    def close(self, request: Request) -> None:
        self.source.close(request)


def grow(
    scorer: Scorer, policy: GrowthPolicy, plan: Plan, name: str = "drafter", draw: DrawChildren | None = None
) -> list[Grown]:
    """Grow one tree a request, each within its budget of the policy's plan.

    Args:
        name: what messages call the scorer.
        draw: draws children at random; None: they are the candidates.

    Raises:
        ConfigError: the policy or the scorer broke the rules of its seam: the policy kept more than the budget, a node
            without its parent, or children to be drawn other than by their number.
    """
    budgets, trees, pools = plan.budgets, list[_Draft](), list[Pool]()
    nodes, limits, requests = list[int](), list[int](), list[int]()
    for request, budget in enumerate(budgets):
        trees.append(_Draft())
        pools.append(trees[request].pool)
        nodes.append(budget.nodes)
        limits.append(budget.nodes if budget.depth is None else budget.depth)
        if nodes[request] and limits[request]:
            requests.append(request)
    if not requests:
        return [NOTHING_GROWN] * len(budgets)
    width = _whole(policy, "width_for", max(nodes))
    most = [_whole(policy, "pool", count) if count else 0 for count in nodes]
    found = _scored(name, scorer, [UnscoredNode(request, ROOT, ROOT, 0) for request in requests], width)
    for request, candidates in zip(requests, found, strict=True):
        trees[request].part = candidates.part
    roots, zeros = [ROOT] * len(requests), [0] * len(requests)
    frontier = Frontier(plan, 0, requests, roots, zeros, zeros, found, nodes, limits, pools)
    while True:
        children = _fitting(frontier, _grown(policy, frontier), most)
        added = _add(trees, frontier, children, draw)
        depth = frontier.depth + 1
        unscored, requests, numbers = list[UnscoredNode](), list[int](), list[int]()
        paths, tags = list[float](), list[Any]()
        for node in added:
            request, number, pool = node.request, node.node, pools[node.request]
            if limits[request] > depth and most[request] > len(pool.tokens):
                unscored.append(node)
                requests.append(request)
                numbers.append(number)
                paths.append(pool.path_logprobs[number])
                tags.append(pool.tags[number])
        if not unscored:
            break
        found = _scored(name, scorer, unscored, width)
        frontier = Frontier(plan, depth, requests, numbers, paths, tags, found, nodes, limits, pools)
    if not any(pool.tokens for pool in pools):
        return [NOTHING_GROWN] * len(budgets)
    kept = _pruned(policy, plan, pools)
    return [tree.finished(keep, budget) for tree, keep, budget in zip(trees, kept, budgets, strict=True)]


def _whole(policy: GrowthPolicy, method: str, nodes: int) -> int:
    name = f"policy {type(policy).__name__}: {method}"
    value = call_named(name, getattr(policy, method), nodes)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} returned {value!r}: return a whole number from 1 on")
    return value


def _grown(policy: GrowthPolicy, frontier: Frontier) -> list[Child]:
    """The policy's children; ConfigError unless they are candidates of the frontier, in order and each once."""
    name = f"policy {type(policy).__name__}: grow"
    children = call_named(name, policy.grow, frontier)
    if not isinstance(children, list):
        raise ConfigError(f"{name} returned {children!r}: return a list of Child")
    counts, last = [len(found.tokens) for found in frontier.candidates], (ROOT, ROOT)
    for child in children:
        if not isinstance(child, Child):
            raise ConfigError(f"{name} returned {child!r} in its list: return a list of Child")
        parent, rank, *_ = child
        if not isinstance(parent, (int, np.integer)) or not 0 <= parent < len(counts):
            rule = f"use a parent from 0 to {len(counts) - 1}, an index in the frontier"
        elif not isinstance(rank, (int, np.integer)) or not 0 <= rank < counts[parent]:
            rule = f"node {parent} has {counts[parent]} candidates: use a rank below that, from 0 on"
        elif (parent, rank) <= last:
            rule = "give each child once, in the order of parents and then of ranks"
        else:
            last = parent, rank
            continue
        raise ConfigError(f"{name} returned {child!r}: {rule}")
    return children


def _pruned(policy: GrowthPolicy, plan: Plan, pools: Sequence[Pool]) -> Sequence[Sequence[bool] | None]:
    """Which nodes the policy keeps; ConfigError unless it is a flag for each."""
    name = f"policy {type(policy).__name__}: prune"
    kept = call_named(name, policy.prune, plan, pools)
    if (
        not isinstance(kept, (list, tuple))
        or len(kept) != len(pools)
        or any([keep is not None and len(keep) != len(pool.tokens) for keep, pool in zip(kept, pools, strict=True)])
    ):
        raise ConfigError(f"{name} returned {kept!r}: return for each pool a flag for each node, or None")
    return kept


def _scored(name: str, scorer: Scorer, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
    """The scorer's candidates; ConfigError unless there are some for each node."""
    scored = scorer.score(nodes, width)
    try:
        fits = len(scored) == len(nodes)
        for tokens, logprobs, entropy, _, _ in scored:
            fits = fits and len(tokens) == len(logprobs) and math.isfinite(entropy + sum(logprobs))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(
            f"{name}: score returned {scored!r}: return a list with Candidates for each node, as many "
            "log-probabilities as tokens, and all of them and the entropy finite"
        )
    return scored


class _Draft:
    """The tree of one request while it grows.

    Attributes:
        pool: what has been drafted.
        part: number of the source in its ensemble.
        distributions: node (ROOT for the root) -> what its children were drawn from.
    """

    def __init__(self) -> None:
        self.pool, self.part = Pool([], [], [], [], [], []), 0
        self.distributions: dict[int, DraftDistribution] = {}

    def finished(self, keep: Sequence[bool] | None, budget: Budget) -> Grown:
        """The tree of these nodes of the pool; None: of all."""
        pool, distributions = self.pool, self.distributions
        numbers = range(len(pool.tokens)) if keep is None else [*compress(range(len(pool.tokens)), keep)]
        if not numbers:
            return NOTHING_GROWN
        if len(numbers) > budget.nodes:
            raise ConfigError(f"the policy kept {len(numbers)} nodes of {budget.nodes}: prune to the budget")
        tokens, parents, depths, paths, entropies, _ = pool
        if keep is not None:
            new = dict(zip([ROOT, *numbers], range(ROOT, len(numbers)), strict=True))
            above = [*compress(parents, keep)]
            if not new.keys() >= set(above):
                raise ConfigError(f"the policy kept nodes {numbers} without all of their parents: keep these too")
            parents = [*map(new.__getitem__, above)]
            tokens, depths = [*compress(tokens, keep)], [*compress(depths, keep)]
            paths, entropies = [*compress(paths, keep)], [*compress(entropies, keep)]
            if distributions:
                distributions = {new[node]: q for node, q in distributions.items() if node in new}
        return Grown(DraftTree.of(tokens, parents, depths, paths, entropies, distributions, self.part), numbers)


def _fitting(frontier: Frontier, children: list[Child], most: Sequence[int]) -> list[Child]:
    """The children that fit into the pools of ``most`` nodes: of each request the most probable ones."""
    if len(children) <= min([most[request] - len(frontier.pools[request].tokens) for request in frontier.requests]):
        return children
    left = [count - len(pool.tokens) for count, pool in zip(most, frontier.pools, strict=True)]
    paths, requests = list[float](), list[int]()
    for parent, rank, *_ in children:
        paths.append(frontier.path_logprobs[parent] + frontier.candidates[parent].logprobs[rank])
        requests.append(frontier.requests[parent])
    return [*compress(children, best_per_request(paths, requests, left))]


def _add(
    trees: Sequence[_Draft], frontier: Frontier, children: Sequence[Child], draw: DrawChildren | None
) -> list[UnscoredNode]:
    """Add children to their pools, drawn or else the candidates; those that may get children in turn."""
    found: Sequence[Candidates | Drawn] = frontier.candidates
    if draw and children:
        nodes = [*zip(frontier.requests, frontier.nodes, strict=True)]
        found = drawn = draw(nodes, frontier.candidates, _counted(children, len(nodes)))
        for (request, node), (_, _, q) in zip(nodes, drawn, strict=True):
            if q is not None:
                trees[request].distributions[node] = q
    added = []
    for parent, rank, extend, tag in children:
        request, above, candidates = frontier.requests[parent], frontier.nodes[parent], frontier.candidates[parent]
        tree, token = trees[request], found[parent].tokens[rank]
        tokens, parents, depths, paths, entropies, tags = tree.pool
        if extend:
            added.append(UnscoredNode(request, len(tokens), above, token))
        tokens.append(token)
        parents.append(above)
        depths.append(frontier.depth + 1)
        paths.append(frontier.path_logprobs[parent] + found[parent].logprobs[rank])
        entropies.append(candidates.entropy)
        tags.append(tag)
    return added


def _counted(children: Sequence[Child], parents: int) -> list[int]:
    """How many children each of the parents gets, which must be its first candidates."""
    counts = [0] * parents
    for parent, rank, *_ in children:
        if rank != counts[parent]:
            raise ConfigError(
                "the policy passes over probable candidates: where children are drawn, keep the first ones"
            )
        counts[parent] += 1
    return counts
