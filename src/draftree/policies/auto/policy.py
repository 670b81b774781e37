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
from ..base import Frontier, Growth, GrowthPolicy, SourceInfo
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
        probabilities: of each of them, [F, K] draft probabilities of its candidates.
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
    probabilities: list[list[list[float]]] = field(default_factory=list)
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
    report: Report = field(init=False, repr=False, compare=False)
    _plan: Proposal | None = field(default=None, repr=False, compare=False)
    _models: list[Capabilities] | None = field(default=None, repr=False, compare=False)
    _costs: CostModel | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("width", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: use at least 1")
        self.calibration = Calibration(2, self.settings)
        self.selection = Selection(self.settings)
        self.report = Report(self.selection)

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:
        """Find the costs, unless they were given: kept from an earlier start, or measured now (seconds, once)."""
        models = [model.capabilities for model in (target, *(source.model for source in sources)) if model]
        if self._models not in (None, models):
            raise ConfigError("this AutoTree has learned for other models: make a new one")
        self._models = models
        self.target = self.target or kept_or_measured(target)
        self.selection.add([self._benefit(source) for source in sources])

    def _benefit(self, source: SourceInfo) -> Benefit:
        models = {id(model): profile for model in source.models if (profile := self._profile(model))}
        return Benefit(source, self._profile(source.model), models, self.settings)

    def _profile(self, model: LanguageModel | None) -> Profile | None:
        """A draft model's costs; a twin of the target has the target's."""
        if model is None:
            return None
        same = self._models is not None and model.capabilities == self._models[0]
        return self.drafter or (self.target if same else kept_or_measured(model))

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
        if not self.selection.drafters:
            self.selection.add([Benefit(profile=self.drafter, settings=self.settings)])
        batch, context = len(requests), max(len(request.ids) for request in requests)
        verify = self._costs.curve(max(budget.nodes for budget in budgets), context, batch)
        fresh = any(request.stats.steps == 0 for request in requests)  # models read prompts, and no time of it counts
        pace, left = self.selection.pace, max(request.tokens_left for request in requests)
        drafts = any(b.depth != 0 for b in budgets) and (fresh or not self._costs.wants_ar(pace))
        price = self.selection.begin(requests, verify, context, self.depth if drafts else 0, left)
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
        probabilities: list[list[float]] = found.logprobs.double().exp().tolist()
        keep = torch.zeros(found.logprobs.shape, dtype=torch.bool)
        if not frontier.depth and not any(map(any, probabilities)):
            return Growth(keep, keep)  # often so where texts repeat little: nothing to weigh or to learn
        rows = frontier.rows.tolist()
        plan.frontiers.append(frontier)
        plan.probabilities.append(probabilities)
        paths = self._paths(probabilities, frontier.tags.tolist() if frontier.depth else [1.0] * len(rows))
        kept = self._kept(paths, rows, frontier.budgets.tolist())
        extend = keep.clone()
        if kept:
            keep[tuple(zip(*kept, strict=True))] = True
            for f, k in kept:
                insort(plan.best[rows[f]], paths[f][k], key=neg)
            wanted, ahead = self._extension(plan, [(f, k) for f, k in kept], paths, rows)
            if wanted and ahead > 0 and frontier.depth + 1 < self.depth:
                extend[tuple(zip(*wanted, strict=True))] = True
                cached = extend & found.known if found.known is not None else torch.zeros_like(keep)
                if plan.affords_layer() and ahead > plan.rate * plan.price.layer:
                    plan.passes += not torch.equal(extend, cached)
                else:
                    extend = cached
        return Growth(keep, extend, torch.tensor(paths, dtype=torch.float64))

    def _paths(self, probabilities: list[list[float]], above: Sequence[float]) -> list[list[float]]:
        """[F, K] probabilities that candidates are accepted, with all above them."""
        found, kinds = [], first_or_not(len(probabilities[0]))
        for each, path in zip(probabilities, above, strict=True):
            edges = self.calibration.acceptance(each, kinds)
            found.append([path * edge if p > 0 else 0.0 for p, edge in zip(each, edges, strict=True)])
        return found

    def _kept(self, paths: list[list[float]], rows: Sequence[int], budgets: Sequence[int]) -> list[tuple[int, int]]:
        """Which candidates may pay as nodes: of each request the best ones, no more than its budget."""
        least, left = self.settings.min_probability, list(budgets)
        best = list[tuple[int, int]]()
        likely = [(f, k) for f, own in enumerate(paths) for k, path in enumerate(own) if path > least]
        for f, k in sorted(likely, key=lambda at: -paths[at[0]][at[1]]):
            left[rows[f]] -= 1
            if left[rows[f]] >= 0:
                best.append((f, k))
        return best

    def _extension(
        self, plan: Proposal, kept: Sequence[tuple[int, int]], paths: list[list[float]], rows: Sequence[int]
    ) -> tuple[list[tuple[int, int]], float]:
        """The nodes of a new layer that may get children, and the expected tokens of one more layer, if it gains less
        than this one by as much as this one than the last.

        No child of a node can be verified that is not among the best of as many as gain most so far.
        """
        totals = plan.best_totals()
        nets = [total - plan.rate * now for total, now in zip(totals, plan.verify[1:].tolist(), strict=True)]
        size = nets.index(max(nets))
        gained = totals[size] - plan.totals[min(size, len(plan.totals) - 1)]
        ahead = min(1.0, gained / plan.gained) * gained
        plan.totals, plan.gained = totals, max(gained, 1e-9)
        last = [best[size] if size < len(best) else 0.0 for best in plan.best]
        return [(f, k) for f, k in kept if paths[f][k] >= last[rows[f]]], ahead

    def prune(
        self, pools: Sequence[DraftTree], tags: Sequence[Tensor], budgets: Sequence[Budget]
    ) -> list[Tensor | None]:
        """The number of nodes that gains most, the same for all requests: they share the pass."""
        plan = self._planned()
        orders = [np.argsort(-t.numpy(), kind="stable")[: b.nodes] for t, b in zip(tags, budgets, strict=True)]
        gains = np.zeros((len(pools), len(plan.verify)))
        for gain, order, tag in zip(gains, orders, tags, strict=True):
            gain[1 : len(order) + 1] = tag.numpy()[order]
        expected = len(pools) + gains.cumsum(1).sum(0)
        net = expected - plan.rate * plan.verify
        plan.chosen = max(filter(plan.affords, range(max(map(len, orders)) + 1)), key=lambda n: float(net[n]))
        plan.pools, plan.expected = pools, float(expected[plan.chosen])
        keeps: list[Tensor | None] = []
        for pool, order in zip(pools, orders, strict=True):
            keep = torch.zeros(len(pool), dtype=torch.bool)
            keep[torch.from_numpy(order[: plan.chosen])] = True
            keeps.append(keep)
        return keeps

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
        edges = zip(pool.parents.tolist(), pool.tokens.tolist(), strict=True)
        children = {edge: node for node, edge in enumerate(edges)}
        node, tried = ROOT, list[Tried]()
        for token, frontier, probabilities in zip(tokens, plan.frontiers, plan.probabilities, strict=False):
            scored = list(zip(frontier.rows.tolist(), frontier.nodes.tolist(), strict=True))
            if (row, node) not in scored:
                break
            at = scored.index((row, node))
            likely = [p for p in probabilities[at] if p > self.settings.min_probability]
            offered, kinds = frontier.candidates.tokens[at, : len(likely)].tolist(), first_or_not(len(likely))
            tried += [Tried(p, t == token, kind) for p, t, kind in zip(likely, offered, kinds, strict=True)]
            node = children.get((node, token), _NOWHERE)
        self.calibration.learn(tried)
