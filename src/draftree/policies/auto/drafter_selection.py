"""What drafting takes and what it brings, source by source and all together: the books of ``auto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...drafters.source import TokenSource
from ...models.cost_profile import Profile
from ...outcome import Outcome
from ...request import Request
from .cost_model import Curve
from .plan import Price, Proposal

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


_HOPE, _FIRST, _FIRST_NEAR = 1.5, 5.0, 20.0
"""Speed over decoding without it: where a source starts, and for how many plain passes that counts. Of one that is
nearly the target a step drafts far: it takes ten of them where it is refused early, which says little."""
_RECENT, _LONG = 0.95, 0.995
"""Share that each step leaves of the record of a request, and of that of all."""
_ANEW = 20.0
"""Steps that the record of all counts for when a request begins."""
_OPTIMIST = 0.98
"""Acceptance of each further layer that a drafting model is granted before it has shown any."""
_DOUBT, _MOST_DOUBT = 0.2, 0.04
"""Share of its costs that a source may fail to earn, and share of all time: twenty steps cannot tell a little less than
enough from a little more."""
_PROBE_MOST = 128
"""Most steps before a source that rests gets another try."""
_PROBE_SHARE, _FIRST_SHARE = 0.002, 0.1
"""Share of the time that such tries may take, and that the first of them may."""
_LITTLE_READ = 32
"""Tokens that a model reads with its next layer; more are worth their time where answers may become so much faster."""
_READ_HOPE, _READ_LEAST, _READ_STEPS = 3.0, 1.02, 20
"""How much faster that is for a source that has been asked in fewer steps, and at least."""
_MOST_LAYER = 3.0
"""Times what a model's layer is known to cost that one may count for."""
_WIDE = 4
"""Nodes of a layer over which the price of one is averaged."""
_LAYER = 0.9
"""Share of what a layer is known to cost that each new step leaves."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What a step took, at the speed of the profile.

    Attributes:
        plain, verify: seconds of a plain pass and of this one.
        layers: that sources were asked about; none where they had nothing to say.
        growing: seconds of drafting that no source took: the growth loop's own; where they had nothing to say, all.
        total: seconds of verifying and drafting.
        scale: profile's over measured seconds.
        fresh: models have read prompts.
    """

    plain: float
    verify: float
    layers: int
    growing: float
    total: float
    scale: float
    fresh: bool = False


@dataclass(slots=True)
class Rate:
    """Tokens a plain pass's time, with a fading memory of both."""

    tokens: float
    passes: float

    @property
    def value(self) -> float:
        """Their ratio."""
        return self.tokens / self.passes

    def blend(self, other: Rate, share: float) -> None:
        """Take over a ``share`` of what another one says, as of ``_ANEW`` passes."""
        self.tokens += share * (_ANEW * other.value - self.tokens)
        self.passes += share * (_ANEW - self.passes)

    def add(self, tokens: float, passes: float, memory: float = _RECENT) -> None:
        """One more step, which leaves ``memory`` of the record."""
        self.tokens += tokens - (1 - memory) * self.tokens
        self.passes += passes - (1 - memory) * self.passes


@dataclass(slots=True, eq=False)
class Stake:
    """One source's record.

    Attributes:
        source: that is asked; None: whatever asks is not known.
        bit: of its nodes in ``DraftTree.origins``.
        profile: measured costs of its model, None without one.
        profiles: of all models that make passes for it, by their ``id``.
        steady: asked at every step: it costs next to nothing, and there is no other.
        asked: in the proposal under way.
        steps, tokens, seconds: how often it was asked, accepted tokens that no other source offered, what it took.
    """

    source: TokenSource | None = None
    bit: int = 1
    profile: Profile | None = None
    profiles: Mapping[int, Profile] = field(default_factory=dict, repr=False)
    steady: bool = False
    asked: bool = False
    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    _with: Rate = field(default_factory=lambda: Rate(_HOPE * _ANEW, _ANEW), repr=False)
    _without: Rate = field(default_factory=lambda: Rate(_ANEW, _ANEW), repr=False)
    _long_with: Rate = field(init=False, repr=False)
    _long_without: Rate = field(init=False, repr=False)
    _layer: float = field(default=0.0, repr=False)
    _factor: float = field(default=1.0, repr=False)
    _share: float = field(default=0.0, repr=False)
    _cost: float = field(default=0.0, repr=False)
    _spent: float = field(default=0.0, repr=False)
    _wait: int = field(default=0, repr=False)
    _pause: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        first = _FIRST_NEAR if self.source is not None and self.source.near else _FIRST
        self._long_with, self._long_without = Rate(_HOPE * first, first), Rate(first, first)

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name if self.source else "drafter"

    @property
    def pays(self) -> bool:
        """By its record."""
        return self.steady or self.worth > 1 - min(_DOUBT * self._share, _MOST_DOUBT)

    @property
    def worth(self) -> float:
        """Speed with it over speed without it, lately."""
        return self._with.value / self._without.value

    def layer(self, context: int, batch: int) -> float:
        """Seconds of asking it about one layer: by its profile and how that has held lately, or as measured."""
        return self._factor * self.profile.seconds(1.5, context, batch) if self.profile else self._layer

    def node(self, context: int, batch: int) -> float:
        """Seconds that one more node of a layer takes it, by its profile."""
        if self.profile is None:
            return 0.0
        wide, narrow = (self.profile.seconds(nodes, context, batch) for nodes in (_WIDE, 1))
        return max(0.0, wide - narrow) / (_WIDE - 1)

    def reading(self, requests: Sequence[Request]) -> float:
        """Seconds of reading what its models must read of these requests before they can say anything."""
        if self.source is None or not self.profiles:
            return 0.0
        waiting = [(model, n) for s in requests for model, n in self.source.unread(s) if n > _LITTLE_READ]
        return sum(self.profiles[id(model)].seconds(n, n) for model, n in waiting)

    def begin(self, curve: Curve, layer: float, depth: int, fresh: float = 0.0, reading: float = 0.0) -> None:
        """Settle whether it is asked in this proposal, to ``depth`` levels at most.

        What has not paid rests, and gets a try after a number of steps, twice as many, ...: as many as make up for what
        a try costs. Where a share of the requests is
        ``fresh``, that share of its record begins anew, with what it was worth in the long run. It is not asked where
        ``reading``, in times what the rest of the answers takes plainly, is more than it is likely to save of that.
        """
        if fresh:
            self._with.blend(self._long_with, fresh)
            self._without.blend(self._long_without, fresh)
        able = self.profile is None or may_pay(curve, layer, depth)
        faster = _READ_HOPE if self.steps < _READ_STEPS else max(self.worth, _READ_LEAST)
        able &= reading <= 1 - 1 / faster
        self.asked = depth > 0 and able and self._turn()
        if self.source is not None:
            self.source.resting, self._spent = not self.asked, self.source.spent

    def _turn(self) -> bool:
        if self.pays:
            self._pause = max(1, round(self._cost / _FIRST_SHARE))
            return True
        self._wait += 1
        if self._wait < self._pause:
            return False
        longest = min(_PROBE_MOST, max(1, round(self._share / _PROBE_SHARE)))
        self._wait, self._pause = 0, min(2 * self._pause, longest)
        return True

    def retry(self) -> None:
        """Another source has left: what this one offers may have become its own."""
        self._wait, self._pause = 0, 1
        if self.asked and self.worth < _HOPE:
            self._with.tokens = _HOPE * self._without.value * self._with.passes

    def judge(self, outcomes: Sequence[Outcome], layer: float, spending: Spending, asked: int) -> None:
        """Speed of this step over what it would have been without the source, which is one of ``asked``.

        Without it the accepted path would have ended before the first node that no other source offered, its own nodes'
        share of verifying and of growing would have been saved, and the time that it took.
        """
        taken = sum(o.taken for o in outcomes)
        nodes, own = sum(len(o.tree) for o in outcomes), sum(self._own(o) for o in outcomes)
        tokens = sum(self._earned(o) for o in outcomes)
        measured = 0.0
        if self.source is not None and spending.layers:
            measured = (self.source.spent - self._spent) * spending.scale
        if spending.fresh and layer:
            measured = layer * spending.layers
        elif measured:
            most = _MOST_LAYER * layer if self.profile else measured
            measured = min(measured, most * spending.layers)
            new = measured / spending.layers
            if self.profile:
                self._factor *= 1 + (1 - _LAYER) * (new / layer - 1)
            else:
                self._layer = layer + (1 - _LAYER if layer else 1.0) * (new - layer)
        drafting = measured or spending.layers * layer
        shared = spending.verify - spending.plain + spending.growing
        seconds = drafting + (shared * own / nodes if nodes else spending.growing / asked)
        for fast, slow, left_out, saved in (
            (self._with, self._long_with, 0, 0.0),
            (self._without, self._long_without, tokens, seconds),
        ):
            # Without it there would still have been a pass: seconds beyond that were another's, or not measured alike.
            passes = max(spending.total - saved, min(spending.total, spending.plain)) / spending.plain
            gained = (taken - left_out) / len(outcomes)
            fast.add(gained, passes)
            slow.add(gained, passes, _LONG)
        self._share += (1 - _RECENT) * (seconds / spending.total - self._share)
        self._cost += (1 - _RECENT) * (seconds / spending.plain - self._cost)
        self.steps += 1
        self.tokens += tokens / len(outcomes)
        self.seconds += drafting

    def _own(self, outcome: Outcome) -> int:
        """Nodes that no other source offered."""
        origins = outcome.tree.origins
        return len(outcome.tree) if origins is None else origins.tolist().count(self.bit)

    def _earned(self, outcome: Outcome) -> int:
        """Tokens that would not have come without it."""
        accepted = min(len(outcome.path), outcome.taken - 1)
        origins = outcome.tree.origins
        if origins is None:
            return accepted
        offered = origins.tolist()
        first = next((i for i, node in enumerate(outcome.path) if offered[node] == self.bit), accepted)
        return max(0, accepted - first)


def may_pay(curve: Curve, layer: float, depth: int) -> bool:
    """Is some depth better than plain decoding, for a source that is nearly always right?"""
    total, verify = 1.0, curve.now.tolist()
    for d in range(1, min(depth, len(verify) - 1) + 1):
        total += _OPTIMIST**d
        if total / (verify[d] + d * layer) > 1 / curve.plain:
            return True
    return False


def part_with_one(stakes: Sequence[Stake], paid: Sequence[Stake]) -> None:
    """Of those that ``paid`` until now and do so no more only the worst leaves; then all others are judged afresh.

    Two sources that say the same earn nothing beside each other, yet one of them may be worth a lot.
    """
    lost = [stake for stake in paid if not stake.pays]
    if lost:
        worst = min(lost, key=lambda stake: stake.worth)
        for other in stakes:
            if other is not worst:
                other.retry()
