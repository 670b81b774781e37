"""What each drafter gains and costs, and which of them draft in the next proposal.

Seconds are counted in passes of AR decoding over all requests, tokens for each one that such a pass yields. A drafter
pays where the tokens that only it brings, a pass that it takes, are more than decoding yields a pass anyway. This ratio
has a Gamma posterior: gained tokens are Poisson in the passes spent, and its prior is one token a pass, which is AR
decoding. Beside it each drafter has a balance of what it has gained less what it has spent. It drafts while that is
above 0, no deeper than it can pay for: the first probes are cheap, success pays for more, and a drafter that is never
right loses no more than its first balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import numpy as np

from ...models.cost_profile import Profile
from ...request import Outcome, Request, StepCost
from ..base import SourceInfo
from .cost_model import ARPass, Floats
from .settings import DEFAULTS, AutoSettings


@dataclass(slots=True, eq=False)
class Benefit:
    """One drafter's posterior and balance.

    Attributes:
        source: the drafter; None: unknown.
        profiles: measured costs of the models that make passes for it, by ``id``.
        profile: of these, that of the model that makes one pass a layer; None: there is none.
        balance: AR passes that it may lose.
        steps, tokens, seconds: how often it drafted, accepted tokens that were its alone, what it took.
    """

    source: SourceInfo | None = None
    profile: Profile | None = None
    profiles: dict[int, Profile] = field(default_factory=dict, repr=False)
    settings: AutoSettings = DEFAULTS
    balance: float = 0.0
    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    _gained: float = field(default=0.0, repr=False)
    _spent: float = field(default=0.0, repr=False)
    _scale: float = field(init=False, repr=False)  # seconds of a layer over the profile's; without one, seconds

    def __post_init__(self) -> None:
        self._scale = 1.0 if self.profile else 0.0

    @property
    def rate(self) -> float:
        """Posterior mean of the tokens that it gains an AR pass spent on it."""
        return (1 + self._gained) / (1 + self._spent)

    @property
    def _share(self) -> float:
        """Of time that may be lost to learning more about it."""
        return self.settings.learning_share * min(1.0, self.rate) ** 2

    def reading(self, requests: Sequence[Request]) -> float:
        """Seconds in which its models read what they have not read of these requests."""
        unread = [pair for request in requests for pair in (self.source.unread(request) if self.source else ())]
        return sum(self.profiles[id(model)].seconds(n, n) for model, n in unread if n > self.settings.context_step // 2)

    def layer(self, ar: ARPass) -> float:
        nodes = self.settings.layer_nodes
        return self._scale * (self.profile.seconds(nodes, ar.context, ar.batch) if self.profile else 1.0)

    def pays(self, verify: Floats, ar: ARPass, depth: int, reading: float, left: float, pace: float) -> bool:
        """Whether it drafts, ``depth`` layers at most, if its models must read for ``reading`` seconds first.

        ``verify``: as in ``Price``; ``left``: AR passes of the rest of the longest answer; ``pace``: of decoding.
        """
        layer, seconds = self.layer(ar), float(verify[0])
        dear = layer >= self._share * seconds
        if dear and self.balance * seconds <= (layer if self.rate < 1 else 0.0):
            return False
        nodes = np.arange(1, min(len(verify) - 1, depth * ar.batch) + 1)
        layers = np.ceil(nodes / ar.batch)
        faster = (1 + nodes / ar.tokens) * seconds > verify[nodes] + layers * layer  # than AR decoding, all accepted
        if not faster.any():
            return False
        if dear and self.rate < 1 and self.balance * seconds <= float(layers[faster.argmax()]) * layer:
            return False  # fewer layers than can pay teach nothing
        affordable = 1 - 1 / pace if self.rate > pace else self.settings.learning_share * self.rate / pace
        return reading <= left * affordable * seconds

    def measure(self, seconds: float, layers: int, layer: float) -> float:
        """Drafting ``layers`` of ``layer`` seconds each took so many: those that count, for a stall is no cost."""
        most, keep = self.settings.max_drift, self.settings.fast_decay
        if not layer:
            self._scale = seconds / layers
            return seconds
        ratio = max(1 / most, min(most, seconds / layers / layer))
        self._scale *= keep + (1 - keep) * ratio
        return min(seconds, most * layers * layer)

    def learn(self, gained: float, spent: float, pace: float) -> None:
        """It has gained so many tokens and spent so many AR passes."""
        slow = self.settings.slow_decay
        self._gained, self._spent = slow * self._gained + gained, slow * self._spent + spent
        self.balance = min(self.settings.max_balance, self.balance + gained / pace - spent)

    def grant(self, passes: float) -> None:
        """So many AR passes have gone by: some of their time may be spent on it, less where it gains less."""
        self.balance = min(self.settings.max_balance, self.balance + passes * self._share)


class Price(NamedTuple):
    """What one step's drafting and verifying take, in seconds.

    Attributes:
        ar: the pass without drafts.
        verify: [N + 1] of verifying 0, 1, ... nodes in all.
        rate: tokens a second that the step must yield.
        enabled: [D] which drafters draft.
        layers: [D] of one layer by each, 0 if it does not draft.
        limit: that they may lose.
        fresh: a model reads much of a text first, so that measured seconds are not those of layers.
    """

    ar: ARPass
    verify: Floats
    rate: float
    enabled: tuple[bool, ...]
    layers: tuple[float, ...]
    limit: float
    fresh: bool


@dataclass(slots=True)
class Selection:
    """The drafters of a policy; new ones share the first balance.

    Attributes:
        drafters: one benefit each.
        pace: tokens an AR pass that decoding has yielded lately, at least 1.
    """

    drafters: Sequence[Benefit]
    settings: AutoSettings = DEFAULTS
    _tokens: float = field(init=False, repr=False)
    _passes: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._tokens = self._passes = self.settings.pseudo_count
        for drafter in self.drafters:
            drafter.balance = self.settings.first_balance / len(self.drafters)

    @property
    def pace(self) -> float:
        return max(1.0, self._tokens / self._passes)

    def begin(self, requests: Sequence[Request], verify: Floats, ar: ARPass, depth: int) -> Price:
        """Settle which drafters are enabled, and what they cost (``Benefit.pays``)."""
        pace, left = self.pace, max(request.tokens_left for request in requests)
        reading = [drafter.reading(requests) for drafter in self.drafters]
        pairs = zip(self.drafters, reading, strict=True)
        enabled = tuple(drafter.pays(verify, ar, depth, seconds, left, pace) for drafter, seconds in pairs)
        layers = tuple(on * drafter.layer(ar) for drafter, on in zip(self.drafters, enabled, strict=True))
        balance = sum(max(0.0, drafter.balance) for drafter in compress(self.drafters, enabled))
        fresh = any(request.stats.steps == 0 for request in requests) or any(compress(reading, enabled))
        seconds = float(verify[0])
        return Price(ar, verify, ar.tokens * pace / seconds, enabled, layers, balance * seconds, fresh)

    def learn(self, price: Price, passes: int, chosen: int, outcomes: Sequence[Outcome]) -> None:
        """A step is over, and ``chosen`` nodes verified; what it took counts at the speed of the profile.

        ``passes``: layers that the drafters made a pass for.
        """
        tokens, ar, seconds, pace = price.ar.tokens, float(price.verify[0]), float(price.verify[chosen]), self.pace
        took = self._took(seconds, price, passes, outcomes[0].step)
        owners = [_owners(outcome, price) for outcome in outcomes]
        nodes = max(1, sum(map(len, owners)))
        for index, (drafter, drafting) in enumerate(zip(self.drafters, took, strict=True)):
            if price.enabled[index]:
                gained = sum(_gained(outcome, own, index) for outcome, own in zip(outcomes, owners, strict=True))
                shared = max(0.0, seconds - ar) * sum(own.count(index) for own in owners) / nodes
                drafter.seconds += drafting
                drafter.steps += 1
                drafter.tokens += gained / tokens
                drafter.learn(gained / tokens, (drafting + shared) / ar, pace)
        passed = (seconds + sum(took)) / ar
        keep = self.settings.fast_decay**passed
        self._tokens = (
            keep * self._tokens + (sum(outcome.taken for outcome in outcomes) + price.ar.other_tokens) / tokens
        )
        self._passes = keep * self._passes + passed
        for drafter in self.drafters:
            drafter.grant(passed)

    def _took(self, verify: float, price: Price, passes: int, cost: StepCost) -> list[float]:
        """Seconds of drafting by each drafter: its own, and its part of those of growing and learning."""
        if not any(price.enabled) or price.fresh:
            return [passes * layer for layer in price.layers]
        scale = verify / max(cost.verify, 1e-9)
        own = cost.drafters or [0.0] * len(self.drafters)
        rest = max(0.0, cost.draft - sum(own)) / sum(price.enabled)
        found = [0.0] * len(self.drafters)
        for i in compress(range(len(found)), price.enabled):
            found[i] = self.drafters[i].measure((own[i] + rest) * scale, passes, price.layers[i])
        return found


def _owners(outcome: Outcome, price: Price) -> list[int]:
    """Whose each node is: of all that offer it the cheapest one's, so that of two that offer the same one stays."""
    order = sorted(compress(range(len(price.layers)), price.enabled), key=price.layers.__getitem__)
    if (origins := outcome.tree.origins) is None:
        return order[:1] * len(outcome.tree)
    return [next((index for index in order if bits >> index & 1), -1) for bits in origins.tolist()]


def _gained(outcome: Outcome, owners: Sequence[int], drafter: int) -> int:
    """Accepted tokens that would be lost without a drafter: those from the first one on that is its own."""
    accepted = [owners[node] for node in outcome.path[: outcome.taken - 1]]
    return len(accepted) - accepted.index(drafter) if drafter in accepted else 0
