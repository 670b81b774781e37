"""What each drafter gains and costs, and which of them draft in the next proposal.

Seconds are counted in passes of AR decoding. A drafter pays where the tokens that only it brings, a pass that it takes,
are more than decoding yields a pass anyway. This ratio has a Gamma posterior: gained tokens are Poisson in the passes
spent, and its prior is one token a pass, which is AR decoding. Beside it each drafter has a balance of what it has
gained less what it has spent. It drafts while that is above 0, no deeper than it can pay for: the first probes are
cheap, success pays for more, and a drafter that is never right loses no more than its first balance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...models.cost_profile import Profile
from ...request import Outcome, Request, StepCost
from ..base import SourceInfo
from .cost_model import Curve
from .settings import DEFAULTS, AutoSettings

_WIDE = 4  # nodes of a layer over which the price of one is averaged


@dataclass(slots=True, eq=False)
class Benefit:
    """One drafter's posterior and balance.

    Attributes:
        source: the drafter; None: unknown, in tests.
        profile: measured costs of the model that it makes one pass of a layer; None: there is none.
        profiles: of all models that make passes for it, by their ``id``.
        balance: AR passes that it may lose.
        enabled: it drafts in the proposal under way.
        steps, tokens, seconds: how often it drafted, accepted tokens that were its alone, what it took.
    """

    source: SourceInfo | None = None
    profile: Profile | None = None
    profiles: Mapping[int, Profile] = field(default_factory=dict, repr=False)
    balance: float = 0.0
    settings: AutoSettings = DEFAULTS
    enabled: bool = False
    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    _gained: float = field(default=0.0, repr=False)
    _spent: float = field(default=0.0, repr=False)
    _layer: float = field(default=0.0, repr=False)
    _drift: float = field(default=0.0, repr=False)
    _recent: float = field(default=0.0, repr=False)

    @property
    def name(self) -> str:
        return self.source.name if self.source else "drafter"

    @property
    def rate(self) -> float:
        """Posterior mean of the tokens that it gains an AR pass spent on it."""
        return (1 + self._gained) / (1 + self._spent)

    @property
    def limit(self) -> float:
        """Largest balance: so many steps of a cheap drafter, so many AR passes of a dear one."""
        return self.settings.max_balance * min(1.0, self._recent)

    @property
    def _share(self) -> float:
        """Of time that may be lost to learning more about it."""
        return self.settings.learning_share * min(1.0, self.rate) ** 2

    def layer(self, context: int, batch: int) -> float:
        """Seconds of drafting one layer: by its profile and how that has held lately, or as measured."""
        if self.profile is None:
            return self._layer
        return math.exp(self._drift) * self.profile.seconds(1.5, context, batch)

    def node(self, context: int, batch: int) -> float:
        """Seconds that one more node of a layer takes, by its profile."""
        if self.profile is None:
            return 0.0
        wide, narrow = (self.profile.seconds(nodes, context, batch) for nodes in (_WIDE, 1))
        return max(0.0, wide - narrow) / (_WIDE - 1)

    def reading(self, requests: Sequence[Request]) -> float:
        """Seconds in which its models read what they have not read of these requests."""
        if self.source is None or not self.profiles:
            return 0.0
        unread = [pair for request in requests for pair in self.source.unread(request)]
        return sum(self.profiles[id(model)].seconds(n, n) for model, n in unread if n > self.settings.context_step // 2)

    def begin(self, curve: Curve, layer: float, depth: int, reading: float, left: float, pace: float) -> None:
        """Settle whether it drafts.

        Args:
            curve: of verifying.
            layer: seconds of drafting one.
            depth: of the deepest one; 0: nothing may be drafted.
            reading: seconds before it can draft the first.
            left: AR passes of the rest of the longest answer.
            pace: tokens an AR pass that decoding yields.
        """
        affordable = 1 - 1 / pace if self.rate > pace else self.settings.learning_share * self.rate / pace
        self.enabled = (
            depth > 0
            and (self.balance * curve.ar > (layer if self.rate < 1 else 0.0) or layer < self._share * curve.ar)
            and (self.profile is None or can_pay(curve, layer, depth))
            and reading <= left * affordable * curve.ar
        )

    def measure(self, seconds: float, layers: int, layer: float) -> None:
        """Drafting ``layers`` took so many seconds where ``layer`` was expected of each."""
        keep, took = self.settings.fast_decay, seconds / layers
        if self.profile:
            most = math.log(self.settings.max_drift)
            ratio = math.log(max(took, 1e-9) / layer) + self._drift
            self._drift = keep * self._drift + (1 - keep) * max(-most, min(most, ratio))
        else:
            self._layer += (1 - keep if self._layer else 1.0) * (took - self._layer)

    def learn(self, gained: float, spent: float, pace: float) -> None:
        """It has gained so many tokens and spent so many AR passes."""
        slow = self.settings.slow_decay
        self._gained, self._spent = slow * self._gained + gained, slow * self._spent + spent
        self._recent += (1 - self.settings.fast_decay if self.steps else 1.0) * (spent - self._recent)
        self.balance = min(max(self.limit, self.balance), self.balance + gained / pace - spent)
        self.steps += 1
        self.tokens += gained

    def grant(self, passes: float) -> None:
        """So many AR passes have gone by: some of their time may be spent on it, less where it gains less."""
        self.balance = min(max(self.limit, self.balance), self.balance + passes * self._share)


def can_pay(curve: Curve, layer: float, depth: int) -> bool:
    """Is some depth faster than AR decoding if all drafted tokens are accepted?"""
    verify = curve.now.tolist()
    depths = range(1, min(depth, len(verify) - 1) + 1)
    return any((1 + d) * curve.ar > verify[d] + d * layer for d in depths)


@dataclass(frozen=True, slots=True)
class Price:
    """Of drafting.

    Attributes:
        each: seconds of one layer by each drafter, those included that are disabled.
        layer: seconds of one layer by all that are enabled.
        node: seconds of each node that a layer has beyond the first, in all requests.
        limit: seconds that may be lost.
        free: seconds that may be lost at every step.
        fresh: a model reads much of a text first, so that measured seconds are not those of layers.
    """

    each: Sequence[float]
    layer: float
    node: float
    limit: float
    free: float
    fresh: bool


@dataclass(slots=True)
class Selection:
    """The drafters of a policy.

    Attributes:
        drafters: one benefit each.
        pace: tokens an AR pass that decoding has yielded lately, at least 1.
        layers: that come of one pass on average: more than one where a cascade answers for several at once.
    """

    settings: AutoSettings = DEFAULTS
    drafters: list[Benefit] = field(default_factory=list)
    layers: float = 1.0
    _tokens: float = field(init=False, repr=False)
    _passes: float = field(init=False, repr=False)
    _steps: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self._tokens = self._passes = self.settings.pseudo_count

    @property
    def pace(self) -> float:
        return max(1.0, self._tokens / self._passes)

    def add(self, drafters: Sequence[Benefit]) -> None:
        """Share the first balance among new drafters."""
        self.drafters = list(drafters)
        for drafter in drafters:
            drafter.balance = self._first

    @property
    def _first(self) -> float:
        """Balance of a drafter that nothing is known of."""
        return self.settings.learning_share * self.settings.horizon / len(self.drafters)

    def _risk(self, drafter: Benefit) -> float:
        """AR passes that it may lose in one step: half of what it has gained, or as much as a new one."""
        return max(min(drafter.balance, self._first), drafter.balance / 2)

    @property
    def enabled(self) -> tuple[bool, ...]:
        return tuple(drafter.enabled for drafter in self.drafters)

    def begin(self, requests: Sequence[Request], curve: Curve, context: int, depth: int, left: float) -> Price:
        """Settle which drafters are enabled, and what they cost (``Benefit.begin``)."""
        batch, fresh = len(requests), any(request.stats.steps == 0 for request in requests)
        each = [drafter.layer(context, batch) for drafter in self.drafters]
        for drafter, layer in zip(self.drafters, each, strict=True):
            reading = drafter.reading(requests)
            if fresh and drafter.rate > self.pace:
                drafter.balance = max(drafter.balance, self._first)
            drafter.begin(curve, layer, depth, reading, left, self.pace)
            fresh |= drafter.enabled and reading > 0
        enabled = [(drafter, layer) for drafter, layer in zip(self.drafters, each, strict=True) if drafter.enabled]
        layer, limit = sum(layer for _, layer in enabled), curve.ar * sum(self._risk(drafter) for drafter, _ in enabled)
        node = sum(drafter.node(context, batch) for drafter, _ in enabled)
        return Price(each, layer, node, limit, self.settings.learning_share * curve.ar, fresh)

    def learn(self, curve: Curve, price: Price, drafted: Drafted, outcomes: Sequence[Outcome]) -> None:
        """A step is over; what it took counts at the speed of the profile."""
        cost, batch, verify = outcomes[0].step, len(outcomes), float(curve.now[drafted.chosen])
        took = self._took(verify, price, drafted.passes, cost)
        pace, passes = self.pace, (verify + sum(took)) / curve.ar
        owners = self._owners(price)
        nodes = max(1, sum(len(outcome.tree) for outcome in outcomes))
        for index, (drafter, seconds) in enumerate(zip(self.drafters, took, strict=True)):
            if drafter.enabled:
                own = sum(owners(outcome, node) == index for outcome in outcomes for node in range(len(outcome.tree)))
                gained = sum(
                    _gained(outcome, [owners(outcome, n) == index for n in outcome.path]) for outcome in outcomes
                )
                shared = max(0.0, verify - curve.ar) * own / nodes
                drafter.seconds += seconds
                drafter.learn(gained / batch, (seconds + shared) / curve.ar, pace)
        if drafted.missed:
            more, first = drafted.missed
            hits = sum(o.tokens[0] in tokens for o, tokens in zip(outcomes, first, strict=True)) / batch
            self._credit(hits / pace - float(curve.now[more] - curve.now[drafted.chosen]) / curve.ar)
        keep = self.settings.fast_decay**passes
        self._tokens = keep * self._tokens + sum(outcome.taken for outcome in outcomes) / batch
        self._passes = keep * self._passes + passes
        self._steps += 1
        for drafter in self.drafters:
            if self._steps > self.settings.horizon or drafter.rate > 1:
                drafter.grant(passes)
        if drafted.layers and not price.fresh:
            self.layers += (1 - self.settings.fast_decay) * (drafted.layers / drafted.passes - self.layers)

    def _credit(self, net: float) -> None:
        """Nodes that could not be afforded would have gained so much, as far as the text tells for nothing."""
        enabled = [drafter for drafter in self.drafters if drafter.enabled]
        for drafter in enabled:
            drafter.balance = max(min(drafter.balance, 0.0), drafter.balance + net / len(enabled))

    def _took(self, verify: float, price: Price, passes: int, cost: StepCost) -> list[float]:
        """Seconds of drafting by each drafter: its own, and its part of those of growing and learning."""
        count = sum(self.enabled)
        if not count or price.fresh:
            return [on * passes * layer for on, layer in zip(self.enabled, price.each, strict=True)]
        scale = verify / max(cost.verify - cost.beside, 1e-9)
        own = cost.drafters or [0.0] * len(self.drafters)
        rest = max(0.0, cost.draft + cost.learned - sum(own)) / count
        found = []
        for drafter, seconds, layer in zip(self.drafters, own, price.each, strict=True):
            beside = cost.beside if drafter.source and drafter.source.successors else 0.0
            took = (seconds + rest + beside) * scale
            if drafter.enabled:
                drafter.measure(took, passes, layer)
            most = self.settings.max_drift * passes * layer or took  # a stall of the machine is no cost
            found.append(min(took, most) if drafter.enabled else 0.0)
        return found

    def _owners(self, price: Price) -> Callable[[Outcome, int], int]:
        """Whose a node is: of all that offer it the cheapest one's, so that of two that offer the same one stays."""
        on = [index for index, drafter in enumerate(self.drafters) if drafter.enabled]
        order = sorted(on, key=lambda index: price.each[index])

        def owner(outcome: Outcome, node: int) -> int:
            if outcome.tree.origins is None:
                return order[0] if order else -1
            bits = int(outcome.tree.origins[node])
            return next((index for index in order if bits >> index & 1), -1)

        return owner


class Drafted(NamedTuple):
    """What a step drafted.

    Attributes:
        layers: of the tree.
        passes: those of them that the drafters made a pass for.
        chosen: verified nodes of a request.
        missed: the larger number that would be verified if it could be afforded, and [B] their tokens at depth 1.
    """

    layers: int
    passes: int
    chosen: int
    missed: tuple[int, Sequence[set[int]]] | None = None


def _gained(outcome: Outcome, owned: Sequence[bool]) -> int:
    """Accepted tokens that would be lost without a drafter: those from the first one on that is its own."""
    accepted = min(len(outcome.path), outcome.taken - 1)
    return max(0, accepted - owned.index(True)) if True in owned else 0
