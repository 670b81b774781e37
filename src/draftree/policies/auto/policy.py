"""The cost-aware policy: trees whose expected tokens pay for their measured seconds, or none at all.

A step that verifies n nodes and has drafted d layers yields 1 + G(n) expected tokens for T_verify(n + 1) + d t_draft
seconds. The long-run rate is highest when each step maximises tokens - rate x seconds (Dinkelbach's transform), with
the rate that decoding has reached so far and never less than AR decoding's, which is n = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

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
from .benefit import Benefit, Drafted, Selection
from .calibration import Calibration, Record, Tried, first_or_not, with_odds
from .cost_model import CostModel
from .explain import Report
from .plan import Proposal
from .settings import DEFAULTS, AutoSettings

_NOWHERE = -2  # no node has this number


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
    _records: WeakKeyDictionary[Request, Record] = field(default_factory=WeakKeyDictionary, repr=False, compare=False)
    _plan: Proposal | None = field(default=None, repr=False, compare=False)
    _accepted: float = field(default=0.0, repr=False, compare=False)
    _expected: float = field(default=0.0, repr=False, compare=False)
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
        if self._models is None and len(sources) == 1:  # an ensemble calibrates its drafters itself
            self.calibration.begin([sources[0].near])
        self._models = models
        self.target = self.target or kept_or_measured(target)
        self.selection.add([self._benefit(source) for source in sources])

    def _benefit(self, source: SourceInfo) -> Benefit:
        models = {id(model): profile for model in source.models if (profile := self._profile(model))}
        return Benefit(source, self._profile(source.model), models, settings=self.settings)

    def _profile(self, model: LanguageModel | None) -> Profile | None:
        """A draft model's costs; a twin of the target has the target's."""
        if model is None:
            return None
        same = self._models is not None and model.capabilities == self._models[0]
        return self.drafter or (self.target if same else kept_or_measured(model))

    @property
    def trust(self) -> float:
        """Accepted over expected nodes of the trees that were chosen: choosing by expectation favours the overrated.

        At most 1: who is underrated is soon counted better, and would be believed twice.
        """
        count = self.settings.pseudo_count
        return min(1.0, (self._accepted + count) / (self._expected + count))

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
        batch, most = len(requests), max(b.nodes for b in budgets)
        context = max(len(s.ids) for s in requests)
        self._costs = self._costs or CostModel(self.target, self.settings)
        if not self.selection.drafters:
            self.selection.add([Benefit(profile=self.drafter, settings=self.settings)])
        curve = self._costs.at(most, context, batch)
        fresh = any(s.stats.steps == 0 for s in requests)  # then models read prompts while none of their time counts
        drafts = any(b.depth != 0 for b in budgets) and (fresh or not self._costs.wants_ar(self.selection.pace))
        left = max(s.room for s in requests)
        price = self.selection.begin(requests, curve, context, self.depth if drafts else 0, left)
        odds = [self._records.setdefault(s, Record()).odds for s in requests]
        self._plan = Proposal(requests, curve, price, batch / curve.ar * self.selection.pace, odds, gained=float(batch))
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
        depth, rows = frontier.depth + 1, frontier.rows.tolist()
        plan.frontiers.append(frontier)
        plan.probabilities.append(probabilities)
        paths = self._paths(plan, probabilities, rows, frontier.tags.tolist() if frontier.depth else [1.0] * len(rows))
        kept = self._kept(plan, paths, rows, frontier.budgets.tolist())
        layer = [(rows[f], paths[f][k]) for f, k in kept]
        plan.add(layer)
        extend = [False] * len(kept)
        if kept and depth < self.depth:
            wanted, ahead, further = self._extension(plan, layer)
            known = None if found.known is None else found.known.tolist()
            free = [known is not None and known[f][k] for f, k in kept]
            if plan.affords_layer() and further > plan.rate * plan.price.layer:
                extend = wanted
                plan.passes += any(want and not have for want, have in zip(wanted, free, strict=True))
            elif ahead > 0:
                extend = [want and have for want, have in zip(wanted, free, strict=True)]
        return Growth(*_marked(keep, kept, extend), torch.tensor(paths, dtype=torch.float64))

    def _paths(
        self, plan: Proposal, probabilities: list[list[float]], rows: Sequence[int], above: Sequence[float]
    ) -> list[list[float]]:
        """[F, K] probabilities that candidates are accepted, with all above them."""
        found, kinds = [], first_or_not(len(probabilities[0]))
        for each, row, path in zip(probabilities, rows, above, strict=True):
            edges, odds = self.calibration.acceptance(each, len(plan.frontiers), kinds), plan.odds[row]
            found.append([path * with_odds(edge, odds) if p > 0 else 0.0 for p, edge in zip(each, edges, strict=True)])
        return found

    def _kept(
        self, plan: Proposal, paths: list[list[float]], rows: Sequence[int], budgets: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Which candidates may pay as nodes: of each request the best ones, no more than its budget."""
        least = self.settings.min_probability
        kept = [(f, k) for f, own in enumerate(paths) for k, path in enumerate(own) if path > least]
        if len(kept) <= min(budgets):
            return kept
        left, best = list(budgets), list[tuple[int, int]]()
        for f, k in sorted(kept, key=lambda at: -paths[at[0]][at[1]]):
            left[rows[f]] -= 1
            if left[rows[f]] >= 0:
                best.append((f, k))
        return sorted(best)

    def _extension(self, plan: Proposal, layer: Sequence[tuple[int, float]]) -> tuple[list[bool], float, float]:
        """Of a new layer: the nodes to ask about, [F]; the expected tokens of one more layer, if it gains as this one
        did; and those of as many layers as the sources answer for when they are asked about one.

        No child of a node can come to be that is not among the best of as many as gain most so far; and what one
        is likely to gain must pay for its share of the drafting pass.
        """
        totals, trust = plan.best_totals(), self.trust
        nets = [trust * total - plan.rate * now for total, now in zip(totals, plan.curve.now[1:].tolist(), strict=True)]
        size = nets.index(max(nets))
        gained = totals[size] - plan.totals[min(size, len(plan.totals) - 1)]
        decay = min(1.0, gained / plan.gained)
        onwards = trust * decay
        plan.totals, plan.gained = totals, max(gained, 1e-9)
        last = [best[size] if size < len(best) else 0.0 for best in plan.best]
        first = [0.0] * len(last)
        for row, path in layer:
            first[row] = max(first[row], path)
        price = plan.rate / len(last) * plan.price.node
        wanted = [path >= last[row] and (onwards * path > price or path == first[row]) for row, path in layer]
        ahead, once = onwards * gained, self.selection.layers
        return wanted, ahead, ahead * sum(decay**k * min(1.0, once - k) for k in range(math.ceil(once)))

    def prune(
        self, pools: Sequence[DraftTree], tags: Sequence[Tensor], budgets: Sequence[Budget]
    ) -> list[Tensor | None]:
        """The number of nodes that gains most, the same for all requests: they share the pass."""
        plan = self._planned()
        most = len(plan.curve.now) - 1
        orders = [np.argsort(-t.numpy(), kind="stable")[: b.nodes] for t, b in zip(tags, budgets, strict=True)]
        gains = np.zeros((len(pools), most + 1))
        for gain, order, tag in zip(gains, orders, tags, strict=True):
            gain[1 : len(order) + 1] = tag.numpy()[order]
        expected = 1.0 + self.trust * gains.cumsum(1)
        net = expected.sum(0) - plan.rate * plan.curve.now
        sizes = range(max(map(len, orders)) + 1)
        wanted = int(net[: len(sizes)].argmax())
        plan.chosen = max((n for n in sizes if plan.affords(n)), key=lambda n: float(net[n]))
        if plan.chosen < wanted:
            best = [
                pool.tokens[order[:wanted]][pool.depths[order[:wanted]] == 1]
                for pool, order in zip(pools, orders, strict=True)
            ]
            plan.missed = wanted, [set(tokens.tolist()) for tokens in best]
        plan.pools = pools
        plan.expected = expected[:, plan.chosen].tolist()
        seconds = plan.curve.now + plan.passes * plan.price.layer
        seconds[0] = plan.curve.ar
        self.report.compare(expected.mean(0), seconds)
        keeps: list[Tensor | None] = []
        for pool, order in zip(pools, orders, strict=True):
            keep = np.zeros(len(pool), np.bool_)
            keep[order[: plan.chosen]] = True
            keeps.append(torch.from_numpy(keep))
        return keeps

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from every candidate that was put to the test, drafted to be verified or not."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        for row, outcome in enumerate(outcomes):
            self._learn(plan, row, outcome.tokens[: outcome.taken])
        cost, taken = outcomes[0].step, sum(o.taken for o in outcomes)
        self.selection.learn(
            plan.curve, plan.price, Drafted(len(plan.frontiers), plan.passes, plan.chosen, plan.missed), outcomes
        )
        if self._costs:
            self._costs.learn(plan.curve, plan.chosen, cost.verify - cost.beside)
        predicted, trust = sum(plan.expected), self.trust
        self._accepted *= self.settings.fast_decay
        self._expected *= self.settings.fast_decay
        if plan.chosen:
            self._accepted += sum(min(len(o.path), o.taken) for o in outcomes)
            self._expected += (predicted - len(outcomes)) / trust
        self.report.add(plan.chosen, predicted / len(outcomes), taken / len(outcomes), cost)

    def _learn(self, plan: Proposal, row: int, tokens: Sequence[int]) -> None:
        """Walk down what was proposed along what the target said.

        All candidates count, whether they became nodes or not.
        """
        if not plan.frontiers:
            return
        record = self._records[plan.requests[row]]
        self.calibration.fade(record)
        pool = plan.pools[row] if plan.pools else DraftTree.empty()
        edges = zip(pool.parents.tolist(), pool.tokens.tolist(), strict=True)
        below = {edge: node for node, edge in enumerate(edges)}
        node, tried = ROOT, list[Tried]()
        layers = zip(tokens, plan.frontiers, plan.probabilities, strict=False)
        for depth, (token, frontier, probabilities) in enumerate(layers, start=1):
            asked = list(zip(frontier.rows.tolist(), frontier.nodes.tolist(), strict=True))
            if (row, node) not in asked:
                break
            at = asked.index((row, node))
            likely = [p for p in probabilities[at] if p > self.settings.min_probability]
            offered, kinds = frontier.candidates.tokens[at, : len(likely)].tolist(), first_or_not(len(likely))
            tried += [Tried(depth, p, t == token, kind) for p, t, kind in zip(likely, offered, kinds, strict=True)]
            node = below.get((node, token), _NOWHERE)
        self.calibration.learn(tried, record)


def _marked(keep: Tensor, kept: Sequence[tuple[int, int]], extended: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """[F, K] bool: where nodes are kept, and where those are that may get children."""
    extend, width = keep.clone(), keep.shape[1]
    flat = [f * width + k for f, k in kept]
    keep.view(-1)[flat] = True
    extend.view(-1)[[at for at, on in zip(flat, extended, strict=True) if on]] = True
    return keep, extend
