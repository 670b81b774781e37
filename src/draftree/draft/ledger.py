"""What drafting takes and what it brings, source by source and all together: the books of ``auto``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..outcome import Outcome
from ..request import Request
from .costs import Curve
from .proposal import Price, Proposal
from .worth import Rate, Spending, Stake, part_with_one

_MEMORY = 0.97
"""Share of an average that each new step leaves."""
_CREDIT = 8.0
"""Plain passes, of a token each, that the record of speed begins with."""
_MOST_GROWING = 10.0
"""Times what a layer's growing takes that one may count for: a stall of the machine is no cost of it."""
_MOST_SAVED = 0.5
"""Share of a layer's price that passes one after another may save of what the profile says of single ones."""
_LITTLE = 2e-4
"""Seconds that growing a layer, and learning, take before they have been measured."""


@dataclass(slots=True)
class Ledger:
    """Records over all proposals.

    Attributes:
        stakes: one for each source.
        pace: tokens a plain pass's time.
        growing: seconds of a layer that the profiles do not tell: the growth loop's own, and less than none where
            passes one after the other find more of their weights in the processor's caches than single ones do.
        layers: that come of asking the sources once, on average: more than one where they answer ahead.
        reads: in the proposal under way a source is asked whose model reads much of a text first.
    """

    stakes: list[Stake] = field(default_factory=list)
    pace: Rate = field(default_factory=lambda: Rate(_CREDIT, _CREDIT))
    growing: float = _LITTLE
    layers: float = 1.0
    reads: bool = False
    _learning: float = _LITTLE
    _drafted: bool = False

    def begin(self, requests: Sequence[Request], curve: Curve, context: int, depth: int, left: float) -> Price:
        """Settle which sources are asked in a proposal (``Stake.begin``), and what that costs.

        Args:
            requests: whom it is for.
            curve: what verifying costs.
            context: the longest one's tokens.
            depth: of its deepest level, at most.
            left: most tokens that one of them may still get.
        """
        batch = len(requests)
        fresh = sum(s.stats.steps == 0 for s in requests) / batch
        each = [stake.layer(context, batch) for stake in self.stakes]
        self.reads = False
        for stake, seconds in zip(self.stakes, each, strict=True):
            reading = stake.reading(requests)
            stake.begin(curve, seconds, depth, fresh, reading / (left * curve.plain))
            self.reads |= stake.asked and reading > 0
        layer = sum(seconds for stake, seconds in zip(self.stakes, each, strict=True) if stake.asked)
        return Price(each, layer, sum(stake.node(context, batch) for stake in self.stakes if stake.asked))

    @property
    def asks(self) -> bool:
        """Some source is asked in the proposal under way."""
        return any(stake.asked for stake in self.stakes)

    def drafting(self, plan: Proposal) -> float:
        """Seconds of all that was drafted, as expected."""
        return plan.asked * plan.price.layer + plan.layers * self.growing + self._learning

    def settle(self, plan: Proposal, outcomes: Sequence[Outcome]) -> None:
        """Enter what a proposal took, at the speed of the profile, and what it brought."""
        cost, verified = outcomes[0].step, float(plan.curve.now[plan.chosen])
        if self._drafted and not plan.fresh:
            self._learning += (1 - _MEMORY) * (cost.learned - self._learning)
        self._drafted = bool(plan.frontiers)
        seconds, scale = verified, verified / max(cost.verify - cost.beside, 1e-9)
        if plan.frontiers or (self.asks and not plan.fresh):
            growing = plan.layers * self.growing + self._learning if plan.frontiers else cost.draft * scale
            seconds += self.drafting(plan) if plan.frontiers else growing  # to ask in vain takes time too
            layers = plan.asked if plan.frontiers else 0
            spending = Spending(plan.curve.plain, verified, layers, growing, seconds, scale, plan.fresh)
            self._judge(plan, outcomes, spending)
        passes = seconds / plan.curve.plain
        self.pace.add(sum(o.taken for o in outcomes) / len(outcomes), passes, _MEMORY**passes)

    def _judge(self, plan: Proposal, outcomes: Sequence[Outcome], spending: Spending) -> None:
        """What each source was worth; the time of drafting that none of them took is the growth loop's own."""
        asked = [(stake, layer) for stake, layer in zip(self.stakes, plan.price.each, strict=True) if stake.asked]
        paid = [stake for stake, _ in asked if stake.pays]
        for stake, layer in asked:
            stake.judge(outcomes, layer, spending, len(asked))
        part_with_one(self.stakes, paid)
        if plan.fresh or not plan.frontiers:
            return
        rest = outcomes[0].step.draft * spending.scale - plan.asked * plan.price.layer
        least = -_MOST_SAVED * plan.price.layer
        took = max(least, min(rest / plan.layers, _MOST_GROWING * abs(self.growing) + _LITTLE))
        self.growing += (1 - _MEMORY) * (took - self.growing)
        self.layers += (1 - _MEMORY) * (plan.layers / plan.asked - self.layers)
