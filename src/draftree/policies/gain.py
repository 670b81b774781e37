"""What each drafter gains and costs, and which of them draft in the next proposal.

Tokens and seconds are counted in passes of AR decoding over all requests: a pass yields one token a request. A drafter
has an account: the tokens of its trees that were accepted, less what drafting and verifying them took. While it has
credit it drafts; without any it pauses, and is tried again. So what it may lose is bounded (``AutoSettings``). A model
that must read a prompt first has a second account of that, and reads where what it has lately gained a step pays for it
in an answer of the usual length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from ..config import Checked, Count, LearningRate, Positive
from ..models.cost_profile import Profile
from ..request import Outcome, Request, StepCost
from .base import Candidates, SourceInfo
from .live_costs import ARPass, Curve, remembered

LAYER_NODES = 1.5
"""Mean nodes of a drafted layer, whose seconds a draft model's profile gives."""
CONTEXT = 512
"""Tokens behind which passes are compared before there is any text."""
_READS = 32
"""Tokens that a model reads beside a proposal; more of a text count as reading it first."""
_EARNED = 2
"""Credits that the account of reading prompts holds at most, and owes at most: a prompt may take more than one."""
_MOST = 4.0
"""A proposal that takes so many times as long as expected, or longer, counts as so many: a stall is no cost."""


@dataclass(frozen=True, slots=True)
class AutoSettings(Checked):
    """What ``auto`` starts with and how fast it learns; docs/how-it-works/auto.md has what chose each number.

    Attributes:
        credit: AR passes that a drafter may lose before it is off, and as many by reading prompts for nothing.
        again: that it may lose each time it is tried again.
        pause, longest: steps until it is tried again, twice as many each time up to the longest. Once it has gained
            all of its credit, the first pause counts again. Reading prompts may lose what one try does, each
            ``longest`` steps.
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
        drafting: what it may still lose by drafting.
        prompts: AR passes that it may still lose by reading prompts and drafting; less than 0: it reads none.
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
        self._settings, self._proposals, self._gained, self._trials = settings, 0, 0.0, 0.0
        self.drafting, self.prompts = Account(settings), settings.credit

    def reading(self, requests: Sequence[Request]) -> float:
        """Seconds in which its models read what they have not read of these requests."""
        unread = [pair for request in requests if self.source for pair in self.source.unread(request)]
        return sum([self._profiles[id(model)].seconds(n, n) for model, n in unread if n > _READS])

    def layer(self, ar: ARPass) -> float:
        """Seconds of drafting one layer."""
        return self._scale * (self._pass(LAYER_NODES, ar.context, ar.batch) if self._pass else 1.0)

    def settle(self, reading: float, left: float, curve: Curve, ar: ARPass) -> None:
        """Decide whether it drafts for requests that have about ``left`` tokens to go.

        ``reading``: seconds in which it reads their prompts first.
        """
        ar_pass, nodes = curve.seconds[0], min(ar.batch, len(curve.below) - 1)
        self.token = (self.layer(ar) + curve.below[nodes] - ar_pass) / ar_pass
        self.on = self.token < 1 and not self.drafting.pausing  # were each first token right, it would pay
        if self.on and reading:
            prior = self._settings.prior
            gain = max(0.0, (prior * (self._settings.onward - self.token) + self._gained) / (prior + self._trials))
            self.on = self.prompts > 0 and left * gain > (1 + gain) * reading / ar_pass

    def add(self, gained: float, reading: float) -> None:
        """It drafted in a step that gained so many AR passes beside what reading prompts took."""
        keep, settings = self._settings.keep, self._settings
        self._gained, self._trials = keep * self._gained + gained, keep * self._trials + 1
        self.drafting.add(gained)
        self.prompts = max(-_EARNED * settings.credit, min(_EARNED * settings.credit, self.prompts + gained - reading))

    def rest(self) -> None:
        """A step without it is over: it is tried again some day."""
        keep, settings = self._settings.keep, self._settings
        self._gained, self._trials = keep * self._gained, keep * self._trials
        self.drafting.rest()
        self.prompts = max(self.prompts, min(settings.credit, self.prompts + settings.again / settings.longest))

    def measure(self, seconds: float, layers: int, layer: float) -> float:
        """Drafting ``layers`` of ``layer`` seconds each took so many; those of them that count."""
        expected = (layers + 1) * layer  # it reads what was committed, too
        self._proposals += 1
        counted = seconds / expected
        if self._pass or self._proposals > 1:
            counted = min(_MOST, max(1 / _MOST, counted))
        share = max(0.05, 1 / (self._proposals + bool(self._pass)))  # what texts take is an assumption until then
        self._scale *= 1 - share + share * counted
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
        self._answers = self._written = 0.0  # that were begun, and tokens of all of them
        self._length = math.inf  # tokens of an answer

    @property
    def pace(self) -> float:
        return max(1.0, self._tokens / self._passes)

    def choose(self, requests: Sequence[Request], curve: Curve, ar: ARPass) -> Price:
        """Settle which drafters draft, and what they cost."""
        self._begin(sum([not request.stats.steps for request in requests]))
        left = min(self._length, max([request.tokens_left for request in requests]))
        reading = tuple([record.reading(requests) for record in self.records])
        for record, seconds in zip(self.records, reading, strict=True):
            record.settle(seconds, left, curve, ar)
        enabled = tuple([record.on for record in self.records])
        layers = tuple([record.on * record.layer(ar) for record in self.records])
        return Price(ar, curve, ar.tokens * self.pace / curve.seconds[0], enabled, layers, reading)

    def _begin(self, answers: int) -> None:
        """So many answers begin."""
        if answers and self._answers:
            self._length = self._written / self._answers
        for _ in range(answers):
            keep = self._settings.keep
            self._answers, self._written = keep * self._answers + 1, keep * self._written

    def learn(self, price: Price, layers: int, nodes: int, outcomes: Sequence[Outcome]) -> float:
        """A step is over; returns the AR passes that it took, at the speed of the profile.

        ``layers``: that drafters made a pass for; ``nodes``: that were verified.
        """
        tokens, ar, verify = price.ar.tokens, price.curve.seconds[0], price.curve.seconds[nodes]
        took = self._took(verify, price, layers, outcomes[0].step)
        for index, (record, drafting) in enumerate(zip(self.records, took, strict=True)):
            own = [outcome for outcome in outcomes if outcome.tree.part == index or not len(outcome.tree)]
            if not price.enabled[index] or not own:
                record.rest()
                continue
            gained = sum([len(outcome.path[: outcome.taken - 1]) for outcome in own]) / tokens
            shared = max(0.0, verify - ar) * sum([len(outcome.tree) for outcome in own]) / max(1, nodes)
            record.steps, record.tokens = record.steps + 1, record.tokens + gained
            record.seconds += drafting
            record.add(gained - (drafting + shared) / ar, price.reading[index] / ar)
        taken, passes = sum([outcome.taken for outcome in outcomes]), (verify + sum(took)) / ar
        self._learn(taken, (taken + price.ar.other_tokens) / tokens, passes)
        return passes

    def _learn(self, written: int, tokens: float, passes: float) -> None:
        keep = self._settings.keep
        self._written += written
        self._tokens, self._passes = keep * self._tokens + tokens, keep * self._passes + passes

    def rest(self, requests: int) -> None:
        """A step of so many requests is over in which nothing could draft."""
        for record in self.records:
            record.rest()
        self._learn(requests, 1.0, 1.0)

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

    @property
    def scale(self) -> float:
        """How much more often candidates are accepted than by their probabilities."""
        return self._right / self._said

    def acceptance(self, found: Candidates) -> list[float]:
        """[K] how probable it is that each of a node's candidates is accepted if the node is.

        If first ones are right more often than they say, the others share what that leaves.
        """
        if not found.tokens:
            return []
        scale, (said, *others) = self.scale, map(math.exp, found.logprobs)
        first = min(1.0, scale * said)
        rest = min(scale, (1.0 - first) / (1.0 - said)) if said < 1.0 else 0.0
        return [first, *[rest * other for other in others]]

    def learn(self, right: bool, logprob: float) -> None:
        """The first candidate of a node was right or not, and had this log-probability."""
        self._right = self._keep * self._right + right
        self._said = self._keep * self._said + math.exp(logprob)
        self._trials = self._keep * self._trials + 1
