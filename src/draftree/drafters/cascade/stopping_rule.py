"""When a cascade loops back: another round of two stages, or the pending run to the target as it is.

By entropy, as in Syu & Lee, *HSDDW*: while the intermediate verifier's entropy is at most the stopping threshold tau2,
the mean entropy of its tokens that the target has rejected. By gain: while a round's expected tokens exceed what its
seconds yield otherwise. Always: as long as the policy of the target's trees extends them. Never: the ablation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ...errors import ConfigError
from ...models.base import LanguageModel
from ...models.cost_profile import Profile, kept_or_measured
from ...policies.auto.calibration import Calibration, Tried
from ...policies.chains import Threshold, check_threshold
from ...request import Outcome, Request
from ...tree import ROOT

NEVER = "never"
RULES = ("entropy", "gain", "always", NEVER)
PENDING = 50
"""Longest pending run that is drafted further by default, as in the authors' code."""
_DECAY = 0.95
"""Share of an average that remains after each new step."""
_FIRST_GAIN = 2.0
"""Accepted tokens of a round before there has been any."""


@dataclass(frozen=True, slots=True)
class LoopBack:
    """How a stopping rule decides; by default as published.

    Attributes:
        rule: one of ``RULES``.
        tau: threshold before any rejection in nats; None: the least entropy of the request's first draft.
        pending: from this many tokens on a run is not drafted further.
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
class RunEnd:
    """The end of a pending run: a token that the verifier has chosen and not scored.

    Attributes:
        depth: of the token below the run's base.
        entropy: nats, of the distribution that it was taken from.
        path: probabilities from the base down to it, each given the one before.
    """

    depth: int
    entropy: float
    path: Sequence[float]


@dataclass(slots=True)
class StoppingRule:
    """Decides on another round, and learns from the tokens that the target accepts.

    Attributes:
        settings: how.
        profile: the target's measured costs, for the rule "gain"; ``prepare`` finds them.
    """

    settings: LoopBack
    profile: Profile | None = None
    _thresholds: WeakKeyDictionary[Request, Threshold] = field(default_factory=WeakKeyDictionary, repr=False)
    _calibration: Calibration = field(default_factory=Calibration, repr=False)
    _gain: float = field(default=_FIRST_GAIN, repr=False)
    _round: float = field(default=0.0, repr=False)
    _tokens: float = field(default=0.0, repr=False)
    _seconds: float = field(default=0.0, repr=False)

    def prepare(self, target: LanguageModel) -> None:
        """Load or measure the target's cost profile if the rule needs it."""
        if self.settings.rule == "gain":
            self.profile = self.profile or kept_or_measured(target)

    def threshold(self, request: Request) -> Threshold:
        """The stopping threshold of a request."""
        return self._thresholds.setdefault(request, Threshold(self.settings.tau, self.settings.memory))

    def goes_on(self, request: Request, end: RunEnd) -> bool:
        """Whether a round is made below this token."""
        rule = self.settings.rule
        if rule == NEVER or end.depth >= self.settings.pending:
            return False
        if rule == "always":
            return True
        if rule == "entropy":
            return end.entropy <= self.threshold(request).value
        return self.gain(end, len(request.ids)) > 0

    def unsure(self, end: RunEnd) -> bool:
        """The entropy refused a round."""
        return self.settings.rule == "entropy" and end.depth < self.settings.pending

    def gain(self, end: RunEnd, context: int) -> float:
        """Expected tokens of a round less those that its seconds would yield otherwise.

        A round below a token gains nothing unless the target accepts all down to the token. It takes the mean seconds
        of rounds and those of verifying what it adds. A second yields the mean tokens so far, and no fewer than AR
        decoding.
        """
        if self.profile is None:
            raise ConfigError("loop=gain has no measured costs: give its drafter to an Engine, which measures them")
        edges = self._calibration.acceptance(end.path, [0] * len(end.path))
        nodes = end.depth + 1
        verify = self.profile.seconds(nodes + self._gain, context) - self.profile.seconds(nodes, context)
        rate = max(self._tokens / self._seconds if self._seconds else 0.0, 1 / self.profile.seconds(1, context))
        return math.prod(edges) * self._gain - rate * (self._round + max(0.0, verify))

    def took(self, seconds: float) -> None:
        """A round took so many seconds."""
        self._round += (1 - _DECAY if self._round else 1.0) * (seconds - self._round)

    def observe(self, outcome: Outcome, refused: float, gained: Sequence[int]) -> None:
        """Learn from a verified pending run.

        Args:
            outcome: of it.
            refused: least entropy that ended it; infinite: another reason did.
            gained: for each round but the first whose token was accepted, the accepted tokens that it added.
        """
        self.threshold(outcome.request).learn(outcome, refused)
        for tokens in gained:
            self._gain += (1 - _DECAY) * (tokens - self._gain)
        self._tokens = _DECAY * self._tokens + outcome.taken
        self._seconds = _DECAY * self._seconds + outcome.step.draft + outcome.step.verify + outcome.step.other
        self._calibrate(outcome)

    def _calibrate(self, outcome: Outcome) -> None:
        """Calibrate the draft's probabilities by every child of the nodes on the accepted path."""
        tree, above = outcome.tree, 0.0
        tried = list[Tried]()
        for node, token in zip([ROOT, *outcome.path], outcome.tokens[: outcome.taken], strict=False):
            children = tree.children(node)
            paths = tree.path_logprobs[children].tolist()
            hit = next((i for i, child in enumerate(children) if int(tree.tokens[child]) == token), None)
            tried += [Tried(math.exp(path - above), i == hit) for i, path in enumerate(paths)]
            above = above if hit is None else paths[hit]
        self._calibration.learn(tried)
