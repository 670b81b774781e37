"""What each drafter gains and costs, and which of them draft in the next proposal.

Tokens and seconds are counted in passes of AR decoding over all requests: a pass yields one token a request. A drafter
has an account: the tokens of its trees that were accepted, less what drafting and verifying them took. While it has
credit it drafts; without any it pauses, and is tried again. So what it may lose is bounded (``AutoSettings``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

from ..config import Checked, Count, LearningRate, Positive
from ..models.cost_profile import Profile
from ..request import Outcome, Request, StepCost
from .base import Candidates, SourceInfo

_CONTEXT_STEP = 64
"""Costs are looked up for contexts rounded to so many tokens."""
_DRIFT_STEP = 0.02
"""And for log-ratios rounded to this."""
_MOST_CURVES, _MOST_COSTS = 256, 4096
_KEEP_DRIFT, _KEEP_DRAFTED = 0.995, 0.95
"""Share of what passes have shown that each further one leaves; of passes over drafts what an AR pass leaves: one slow
pass would keep all others from being drafted."""
_MOST_DRIFT = math.log(2.0)
"""A pass that takes more than twice as long beside its profile as others do, or less than half, is clipped."""
_PROFILE = 0.3
"""AR passes that the profile counts as."""
_AR_SHARE = 0.2
"""Of the square root of the drafted passes so many AR passes are wanted: else nobody knows what drafts cost."""


class ARPass(NamedTuple):
    """A pass without drafts: over ``batch`` requests of up to ``context`` tokens, and ``other_tokens`` of others."""

    context: int
    batch: int
    other_tokens: int = 0

    @property
    def tokens(self) -> int:
        """That it computes, and as many it yields: one read of a prompt counts as one generated."""
        return self.batch + self.other_tokens


class Curve(NamedTuple):
    """Seconds of verifying 0, 1, ... N nodes in all.

    Attributes:
        seconds: [N + 1].
        below: [N + 1] the largest convex curve that is nowhere above: behind the dents and steps of ``seconds`` larger
            sizes may pay.
    """

    seconds: list[float]
    below: list[float]


def remembered(profile: Profile) -> Callable[[float, int, int], float]:
    """Its ``seconds`` of nodes, context and batch, for contexts rounded down."""
    kept = lru_cache(_MOST_COSTS)(profile.seconds)
    return lambda nodes, context, batch: kept(nodes, context // _CONTEXT_STEP * _CONTEXT_STEP, batch)


def convex_below(curve: list[float]) -> list[float]:
    """The largest convex curve that is nowhere above ``curve``."""
    corners = list[int]()
    for at in range(len(curve)):
        while len(corners) > 1:
            first, middle = corners[-2:]
            if (curve[middle] - curve[first]) * (at - first) < (curve[at] - curve[first]) * (middle - first):
                break
            corners.pop()  # it is on or above the line from the corner before it
        corners.append(at)
    found = curve[:1]
    for left, right in zip(corners, corners[1:], strict=False):
        slope = (curve[right] - curve[left]) / (right - left)
        found += [curve[left] + slope * step for step in range(1, right - left + 1)]
    return found


class _Drift:
    """The fading mean of log-ratios of passes to their profile."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, ratio: float) -> None:
        self.total, self.weight = self.total + ratio, self.weight + 1

    def fade(self, keep: float = _KEEP_DRIFT) -> None:
        self.total, self.weight = keep * self.total, keep * self.weight

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


_OWN = 2.0
"""Passes of its size that count as much as the level of all drafted passes."""


def _size(tokens: int) -> int:
    """The class of passes over 1, 2, 3 to 4, 5 to 8, 9 to 16, ... tokens."""
    return (tokens - 1).bit_length()


class CostModel:
    """A target's seconds by tokens, context and batch: a pass computes no more than the tokens of its requests.

    A profile may have the wrong shape, and repeats one pass; between passes that draft, a pass finds its weights less
    often in the processor's caches. So what live passes take overrules it: AR passes have their log-ratio to it, and
    passes over drafted nodes one for each class of sizes, shrunk to that of all of them. A factor common to all
    (another load on the machine) changes no choice and is left out.
    """

    def __init__(self, profile: Profile) -> None:
        self._seconds, self._ar, self._drafted = remembered(profile), _Drift(), _Drift()
        self._sizes: dict[int, _Drift] = {}
        self._kept = lru_cache(_MOST_CURVES)(self._curve)

    def curve(self, nodes: int, ar: ARPass) -> Curve:
        """Of up to ``nodes`` nodes behind about ``context`` tokens, at the speed that AR passes have."""
        context = ar.context // _CONTEXT_STEP * _CONTEXT_STEP
        sizes = range(_size(ar.tokens + 1), _size(ar.tokens + nodes) + 1)
        drifts = tuple([round(self._drift(size) / _DRIFT_STEP) for size in sizes])
        return self._kept(nodes, ar._replace(context=context), drifts)

    def _curve(self, nodes: int, ar: ARPass, drifts: tuple[int, ...]) -> Curve:
        first, slower = _size(ar.tokens + 1), [math.exp(drift * _DRIFT_STEP) for drift in drifts]
        drafted = range(ar.tokens + 1, ar.tokens + nodes + 1)
        seconds = [self._of(ar.tokens, ar)]
        seconds += [self._of(tokens, ar) * slower[_size(tokens) - first] for tokens in drafted]
        return Curve(seconds, convex_below(seconds))

    def _of(self, tokens: int, ar: ARPass) -> float:
        return self._seconds(tokens / ar.batch, ar.context, ar.batch)

    def _drift(self, size: int) -> float:
        """Log-ratio of passes over drafted nodes of this class to their profile, less that of AR passes to theirs."""
        known = min(self._ar.weight, self._drafted.weight)
        if not known:
            return 0.0
        own, common = self._sizes.get(size, _Drift()), self._drafted.mean
        level = (own.total + _OWN * common) / (own.weight + _OWN)
        return known / (known + _PROFILE) * (level - self._ar.mean)

    @property
    def wants_ar(self) -> bool:
        """An AR pass is to be made now: there were too few of them."""
        return self._ar.weight < _AR_SHARE * math.sqrt(self._drafted.weight)

    def learn(self, nodes: int, ar: ARPass, measured: float) -> None:
        """A pass over ``nodes`` nodes in all took ``measured`` seconds; one that mostly reads prompts tells nothing."""
        if ar.other_tokens > ar.batch:
            return
        ratio = math.log(max(measured, 1e-9) / self._of(ar.tokens + nodes, ar))
        own, other = (self._drafted, self._ar) if nodes else (self._ar, self._drafted)
        if own.weight or other.weight:
            level = own.mean if own.weight else other.mean
            ratio = max(level - _MOST_DRIFT, min(level + _MOST_DRIFT, ratio))
        self._ar.fade()
        for drift in (self._drafted, *self._sizes.values()):
            drift.fade(_KEEP_DRIFT if nodes else _KEEP_DRAFTED)
        own.add(ratio)
        if nodes:
            self._sizes.setdefault(_size(ar.tokens + nodes), _Drift()).add(ratio)


LAYER_NODES = 1.5
"""Mean nodes of a drafted layer, whose seconds a draft model's profile gives."""
CONTEXT = 512
"""Tokens behind which passes are compared before there is any text."""
_READS = 32
"""Tokens that a model reads beside a proposal; more of a text count as reading it first."""
_MOST = 4.0
"""A proposal that takes so many times as long as expected, or longer, counts as so many: a stall is no cost."""


@dataclass(frozen=True, slots=True)
class AutoSettings(Checked):
    """What ``auto`` starts with and how fast it learns; docs/how-it-works/auto.md has what chose each number.

    Attributes:
        credit: AR passes that a drafter may lose before it is off, and as many by reading texts for nothing.
        again: that it may lose each time it is tried again.
        pause, longest: steps until it is tried again, twice as many each time up to the longest. Once it has gained
            all of its credit, the first pause counts again.
        keep: share of what steps have shown that each further one leaves.
        prior: steps that the assumptions before the first one count as.
        onward: of these, how often first candidates are right.
        text_layer: seconds of a layer that texts give, before any is measured.
    """

    credit: Positive = 4.0
    again: Positive = 1.0
    pause: Count = 8
    longest: Count = 128
    keep: LearningRate = 0.99
    prior: Positive = 10.0
    onward: LearningRate = 0.6
    text_layer: Positive = 1e-4


def may_pay(target: Profile, drafter: Profile) -> bool:
    """Whether three layers of a draft model, of which two tokens are accepted, cost less than two AR passes."""
    ar = target.seconds(1, CONTEXT)
    return target.seconds(4, CONTEXT) - ar + 3 * drafter.seconds(LAYER_NODES, CONTEXT) < 2 * ar


class Account:
    """AR passes that a drafter may still lose; without any it pauses.

    Attributes:
        balance: what it has gained and not spent, within the credit.
        pausing: steps until it is tried again; 0: it may draft.
    """

    def __init__(self, settings: AutoSettings) -> None:
        self._settings, self.balance, self.pausing, self._pause = settings, settings.credit, 0, settings.pause

    def add(self, passes: float) -> None:
        """A step gained so many AR passes, or lost them."""
        settings = self._settings
        self.balance = min(settings.credit, self.balance + passes)
        if self.balance == settings.credit:
            self._pause = settings.pause
        elif self.balance <= 0:
            self.balance, self.pausing = settings.again, self._pause
            self._pause = min(2 * self._pause, settings.longest)

    def rest(self) -> None:
        """A step without it is over."""
        self.pausing = max(0, self.pausing - 1)


class Record:
    """What one drafter has gained and cost.

    Args:
        source: the drafter; None: unknown.
        profiles: measured costs of the models that make passes for it, by ``id``.
        profile: of these, that of the model that makes one pass a layer; None: there is none.

    Attributes:
        on: it drafts in the step that was begun last.
        steps, tokens, seconds: how often it drafted, accepted tokens of its trees, what drafting took.
        token: AR passes that drafting and verifying one token took, when that was settled last.
        drafting, texts: what it may still lose by drafting, and by that and by reading texts.
    """

    def __init__(
        self,
        settings: AutoSettings,
        source: SourceInfo | None = None,
        profiles: Mapping[int, Profile] | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.source, self._profiles = source, profiles or {}
        self.on, self.steps, self.tokens, self.seconds, self.token = True, 0, 0.0, 0.0, 0.0
        self._scale = 1.0 if profile else settings.text_layer  # seconds of a layer over the profile's, or seconds
        self._pass = remembered(profile) if profile else None
        self.drafting, self.texts = Account(settings), Account(settings)

    def reading(self, requests: Sequence[Request]) -> float:
        """Seconds in which its models read what they have not read of these requests."""
        unread = [pair for request in requests if self.source for pair in self.source.unread(request)]
        return sum([self._profiles[id(model)].seconds(n, n) for model, n in unread if n > _READS])

    def layer(self, ar: ARPass) -> float:
        """Seconds of drafting one layer."""
        return self._scale * (self._pass(LAYER_NODES, ar.context, ar.batch) if self._pass else 1.0)

    def settle(self, reading: float, left: int, curve: Curve, ar: ARPass) -> None:
        """Decide whether it drafts for requests that have ``left`` tokens to go, if reading their texts comes first."""
        ar_pass, nodes = curve.seconds[0], min(ar.batch, len(curve.below) - 1)
        self.token = (self.layer(ar) + curve.below[nodes] - ar_pass) / ar_pass
        could = left * (1 - self.token) > reading / ar_pass  # were each first token right
        self.on = could and not self.drafting.pausing and not (reading and self.texts.pausing)

    def measure(self, seconds: float, layers: int, layer: float) -> float:
        """Drafting ``layers`` of ``layer`` seconds each took so many; those of them that count."""
        expected = (layers + 1) * layer  # it reads what was committed, too
        counted = min(_MOST, max(1 / _MOST, seconds / expected))
        self._scale *= 0.95 + 0.05 * counted
        return counted * expected


class Price(NamedTuple):
    """What one step's drafting and verifying take.

    Attributes:
        ar: the pass without drafts.
        curve: seconds of verifying.
        rate: tokens a second that the step must yield.
        enabled: [D] which drafters draft.
        layers: [D] seconds of one layer by each, 0 if it does not draft.
        reading: [D] seconds in which a model reads much of a text first, so that measured ones are not those of layers.
    """

    ar: ARPass
    curve: Curve
    rate: float
    enabled: tuple[bool, ...]
    layers: tuple[float, ...]
    reading: tuple[float, ...]


class Selection:
    """The drafters of a policy.

    Attributes:
        records: one each.
        pace: tokens an AR pass that decoding has yielded lately, at least 1.
    """

    def __init__(self, settings: AutoSettings, records: Sequence[Record]) -> None:
        self._settings, self.records = settings, records
        self._tokens = self._passes = settings.prior

    @property
    def pace(self) -> float:
        return max(1.0, self._tokens / self._passes)

    def choose(self, requests: Sequence[Request], curve: Curve, ar: ARPass) -> Price:
        """Settle which drafters draft, and what they cost."""
        left = max([request.tokens_left for request in requests])
        reading = tuple([record.reading(requests) for record in self.records])
        for record, seconds in zip(self.records, reading, strict=True):
            record.settle(seconds, left, curve, ar)
        enabled = tuple([record.on for record in self.records])
        layers = tuple([record.on * record.layer(ar) for record in self.records])
        return Price(ar, curve, ar.tokens * self.pace / curve.seconds[0], enabled, layers, reading)

    def learn(self, price: Price, layers: int, nodes: int, outcomes: Sequence[Outcome]) -> float:
        """A step is over; returns the AR passes that it took, at the speed of the profile.

        ``layers``: that drafters made a pass for; ``nodes``: that were verified.
        """
        tokens, ar, verify = price.ar.tokens, price.curve.seconds[0], price.curve.seconds[nodes]
        took = self._took(verify, price, layers, outcomes[0].step)
        for index, (record, drafting) in enumerate(zip(self.records, took, strict=True)):
            own = [outcome for outcome in outcomes if outcome.tree.part == index or not len(outcome.tree)]
            if not price.enabled[index] or not own:
                record.drafting.rest()
                record.texts.rest()
                continue
            gained = sum([len(outcome.path[: outcome.taken - 1]) for outcome in own]) / tokens
            shared = max(0.0, verify - ar) * sum([len(outcome.tree) for outcome in own]) / max(1, nodes)
            record.steps, record.tokens = record.steps + 1, record.tokens + gained
            record.seconds += drafting
            value = gained - (drafting + shared) / ar
            record.drafting.add(value)
            record.texts.add(value - price.reading[index] / ar)
        taken = sum([outcome.taken for outcome in outcomes]) + price.ar.other_tokens
        passes = (verify + sum(took)) / ar
        self._learn(taken / tokens, passes)
        return passes

    def _learn(self, tokens: float, passes: float) -> None:
        keep = self._settings.keep
        self._tokens, self._passes = keep * self._tokens + tokens, keep * self._passes + passes

    def rest(self) -> None:
        """A step is over in which nothing could draft."""
        for record in self.records:
            record.drafting.rest()
            record.texts.rest()
        self._learn(1.0, 1.0)

    def _took(self, verify: float, price: Price, layers: int, cost: StepCost) -> list[float]:
        """Seconds of drafting by each drafter: its own, and its part of those of growing and learning."""
        own = cost.drafters or [cost.draft / len(self.records)] * len(self.records)
        busy = [on and seconds > 0 for on, seconds in zip(price.enabled, own, strict=True)]
        scale, rest = verify / max(cost.verify, 1e-9), max(0.0, cost.draft - sum(own)) / max(1, sum(busy))
        fresh = any(compress(price.reading, price.enabled))
        return [
            at_work and (layers * layer if fresh else record.measure((seconds + rest) * scale, layers, layer))
            for record, at_work, seconds, layer in zip(self.records, busy, own, price.layers, strict=True)
        ]


class Trust:
    """How often one drafter's first candidates are right, and how often they should be by their probabilities."""

    def __init__(self, settings: AutoSettings) -> None:
        self._keep = settings.keep
        self._trials = settings.prior
        self._right = self._said = settings.onward * self._trials

    @property
    def onward(self) -> float:
        """How often a first candidate is right below a token that was."""
        return self._right / self._trials

    def acceptance(self, found: Candidates) -> list[float]:
        """[K] how probable it is that each of a node's candidates is accepted if the node is.

        If first ones are right more often than they say, the others share what that leaves.
        """
        if not found.tokens:
            return []
        scale, (said, *others) = self._right / self._said, map(math.exp, found.logprobs)
        first = min(1.0, scale * said)
        rest = min(scale, (1.0 - first) / (1.0 - said)) if said < 1.0 else 0.0
        return [first, *[rest * other for other in others]]

    def learn(self, found: Candidates, token: int) -> None:
        """What followed a node in the text was this token."""
        self._right = self._keep * self._right + (found.tokens[0] == token)
        self._said = self._keep * self._said + math.exp(found.logprobs[0])
        self._trials = self._keep * self._trials + 1
