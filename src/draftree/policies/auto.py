"""The cost-aware policy: a node is drafted where its expected tokens pay for its measured seconds.

A step of B requests that verifies n nodes in all and has drafted d layers yields B + G(n) expected tokens for
T_verify(B + n) + d t_draft seconds. The long-run rate is highest where each step maximises tokens - rate x seconds
(Dinkelbach's transform), with the rate that decoding has reached so far and never less than AR decoding's, which is
n = 0. So a node stays while the probability of its path exceeds rate x the seconds of one more token, and a layer is
drafted while what it is expected to add exceeds rate x its seconds. The requests share the pass, so each node competes
with those of all of them.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, attrgetter, truediv
from typing import cast

from ..config import Budget, Count, check_fields
from ..errors import ConfigError
from ..models.base import Capabilities, LanguageModel
from ..models.cost_profile import Profile, profile_of
from ..request import Outcome, Request
from ..tree import ROOT
from .accounts import AutoSettings
from .base import NO_CANDIDATES, Child, Frontier, GrowthPolicy, GrowthRule, PartRule, Plan, Pool, SourceInfo, Trial
from .gain import Price, Record, Selection, Trust
from .live_costs import CONTEXT_STEP, ARPass, CostModel
from .report import Report

MOST_NODES = 512
"""A pass over several requests verifies no more in all, so that looking for how many stays quick."""
_LEAST = 0.01
"""Candidates that are less likely to be accepted are not drafted."""
_SPARE = 0.5
"""Nodes of so much of the least value stay until the end: steps of the curve may have room for them."""
_REST = 8
"""Where nothing pays, it is settled anew after so many steps, or with a new request: settling costs time, too."""


@dataclass(slots=True, kw_only=True)
class AutoPlan(Plan):
    """A plan of ``AutoTree``.

    Attributes:
        price: what drafting and verifying take.
        best: acceptance probabilities of all drafted nodes, negated, in ascending order.
        size: how many of them pay.
        proposed: each layer's frontier.
    """

    price: Price
    best: list[float] = field(default_factory=list)
    size: int = 0
    proposed: list[Frontier] = field(default_factory=list)

    @property
    def least(self) -> float:
        """What one more node must be worth: its seconds at the rate."""
        below = self.price.curve.below
        if self.size + 1 >= len(below):
            return math.inf
        return self.price.rate * (below[self.size + 1] - below[self.size])

    def add(self, value: float) -> None:
        """Count a drafted node that is accepted with probability ``value``."""
        insort(self.best, -value)
        while self.size < len(self.best) and -self.best[self.size] > self.least:
            self.size += 1

    def tried(self, request: int, tokens: Sequence[int]) -> Iterator[Trial]:
        """Walk down what was proposed along the target's tokens; candidates count whether they became nodes or not."""
        node: int | None = ROOT
        for token, frontier in zip(tokens, self.proposed, strict=False):
            numbered = zip(frontier.requests, frontier.nodes, frontier.candidates, strict=True)
            candidates = next((candidates for r, n, candidates in numbered if (r, n) == (request, node)), NO_CANDIDATES)
            if not candidates.tokens:
                return
            yield candidates.part, candidates.tokens[0] == token, candidates.logprobs[0]
            children = enumerate(zip(frontier.pools[request].parents, frontier.pools[request].tokens, strict=True))
            node = next((number for number, child in children if child == (node, token)), None)


@dataclass
class AutoTree(GrowthPolicy):
    """Chooses each step's shape by what it gains and costs on this machine; learns both as it decodes.

    Attributes:
        width: most children of a node.
        depth: deepest level.
        target: the target's costs; None until ``prepare``, which finds them.
        drafter: the drafting model's; None without one, and until ``prepare``.
    """

    by_value = True

    width: Count = 8
    depth: Count = 16
    target: Profile | None = None
    drafter: Profile | None = None
    settings: AutoSettings = AutoSettings()

    def __post_init__(self) -> None:
        check_fields(self)
        self._models: list[Capabilities] | None = None
        self._rest = 0  # steps until it is settled anew
        self._ar: ARPass | None = None  # of the last step that was planned
        self._learn_anew([Record(self.settings, profile=self.drafter)])

    def _learn_anew(self, records: Sequence[Record]) -> None:
        self._trust = [Trust(self.settings) for _ in records]
        self._selection = Selection(self.settings, records)
        self.report: Report = Report(records, self.target)
        if self.target is not None:
            self._costs = CostModel(self.target)

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:
        """Find the costs, unless they were given: measured earlier, or of a table that ships."""
        models = [model.capabilities for model in (target, *(source.model for source in sources)) if model]
        if self._models not in (None, models):
            raise ConfigError("this AutoTree has learned for other models: make a new one")
        self._models = models
        self.target = self.target or profile_of(target)
        self._learn_anew([self._record(source) for source in sources])

    def _record(self, source: SourceInfo) -> Record:
        costs = {id(model): self.drafter or profile_of(model) for model in source.models}
        return Record(self.settings, source, costs, costs.get(id(source.model)))

    def width_for(self, nodes: int) -> int:
        """``width``, whatever the budget."""
        return self.width

    def pool(self, nodes: int) -> int:
        """More than is verified: what pays in one layer may be outdone in the next."""
        return 2 * nodes + self.width

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> Plan:
        """Look up the costs and choose the drafters; no nodes where drafting cannot win, and while that rests."""
        if self._rest and all(map(attrgetter("stats.steps"), requests)):
            self._rest -= 1
            return Plan([Budget(0)] * len(requests))
        if self.target is None:
            raise ConfigError("auto has no costs: give its drafter to an Engine, which finds them")
        longest, batch = max([len(request.ids) for request in requests]), len(requests)
        ar = self._ar = ARPass(longest // CONTEXT_STEP * CONTEXT_STEP, batch, batch + other_tokens)
        nodes = [*map(attrgetter("nodes"), budgets)]
        curve = self._costs.curve(min(sum(nodes), max(*nodes, MOST_NODES)), ar)
        price = self._selection.choose(requests, curve, ar, self._costs.alone(ar) if other_tokens else None)
        self._rest = 0 if any(price.enabled) else _REST - 1
        if self._costs.wants_ar:
            price = price._replace(enabled=(False,) * len(price.enabled))
        drafts = any(price.enabled) and {*map(attrgetter("depth"), budgets)} != {0}
        within = budgets if drafts else [Budget(0, budget.depth) for budget in budgets]
        if price.left_out:
            parts = [*zip(price.enabled, price.left_out, strict=True)]
            drafted = [any([on and request not in others for on, others in parts]) for request in requests]
            within = [b if drafts else Budget(0, b.depth) for b, drafts in zip(within, drafted, strict=True)]
        return AutoPlan(within, price.enabled, price.left_out, price=price)

    def rule(self, plan: Plan) -> GrowthRule | None:
        price = cast(AutoPlan, plan).price
        pairs = zip(self._trust, price.layers, strict=True)
        parts = [PartRule(trust.scale, trust.onward, layer) for trust, layer in pairs]
        return GrowthRule(self.width, self.depth, 0.0, *price.curve, price.rate, price.ar.tokens, parts)

    def grow(self, frontier: Frontier) -> list[Child]:
        """Candidates whose path may pay; those that another layer may pay below get children."""
        plan = cast(AutoPlan, frontier.plan)
        plan.proposed.append(frontier)
        plan.layers += 1
        children, least = list[Child](), max(_SPARE * plan.least, _LEAST)
        for at, candidates in enumerate(frontier.candidates):
            above = frontier.tags[at] if frontier.depth else 1.0
            for rank, edge in enumerate(self._trust[candidates.part].acceptance(candidates)):
                if (path := above * edge) > least:
                    children.append(Child(at, rank, False, path))
                    plan.add(path)
        if frontier.depth + 1 >= self.depth:
            return children
        least, parts = plan.least, [frontier.candidates[child.parent].part for child in children]
        gains = [self._trust[part].onward * child.tag - least for part, child in zip(parts, children, strict=True)]
        # added one after the other, as in C: sum() rounds otherwise where Python is 3.12 or newer
        layer = reduce(add, [plan.price.layers[part] for part in sorted(set(parts))], 0.0)
        if reduce(add, [gain for gain in gains if gain > 0], 0.0) <= plan.price.rate * layer:
            return children
        return [child._replace(extend=gain > 0) for child, gain in zip(children, gains, strict=True)]

    def prune(self, plan: Plan, pools: Sequence[Pool]) -> Sequence[Sequence[bool] | None]:
        """The number of nodes that gains most, and the best nodes of all requests: they share the pass."""
        plan = cast(AutoPlan, plan)
        ranked = sorted(
            (-path, request, node) for request, pool in enumerate(pools) for node, path in enumerate(pool.tags)
        )
        left, chosen = [budget.nodes for budget in plan.budgets], list[tuple[int, int]]()
        seconds, expected = plan.price.curve.seconds, [float(plan.price.ar.tokens)]
        for minus, request, node in ranked:
            if left[request] and len(expected) < len(seconds):
                left[request] -= 1
                chosen.append((request, node))
                expected.append(expected[-1] - minus)
        # where the rate of the last steps is more than any size can reach, all lose against it, the smallest least
        rate = min(plan.price.rate, max(map(truediv, expected, seconds)))
        size = max(range(len(expected)), key=lambda size: expected[size] - rate * seconds[size])
        best = set(chosen[:size])
        return [[(request, node) in best for node in range(len(pool.tags))] for request, pool in enumerate(pools)]

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Learn from every candidate that was put to the test, drafted to be verified or not."""
        nodes, passes = 0, 1.0
        if isinstance(plan, AutoPlan):
            ar: ARPass | None = plan.price.ar
            nodes = sum([len(outcome.tree.tokens) for outcome in outcomes])
            trials = plan.trials
            if trials is None:
                numbered = enumerate(outcomes)
                trials = [t for r, outcome in numbered for t in plan.tried(r, outcome.tokens[: outcome.taken])]
            for part, trust in enumerate(self._trust):
                trust.learn(trials, part)
            passes = self._selection.learn(plan.price, max(1, plan.layers), nodes, outcomes)
        else:
            self._selection.rest(len(outcomes))
            ar = self._unplanned(outcomes[0].step.batch)
        if ar is not None and ar.batch == len(outcomes):
            self._costs.learn(nodes, ar, outcomes[0].step.verify)
        self.report.add(nodes, outcomes, passes)

    def _unplanned(self, batch: int) -> ARPass | None:
        """The pass of a step of so many requests that nobody planned; None: prompts may have been read in it."""
        ar = self._ar
        return ar._replace(tokens=batch) if ar is not None and ar.batch == batch else None


_USUAL = AutoSettings()


def auto(  # noqa: PLR0913 - a setting of the method each
    width: int = 8,
    depth: int = 16,
    credit: float = _USUAL.credit,
    again: float = _USUAL.again,
    pause: int = _USUAL.pause,
    longest: int = _USUAL.longest,
    keep: float = _USUAL.keep,
    prior: float = _USUAL.prior,
    onward: float = _USUAL.onward,
    text_layer: float = _USUAL.text_layer,
    model_layer: float = _USUAL.model_layer,
) -> AutoTree:
    """The method ``auto``."""
    settings = AutoSettings(credit, again, pause, longest, keep, prior, onward, text_layer, model_layer)
    return AutoTree(width, depth, settings=settings)
