"""What each drafter gains and costs, and which of them draft in the next proposal.

Seconds are counted in passes of AR decoding. A drafter pays where the tokens that only it brings, a pass that it takes,
are more than decoding yields a pass anyway. This ratio has a Gamma posterior: gained tokens are Poisson in the passes
spent, and its prior is one token a pass, which is AR decoding. Beside it each drafter has a balance of what it has
gained less what it has spent. It drafts while that is above 0, no deeper than it can pay for: the first probes are
cheap, success pays for more, and a drafter that is never right loses no more than its first balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...models.cost_profile import Profile
from ...request import Outcome, Request, StepCost
from ..base import SourceInfo
from .cost_model import Floats
from .settings import DEFAULTS, AutoSettings


@dataclass(slots=True, eq=False)
class Benefit:
    """One drafter's posterior and balance.

    Attributes:
        source: the drafter; None: unknown.
        profiles: measured costs of the models that make passes for it, by ``id``.
        profile: of these, that of the model that makes one pass a layer; None: there is none.
        balance: AR passes that it may lose.
        enabled: it drafts in the proposal under way.
        layer: seconds of drafting one layer, in that proposal.
        steps, tokens, seconds: how often it drafted, accepted tokens that were its alone, what it took.
    """

    source: SourceInfo | None = None
    profile: Profile | None = None
    profiles: dict[int, Profile] = field(default_factory=dict, repr=False)
    settings: AutoSettings = DEFAULTS
    balance: float = 0.0
    enabled: bool = False
    layer: float = 0.0
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
        if self.source is None or not self.profiles:
            return 0.0
        unread = [pair for request in requests for pair in self.source.unread(request)]
        return sum(self.profiles[id(model)].seconds(n, n) for model, n in unread if n > self.settings.context_step // 2)

    def begin(
        self, verify: Floats, context: int, batch: int, depth: int, reading: float, left: float, pace: float
    ) -> None:
        """Settle whether it drafts.

        Args:
            verify: [N + 1] seconds of verifying.
            context, batch: of the requests.
            depth: of the deepest layer; 0: nothing may be drafted.
            reading: seconds before it can draft the first.
            left: AR passes of the rest of the longest answer.
            pace: tokens an AR pass that decoding yields.
        """
        ar, *deeper = verify.tolist()
        measured = self.profile.seconds(self.settings.layer_nodes, context, batch) if self.profile else 1.0
        self.layer = self._scale * measured
        affordable = 1 - 1 / pace if self.rate > pace else self.settings.learning_share * self.rate / pace
        all_right = any((2 + d) * ar > seconds + (1 + d) * self.layer for d, seconds in enumerate(deeper[:depth]))
        self.enabled = (
            all_right  # some depth is faster than AR decoding if all of it is accepted
            and (self.balance * ar > (self.layer if self.rate < 1 else 0.0) or self.layer < self._share * ar)
            and reading <= left * affordable * ar
        )

    def measure(self, seconds: float, layers: int) -> float:
        """Drafting ``layers`` took so many seconds: those that count, for a stall of the machine is no cost."""
        most, keep = self.settings.max_drift, self.settings.fast_decay
        if not self.layer:
            self._scale = seconds / layers
            return seconds
        ratio = max(1 / most, min(most, seconds / layers / self.layer))
        self._scale *= keep + (1 - keep) * ratio
        return min(seconds, most * layers * self.layer)

    def learn(self, gained: float, spent: float, pace: float) -> None:
        """It has gained so many tokens and spent so many AR passes."""
        slow = self.settings.slow_decay
        self._gained, self._spent = slow * self._gained + gained, slow * self._spent + spent
        self.balance = min(self.settings.max_balance, self.balance + gained / pace - spent)
        self.steps += 1
        self.tokens += gained

    def grant(self, passes: float) -> None:
        """So many AR passes have gone by: some of their time may be spent on it, less where it gains less."""
        self.balance = min(self.settings.max_balance, self.balance + passes * self._share)


class Price(NamedTuple):
    """Of drafting: seconds of a layer by all enabled drafters, and seconds that they may lose.

    ``fresh``: a model reads much of a text first, so that measured seconds are not those of layers.
    """

    layer: float
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

    @property
    def enabled(self) -> tuple[bool, ...]:
        return tuple(drafter.enabled for drafter in self.drafters)

    def begin(self, requests: Sequence[Request], verify: Floats, context: int, depth: int, left: float) -> Price:
        """Settle which drafters are enabled, and what they cost (``Benefit.begin``)."""
        fresh = any(request.stats.steps == 0 for request in requests)
        for drafter in self.drafters:
            reading = drafter.reading(requests)
            drafter.begin(verify, context, len(requests), depth, reading, left, self.pace)
            fresh |= drafter.enabled and reading > 0
        enabled = [drafter for drafter in self.drafters if drafter.enabled]
        balance = sum(max(0.0, drafter.balance) for drafter in enabled)
        return Price(sum(drafter.layer for drafter in enabled), balance * float(verify[0]), fresh)

    def learn(self, verify: Floats, price: Price, passes: int, chosen: int, outcomes: Sequence[Outcome]) -> None:
        """A step is over; what it took counts at the speed of the profile.

        Args:
            verify, price: of the step.
            passes: layers that the drafters made a pass for.
            chosen: verified nodes of a request.
            outcomes: of all requests.
        """
        batch, ar, seconds, pace = len(outcomes), float(verify[0]), float(verify[chosen]), self.pace
        took = self._took(seconds, price, passes, outcomes[0].step)
        owners = [self._owners(outcome) for outcome in outcomes]
        nodes = max(1, sum(map(len, owners)))
        for index, (drafter, drafting) in enumerate(zip(self.drafters, took, strict=True)):
            if drafter.enabled:
                gained = sum(_gained(outcome, own, index) for outcome, own in zip(outcomes, owners, strict=True))
                shared = max(0.0, seconds - ar) * sum(own.count(index) for own in owners) / nodes
                drafter.seconds += drafting
                drafter.learn(gained / batch, (drafting + shared) / ar, pace)
        passed = (seconds + sum(took)) / ar
        keep = self.settings.fast_decay**passed
        self._tokens = keep * self._tokens + sum(outcome.taken for outcome in outcomes) / batch
        self._passes = keep * self._passes + passed
        for drafter in self.drafters:
            drafter.grant(passed)

    def _took(self, verify: float, price: Price, passes: int, cost: StepCost) -> list[float]:
        """Seconds of drafting by each drafter: its own, and its part of those of growing and learning."""
        if not any(self.enabled) or price.fresh:
            return [drafter.enabled * passes * drafter.layer for drafter in self.drafters]
        scale = verify / max(cost.verify - cost.beside, 1e-9)
        own = cost.drafters or [0.0] * len(self.drafters)
        rest = max(0.0, cost.draft + cost.learned - sum(own)) / sum(self.enabled)
        found = []
        for drafter, seconds in zip(self.drafters, own, strict=True):
            beside = cost.beside if drafter.source and drafter.source.successors else 0.0
            took = (seconds + rest + beside) * scale
            found.append(drafter.measure(took, passes) if drafter.enabled else 0.0)
        return found

    def _owners(self, outcome: Outcome) -> list[int]:
        """Whose each node is: of all that offer it the cheapest one's, so that of two that offer the same one stays."""
        on = [index for index, enabled in enumerate(self.enabled) if enabled]
        order = sorted(on, key=lambda index: self.drafters[index].layer)
        if (origins := outcome.tree.origins) is None:
            return order[:1] * len(outcome.tree)
        return [next((index for index in order if bits >> index & 1), -1) for bits in origins.tolist()]


def _gained(outcome: Outcome, owners: Sequence[int], drafter: int) -> int:
    """Accepted tokens that would be lost without a drafter: those from the first one on that is its own."""
    accepted = [owners[node] for node in outcome.path[: outcome.taken - 1]]
    return len(accepted) - accepted.index(drafter) if drafter in accepted else 0
