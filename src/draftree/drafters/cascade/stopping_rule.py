"""When a hierarchy loops back: another round of two drafters, or the pending run to the target as it is.

By entropy, as in Syu & Lee, *HSDDW*: while the upper drafter's entropy is at most tau2, the mean entropy of its tokens
that the target has rejected. By gain: while a round's expected tokens are worth its seconds. Always: for as long as the
method that shapes the target's trees asks for more. Or never (the ablation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ...errors import ConfigError
from ...models.base import LanguageModel
from ...models.cost_profile import Profile, kept_or_measured
from ...outcome import Outcome
from ...policies.auto.calibration import Calibration, Tried
from ...policies.chains import Threshold, check_threshold, learn
from ...request import Request
from ...tree import ROOT

NEVER = "never"
RULES = ("entropy", "gain", "always", NEVER)
PENDING = 50
"""Longest pending run that is drafted further by default, as in the authors' code."""
_NEAR = 0.95
"""Share of an average that each new step leaves."""
_HOPE = 2.0
"""Accepted tokens of a round before there has been any."""


@dataclass(frozen=True, slots=True)
class LoopBack:
    """How a hierarchy decides; by default as published.

    Attributes:
        rule: one of ``RULES``.
        tau: threshold before any rejection in nats; None: the least entropy of the request's first draft.
        pending: from this many tokens on a run is not drafted any further.
        memory: see ``Threshold``.

    Raises:
        ConfigError: a value is out of range.
    """

    rule: str = "entropy"
    tau: float | None = None
    pending: int = PENDING
    memory: float = math.inf

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"loop is {self.rule!r}: choose from {', '.join(RULES)}")
        check_threshold("tau", self.tau, self.memory)
        if self.pending < 1:
            raise ConfigError(f"pending is {self.pending}: use at least 1 token, or loop=never for one round")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a round would go on: a token that has not been looked at below a run that has.

    Attributes:
        depth: of the token.
        entropy: nats, of the law that it was taken from.
        path: draft probabilities from the root down to it, each given the one before.
    """

    depth: int
    entropy: float
    path: Sequence[float]


@dataclass(slots=True)
class Decider:
    """Decides, and learns from what the target says.

    Attributes:
        settings: how.
        profile: the target's measured costs, for the rule "gain"; ``prepare`` finds them.
    """

    settings: LoopBack
    profile: Profile | None = None
    _thresholds: WeakKeyDictionary[Request, Threshold] = field(default_factory=WeakKeyDictionary, repr=False)
    _calibration: Calibration = field(default_factory=Calibration, repr=False)
    _gain: float = field(default=_HOPE, repr=False)
    _round: float = field(default=0.0, repr=False)
    _tokens: float = field(default=0.0, repr=False)
    _seconds: float = field(default=0.0, repr=False)

    def prepare(self, target: LanguageModel) -> None:
        """Find the target's costs where they count: kept from an earlier start, or measured now."""
        if self.settings.rule == "gain":
            self.profile = self.profile or kept_or_measured(target)

    def threshold(self, request: Request) -> Threshold:
        """A request's tau."""
        return self._thresholds.setdefault(request, Threshold(self.settings.tau, self.settings.memory))

    def goes_on(self, request: Request, place: Place) -> bool:
        """Another round below this token?"""
        rule = self.settings.rule
        if rule == NEVER or place.depth >= self.settings.pending:
            return False
        if rule == "always":
            return True
        if rule == "entropy":
            return place.entropy <= self.threshold(request).value
        return self.worth(place, len(request.ids)) > 0

    def unsure(self, place: Place) -> bool:
        """A round was refused because of the entropy."""
        return self.settings.rule == "entropy" and place.depth < self.settings.pending

    def worth(self, place: Place, context: int) -> float:
        """Expected tokens of a round less those that its seconds would yield otherwise.

        A round below a token gains nothing unless the target accepts all down to the token. It takes the seconds that
        rounds took lately and those of verifying what it adds; a second is worth the tokens that it yielded lately, and
        never fewer than plain decoding yields.
        """
        if self.profile is None:
            raise ConfigError("loop=gain has no measured costs: give its drafter to an Engine, which measures them")
        edges = [self._calibration.acceptance([p], depth, [0])[0] for depth, p in enumerate(place.path, start=1)]
        nodes = place.depth + 1
        verify = self.profile.seconds(nodes + self._gain, context) - self.profile.seconds(nodes, context)
        rate = max(self._tokens / self._seconds if self._seconds else 0.0, 1 / self.profile.seconds(1, context))
        return math.prod(edges) * self._gain - rate * (self._round + max(0.0, verify))

    def took(self, seconds: float) -> None:
        """A round took so many seconds."""
        self._round += (1 - _NEAR if self._round else 1.0) * (seconds - self._round)

    def observe(self, outcome: Outcome, refused: float, below: Sequence[int]) -> None:
        """Learn what became of a pending run.

        Args:
            outcome: of it.
            refused: least entropy at which it was sent to the target; infinite: for another reason.
            below: for each round but the first whose token was accepted, the accepted tokens that the round gave.
        """
        learn(self.threshold(outcome.request), outcome, refused)
        for gained in below:
            self._gain += (1 - _NEAR) * (gained - self._gain)
        self._tokens = _NEAR * self._tokens + outcome.taken
        self._seconds = _NEAR * self._seconds + outcome.step.draft + outcome.step.verify + outcome.step.other
        self._calibrate(outcome)

    def _calibrate(self, outcome: Outcome) -> None:
        """How far the draft's probabilities can be trusted, from each node that the target judged on its way."""
        tree, above = outcome.tree, 0.0
        tried = list[Tried]()
        self._calibration.fade()
        for depth, (node, token) in enumerate(
            zip([ROOT, *outcome.path], outcome.tokens[: outcome.taken], strict=False), start=1
        ):
            children = tree.children(node)
            paths = tree.path_logprobs[children].tolist()
            hit = next((i for i, child in enumerate(children) if int(tree.tokens[child]) == token), None)
            tried += [Tried(depth, math.exp(path - above), i == hit) for i, path in enumerate(paths)]
            above = above if hit is None else paths[hit]
        self._calibration.learn(tried)
