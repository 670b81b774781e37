"""The cost-aware policy: trees whose expected tokens pay for their measured seconds, or none at all.

A step of B requests that verifies n nodes in all and has drafted d layers yields B + G(n) expected tokens for
T_verify(B + n) + d t_draft seconds. The long-run rate is highest when each step maximises tokens - rate x seconds
(Dinkelbach's transform), with the rate that decoding has reached so far and never less than AR decoding's, which is
n = 0. The requests share the pass, so each node competes with those of all of them; where their tokens do not count the
same (``Budget.weight``) the benefit of a node is its expected tokens times its request's weight, of mean 1.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from operator import neg
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ...config import Budget, Count, check_fields
from ...errors import ConfigError
from ...models.base import Capabilities, LanguageModel
from ...models.cost_profile import Profile, profile_of
from ...request import Outcome, Request
from ...tree import ROOT
from ..base import Child, Frontier, GrowthPolicy, Plan, Pool, SourceInfo, best_per_row, highest, least_together
from .benefit import Benefit, Price, Selection
from .calibration import Calibration, Tried, first_or_not
from .cost_model import ARPass, CostModel, Floats, convex_below
from .explain import Report
from .settings import DEFAULTS, AutoSettings


@dataclass(slots=True, kw_only=True)
class AutoPlan(Plan):
    """A plan of ``AutoTree``.

    Attributes:
        price: what drafting and verifying take.
        weights: [B] what each request's tokens count; their mean is 1.
        below: [N + 1] seconds of verifying without the dents and steps of its curve, behind which sizes may pay.
        gained: expected tokens that the last layer has added.
        best: [B] weighted acceptance probabilities of each request's drafted nodes, in descending order.
        proposed: each layer's frontier.
        totals: [N] expected tokens of the best 1, 2, ... nodes of all requests.
        passes: layers that the drafters made a pass for.
        pools, chosen: what was drafted, and how many nodes in all are verified.
        expected: tokens of what is verified, the target's own included, summed over requests.
    """

    price: Price
    weights: Floats
    below: Floats = field(init=False)
    gained: float = field(init=False)
    best: list[list[float]] = field(init=False)
    proposed: list[Frontier] = field(default_factory=list)
    totals: Floats = field(default_factory=lambda: np.zeros(1))
    passes: int = 1
    pools: Sequence[Pool] = ()
    chosen: int = 0
    expected: float = field(init=False)

    @property
    def together(self) -> int | None:
        """None: the costs that it weighs end there."""
        return None

    def __post_init__(self) -> None:
        self.gained = self.expected = float(len(self.budgets))
        self.best = [[] for _ in self.budgets]

    def next_layer(self) -> tuple[float, float]:
        """Weigh a new layer.

        Returns:
            the least weighted acceptance probability of nodes that may get children, of whichever request: no child of
            another can be verified, for it is not among the best of as many as gain most so far; and the expected
            tokens of one more layer, if it gains less than this one by as much as this one than the last.
        """
        within = (own[: budget.nodes] for own, budget in zip(self.best, self.budgets, strict=True))
        verify = self.below[1:]
        best = sorted(chain.from_iterable(within), reverse=True)[: len(verify)]
        best += [0.0] * (len(verify) - len(best))
        totals = np.cumsum(best)
        size = int((totals - self.rate(totals, verify) * verify).argmax())
        gained = float(totals[size] - self.totals[min(size, len(self.totals) - 1)])
        ahead = min(1.0, gained / self.gained) * gained
        self.totals, self.gained = totals, max(gained, 1e-9)
        return best[size], ahead

    def rate(self, drafted: Floats, seconds: Floats) -> float:
        """Tokens a second that this step must yield, but no more than the best of its sizes does.

        ``drafted``: tokens that sizes gain over the pass of AR decoding; ``seconds``: that they take.

        The rate of the last steps is noisy. Where it is too high each size loses against it, the smallest least.
        """
        return min(self.price.rate, float(((self.price.ar.tokens + drafted) / seconds).max()))

    def may_gain(self, rows: NDArray[np.int64], first: Floats) -> bool:
        """Some size gains if the tokens below each request's first node are as likely as that: none is likelier.

        Args:
            rows: [F] which requests may draft.
            first: [F] acceptance probabilities of their first nodes.
        """
        verify = self.price.verify
        levels = -(-(len(verify) - 1) // len(first))
        steps = (np.power.outer(first, np.arange(1, levels + 1)) * self.weights[rows, None]).ravel()
        gained = np.sort(steps)[::-1][: len(verify) - 1].cumsum()
        return bool((gained > self.price.rate * (verify[1:] - verify[0])).any())

    def affords_layer(self) -> bool:
        """One more layer costs no more than the drafters may lose."""
        return self.passes * sum(self.price.layers) <= self.price.limit


@dataclass(slots=True)
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
    settings: AutoSettings = DEFAULTS
    calibration: Calibration = field(init=False, repr=False, compare=False)
    selection: Selection = field(init=False, repr=False, compare=False)
    report: Report = field(default_factory=Report, init=False, repr=False, compare=False)
    _models: list[Capabilities] | None = field(default=None, repr=False, compare=False)
    _costs: CostModel | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        self.calibration = Calibration(2, self.settings)
        self.selection = Selection([Benefit(profile=self.drafter, settings=self.settings)], self.settings)

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:
        """Find the costs, unless they were given: measured earlier, or of a table that ships."""
        models = [model.capabilities for model in (target, *(source.model for source in sources)) if model]
        if self._models not in (None, models):
            raise ConfigError("this AutoTree has learned for other models: make a new one")
        self._models = models
        self.target = self.target or profile_of(target)
        self.selection = Selection([self._benefit(source, target) for source in sources], self.settings)
        self.calibration = Calibration(2, self.settings)

    def _benefit(self, source: SourceInfo, target: LanguageModel) -> Benefit:
        """A drafter's, with the costs of its models; a twin of the target has the target's."""
        own = [self.target if model.capabilities == target.capabilities else None for model in source.models]
        costs = {id(m): self.drafter or twin or profile_of(m) for m, twin in zip(source.models, own, strict=True)}
        return Benefit(source, costs.get(id(source.model)), costs, self.settings)

    def width_for(self, nodes: int) -> int:
        """``width``, whatever the budget."""
        return self.width

    def pool(self, nodes: int) -> int:
        """Several times what is verified: unlikely paths are drafted too, for their outcome teaches."""
        return 4 * nodes + self.width

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> AutoPlan:
        """Look up the costs and choose the drafters; no nodes where drafting cannot win."""
        if self.target is None:
            raise ConfigError("auto has no costs: give its drafter to an Engine, which finds them")
        self._costs = self._costs or CostModel(self.target, self.settings)
        ar = ARPass(max(len(request.ids) for request in requests), len(requests), other_tokens)
        nodes = [budget.nodes for budget in budgets]
        most = min(sum(nodes), max(*nodes, self.settings.most_nodes))
        together = least_together(budgets)
        verify = self._costs.curve(most if together is None else min(most, together), ar)
        depth = self.depth if any(budget.depth != 0 for budget in budgets) else 0
        price = self.selection.begin(requests, verify, ar, depth)
        drafted = budgets if any(price.enabled) else [Budget(0, budget.depth) for budget in budgets]
        weights = np.array([budget.weight for budget in budgets])
        return AutoPlan(drafted, price.enabled, price=price, weights=weights / weights.mean())

    def grow(self, frontier: Frontier) -> list[Child]:
        """Candidates whose calibrated path may pay; go on where another layer may pay."""
        plan = cast(AutoPlan, frontier.plan)
        if not any([found.tokens for found in frontier.candidates]) and not frontier.depth:
            return []  # often so where texts repeat little: nothing to weigh or to learn
        plan.proposed.append(frontier)
        paths = self._paths(frontier)
        if not frontier.depth:
            firsts = np.array([max(own, default=0.0) for own in paths])
            if not plan.may_gain(np.array(frontier.rows), firsts):
                return []
            plan.below = convex_below(plan.price.verify)
        every = [
            Child(parent, rank, tag=path)
            for parent, own in enumerate(paths)
            for rank, path in enumerate(own)
            if path > self.settings.min_probability
        ]
        rows = [frontier.rows[child.parent] for child in every]
        kept = [*compress(every, best_per_row([child.tag for child in every], rows, frontier.budgets))]
        values = [child.tag * float(plan.weights[frontier.rows[child.parent]]) for child in kept]
        for child, value in zip(kept, values, strict=True):
            insort(plan.best[frontier.rows[child.parent]], value, key=neg)
        last, ahead = plan.next_layer()
        more = ahead > 0 and frontier.depth + 1 < self.depth and plan.affords_layer()
        more = more and ahead > plan.price.rate * sum(plan.price.layers)
        grown = [child._replace(extend=more and value >= last) for child, value in zip(kept, values, strict=True)]
        plan.passes += any([child.extend for child in grown])
        return grown

    def _paths(self, frontier: Frontier) -> list[list[float]]:
        """[F][K] probabilities that candidates are accepted, with all above them."""
        tags = frontier.tags if frontier.depth else [1.0] * len(frontier.rows)
        paths = []
        for above, found in zip(tags, frontier.candidates, strict=True):
            edges = self.calibration.acceptance(map(math.exp, found.logprobs), first_or_not(len(found.tokens)))
            paths.append([above * edge for edge in edges])
        return paths

    def prune(self, plan: Plan, pools: Sequence[Pool]) -> Sequence[Sequence[bool] | None]:
        """The number of nodes that gains most, and the best nodes of all requests: they share the pass."""
        plan = cast(AutoPlan, plan)
        price, tags = plan.price, [*chain.from_iterable(pool.tags for pool in pools)]
        paths, rows = np.array(tags), np.arange(len(pools)).repeat([len(pool.tags) for pool in pools])
        within = np.array(best_per_row(tags, rows.tolist(), [budget.nodes for budget in plan.budgets]))
        values = np.where(within, paths * plan.weights[rows], -1.0)
        best = np.sort(values[within])[::-1][: len(price.verify) - 1]
        expected = len(pools) + np.cumsum([0.0, *best])
        verify = price.verify[: len(expected)]
        lost = verify - verify[0] + (plan.passes - 1) * sum(price.layers)  # where none is accepted
        net = expected - plan.rate(expected - len(pools), verify) * verify
        net[2:][lost[2:] > price.limit] = -np.inf  # one node may always be tried while there is anything to lose
        plan.chosen = int(net.argmax()) if price.limit > 0 else 0
        found = iter(highest(values.tolist(), plan.chosen))
        kept = [[*islice(found, len(pool.tags))] for pool in pools]
        plan.pools, plan.expected = pools, len(pools) + sum(compress(tags, chain.from_iterable(kept)))
        return kept

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        """Learn from every candidate that was put to the test, drafted to be verified or not."""
        plan, cost, batch = cast(AutoPlan, plan), outcomes[0].step, len(outcomes)
        for row, outcome in enumerate(outcomes if plan.proposed else ()):
            self._calibrate(plan, row, outcome.tokens[: outcome.taken])
        self.selection.learn(plan.price, plan.passes, plan.chosen, outcomes)
        if self._costs is not None:
            self._costs.learn(plan.chosen, plan.price.ar, cost.verify)
        self.report.add(plan.chosen, plan.expected / batch, sum(outcome.taken for outcome in outcomes) / batch, cost)

    def _calibrate(self, plan: AutoPlan, row: int, tokens: Sequence[int]) -> None:
        """Walk down what was proposed along the target's tokens.

        All candidates count, whether they became nodes or not.
        """
        pool = plan.pools[row] if plan.pools else Pool.empty()
        node, tried = ROOT, list[Tried]()
        for token, frontier in zip(tokens, plan.proposed, strict=False):
            places = [*zip(frontier.rows, frontier.nodes, strict=True)]
            if (row, node) not in places:
                break
            found = frontier.candidates[places.index((row, node))]
            likely = [p for p in map(math.exp, found.logprobs) if p > self.settings.min_probability]
            rows = zip(likely, found.tokens, first_or_not(len(likely)), strict=False)
            tried += [Tried(p, guess == token, kind) for p, guess, kind in rows]
            edges = [*zip(pool.parents, pool.tokens, strict=True)]
            if (node, token) not in edges:
                break
            node = edges.index((node, token))
        self.calibration.learn(tried)
