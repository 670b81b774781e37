"""The cost-aware policy: trees whose expected tokens pay for their measured seconds, or none at all.

A step that verifies n nodes and has drafted d layers yields 1 + G(n) expected tokens for T_verify(n + 1) + d t_draft
seconds. The long-run rate is highest when each step maximises tokens - rate x seconds (Dinkelbach's transform), with
the rate that decoding has reached so far and never less than AR decoding's, which is n = 0.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import neg

import numpy as np
import torch
from torch import Tensor

from ...config import Budget, check_fields
from ...errors import ConfigError
from ...models.base import Capabilities, LanguageModel
from ...models.cost_profile import Profile, kept_or_measured
from ...request import Outcome, Request
from ...tree import ROOT, DraftTree
from ..base import Frontier, Growth, GrowthPolicy, SourceInfo, best_per_row, check_count, highest
from .benefit import Benefit, Price, Selection
from .calibration import Calibration, Tried, first_or_not
from .cost_model import CostModel, Floats
from .explain import Report
from .settings import DEFAULTS, AutoSettings

_NOWHERE = -2  # no node has this number


@dataclass(slots=True)
class Proposal:
    """One proposal, from the budgets to the outcome.

    Attributes:
        context: tokens of the longest of B requests.
        verify: [N + 1] seconds of verifying 0, 1, ... nodes of each request.
        price: of drafting.
        rate: tokens a second that a step must yield, of all requests together.
        gained: expected tokens that the last layer has added.
        best: [B] acceptance probabilities of drafted nodes, in descending order.
        frontiers: what was proposed, layer by layer.
        totals: [N] expected tokens of the best 1, 2, ... nodes of each request, summed over requests.
        passes: layers that the drafters made a pass for: not those that were cached.
        pools, chosen: what was drafted, and how many nodes of each request are verified.
        expected: tokens of what is verified, the target's own included, summed over requests.
    """

    context: int
    verify: Floats
    price: Price
    rate: float
    gained: float
    best: list[list[float]]
    frontiers: list[Frontier] = field(default_factory=list)
    totals: Sequence[float] = (0.0,)
    passes: int = 1
    pools: Sequence[DraftTree] = ()
    chosen: int = 0
    expected: float = field(init=False)

    def __post_init__(self) -> None:
        self.expected = float(len(self.best))

    def best_totals(self) -> list[float]:
        """[N] expected tokens of the best 1, 2, ... nodes of each request, summed over requests."""
        most = len(self.verify) - 1
        columns = zip_longest(*(best[:most] for best in self.best), fillvalue=0.0)
        found = list(accumulate(map(sum, columns)))
        return found + [found[-1] if found else 0.0] * (most - len(found))

    def next_layer(self) -> tuple[list[float], float]:
        """Weigh a new layer.

        Returns:
            [B] the least acceptance probability of nodes that may get children: no child of another can be verified,
            for it is not among the best of as many as gain most so far; and the expected tokens of one more layer, if
            it gains less than this one by as much as this one than the last.
        """
        totals = self.best_totals()
        nets = [total - self.rate * now for total, now in zip(totals, self.verify[1:].tolist(), strict=True)]
        size = nets.index(max(nets))
        gained = totals[size] - self.totals[min(size, len(self.totals) - 1)]
        ahead = min(1.0, gained / self.gained) * gained
        self.totals, self.gained = totals, max(gained, 1e-9)
        return [best[size] if size < len(best) else 0.0 for best in self.best], ahead

    def affords(self, nodes: int) -> bool:
        """Verifying so many costs no more than the drafters may lose if none is accepted.

        One node is affordable while there is anything left.
        """
        beyond = float(self.verify[nodes] - self.verify[0]) + (self.passes - 1) * self.price.layer
        return not nodes or 0 < self.price.limit and (nodes == 1 or beyond <= self.price.limit)

    def affords_layer(self) -> bool:
        """The same of one more layer, and of the cheapest pass over a chain of all layers."""
        chain = float(self.verify[self.passes + 1 :].min(initial=self.verify[-1]) - self.verify[0])
        return chain + self.passes * self.price.layer <= self.price.limit


@dataclass(slots=True)
class AutoTree(GrowthPolicy):
    """Chooses each step's shape by what it gains and costs on this machine; learns both as it decodes.

    Attributes:
        width: most children of a node.
        depth: deepest level.
        target: the target's measured costs; None until ``prepare``, which loads or measures them.
        drafter: the drafting model's; None without one, and until ``prepare``.
    """

    by_value = True

    width: int = 8
    depth: int = 16
    target: Profile | None = None
    drafter: Profile | None = None
    settings: AutoSettings = DEFAULTS
    calibration: Calibration = field(init=False, repr=False, compare=False)
    selection: Selection = field(init=False, repr=False, compare=False)
    report: Report = field(default_factory=Report, init=False, repr=False, compare=False)
    _plan: Proposal | None = field(default=None, repr=False, compare=False)
    _models: list[Capabilities] | None = field(default=None, repr=False, compare=False)
    _costs: CostModel | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_count("width", self.width)
        check_count("depth", self.depth)
        self.calibration = Calibration((0.0, 0.0), self.settings)
        self.selection = Selection([Benefit(profile=self.drafter, settings=self.settings)], self.settings)

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:
        """Find the costs, unless they were given: kept from an earlier start, or measured now (seconds, once)."""
        models = [model.capabilities for model in (target, *(source.model for source in sources)) if model]
        if self._models not in (None, models):
            raise ConfigError("this AutoTree has learned for other models: make a new one")
        self._models = models
        self.target = self.target or kept_or_measured(target)
        self.selection = Selection([self._benefit(source, target) for source in sources], self.settings)
        shift = self.settings.near_shift if all(source.near for source in sources) else 0.0
        self.calibration = Calibration((shift, -shift), self.settings)

    def _benefit(self, source: SourceInfo, target: LanguageModel) -> Benefit:
        """A drafter's, with the costs of its models; a twin of the target has the target's."""
        costs = {}
        for model in source.models:
            twin = model.capabilities == target.capabilities
            costs[id(model)] = self.drafter or (self.target if twin else None) or kept_or_measured(model)
        return Benefit(source, costs.get(id(source.model)), costs, self.settings)

    def width_for(self, nodes: int) -> int:
        """``width``, whatever the budget."""
        return self.width

    def pool(self, nodes: int) -> int:
        """Several times what is verified: unlikely paths are drafted too, for their outcome teaches."""
        return 4 * nodes + self.width

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> Sequence[Budget]:
        """Look up the costs and choose the drafters; no nodes where drafting cannot win."""
        if self.target is None:
            raise ConfigError("auto has no measured costs: give its drafter to an Engine, which measures them")
        self._costs = self._costs or CostModel(self.target, self.settings)
        batch, context = len(requests), max(len(request.ids) for request in requests)
        verify = self._costs.curve(max(budget.nodes for budget in budgets), context, batch)
        depth = self.depth if any(budget.depth != 0 for budget in budgets) else 0
        pace, left = self.selection.pace, max(request.tokens_left for request in requests)
        price = self.selection.begin(requests, verify, context, depth, left)
        best: list[list[float]] = [[] for _ in requests]
        self._plan = Proposal(context, verify, price, batch * pace / float(verify[0]), batch, best)
        return budgets if any(self.selection.enabled) else [Budget(0, b.depth) for b in budgets]

    @property
    def enabled(self) -> Sequence[bool]:
        """Of the drafters it was prepared for."""
        return self.selection.enabled

    def _planned(self) -> Proposal:
        if self._plan is None:
            raise ConfigError("a proposal without a plan: call plan first")
        return self._plan

    def grow(self, frontier: Frontier) -> Growth:
        """Candidates whose calibrated path may pay; go on where another layer may pay."""
        plan, found = self._planned(), frontier.candidates
        none = torch.zeros(found.logprobs.shape, dtype=torch.bool)
        if not frontier.depth and not bool(found.logprobs.isfinite().any()):
            return Growth(none, none)  # often so where texts repeat little: nothing to weigh or to learn
        plan.frontiers.append(frontier)
        paths = self._paths(frontier)
        rows = frontier.rows.repeat_interleave(paths.shape[1])
        keep = best_per_row(paths.flatten(), rows, frontier.budgets).view_as(paths)
        keep &= paths > self.settings.min_probability
        if not bool(keep.any()):
            return Growth(keep, none, paths)
        for row, path in zip(rows[keep.flatten()].tolist(), paths[keep].tolist(), strict=True):
            insort(plan.best[row], path, key=neg)
        last, ahead = plan.next_layer()
        if ahead <= 0 or frontier.depth + 1 >= self.depth:
            return Growth(keep, none, paths)
        extend = keep & (paths >= torch.tensor(last, dtype=paths.dtype)[frontier.rows][:, None])
        cached = none if found.known is None else extend & found.known
        if plan.affords_layer() and ahead > plan.rate * plan.price.layer:
            plan.passes += not torch.equal(extend, cached)
            return Growth(keep, extend, paths)
        return Growth(keep, cached, paths)

    def _paths(self, frontier: Frontier) -> Tensor:
        """[F, K] float64 probabilities that candidates are accepted, with all above them."""
        probabilities = frontier.candidates.logprobs.double().exp()
        kinds = first_or_not(probabilities.shape[1])
        edges = [self.calibration.acceptance(each, kinds) for each in probabilities.tolist()]
        above = frontier.tags[:, None] if frontier.depth else 1.0
        return torch.tensor(edges, dtype=torch.float64) * (probabilities > 0) * above

    def prune(
        self, pools: Sequence[DraftTree], tags: Sequence[Tensor], budgets: Sequence[Budget]
    ) -> Sequence[Tensor | None]:
        """The number of nodes that gains most, the same for all requests: they share the pass."""
        plan = self._planned()
        gains = np.zeros((len(pools), len(plan.verify)))
        for gain, tag, budget in zip(gains, tags, budgets, strict=True):
            best = tag.sort(descending=True).values[: budget.nodes]
            gain[1 : len(best) + 1] = best
        expected = len(pools) + gains.cumsum(1).sum(0)
        net = expected - plan.rate * plan.verify
        most = max(min(len(pool), budget.nodes) for pool, budget in zip(pools, budgets, strict=True))
        plan.chosen = max(filter(plan.affords, range(most + 1)), key=lambda n: float(net[n]))
        plan.pools, plan.expected = pools, float(expected[plan.chosen])
        return [highest(tag, min(plan.chosen, budget.nodes)) for tag, budget in zip(tags, budgets, strict=True)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from every candidate that was put to the test, drafted to be verified or not."""
        plan, self._plan = self._plan, None
        if plan is None or self._costs is None:
            return
        if plan.frontiers:
            for row, outcome in enumerate(outcomes):
                self._calibrate(plan, row, outcome.tokens[: outcome.taken])
        cost, batch = outcomes[0].step, len(outcomes)
        self.selection.learn(plan.verify, plan.price, plan.passes, plan.chosen, outcomes)
        self._costs.learn(plan.chosen, plan.context, batch, cost.verify - cost.beside)
        self.report.add(plan.chosen, plan.expected / batch, sum(outcome.taken for outcome in outcomes) / batch, cost)

    def _calibrate(self, plan: Proposal, row: int, tokens: Sequence[int]) -> None:
        """Walk down what was proposed along the target's tokens.

        All candidates count, whether they became nodes or not.
        """
        pool = plan.pools[row] if plan.pools else DraftTree.empty()
        node, tried = ROOT, list[Tried]()
        for token, frontier in zip(tokens, plan.frontiers, strict=False):
            scored = ((frontier.rows == row) & (frontier.nodes == node)).nonzero()
            if not len(scored):
                break
            found, at = frontier.candidates, int(scored[0])
            likely = [p for p in found.logprobs[at].double().exp().tolist() if p > self.settings.min_probability]
            offered, kinds = found.tokens[at, : len(likely)].tolist(), first_or_not(len(likely))
            tried += [Tried(p, t == token, kind) for p, t, kind in zip(likely, offered, kinds, strict=True)]
            children = (child for child in pool.children(node) if int(pool.tokens[child]) == token)
            node = next(children, _NOWHERE)
        self.calibration.learn(tried)
