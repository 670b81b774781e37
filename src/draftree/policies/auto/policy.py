"""The cost-aware policy: trees whose expected tokens are worth their measured seconds, or none at all.

A step that verifies n nodes and has drafted d layers yields 1 + G(n) expected tokens for T_verify(n + 1) + d t_draft
seconds. The long-run rate is highest when each step maximises tokens - rate x seconds (Dinkelbach's transform), with
the rate that decoding has reached so far and never less than plain decoding's. Plain decoding is n = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...config import Budget
from ...drafters.source import TokenSource
from ...errors import ConfigError
from ...models.base import Capabilities, LanguageModel
from ...models.cost_profile import Profile, kept_or_measured
from ...outcome import Outcome
from ...request import Request
from ...tree import ROOT, DraftTree
from ...typed import check_fields
from ..base import Frontier, Growth, GrowthPolicy
from .calibration import Calibration, Record, Tried, first_or_not, with_odds
from .cost_model import Curves
from .drafter_selection import Ledger, Rate, Stake
from .explain import Report
from .plan import Proposal

_RECORD = 0.99
"""Share that each new step leaves of the record of how far expected acceptance can be trusted."""
_PRIOR = 5.0
"""Accepted nodes that make up that record before there is any."""
_LEAST = 0.01
"""Candidates less probable than this are never drafted."""
_SHARE = 0.1
"""Share of a node's mean price that a candidate must promise to be drafted: on plateaus nodes are cheaper than that."""
_FURTHER = 3.0
"""Expected tokens of all deeper layers that each one of the last layer may stand for, at most, while it is drafted."""
_LAYERS = 0.99
_NOWHERE = -2
"""No node has this number."""


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
    calibration: Calibration = field(default_factory=lambda: Calibration(2), repr=False, compare=False)
    report: Report = field(default_factory=Report, repr=False, compare=False)
    _records: WeakKeyDictionary[Request, Record] = field(default_factory=WeakKeyDictionary, repr=False, compare=False)
    _plan: Proposal | None = field(default=None, repr=False, compare=False)
    _ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)
    _near: bool = field(default=False, repr=False, compare=False)
    _steady: Rate = field(default_factory=lambda: Rate(_PRIOR, _PRIOR), repr=False, compare=False)
    _accepted: float = field(default=0.0, repr=False, compare=False)
    _expected: float = field(default=0.0, repr=False, compare=False)
    _models: list[Capabilities] | None = field(default=None, repr=False, compare=False)
    _curves: Curves | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("width", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: use at least 1")

    def prepare(self, target: LanguageModel, sources: Sequence[TokenSource]) -> None:
        """Find the costs, unless they were given: kept from an earlier start, or measured now (seconds, once)."""
        drafting = [source.model for source in sources if source.model]
        models = [model.capabilities for model in (target, *drafting)]
        if self._models not in (None, models):
            raise ConfigError("this AutoTree has learned for other models: make a new one")
        if self._models is None and len(sources) == 1:  # a union weighs its parts itself
            self.calibration.begin([sources[0].near])
            self._near = sources[0].near
        self._models = models
        self.target = self.target or kept_or_measured(target)
        self._ledger.stakes = [
            Stake(
                source,
                1 << i,
                self._profile(source.model),
                {id(model): profile for model in source.models if (profile := self._profile(model))},
                steady=len(sources) == 1 and not source.costly,
            )
            for i, source in enumerate(sources)
        ]
        self.report.stakes = self._ledger.stakes

    def _profile(self, model: LanguageModel | None) -> Profile | None:
        """A drafting model's costs; a twin of the target has the target's."""
        if model is None:
            return None
        same = self._models is not None and model.capabilities == self._models[0]
        return self.drafter or (self.target if same else kept_or_measured(model))

    @property
    def trust(self) -> float:
        """Accepted over expected nodes of the trees that were chosen: choosing by expectation favours the overrated.

        At most 1: who is underrated is soon counted better, and would be believed twice.
        """
        return min(1.0, (self._accepted + _PRIOR) / (self._expected + _PRIOR))

    def width_for(self, nodes: int) -> int:
        """``width``, whatever the budget."""
        return self.width

    def pool(self, nodes: int) -> int:
        """Several times what is verified: unlikely paths are drafted too, for their outcome teaches."""
        return 4 * nodes + self.width

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> Sequence[Budget]:
        """Look up the costs; no nodes where drafting cannot win."""
        if self.target is None:
            raise ConfigError("auto has no measured costs: give its drafter to an Engine, which measures them")
        batch, most = len(requests), max(b.nodes for b in budgets)
        context = max(len(s.ids) for s in requests)
        self._curves = self._curves or Curves(self.target)
        curve = self._curves.at(most, context, batch)
        books = self._ledger
        books.stakes = books.stakes or [Stake(profile=self.drafter, steady=self.drafter is None)]
        fresh = any(s.stats.steps == 0 for s in requests)  # models read prompts while none of their time counts
        room = any(b.depth != 0 for b in budgets)  # no try is spent where there is none
        room = room and (fresh or not self._curves.want_plain(books.pace.value))
        left = max(s.room for s in requests)
        price = books.begin(requests, curve, context, self.depth if room else 0, left)
        odds = [self._records.setdefault(s, Record()).odds for s in requests]
        rate = batch / curve.plain * max(1.0, books.pace.value)
        self._plan = Proposal(requests, curve, price, rate, odds, fresh or books.reads, gained=float(batch))
        return budgets if books.asks else [Budget(0, b.depth) for b in budgets]

    def _planned(self) -> Proposal:
        if self._plan is None:
            raise ConfigError("a proposal without a plan: call plan first")
        return self._plan

    def grow(self, frontier: Frontier) -> Growth:
        """Candidates whose calibrated path may pay; go on where another layer may pay."""
        plan, found = self._planned(), frontier.candidates
        laws: list[list[float]] = found.logprobs.double().exp().tolist()
        keep = torch.zeros(found.logprobs.shape, dtype=torch.bool)
        if not frontier.depth and not any(map(any, laws)):
            return Growth(keep, keep)  # often so where texts repeat little: nothing to weigh or to learn
        depth, rows = frontier.depth + 1, frontier.rows.tolist()
        plan.frontiers.append(frontier)
        plan.laws.append(laws)
        paths = self._paths(plan, laws, rows, frontier.tags.tolist() if frontier.depth else [1.0] * len(rows))
        kept = self._kept(plan, paths, rows, frontier.budgets.tolist())
        layer = [(rows[f], paths[f][k]) for f, k in kept]
        mass = plan.add(layer)
        promising = plan.mass + _FURTHER * mass > plan.rate * plan.curve.least
        if frontier.depth == 0 and not promising:
            return Growth(keep, keep)
        among = [False] * len(kept)
        if promising and depth < self.depth:
            wanted, ahead, further = self._extension(plan, layer)
            known = None if found.known is None else found.known.tolist()
            free = [known is not None and known[f][k] for f, k in kept]
            if further > plan.rate * (plan.price.layer + self._ledger.layers * self._ledger.growing):
                among = wanted
                plan.asked += any(want and not have for want, have in zip(wanted, free, strict=True))
            elif ahead > plan.rate * max(0.0, self._ledger.growing):
                among = [want and have for want, have in zip(wanted, free, strict=True)]
        return Growth(*_marked(keep, kept, among), torch.tensor(paths, dtype=torch.float64))

    def _paths(
        self, plan: Proposal, laws: list[list[float]], rows: Sequence[int], above: Sequence[float]
    ) -> list[list[float]]:
        """[F, K] probabilities that candidates are accepted, with all above them."""
        found, kinds = [], first_or_not(len(laws[0]))
        for law, row, path in zip(laws, rows, above, strict=True):
            edges, odds = self.calibration.acceptance(law, plan.layers, kinds), plan.odds[row]
            found.append([path * with_odds(edge, odds) if p > 0 else 0.0 for p, edge in zip(law, edges, strict=True)])
        return found

    @staticmethod
    def _kept(
        plan: Proposal, paths: list[list[float]], rows: Sequence[int], budgets: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Which candidates may pay as nodes: of each request the best ones, no more than its budget."""
        least = max(_LEAST, _SHARE * plan.rate / len(plan.requests) * plan.curve.slope)
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

        No child of a node can come to be that is not among the best of as many as are worth most so far; and what one
        is likely to bring must be worth its share of the drafting pass.
        """
        totals, trust = plan.best_totals(), self.trust
        nets = [trust * total - plan.rate * now for total, now in zip(totals, plan.seconds[1:], strict=True)]
        size = nets.index(max(nets))
        gained = totals[size] - plan.totals[min(size, len(plan.totals) - 1)]
        self._steady.add(max(0.0, gained), plan.gained, _LAYERS)
        decay = min(1.0, self._steady.value if self._near else gained / plan.gained)
        onwards = trust * decay
        plan.totals, plan.gained = totals, max(gained, 1e-9)
        last = [best[size] if size < len(best) else 0.0 for best in plan.best]
        first = [0.0] * len(last)
        for row, path in layer:
            first[row] = max(first[row], path)
        price = plan.rate / len(last) * plan.price.node
        wanted = [path >= last[row] and (onwards * path > price or path == first[row]) for row, path in layer]
        ahead, once = onwards * gained, self._ledger.layers
        return wanted, ahead, ahead * sum(decay**k * min(1.0, once - k) for k in range(math.ceil(once)))

    def prune(
        self, pools: Sequence[DraftTree], tags: Sequence[Tensor], budgets: Sequence[Budget]
    ) -> list[Tensor | None]:
        """The number of nodes that is worth most, the same for all requests: they share the pass."""
        plan = self._planned()
        most = len(plan.curve.now) - 1
        orders = [np.argsort(-t.numpy(), kind="stable")[: b.nodes] for t, b in zip(tags, budgets, strict=True)]
        gains = np.zeros((len(pools), most + 1))
        for gain, order, tag in zip(gains, orders, tags, strict=True):
            gain[1 : len(order) + 1] = tag.numpy()[order]
        worth = 1.0 + self.trust * gains.cumsum(1)
        net = worth.sum(0) - plan.rate * plan.curve.now
        plan.chosen = int(net[: max(map(len, orders)) + 1].argmax())
        plan.pools = pools
        plan.gain = worth[:, plan.chosen].tolist()
        seconds = plan.curve.now + self._ledger.drafting(plan)
        seconds[0] = plan.curve.plain
        self.report.compare(worth.mean(0), seconds)
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
        self._ledger.settle(plan, outcomes)
        cost, taken = outcomes[0].step, sum(o.taken for o in outcomes)
        if self._curves:
            self._curves.learn(plan.curve, plan.chosen, cost.verify - cost.beside)
        predicted = sum(plan.gain) if plan.pools else float(len(outcomes))
        trust = self.trust
        self._accepted *= _RECORD
        self._expected *= _RECORD
        if plan.chosen:
            accepted = sum(min(len(o.path), o.taken) for o in outcomes)
            self._accepted += accepted
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
        for depth, (token, frontier, laws) in enumerate(zip(tokens, plan.frontiers, plan.laws, strict=False), start=1):
            asked = list(zip(frontier.rows.tolist(), frontier.nodes.tolist(), strict=True))
            if (row, node) not in asked:
                break
            at = asked.index((row, node))
            likely = [p for p in laws[at] if p > _LEAST]
            said, kinds = frontier.candidates.tokens[at, : len(likely)].tolist(), first_or_not(len(likely))
            tried += [Tried(depth, p, t == token, kind) for p, t, kind in zip(likely, said, kinds, strict=True)]
            node = below.get((node, token), _NOWHERE)
        self.calibration.learn(tried, record)


def _marked(keep: Tensor, kept: Sequence[tuple[int, int]], among: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """[F, K] bool: where nodes are kept, and where those are that may get children."""
    extend, width = keep.clone(), keep.shape[1]
    flat = [f * width + k for f, k in kept]
    keep.view(-1)[flat] = True
    extend.view(-1)[[at for at, on in zip(flat, among, strict=True) if on]] = True
    return keep, extend
