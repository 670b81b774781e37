"""The cost-aware policy: trees whose expected tokens are worth their measured seconds, or none at all.

A step that verifies n nodes and has drafted d layers yields 1 + G(n) expected tokens for T_verify(n + 1) + d t_draft
seconds. The long-run rate is highest when each step maximises tokens - rate x seconds (Dinkelbach's transform), with
the rate that decoding has reached so far and never less than plain decoding's. Plain decoding is n = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Budget
from ..errors import ConfigError
from ..models.base import Capabilities, LanguageModel
from ..models.profile import Profile, kept_or_measured
from ..sequence import Sequence
from ..tree import ROOT, DraftTree
from .base import Outcome
from .calibration import Calibration, Floats, Ints, Record, first_or_not, with_odds
from .costs import Curve, Curves
from .policy import Frontier, Growth, GrowthPolicy, best_per_row, ranks_per_row
from .report import Report
from .source import Source
from .worth import Rate, Spending, Stake, part_with_one

_MEMORY = 0.97
"""Share of an average that each new step leaves."""
_CREDIT = 8.0
"""Plain passes, of a token each, that the record of speed begins with."""
_RECORD = 0.99
"""The same for how far expected acceptance can be trusted."""
_PRIOR = 5.0
"""Accepted nodes that make up that record before there is any."""
_LEAST = 0.01
"""Candidates less probable than this are never drafted."""
_SHARE = 0.1
"""Share of a node's mean price that a candidate must promise to be drafted: on plateaus nodes are cheaper than that."""
_FURTHER = 3.0
"""Expected tokens of all deeper layers that each one of the last layer may stand for, at most, while it is drafted."""
_NOWHERE = -2
"""No node has this number."""


@dataclass(slots=True)
class _Plan:
    """One proposal, from the budgets to the outcome.

    Attributes:
        sequences: whom it is for.
        curve: what verifying costs.
        stakes: seconds of asking each source about a layer.
        layer, node: seconds of asking the sources about a layer, and of each node that it has beyond the first.
        rate: tokens a second that a step must be worth, of all sequences together.
        odds: [B] each sequence's record.
        frontiers: what was proposed, layer by layer.
        rows, paths: [P] of all that has been drafted: which sequence, and the probability of being accepted.
        totals: [N] expected tokens of the best 1, 2, ... nodes of each sequence, summed over sequences.
        gained: expected tokens that the last layer has brought.
        pools, chosen: what was drafted, and how many nodes are verified.
        gain: [B] expected tokens of what is verified, the root's bonus included.
        fresh: models read prompts first.
        asked: layers that the sources were asked about: not those that were known already.
    """

    sequences: Many[Sequence]
    curve: Curve
    stakes: Many[float]
    layer: float
    node: float
    rate: float
    odds: Floats
    fresh: bool
    frontiers: list[Frontier] = field(default_factory=list)
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    paths: Floats = field(default_factory=lambda: np.zeros(0))
    totals: Floats = field(default_factory=lambda: np.zeros(1))
    gained: float = 0.0
    pools: Many[DraftTree] = ()
    chosen: int = 0
    gain: Many[float] = ()
    asked: int = 1

    @property
    def layers(self) -> int:
        """How deep it was drafted."""
        return len(self.frontiers)


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
    _records: WeakKeyDictionary[Sequence, Record] = field(default_factory=WeakKeyDictionary, repr=False, compare=False)
    _plan: _Plan | None = field(default=None, repr=False, compare=False)
    _pace: Rate = field(default_factory=lambda: Rate(_CREDIT, _CREDIT), repr=False, compare=False)
    _growing: float = field(default=2e-4, repr=False, compare=False)
    _learning: float = field(default=2e-4, repr=False, compare=False)
    _drafted: bool = field(default=False, repr=False, compare=False)
    _yield: float = field(default=1.0, repr=False, compare=False)
    _stakes: list[Stake] = field(default_factory=list, repr=False, compare=False)
    _accepted: float = field(default=0.0, repr=False, compare=False)
    _expected: float = field(default=0.0, repr=False, compare=False)
    _models: list[Capabilities] | None = field(default=None, repr=False, compare=False)
    _curves: Curves | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("width", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: use at least 1")

    def prepare(self, target: LanguageModel, sources: Many[Source]) -> None:
        """Find the costs, unless they were given: kept from an earlier start, or measured now (seconds, once)."""
        drafting = [source.model for source in sources if source.model]
        models = [model.capabilities for model in (target, *drafting)]
        if self._models not in (None, models):
            raise ConfigError("this AutoTree has learned for other models: make a new one")
        self._models = models
        self.target = self.target or kept_or_measured(target)
        self._stakes = [
            Stake(source, 1 << i, self._profile(source.model), steady=len(sources) == 1 and not source.costly)
            for i, source in enumerate(sources)
        ]
        self.report.stakes = self._stakes

    def _profile(self, model: LanguageModel | None) -> Profile | None:
        """A drafting model's costs; a twin of the target has the target's."""
        if model is None:
            return None
        same = self._models is not None and model.capabilities == self._models[0]
        return self.drafter or (self.target if same else kept_or_measured(model))

    @property
    def trust(self) -> float:
        """Accepted over expected nodes of the trees that were chosen: choosing by expectation favours the overrated."""
        return (self._accepted + _PRIOR) / (self._expected + _PRIOR)

    def width_for(self, nodes: int) -> int:
        """``width``, whatever the budget."""
        return self.width

    def pool(self, nodes: int) -> int:
        """Several times what is verified: unlikely paths are drafted too, for their outcome teaches."""
        return 4 * nodes + self.width

    def plan(self, sequences: Many[Sequence], budgets: Many[Budget]) -> Many[Budget]:
        """Look up the costs; no nodes where drafting cannot win."""
        if self.target is None:
            raise ConfigError("auto has no measured costs: give its drafter to an Engine, which measures them")
        batch, most = len(sequences), max(b.nodes for b in budgets)
        context = max(len(s.ids) for s in sequences)
        self._curves = self._curves or Curves(self.target)
        curve = self._curves.at(most, context, batch)
        self._stakes = self._stakes or [Stake(profile=self.drafter, steady=self.drafter is None)]
        layers = [stake.layer(context, batch) for stake in self._stakes]
        room = any(b.depth != 0 for b in budgets)  # no try is spent where there is none
        room = room and not self._curves.want_plain(self._pace.value)
        fresh = sum(s.stats.steps == 0 for s in sequences) / batch
        for stake, seconds in zip(self._stakes, layers, strict=True):
            stake.begin(curve, seconds, self.depth if room else 0, fresh)
        layer = sum(seconds for stake, seconds in zip(self._stakes, layers, strict=True) if stake.asked)
        node = sum(stake.node(context, batch) for stake in self._stakes if stake.asked)
        odds = np.array([self._records.setdefault(s, Record()).odds for s in sequences])
        rate = batch / curve.plain * max(1.0, self._pace.value)
        self._plan = _Plan(sequences, curve, layers, layer, node, rate, odds, fresh > 0, gained=float(batch))
        return budgets if any(stake.asked for stake in self._stakes) else [Budget(0, b.depth) for b in budgets]

    def _planned(self) -> _Plan:
        if self._plan is None:
            raise ConfigError("a proposal without a plan: call plan first")
        return self._plan

    def grow(self, frontier: Frontier) -> Growth:
        """Candidates whose calibrated path may pay; go on where another layer may pay."""
        plan, found = self._planned(), frontier.candidates
        law = np.exp(found.logprobs.numpy(), dtype=np.float64)
        if not frontier.depth and not law.any():
            nothing = torch.zeros(law.shape, dtype=torch.bool)
            return Growth(nothing, nothing)  # often so where texts repeat little: nothing to weigh or to learn
        depth = frontier.depth + 1
        plan.frontiers.append(frontier)
        rows = frontier.rows.numpy()[:, None].repeat(law.shape[1], 1)
        edges = self.calibration.acceptance(law, depth, first_or_not(law.shape[1]))
        edges = with_odds(edges, plan.odds[rows])
        above = frontier.tags.numpy()[:, None] if frontier.depth else 1.0
        paths = np.where(law > 0, above * edges, 0.0)
        keep = paths > max(_LEAST, _SHARE * plan.rate / len(plan.sequences) * plan.curve.slope)
        if keep.sum() > int(frontier.budgets.min()):
            wanted = torch.from_numpy(np.where(keep, paths, -1.0).ravel())
            keep &= best_per_row(wanted, torch.from_numpy(rows.ravel()), frontier.budgets).numpy().reshape(keep.shape)
        mass = float(paths[keep].sum())
        promising = float(plan.paths.sum()) + (1 + _FURTHER) * mass > plan.rate * plan.curve.least
        if frontier.depth == 0:
            keep &= promising
        extend = np.zeros_like(keep)
        if promising and depth < self.depth:
            among, ahead, further = self._extension(plan, rows[keep], paths[keep])
            free = np.zeros_like(among) if found.known is None else found.known.numpy()[keep]
            if further > plan.rate * (plan.layer + self._yield * self._growing):
                extend[keep] = among
                plan.asked += bool((among & ~free).any())
            elif ahead > plan.rate * self._growing:
                extend[keep] = among & free
        return Growth(*map(torch.from_numpy, (keep, extend, paths)))

    def _extension(self, plan: _Plan, rows: Ints, paths: Floats) -> tuple[NDArray[np.bool_], float, float]:
        """Of a new layer: the nodes to ask about, [F] bool; the expected tokens of one more layer, if it gains as this
        one did; and those of as many layers as the sources answer for when they are asked about one.

        No child of a node can come to be that is not among the best of as many as are worth most so far; and what one
        is likely to bring must be worth its share of the drafting pass.
        """
        plan.rows, plan.paths = np.concatenate([plan.rows, rows]), np.concatenate([plan.paths, paths])
        everywhere = torch.from_numpy(plan.paths), torch.from_numpy(plan.rows)
        ranks = ranks_per_row(*everywhere, len(plan.sequences)).numpy()
        most = len(plan.curve.now) - 1
        totals = np.bincount(ranks, plan.paths, most)[:most].cumsum()
        size = int((self.trust * totals - plan.rate * plan.curve.now[1:]).argmax())
        gained = float(totals[size] - plan.totals[min(size, len(plan.totals) - 1)])
        decay = min(1.0, gained / plan.gained)
        onwards = self.trust * decay
        plan.totals, plan.gained = totals, max(gained, 1e-9)
        among = ranks[len(ranks) - len(rows) :] <= size
        among &= (onwards * paths > plan.rate * plan.node) | (paths >= paths.max(initial=0.0))
        ahead = onwards * gained
        return among, ahead, ahead * sum(decay**k * min(1.0, self._yield - k) for k in range(math.ceil(self._yield)))

    def prune(self, pools: Many[DraftTree], tags: Many[Tensor], budgets: Many[Budget]) -> list[Tensor | None]:
        """The number of nodes that is worth most, the same for all sequences: they share the pass."""
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
        seconds = plan.curve.now + self._drafting(plan)
        seconds[0] = plan.curve.plain
        self.report.compare(worth.mean(0), seconds)
        keeps: list[Tensor | None] = []
        for pool, order in zip(pools, orders, strict=True):
            keep = np.zeros(len(pool), np.bool_)
            keep[order[: plan.chosen]] = True
            keeps.append(torch.from_numpy(keep))
        return keeps

    def observe(self, outcomes: Many[Outcome]) -> None:
        """Learn from every candidate that was put to the test, drafted to be verified or not."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        cost, taken = outcomes[0].step, sum(o.taken for o in outcomes)
        if self._drafted and not plan.fresh:
            self._learning += (1 - _MEMORY) * (cost.learned - self._learning)
        self._drafted = bool(plan.frontiers)
        if plan.frontiers:
            for row, outcome in enumerate(outcomes):
                self._learn(plan, row, outcome.tokens[: outcome.taken])
        verified = float(plan.curve.now[plan.chosen])
        seconds = verified
        scale = verified / max(cost.verify - cost.beside, 1e-9)  # as if at the speed of the profile
        if plan.frontiers or (any(stake.asked for stake in self._stakes) and not plan.fresh):
            growing = plan.layers * self._growing + self._learning if plan.frontiers else cost.draft * scale
            seconds += self._drafting(plan) if plan.frontiers else growing  # to ask in vain takes time too
            layers = plan.asked if plan.frontiers else 0
            spending = Spending(plan.curve.plain, verified, layers, growing, seconds, scale, plan.fresh)
            self._judge(plan, outcomes, spending)
        passes = seconds / plan.curve.plain
        self._pace.add(taken / len(outcomes), passes, _MEMORY**passes)
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

    def _drafting(self, plan: _Plan) -> float:
        """Seconds of all that was drafted, as expected."""
        return plan.asked * plan.layer + plan.layers * self._growing + self._learning

    def _judge(self, plan: _Plan, outcomes: Many[Outcome], spending: Spending) -> None:
        """What each source was worth; the time of drafting that none of them took is the growth loop's own."""
        asked = [(stake, layer) for stake, layer in zip(self._stakes, plan.stakes, strict=True) if stake.asked]
        paid = [stake for stake, _ in asked if stake.pays]
        for stake, layer in asked:
            stake.judge(outcomes, layer, spending, len(asked))
        part_with_one(self._stakes, paid)
        if plan.fresh or not plan.frontiers:
            return
        rest = outcomes[0].step.draft * spending.scale - plan.asked * sum(layer for _, layer in asked)
        self._growing += (1 - _MEMORY) * (max(0.0, rest) / plan.layers - self._growing)
        self._yield += (1 - _MEMORY) * (plan.layers / plan.asked - self._yield)

    def _learn(self, plan: _Plan, row: int, tokens: Many[int]) -> None:
        """Walk down what was proposed along what the target said.

        All candidates count, whether they became nodes or not.
        """
        record = self._records[plan.sequences[row]]
        self.calibration.fade(record)
        pool = plan.pools[row] if plan.pools else DraftTree.empty()
        edges = list(zip(pool.parents.tolist(), pool.tokens.tolist(), strict=True))
        node = ROOT
        for depth, (token, frontier) in enumerate(zip(tokens, plan.frontiers, strict=False), start=1):
            asked = list(zip(frontier.rows.tolist(), frontier.nodes.tolist(), strict=True))
            if (row, node) not in asked:
                return
            at, found = asked.index((row, node)), frontier.candidates
            probabilities = [p for p in map(math.exp, found.logprobs[at].tolist()) if p > _LEAST]
            said = found.tokens[at, : len(probabilities)].tolist()
            hits = [said.index(token)] if token in said else []
            self.calibration.learn(depth, probabilities, hits, record, first_or_not(len(said)))
            node = edges.index((node, token)) if (node, token) in edges else _NOWHERE
