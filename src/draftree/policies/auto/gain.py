"""What each drafter gains and costs, and which of them draft in the next proposal.

Tokens and seconds are counted in passes of AR decoding over all requests: a pass yields one token a request. A drafter
drafts while the tokens of its trees that are accepted are expected to exceed what decoding would yield in the time that
drafting and verifying them take. Before it has drafted that is a guess from its kind and the measured costs. Records
fade: while a drafter does not draft its own comes near the guess again, and where the guess pays it is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from ...models.cost_profile import Profile
from ...models.protocols import DraftHead
from ...request import Outcome, Request, StepCost
from ..base import SourceInfo
from .costs import ARPass, Curve

LAYER_NODES = 1.5
"""Mean nodes of a drafted layer, whose seconds a draft model's profile gives."""
_CHEAP = 0.02
"""A drafter that takes no more of an AR pass always drafts."""
_READS = 32
"""Tokens that a model reads beside a proposal; more of a text count as reading it first."""
_FIRST, _FIRST_OF_MODEL = (0.6, 1), (2.0, 3)
"""Tokens that a proposal gains and the layers that it takes, before any is known: of a head or of texts, and of a draft
model."""
_WEIGHT = 1.0
"""Steps that a guess counts for."""
_KEEP, _KEEP_UNUSED = 0.94, 0.98
"""Share of a record that each further step leaves in which the drafter drafts, and in which it does not."""
_KEEP_ANEW = 0.5
"""And what a new request's first step leaves, where it is alone: its text is another one."""
_KEEP_PACE, _FIRST_PASSES = 0.95, 6.0
"""The same of the pace, which begins with so many AR passes."""
_MOST = 4.0
"""A proposal that takes so many times as long as expected, or longer, counts as so many: a stall is no cost."""


@dataclass(slots=True, eq=False)
class Record:
    """What one drafter has gained and cost.

    Attributes:
        source: the drafter; None: unknown.
        profiles: measured costs of the models that make passes for it, by ``id``.
        profile: of these, that of the model that makes one pass a layer; None: there is none.
        on: it drafts in the step that was begun last.
        steps, tokens, seconds: how often it drafted, accepted tokens of its trees, what drafting took.
    """

    source: SourceInfo | None = None
    profiles: dict[int, Profile] = field(default_factory=dict, repr=False)
    profile: Profile | None = None
    on: bool = True
    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    _scale: float = field(init=False, repr=False)  # seconds of a layer over the profile's; without one, seconds
    _gained: float = field(default=0.0, repr=False)
    _spent: float = field(default=0.0, repr=False)
    _weight: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        self._scale = 1.0 if self.profile else 0.0

    def reading(self, requests: Sequence[Request]) -> float:
        """Seconds in which its models read what they have not read of these requests."""
        unread = [pair for request in requests if self.source for pair in self.source.unread(request)]
        return sum([self.profiles[id(model)].seconds(n, n) for model, n in unread if n > _READS])

    def layer(self, ar: ARPass) -> float:
        """Seconds of drafting one layer."""
        return self._scale * (self.profile.seconds(LAYER_NODES, ar.context, ar.batch) if self.profile else 1.0)

    def value(self, curve: Curve, ar: ARPass, pace: float) -> float:
        """Expected tokens of a step beyond those of the time that drafting takes, in AR passes."""
        model = self.source.model if self.source else None
        gain, layers = _FIRST if model is None or isinstance(model, DraftHead) else _FIRST_OF_MODEL
        nodes = min(layers * ar.batch, len(curve.below) - 1)
        guess = gain - pace * (curve.below[nodes] - curve.seconds[0] + layers * self.layer(ar)) / curve.seconds[0]
        return (_WEIGHT * guess + self._gained - pace * self._spent) / (_WEIGHT + self._weight)

    def pays(self, reading: float, left: int, curve: Curve, ar: ARPass, pace: float) -> bool:
        """Whether it drafts for requests that have ``left`` tokens to go, if reading their texts comes first."""
        if not reading and self.layer(ar) <= _CHEAP * curve.seconds[0]:
            return True
        value = self.value(curve, ar, pace)
        return value > 0 and reading <= left * value / (1 + value) * curve.seconds[0]

    def measure(self, seconds: float, layers: int, layer: float) -> float:
        """Drafting ``layers`` of ``layer`` seconds each took so many; those of them that count."""
        if not layer:
            self._scale = seconds / layers
            return seconds
        expected = (layers + 1) * layer  # it reads what was committed, too
        counted = min(_MOST, max(1 / _MOST, seconds / expected))
        self._scale *= 0.95 + 0.05 * counted
        return counted * expected

    def learn(self, gained: float, spent: float) -> None:
        """In one step it has gained so many tokens a request and spent so many AR passes."""
        self.fade(_KEEP)
        self._gained, self._spent, self._weight = self._gained + gained, self._spent + spent, self._weight + 1

    def fade(self, keep: float) -> None:
        """Leave so much of the record."""
        self._gained, self._spent, self._weight = keep * self._gained, keep * self._spent, keep * self._weight


class Price(NamedTuple):
    """What one step's drafting and verifying take.

    Attributes:
        ar: the pass without drafts.
        curve: seconds of verifying.
        rate: tokens a second that the step must yield.
        enabled: [D] which drafters draft.
        layers: [D] seconds of one layer by each, 0 if it does not draft.
        fresh: a model reads much of a text first, so that measured seconds are not those of layers.
    """

    ar: ARPass
    curve: Curve
    rate: float
    enabled: tuple[bool, ...]
    layers: tuple[float, ...]
    fresh: bool


class Selection:
    """The drafters of a policy.

    Attributes:
        records: one each.
        pace: tokens an AR pass that decoding has yielded lately, at least 1.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self._tokens = self._passes = _FIRST_PASSES

    @property
    def pace(self) -> float:
        return max(1.0, self._tokens / self._passes)

    def begin(self, requests: Sequence[Request], curve: Curve, ar: ARPass) -> Price:
        """Settle which drafters draft, and what they cost."""
        pace, left = self.pace, max([request.tokens_left for request in requests])
        new = sum([request.stats.steps == 0 for request in requests]) / len(requests)
        reading = [record.reading(requests) for record in self.records]
        for record, seconds in zip(self.records, reading, strict=True):
            record.fade(1 - (1 - _KEEP_ANEW) * new)
            record.on = record.pays(seconds, left, curve, ar, pace)
        enabled = tuple([record.on for record in self.records])
        layers = tuple([record.on * record.layer(ar) for record in self.records])
        fresh = any(compress(reading, enabled))
        return Price(ar, curve, ar.tokens * pace / curve.seconds[0], enabled, layers, fresh)

    def learn(self, price: Price, layers: int, nodes: int, outcomes: Sequence[Outcome]) -> float:
        """A step is over; returns the AR passes that it took, at the speed of the profile.

        ``layers``: that drafters made a pass for; ``nodes``: that were verified.
        """
        tokens, ar, verify = price.ar.tokens, price.curve.seconds[0], price.curve.seconds[nodes]
        took = self._took(verify, price, layers, outcomes[0].step)
        for index, (record, drafting) in enumerate(zip(self.records, took, strict=True)):
            own = [outcome for outcome in outcomes if outcome.tree.part == index or not len(outcome.tree)]
            if not price.enabled[index] or not own:
                record.fade(_KEEP_UNUSED)
                continue
            gained = sum([len(outcome.path[: outcome.taken - 1]) for outcome in own])
            shared = max(0.0, verify - ar) * sum([len(outcome.tree) for outcome in own]) / max(1, nodes)
            record.steps, record.tokens = record.steps + 1, record.tokens + gained / tokens
            record.seconds += drafting
            record.learn(gained / tokens, (drafting + shared) / ar)
        taken = sum([outcome.taken for outcome in outcomes]) + price.ar.other_tokens
        self._tokens = _KEEP_PACE * self._tokens + taken / tokens
        passes = (verify + sum(took)) / ar
        self._passes = _KEEP_PACE * self._passes + passes
        return passes

    def _took(self, verify: float, price: Price, layers: int, cost: StepCost) -> list[float]:
        """Seconds of drafting by each drafter: its own, and its part of those of growing and learning."""
        own = cost.drafters or [cost.draft / len(self.records)] * len(self.records)
        busy = [on and seconds > 0 for on, seconds in zip(price.enabled, own, strict=True)]
        scale, rest = verify / max(cost.verify, 1e-9), max(0.0, cost.draft - sum(own)) / max(1, sum(busy))
        return [
            at_work and (layers * layer if price.fresh else record.measure((seconds + rest) * scale, layers, layer))
            for record, at_work, seconds, layer in zip(self.records, busy, own, price.layers, strict=True)
        ]
