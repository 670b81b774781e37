"""What each drafter gains and costs, and which of them draft in the next proposal.

Tokens and seconds are counted in passes of AR decoding over all requests: a pass yields one token a request. A drafter
drafts while the tokens of its trees that are accepted are expected to exceed what decoding would yield in the time that
drafting and verifying them take. Before it has drafted that is a guess from its kind and the measured costs. Records
fade: while a drafter does not draft its own comes near the guess again, and where the guess pays it is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

from ..models.cost_profile import Profile
from ..models.protocols import DraftHead
from ..request import Outcome, Request, StepCost
from .base import Candidates, SourceInfo

_CONTEXT_STEP = 64
"""Costs are looked up for contexts rounded to so many tokens."""
_DRIFT_STEP = 0.02
"""And for log-ratios rounded to this."""
_MOST_CURVES, _MOST_COSTS = 256, 4096
_KEEP_DRIFT = 0.95
"""Share of what passes have shown that each further one leaves."""
_MOST_DRIFT = math.log(4.0)
"""A pass that takes more than four times as long beside its profile as others do, or less than a fourth, is clipped."""


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


@dataclass(slots=True)
class _Drift:
    """The fading mean of log-ratios of passes to their profile."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, ratio: float) -> None:
        self.total, self.weight = _KEEP_DRIFT * self.total + ratio, _KEEP_DRIFT * self.weight + 1

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


class CostModel:
    """A target's seconds by tokens, context and batch: a pass computes no more than the tokens of its requests.

    A profile repeats one pass; between passes that draft, a pass finds its weights less often in the processor's
    caches. So AR passes drift from it, and passes over drafted nodes do. A factor common to both (another load on the
    machine) changes no choice and is left out.
    """

    def __init__(self, profile: Profile) -> None:
        self._seconds, self._ar, self._drafted = remembered(profile), _Drift(), _Drift()
        self._kept = lru_cache(_MOST_CURVES)(self._curve)

    def curve(self, nodes: int, ar: ARPass) -> Curve:
        """Of up to ``nodes`` nodes behind about ``context`` tokens, at the speed that AR passes have."""
        context = ar.context // _CONTEXT_STEP * _CONTEXT_STEP
        return self._kept(nodes, ar._replace(context=context), round(self.drift / _DRIFT_STEP))

    def _curve(self, nodes: int, ar: ARPass, drift: int) -> Curve:
        sizes = range(ar.tokens, ar.tokens + nodes + 1)
        seconds, slower = [self._of(tokens, ar) for tokens in sizes], math.exp(drift * _DRIFT_STEP)
        seconds[1:] = [second * slower for second in seconds[1:]]
        return Curve(seconds, convex_below(seconds))

    def _of(self, tokens: int, ar: ARPass) -> float:
        return self._seconds(tokens / ar.batch, ar.context, ar.batch)

    @property
    def drift(self) -> float:
        """Log-ratio of passes over drafted nodes to their profile, less that of AR passes to theirs."""
        known = min(self._ar.weight, self._drafted.weight)
        return known / (known + 1) * (self._drafted.mean - self._ar.mean) if known else 0.0

    def learn(self, nodes: int, ar: ARPass, measured: float) -> None:
        """A pass over ``nodes`` nodes in all took ``measured`` seconds; one that mostly reads prompts tells nothing."""
        if ar.other_tokens > ar.batch:
            return
        ratio = math.log(max(measured, 1e-9) / self._of(ar.tokens + nodes, ar))
        own, other = (self._drafted, self._ar) if nodes else (self._ar, self._drafted)
        if own.weight or other.weight:
            level = own.mean if own.weight else other.mean
            ratio = max(level - _MOST_DRIFT, min(level + _MOST_DRIFT, ratio))
        own.add(ratio)
        if not nodes:  # one slow pass over drafts would keep all others from being drafted
            self._drafted.weight *= _KEEP_DRIFT
            self._drafted.total *= _KEEP_DRIFT


LAYER_NODES = 1.5
"""Mean nodes of a drafted layer, whose seconds a draft model's profile gives."""
_CHEAP = 0.02
"""A drafter that takes no more of an AR pass always drafts."""
_READS = 32
"""Tokens that a model reads beside a proposal; more of a text count as reading it first."""
_FIRST, _FIRST_OF_HEAD, _FIRST_OF_MODEL = (0.6, 1, 1.0), (0.6, 1, 3.0), (2.0, 3, 1.0)
"""Tokens that a proposal gains and the layers that it takes, before any is known, and the steps that this guess counts
for: of texts, of a head, which was trained for its target and whose first steps in a process are slow, and of a draft
model."""
CONTEXT = 512
"""Tokens behind which passes are compared before there is any text."""
_GUESS_OF_MODEL = 6.0
"""Steps that the guess of a draft model counts for beside those of all requests in which it has drafted."""
_KEEP_LONG = 0.998
"""Share of these that each further step leaves: in texts of sixty tokens that a model never predicts, trying it takes
1% of AR decoding's time, and 4% in the first one of a process (``tests/policies/auto/test_gain.py``)."""
_TEXT_LAYER = 1e-4
"""Seconds of a layer that texts give, before any is measured: the first ones of a process take ten times as long."""
_KEEP, _KEEP_UNUSED = 0.94, 0.98
"""Share of a record that each further step leaves in which the drafter drafts, and in which it does not."""
_KEEP_ANEW = 0.5
"""And what a new request's first step leaves, where it is alone: its text is another one."""
_KEEP_PACE, _FIRST_PASSES = 0.95, 6.0
"""The same of the pace, which begins with so many AR passes."""
_MOST = 4.0
"""A proposal that takes so many times as long as expected, or longer, counts as so many: a stall is no cost."""


def may_pay(target: Profile, drafter: Profile) -> bool:
    """Whether a draft model is expected to gain more than it costs, before it has drafted anything."""
    gain, layers, _ = _FIRST_OF_MODEL
    ar = target.seconds(1, CONTEXT)
    verifying = target.seconds(1 + layers, CONTEXT) - ar
    return verifying + layers * drafter.seconds(LAYER_NODES, CONTEXT) < gain * ar


class Record:
    """What one drafter has gained and cost.

    Args:
        source: the drafter; None: unknown.
        profiles: measured costs of the models that make passes for it, by ``id``.
        profile: of these, that of the model that makes one pass a layer; None: there is none.

    Attributes:
        on: it drafts in the step that was begun last.
        steps, tokens, seconds: how often it drafted, accepted tokens of its trees, what drafting took.
        rate: of decoding with it, of AR decoding's, as it was expected when that was settled last.
    """

    def __init__(
        self,
        source: SourceInfo | None = None,
        profiles: Mapping[int, Profile] | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.source, self._profiles = source, profiles or {}
        self.on, self.steps, self.tokens, self.seconds, self.rate = True, 0, 0.0, 0.0, 1.0
        self._scale = 1.0 if profile else _TEXT_LAYER  # seconds of a layer over the profile's; without one, seconds
        self._pass = remembered(profile) if profile else None
        self._gained = self._spent = self._weight = 0.0
        self._long = (0.0, 0.0, 0.0)  # these over all requests, which fade more slowly
        model = source.model if source else None
        self._first = _FIRST if model is None else _FIRST_OF_HEAD if isinstance(model, DraftHead) else _FIRST_OF_MODEL

    def reading(self, requests: Sequence[Request]) -> float:
        """Seconds in which its models read what they have not read of these requests."""
        unread = [pair for request in requests if self.source for pair in self.source.unread(request)]
        return sum([self._profiles[id(model)].seconds(n, n) for model, n in unread if n > _READS])

    def layer(self, ar: ARPass) -> float:
        """Seconds of drafting one layer."""
        return self._scale * (self._pass(LAYER_NODES, ar.context, ar.batch) if self._pass else 1.0)

    def expected(self, curve: Curve, ar: ARPass) -> tuple[float, float]:
        """Tokens that drafting gains a step, and AR passes that it and verifying the drafts take."""
        gain, layers, weight = self._first
        nodes = min(layers * ar.batch, len(curve.below) - 1)
        passes = (curve.below[nodes] - curve.seconds[0] + layers * self.layer(ar)) / curve.seconds[0]
        if self._first is _FIRST_OF_MODEL:  # mixed with what it has gained and spent in all requests
            gained, spent, steps = self._long
            all_steps = _GUESS_OF_MODEL + steps
            gain = (_GUESS_OF_MODEL * gain + gained) / all_steps
            passes = (_GUESS_OF_MODEL * passes + spent) / all_steps
        total = weight + self._weight
        return (weight * gain + self._gained) / total, (weight * passes + self._spent) / total

    def pays(self, reading: float, left: int, curve: Curve, ar: ARPass, pace: float) -> bool:
        """Whether it drafts for requests that have ``left`` tokens to go, if reading their texts comes first."""
        if not reading and self.layer(ar) <= _CHEAP * curve.seconds[0]:
            return True
        gained, spent = self.expected(curve, ar)
        value, steps = gained - pace * spent, left / (1 + gained)
        self.rate = left / (steps * (1 + spent) + reading / curve.seconds[0])
        return value > 0 and reading <= left * value / (1 + value) * curve.seconds[0]

    def measure(self, seconds: float, layers: int, layer: float) -> float:
        """Drafting ``layers`` of ``layer`` seconds each took so many; those of them that count."""
        expected = (layers + 1) * layer  # it reads what was committed, too
        counted = min(_MOST, max(1 / _MOST, seconds / expected))
        self._scale *= 0.95 + 0.05 * counted
        return counted * expected

    def learn(self, gained: float, spent: float) -> None:
        """In one step it has gained so many tokens a request and spent so many AR passes."""
        self.fade(_KEEP)
        self._gained, self._spent, self._weight = self._gained + gained, self._spent + spent, self._weight + 1
        self._long = self._long[0] + gained, self._long[1] + spent, self._long[2] + 1

    def fade(self, keep: float) -> None:
        """Leave so much of the record."""
        self._gained, self._spent, self._weight = keep * self._gained, keep * self._spent, keep * self._weight
        if keep < 1:
            gained, spent, steps = self._long
            self._long = _KEEP_LONG * gained, _KEEP_LONG * spent, _KEEP_LONG * steps


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

    def choose(self, requests: Sequence[Request], curve: Curve, ar: ARPass) -> Price:
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

    def rest(self) -> None:
        """A step is over in which nothing could draft."""
        for record in self.records:
            record.fade(_KEEP_UNUSED)
        self._tokens, self._passes = _KEEP_PACE * self._tokens + 1, _KEEP_PACE * self._passes + 1

    def _took(self, verify: float, price: Price, layers: int, cost: StepCost) -> list[float]:
        """Seconds of drafting by each drafter: its own, and its part of those of growing and learning."""
        own = cost.drafters or [cost.draft / len(self.records)] * len(self.records)
        busy = [on and seconds > 0 for on, seconds in zip(price.enabled, own, strict=True)]
        scale, rest = verify / max(cost.verify, 1e-9), max(0.0, cost.draft - sum(own)) / max(1, sum(busy))
        return [
            at_work and (layers * layer if price.fresh else record.measure((seconds + rest) * scale, layers, layer))
            for record, at_work, seconds, layer in zip(self.records, busy, own, price.layers, strict=True)
        ]


_PRIOR = 1.5
"""Fisher information before any trial: of six trials at p = 1/2."""
_KEEP_INFORMATION = 0.998
"""Share of the information beyond it that each further trial leaves."""
_MOST_SHIFT = 4.0
"""Largest correction of log-odds."""
_LEAST = 0.01
"""Candidates that are less likely teach nothing."""
_ONWARD, _TRIALS, _KEEP_TRIALS = 0.6, 10.0, 0.98
"""How often first candidates are right: before any trial, which counts for so many, and what a further trial leaves."""


class Calibration:
    """The log-odds of draft probabilities, shifted by what trials show (one step of Newton's method a trial)."""

    def __init__(self) -> None:
        self._shift, self._odds, self._information = 0.0, 1.0, _PRIOR

    def acceptance(self, probability: float) -> float:
        """How probable it is that a candidate of this draft probability is accepted; no child exceeds its parent."""
        odds = self._odds * probability
        return odds / max(1.0 - probability + odds, 1e-6)

    def learn(self, probability: float, hit: bool) -> None:
        """A child of an accepted node, verified or not: the text shows whether it is right."""
        q = self.acceptance(probability)
        self._information = _PRIOR + _KEEP_INFORMATION * (self._information - _PRIOR) + q * (1.0 - q)
        self._shift = min(_MOST_SHIFT, max(-_MOST_SHIFT, self._shift + (hit - q) / self._information))
        self._odds = math.exp(self._shift)


class Trust:
    """What has been learned of one drafter's probabilities: its first candidates and all others are judged apart."""

    def __init__(self) -> None:
        self._first, self._others = Calibration(), Calibration()
        self._right, self._trials = _ONWARD * _TRIALS, _TRIALS

    @property
    def onward(self) -> float:
        """How often a first candidate is right below a token that was."""
        return self._right / self._trials

    def acceptance(self, found: Candidates) -> list[float]:
        """[K] how probable it is that each of a node's candidates is accepted if the node is."""
        first, others = self._first.acceptance, self._others.acceptance
        return [(others if rank else first)(math.exp(logprob)) for rank, logprob in enumerate(found.logprobs)]

    def learn(self, found: Candidates, token: int) -> None:
        """What followed a node in the text was this token."""
        self._right = _KEEP_TRIALS * self._right + (found.tokens[0] == token)
        self._trials = _KEEP_TRIALS * self._trials + 1
        for rank, (guess, logprob) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
            if (p := math.exp(logprob)) > _LEAST:
                (self._others if rank else self._first).learn(p, guess == token)
