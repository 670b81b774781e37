"""Drafters that grow trees out of a source's candidates, by the one growth loop.

Layer by layer, a scorer predicts what may follow and a policy chooses, within a budget.

A node's number in the pool is its index among the drafted nodes of its request, layer by layer. ``Grown.numbers`` maps
the nodes of the finished tree to it.

Layers are small lists, flat over all requests; the scorer alone touches a model. The last layer is never scored: a leaf
costs no draft pass.

Where children are drawn at random (``ChildSampler``), the policy and the budget first settle how many each node of the
frontier gets. They know the most probable tokens of the draft distribution and what was drawn in the layers above. Only
then are they drawn. So no choice depends on a drawn sibling, which is what the schemes that verify such
trees stand on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from operator import attrgetter, sub
from typing import Any

import numpy as np

from ..config import Budget, check_fields
from ..errors import CacheFullError, ConfigError, call_named
from ..models.base import LanguageModel
from ..policies.base import Candidates, Child, ChildSampler, Frontier, GrowthPolicy, Plan, Pool, best_per_request
from ..request import Outcome, Request
from ..sampling.constraint import ConstraintState
from ..tree import ROOT, DraftTree
from .base import (
    NOTHING_GROWN,
    Drafter,
    DraftSource,
    Grown,
    NodeStates,
    Scorer,
    UnscoredNode,
    scored,
)
from .native_growth import NativeGrowth

log = logging.getLogger("draftree.drafters")

_nodes, _own_passes = attrgetter("nodes"), attrgetter("own_passes")


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
        parts = self.source.parts or (self.source,)
        self.name = self.name or self.source.name
        self.parts = (self.name,) if len(parts) == 1 else tuple(part.name for part in parts)
        self.learns = self.source.learns
        self._sources, self._part_of = [*parts], [*range(len(parts))]
        """The parts, down to the parts of their parts; the part that each of them belongs to."""
        for number, source in zip(self._part_of, self._sources, strict=False):
            self._sources += source.sources
            self._part_of += [number] * len(source.sources)
        self._learning = 0.0
        """Seconds of learning since the last proposal."""
        self._plan: Plan | None = None
        """Of the proposal whose outcomes are still to come."""
        self._native = NativeGrowth.find(self.source, f"drafter {self.name}")
        self._grown_natively = False  # the last proposal
        self._full = False  # some proposal was given up

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        self.source.prepare(target, prefixes)
        if self._native:
            self._native.vocab_size = target.capabilities.vocab_size
        parts = self.source.parts or (self.source,)
        call_named(f"policy {type(self.policy).__name__}: prepare", self.policy.prepare, target, parts)

    def open(self, request: Request) -> None:
        self.source.open(request)

    def propose(
        self,
        requests: Sequence[Request],
        budgets: Sequence[Budget],
        coupled: bool = True,
        other_tokens: int = 0,
        reading: int | None = None,
        sampler: type[ChildSampler] | None = None,
    ) -> list[DraftTree]:
        """Plan, grow, and settle; without nodes in the budgets neither policy nor source take part.

        Where a draft model has no room nothing is drafted: the text is the same.
        """
        began, before = time.perf_counter(), [*map(_own_passes, self._sources)]
        trees = [DraftTree.empty()] * len(requests)
        self._grown_natively, self.part_seconds, self.part_passes = False, (), ()
        if self._plan is not None:
            self._plan = None
            self.source.forget()
        native = None if sampler or not grows_by_rule(type(self.policy)) else self._native
        if native and native.knows_nothing(requests):
            self._plan = Plan([Budget(0)] * len(requests))
        elif any(map(_nodes, budgets)):
            name = f"policy {type(self.policy).__name__}: plan"
            plan = self._plan = call_named(name, self.policy.plan, requests, budgets, other_tokens)
            if not isinstance(plan, Plan) or len(plan.budgets) != len(budgets):
                raise ConfigError(f"{name} returned {plan!r}: return a Plan with a budget a request")
            if any(map(_nodes, plan.budgets)):
                rule = self.policy.rule(plan) if native else None
                try:
                    if native and rule:
                        self._grown_natively = True
                        trees = native.grow(requests, plan, rule, coupled, reading)
                        plan.layers, self.part_seconds = native.layers, native.seconds
                    else:
                        trees = self._grown(plan, requests, coupled, reading, sampler(requests) if sampler else None)
                        self.part_seconds = tuple(self.source.seconds)
                except CacheFullError as error:
                    self._give_up(requests, error)
        passes = [*map(sub, map(_own_passes, self._sources), before)]
        self.passes = sum(passes)
        if self.part_seconds:
            own = [0] * len(self.parts)
            for number, count in zip(self._part_of, passes, strict=True):
                own[number] += count
            self.part_passes = tuple(own)
        self.seconds, self._learning = self._learning + time.perf_counter() - began, 0.0
        return trees

    def _grown(
        self,
        plan: Plan,
        requests: Sequence[Request],
        coupled: bool,
        reading: int | None,
        sampler: ChildSampler | None,
    ) -> list[DraftTree]:
        if plan.enabled is not None:
            self.source.enable(plan.enabled, plan.left_out)
        fits = list[Budget]()
        for request, budget in zip(requests, plan.budgets, strict=True):
            fit = self.source.fit(request, budget)
            reads = reading is not None and fit.nodes and not self.source.read(request, reading)
            fits.append(Budget(0) if reads else fit)
        plan.budgets = fits
        scorer = self.source.scorer(requests, coupled)
        if not isinstance(scorer, Scorer):
            raise ConfigError(f"drafter {self.name}: scorer returned {scorer!r}: return a Scorer")
        grown = grow(scorer, self.policy, plan, f"drafter {self.name}", sampler, NodeStates(requests))
        self.source.settle(requests, grown)
        return [g.tree for g in grown]

    def _give_up(self, requests: Sequence[Request], error: CacheFullError) -> None:
        """Drop a proposal, of whose outcomes the policy learns nothing."""
        if not self._full:
            log.warning("drafter %s drafts nothing while its cache is full: %s", self.name, error)
        self._full, self._grown_natively, self._plan = True, False, None
        self.source.give_up(requests)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Notify source and policy."""
        began = time.perf_counter()
        if self._native and self._grown_natively and self._plan is not None:
            self._plan.trials = self._native.observe(outcomes)
        else:
            self.source.observe(outcomes)
        if self._plan is not None:
            call_named(f"policy {type(self.policy).__name__}: observe", self.policy.observe, self._plan, outcomes)
        self._plan = None
        self._learning += time.perf_counter() - began

    def close(self, request: Request) -> None:
        self.source.close(request)
        if self._native:
            self._native.close(request)


@cache
def grows_by_rule(policy: type[GrowthPolicy]) -> bool:
    """The class that has the policy's last word on growth has one on ``rule``, too."""
    for base in policy.__mro__:
        if vars(base).keys() & {"grow", "pool", "prune", "rule", "width_for"}:
            return "rule" in vars(base)
    return False


def grow(
    scorer: Scorer,
    policy: GrowthPolicy,
    plan: Plan,
    name: str = "drafter",
    sampler: ChildSampler | None = None,
    states: NodeStates | None = None,
) -> list[Grown]:
    """Grow one tree a request, each within its budget of the policy's plan.

    Args:
        name: what messages call the scorer.
        sampler: draws children at random; None: they are the first candidates.
        states: of constraints, whose refused tokens are no candidates, whatever the scorer knows of them; None: there
            are none.

    Raises:
        ConfigError: the policy or the scorer broke the rules of its seam: the policy kept more than the budget, a node
            without its parent, or children to be drawn other than by their number.
    """
    budgets, trees = plan.budgets, [_Draft() for _ in plan.budgets]
    pools, nodes = [tree.pool for tree in trees], [budget.nodes for budget in budgets]
    # the nodes that stay hang together, so a tree is no deeper than it has nodes
    limits = [b.nodes if b.depth is None else min(b.nodes, b.depth) for b in budgets]
    unscored = [UnscoredNode(b, ROOT, ROOT, 0) for b in range(len(budgets)) if nodes[b] and limits[b]]
    if not unscored:
        return [NOTHING_GROWN] * len(budgets)
    width = _whole(policy, "width_for", max(nodes))
    most, depth = [_whole(policy, "pool", count) if count else 0 for count in nodes], 0
    while unscored:
        candidates, requests, numbers = scored(name, scorer, unscored, width), list[int](), list[int]()
        if states is not None:
            candidates = [*map(allowed, candidates, states.of(unscored))]
        paths, tags = list[float](), list[Any]()
        for request, number, _, _ in unscored:
            requests.append(request)
            numbers.append(number)
            paths.append(pools[request].path_logprobs[number] if depth else 0.0)
            tags.append(pools[request].tags[number] if depth else 0)
        frontier = Frontier(plan, depth, requests, numbers, paths, tags, candidates, nodes, limits, pools)
        children = _fitting(frontier, _grown(policy, frontier), most)
        if sampler and children:
            drawn = sampler.draw(frontier, _counts(frontier, children), scorer.distributions)
            frontier = frontier._replace(candidates=drawn)
        added = _add(trees, frontier, children)
        depth += 1
        unscored = [n for n in added if limits[n.request] > depth and most[n.request] > len(pools[n.request].tokens)]
    keeps = _pruned(policy, plan, pools)
    grown = [tree.finished(keep, budget) for tree, keep, budget in zip(trees, keeps, budgets, strict=True)]
    if sampler:
        grown = [Grown(sampler.finished(b, tree, numbers), numbers) for b, (tree, numbers) in enumerate(grown)]
    return grown


def allowed(candidates: Candidates, state: ConstraintState | None) -> Candidates:
    """The candidates that a constraint allows."""
    if state is None or not candidates.tokens:
        return candidates
    flags = state.allows(np.array(candidates.tokens)).tolist()
    return candidates._replace(
        tokens=[*compress(candidates.tokens, flags)], logprobs=[*compress(candidates.logprobs, flags)]
    )


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
        whole = isinstance(parent, (int, np.integer)) and isinstance(rank, (int, np.integer))
        if not (whole and 0 <= parent < len(counts) and 0 <= rank < counts[parent] and (parent, rank) > last):
            raise ConfigError(
                f"{name} returned {child!r}: use an index of the frontier, below {len(counts)}, as parent, one of its "
                "candidates as rank, and give each child once, in the order of parents and then of ranks"
            )
        last = parent, rank
    return children


def _pruned(policy: GrowthPolicy, plan: Plan, pools: Sequence[Pool]) -> Sequence[Sequence[bool] | None]:
    """Which nodes the policy keeps; ConfigError unless it is a flag for each."""
    name = f"policy {type(policy).__name__}: prune"
    keeps = call_named(name, policy.prune, plan, pools)
    if (
        not isinstance(keeps, (list, tuple))
        or len(keeps) != len(pools)
        or any([keep is not None and len(keep) != len(pool.tokens) for keep, pool in zip(keeps, pools, strict=True)])
    ):
        raise ConfigError(f"{name} returned {keeps!r}: return for each pool a flag for each node, or None")
    return keeps


class _Draft:
    """The tree of one request while it grows.

    Attributes:
        pool: what has been drafted.
        part: number of the source in its ensemble.
    """

    def __init__(self) -> None:
        self.pool, self.part = Pool([], [], [], [], [], []), 0

    def finished(self, keep: Sequence[bool] | None, budget: Budget) -> Grown:
        """The tree of these nodes of the pool; None: of all."""
        every = range(len(self.pool.tokens))
        numbers = every if keep is None else [*compress(every, keep)]
        if not numbers:
            return NOTHING_GROWN
        if len(numbers) > budget.nodes:
            raise ConfigError(f"the policy kept {len(numbers)} nodes of {budget.nodes}: prune to the budget")
        columns: Sequence[list[Any]] = self.pool
        tokens, parents, depths, paths, entropies, _ = ([column[n] for n in numbers] for column in columns)
        new = dict(zip([ROOT, *numbers], range(ROOT, len(numbers)), strict=True))
        if not new.keys() >= set(parents):
            raise ConfigError(f"the policy kept nodes {numbers} without all of their parents: keep these too")
        tokens, parents = [*map(int, tokens)], [new[parent] for parent in parents]  # a scorer's may be NumPy's
        paths, entropies = np.array([paths, entropies], np.float32).tolist()  # as C returns them
        return Grown(DraftTree(tokens, parents, depths, paths, entropies, self.part), numbers)


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


def _counts(frontier: Frontier, children: Sequence[Child]) -> list[int]:
    """[F] how many children are drawn; ConfigError unless they take the places of as many first candidates."""
    counts = [0] * len(frontier.nodes)
    for parent, rank, *_ in children:
        if rank != counts[parent]:
            raise ConfigError(
                "the policy passes over probable candidates: where children are drawn, keep the first ones"
            )
        counts[parent] += 1
    return counts


def _add(trees: Sequence[_Draft], frontier: Frontier, children: Sequence[Child]) -> list[UnscoredNode]:
    """Add children to their pools; those that may get children in turn."""
    candidates = frontier.candidates
    added, depth = [], frontier.depth + 1
    for f, rank, extend, tag in children:
        request, above, tree = frontier.requests[f], frontier.nodes[f], trees[frontier.requests[f]]
        token, path = candidates[f].tokens[rank], frontier.path_logprobs[f] + candidates[f].logprobs[rank]
        if extend:
            added.append(UnscoredNode(request, len(tree.pool.tokens), above, token))
        columns: Sequence[list[Any]] = tree.pool
        for column, value in zip(columns, (token, above, depth, path, candidates[f].entropy, tag), strict=True):
            column.append(value)
        tree.part = candidates[f].part
    return added
