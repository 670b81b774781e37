"""What each drafter gains and costs, and which of them draft in the next proposal.

Tokens and seconds are counted in passes of AR decoding over all requests: a pass yields one token a request. A drafter
has an account: the tokens of its trees that were accepted, less what drafting and verifying them took. While it has
credit it drafts; without any it pauses, and is tried again. So what it may lose is bounded (``AutoSettings``). A model
that must read a prompt first has a second account of that (``PromptAccount``): it reads where what it has lately gained
a step pays for that in an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

from ..config import Checked, Count, LearningRate, Positive
from ..models.cost_profile import Profile
from ..request import Outcome, Request
from .base import Candidates, SourceInfo, Trial
from .live_costs import MOST_COSTS, ARPass, Curve

LAYER_NODES = 1.5
"""Mean nodes of a drafted layer, whose seconds a draft model's profile gives."""
CONTEXT = 512
"""Tokens behind which passes are compared before there is any text."""
_READS = 32
"""Tokens that a model reads beside a proposal; more of a text count as reading it first."""
_MOST = 4.0
"""A proposal counts as at most so many times its expected seconds, so that a stall of the machine is no cost."""

_EARNED = 2
"""Credits that the account of reading prompts holds at most, and owes at most: a prompt may take more than one."""


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
        text_layer, model_layer: seconds of a layer that texts give, and of one beside its model's pass in a loop of its
            own, before any is measured.
    """

    credit: Positive = 4.0
    again: Positive = 1.0
    pause: Count = 8
    longest: Count = 128
    keep: LearningRate = 0.99
    prior: Positive = 10.0
    onward: LearningRate = 0.6
    text_layer: Positive = 1e-4
    model_layer: Positive = 5e-4


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

    def __init__(self, settings: AutoSettings, share: float) -> None:
        self._settings, self._share, self.pausing, self._pause = settings, share, 0, settings.pause
        self.balance = share * settings.credit

    def add(self, passes: float) -> None:
        """A step gained so many AR passes, or lost them."""
        settings, credit = self._settings, self._share * self._settings.credit
        self.balance = min(credit, self.balance + passes)
        if self.balance == credit:
            self._pause = settings.pause
        elif self.balance <= 0:
            self.balance, self.pausing = self._share * settings.again, self._pause
            self._pause = min(2 * self._pause, settings.longest)


class Answers:
    """How long answers are.

    Attributes:
        length: mean tokens of those so far; infinite before the first has ended.
    """

    def __init__(self, keep: float) -> None:
        self._keep, self.length, self._begun, self._written = keep, math.inf, 0.0, 0.0

    def begin(self, answers: int) -> None:
        """Count so many new answers; ``length`` is that of the earlier ones."""
        if answers and self._begun:
            self.length = self._written / self._begun
        for _ in range(answers):
            self._begun, self._written = self._keep * self._begun + 1, self._keep * self._written

    def write(self, tokens: int) -> None:
        """Count the tokens of a step."""
        self._written += tokens


class PromptAccount:
    """What one drafter gains a step, and what it may still lose by reading prompts: by long ones and short ones apart.

    Where a long prompt was read for nothing, a short one may still pay: prompts that take at most 1, 2, 4, ...
    AR passes to read have a balance each, to which the steps until another prompt count.

    Args:
        credit: AR passes that it may lose at first.
        allowance: that it may lose more with each step without it.
        keep: share of what steps have shown that each further one leaves.
        prior: steps that the assumption before the first one counts as.
    """

    def __init__(self, credit: float, allowance: float, keep: float, prior: float) -> None:
        self._credit, self._allowance, self._keep, self._prior = credit, allowance, keep, prior
        self._balances, self._size = dict[int, float](), 0
        self._gained = self._steps = 0.0

    def may_read(self, reading: float, left: float, assumed: float) -> bool:
        """Whether reading, which takes so many AR passes, pays in ``left`` tokens.

        ``assumed``: AR passes that a step gains, before any has shown it.
        """
        self._size = max(0, math.ceil(math.log2(reading)))
        gain = max(0.0, (self._prior * assumed + self._gained) / (self._prior + self._steps))
        return self._balances.get(self._size, self._credit) > 0 and left * gain > (1 + gain) * reading

    def add(self, gained: float, reading: float) -> None:
        """It drafted in a step that gained so many AR passes, beside what reading took."""
        self._gained, self._steps = self._keep * self._gained + gained, self._keep * self._steps + 1
        most, balance = _EARNED * self._credit, self._balances.get(self._size, self._credit)
        self._balances[self._size] = max(-most, min(most, balance + gained - reading))

    def rest(self) -> None:
        """A step without it is over: what is assumed counts again, in the end."""
        self._gained, self._steps = self._keep * self._gained, self._keep * self._steps
        balance = self._balances.get(self._size, self._credit)
        self._balances[self._size] = max(balance, min(self._credit, balance + self._allowance))


class Record:
    """What one drafter has gained and cost.

    Args:
        source: the drafter; None: unknown.
        profiles: measured costs of the models that make passes for it, by ``id``.
        profile: of these, that of the model that makes one pass a layer; None: there is none.

    Attributes:
        on: it drafts in the step that was begun last.
        layer: seconds of drafting one layer in that step.
        reading: seconds in which a model reads much of a text first, so that measured ones are not those of layers.
        steps, tokens, seconds: how often it drafted, accepted tokens of its trees, what drafting took.
        token: what drafting and verifying a token of each request takes over what an AR pass takes for as many tokens,
            when that was settled last.
        drafting: what it may still lose by drafting for about as many requests as it was settled for last.
        prompts: what it may still lose by reading prompts and drafting for as many.
    """

    def __init__(
        self,
        settings: AutoSettings,
        source: SourceInfo | None = None,
        profiles: Mapping[int, Profile] | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.source, self._profiles = source, profiles or {}
        self.on, self.layer, self.reading = True, 0.0, 0.0
        self.steps, self.tokens, self.seconds, self.token = 0, 0.0, 0.0, 0.0
        self._scale = 1.0  # seconds of a layer over what is assumed
        self._beside = settings.model_layer if profile else settings.text_layer
        self._pass = lru_cache(MOST_COSTS)(profile.seconds) if profile else None
        self._proposals = 0
        self._settings, self._accounts = settings, dict[int, tuple[Account, PromptAccount]]()
        self.drafting, self.prompts = self._account(0)

    @property
    def name(self) -> str:
        """The drafter's; empty where it is unknown."""
        return self.source.name if self.source else ""

    def _account(self, size: int) -> tuple[Account, PromptAccount]:
        """Where ``2 ** size`` requests decode: a step of theirs shows as much as that many steps of one."""
        settings, share = self._settings, 0.5 ** (size / 2)
        credit, allowance = share * settings.credit, share * settings.again / settings.longest
        return Account(settings, share), PromptAccount(credit, allowance, settings.keep, settings.prior)

    def settle(self, requests: Sequence[Request], left: float, curve: Curve, ar: ARPass) -> None:
        """Decide whether it drafts for requests, of which one has about ``left`` tokens to go."""
        self.reading = 0.0
        if self.source and self._profiles:
            for request in requests:
                for model, tokens in self.source.unread(request):
                    if tokens > _READS:
                        self.reading += self._profiles[id(model)].seconds(tokens, tokens)
        layer = self._beside + (self._pass(LAYER_NODES, ar.context, ar.batch) if self._pass else 0.0)
        layer *= self._scale
        ar_pass, nodes = curve.seconds[0], min(ar.batch, len(curve.below) - 1)
        self.token = (layer + curve.below[nodes] - ar_pass) / ar_pass * ar.tokens / nodes
        if (size := (ar.batch - 1).bit_length()) not in self._accounts:
            self._accounts[size] = self._account(size)
        self.drafting, self.prompts = self._accounts[size]
        self.on = self.token < 1 and not self.drafting.pausing  # were each first token right, it would pay
        if self.on and self.reading:
            self.on = self.prompts.may_read(self.reading / ar_pass, left, self._settings.onward - self.token)
        self.layer = self.on * layer

    def rest(self) -> None:
        """A step without it is over: where its layers were too dear, what is assumed counts again, in the end."""
        if self.drafting.pausing:
            self.drafting.pausing -= 1
        if self.token >= 1:
            self._scale += (1 - self._settings.keep) * (1 - self._scale)
        self.prompts.rest()

    def measure(self, seconds: float, layers: int) -> float:
        """Drafting so many layers took so many seconds; those of them that count."""
        expected = (layers + 1) * self.layer  # it reads what was committed, too
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
    """

    ar: ARPass
    curve: Curve
    rate: float
    enabled: tuple[bool, ...]
    layers: tuple[float, ...]


class Selection:
    """The drafters of a policy.

    Attributes:
        records: one each.
        pace: tokens an AR pass that decoding has yielded lately, at least 1.
    """

    def __init__(self, settings: AutoSettings, records: Sequence[Record]) -> None:
        self._keep, self.records, self.pace = settings.keep, records, 1.0
        self._tokens = self._passes = settings.prior
        self._answers = Answers(settings.keep)

    def choose(self, requests: Sequence[Request], curve: Curve, ar: ARPass) -> Price:
        """Settle which drafters draft, and what they cost."""
        self._answers.begin([request.stats.steps for request in requests].count(0))
        left = min(self._answers.length, max([request.tokens_left for request in requests]))
        for record in self.records:
            record.settle(requests, left, curve, ar)
        enabled, layers = zip(*map(attrgetter("on", "layer"), self.records), strict=True)
        return Price(ar, curve, ar.tokens * self.pace / curve.seconds[0], enabled, layers)

    def learn(self, price: Price, layers: int, nodes: int, outcomes: Sequence[Outcome]) -> float:
        """A step is over; returns the AR passes that it took, at the speed of the profile.

        ``layers``: that drafters made a pass for; ``nodes``: that were verified.
        """
        tokens, ar, verify = price.ar.tokens, price.curve.seconds[0], price.curve.seconds[nodes]
        drafters, cost, total = len(self.records), outcomes[0].step, verify
        gained, drafted, alone, taken = [0] * drafters, [0] * drafters, False, 0
        for outcome in outcomes:
            size, part = len(outcome.tree.tokens), outcome.tree.part
            alone |= not size
            drafted[part] += size
            gained[part] += len(outcome.path[: outcome.taken - 1])
            taken += outcome.taken
        # what a drafter took: its own seconds, and its part of those of growing and learning
        part_seconds = cost.drafters or [cost.draft / drafters] * drafters
        busy = [on and seconds > 0 for on, seconds in zip(price.enabled, part_seconds, strict=True)]
        scale, rest = verify / max(cost.verify, 1e-9), max(0.0, cost.draft - sum(part_seconds)) / max(1, sum(busy))
        read = any(map(attrgetter("reading"), compress(self.records, price.enabled)))
        for number, record in enumerate(self.records):
            took = 0.0
            if busy[number]:
                took = layers * record.layer if read else record.measure((part_seconds[number] + rest) * scale, layers)
                total += took
            asked = drafted[number] or (busy[number] and record._pass is not None)  # another may have drafted after it
            if not price.enabled[number] or not (alone or asked):
                record.rest()
                continue
            shared = max(0.0, verify - ar) * drafted[number] / max(1, nodes)
            record.steps, record.tokens = record.steps + 1, record.tokens + gained[number] / tokens
            record.seconds += took
            value = gained[number] / tokens - (took + shared) / ar
            record.drafting.add(value)
            record.prompts.add(value, record.reading / ar)
        self._learn(taken, (taken + tokens - price.ar.batch) / tokens, total / ar)
        return total / ar

    def _learn(self, written: int, tokens: float, passes: float) -> None:
        self._answers.write(written)
        self._tokens, self._passes = self._keep * self._tokens + tokens, self._keep * self._passes + passes
        self.pace = max(1.0, self._tokens / self._passes)

    def rest(self, requests: int) -> None:
        """A step of so many requests is over in which nothing could draft."""
        for record in self.records:
            record.rest()
        self._learn(requests, 1.0, 1.0)


class Trust:
    """How often one drafter's first candidates are right, and how often they should be by their probabilities.

    Attributes:
        onward: how often a first candidate is right below a token that was.
        scale: how much more often candidates are accepted than by their probabilities.
    """

    def __init__(self, settings: AutoSettings) -> None:
        self._keep, self._trials, self.onward, self.scale = settings.keep, settings.prior, settings.onward, 1.0
        self._right = self._said = settings.onward * self._trials

    def acceptance(self, candidates: Candidates) -> list[float]:
        """[K] how probable it is that each of a node's candidates is accepted if the node is.

        If first ones are right more often than they say, the others share what that leaves.
        """
        if not candidates.tokens:
            return []
        scale, (said, *others) = self.scale, map(math.exp, candidates.logprobs)
        first = min(1.0, scale * said)
        rest = min(scale, (1.0 - first) / (1.0 - said)) if said < 1.0 else 0.0
        return [first, *[rest * other for other in others]]

    def learn(self, trials: Iterable[Trial], part: int) -> None:
        """Of these trials, those of the drafter with this number."""
        keep = self._keep
        for number, right, logprob in trials:
            if number == part:
                self._right = keep * self._right + right
                self._said = keep * self._said + math.exp(logprob)
                self._trials = keep * self._trials + 1
        self.onward, self.scale = self._right / self._trials, self._right / self._said
