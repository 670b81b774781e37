"""What each drafter gains and costs, and which of them draft in the next proposal.

Tokens and seconds are counted in passes of AR decoding over all requests: a pass yields one token a request. A drafter
has an account: the tokens of its trees that were accepted, less what drafting and verifying them took. While it has
credit it drafts; without any it pauses, and is tried again. So what it may lose is bounded (``AutoSettings``). A model
that must read a prompt first has a second account of that (``PromptAccount``): it reads where what it has lately gained
a step pays for that in an answer, and drafts for the requests whose prompts it reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

from ..models.cost_profile import Profile
from ..request import Outcome, Request
from .accounts import Account, Answers, AutoSettings, PromptAccount
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


def may_pay(target: Profile, drafter: Profile) -> bool:
    """Whether three layers of a draft model, of which two tokens are accepted, cost less than two AR passes."""
    ar = target.seconds(1, CONTEXT)
    return target.seconds(4, CONTEXT) - ar + 3 * drafter.seconds(LAYER_NODES, CONTEXT) < 2 * ar


class Record:
    """What one drafter has gained and cost.

    Args:
        source: the drafter; None: unknown.
        profiles: measured costs of the models that make passes for it, by ``id``.
        profile: of these, that of the model that makes one pass a layer; None: there is none.

    Attributes:
        on: it drafts in the step that was begun last.
        left_out: requests of that step for which it does not: reading their texts does not pay.
        layer: seconds of drafting one layer in that step.
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
        self.on, self.layer, self.left_out = True, 0.0, list[Request]()
        self._begun = dict[Request, float]()  # texts that it has begun to read -> AR passes of all that was unread
        self._reading = dict[Request, float]()  # those that it reads in that step -> seconds of what is unread
        self._waiting = list[Request]()  # requests left out, and once the step is over those whose texts it reads on
        self.steps, self.tokens, self.seconds, self.token = 0, 0.0, 0.0, 0.0
        self._scale = 1.0  # seconds of a layer over what is assumed
        self._beside = settings.model_layer if profile else settings.text_layer
        self._pass = lru_cache(MOST_COSTS)(profile.seconds) if profile else None
        self._most_read = source.model.most_read if source and source.model else None
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

    def settle(
        self, requests: Sequence[Request], left: float, curve: Curve, ar: ARPass, alone: float | None = None
    ) -> None:
        """Decide whether it drafts, and for which of these requests, whose answers have about ``left`` tokens.

        ``alone``: seconds of the AR pass without the tokens of other requests; None: it has none.
        """
        context = min(ar.context, self._most_read or ar.context)
        layer = self._beside + (self._pass(LAYER_NODES, context, ar.batch) if self._pass else 0.0)
        layer *= self._scale
        ar_pass, nodes = curve.seconds[0], min(ar.batch, len(curve.below) - 1)
        self.token = (layer + curve.below[nodes] - ar_pass) / ar_pass * ar.tokens / nodes
        if (size := (ar.batch - 1).bit_length()) not in self._accounts:
            self._accounts[size] = self._account(size)
        self.drafting, self.prompts = self._accounts[size]
        self.on = self.token < 1 and not self.drafting.pausing  # were each first token right, it would pay
        self._reading, self._waiting = {}, []
        if self._begun:
            self._begun = {request: whole for request, whole in self._begun.items() if request in requests}
        if self.on and self._profiles:
            self._choose_texts(requests, left, alone or ar_pass)
            self.on = len(self._waiting) < len(requests)
        self.left_out = self._waiting[:]
        self.layer = self.on * layer

    def _choose_texts(self, requests: Sequence[Request], left: float, ar_pass: float) -> None:
        """Choose which texts it reads. One that it has begun needs no credit, as long as the rest of it pays."""
        assumed, unread = self._settings.onward - self.token, {r: s for r in requests if (s := self._unread(r))}
        promised = sum([unread.get(request, 0.0) for request in self._begun]) / ar_pass
        begun, self._begun = self._begun, {}
        for request, seconds in unread.items():
            passes = seconds / ar_pass
            steps = min(left, request.tokens_left) / len(requests)
            pays = self.prompts.pays(passes, steps, assumed)
            if pays and (request in begun or self.prompts.may_begin(passes, promised)):
                self._reading[request], self._begun[request] = seconds, begun.get(request, passes)
            else:
                self._waiting.append(request)

    def _unread(self, request: Request) -> float:
        """Seconds of what its models have yet to read of a text, unless that is little."""
        if self.source is None:
            return 0.0
        unread = [(self._profiles[id(model)], tokens) for model, tokens in self.source.unread(request)]
        return sum([profile.seconds(tokens, tokens) for profile, tokens in unread if tokens > _READS])

    def read(self, ar_pass: float) -> bool:
        """Count what it read of texts in the step that is over; if it did, measured seconds are not those of layers."""
        for request, seconds in self._reading.items():
            rest = self._unread(request)
            self.prompts.spend(self._begun[request], max(0.0, seconds - rest) / ar_pass)
            if rest:
                self._waiting.append(request)
        return bool(self._reading)

    def drafts_for(self, requests: Sequence[Request]) -> int:
        """How many of these requests of the step that is over it drafted for, wherever it knew what to draft."""
        return sum([request not in self._waiting for request in requests])

    def rest(self) -> None:
        """A step without it is over: where its layers were too dear, what is assumed counts again, in the end."""
        if self.drafting.pausing:
            self.drafting.pausing -= 1
        if self.token >= 1:
            self._scale += (1 - self._settings.keep) * (1 - self._scale)
        self.prompts.rest()

    @property
    def has_model(self) -> bool:
        """A model makes a pass for each layer."""
        return self._pass is not None

    def measure(self, seconds: float, layers: int) -> float:
        """Drafting so many layers took so many seconds; those of them that count."""
        if not layers:
            return seconds
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
        alone: seconds of that without the tokens of other requests.
        curve: seconds of verifying.
        rate: tokens a second that the step must yield.
        enabled: [D] which drafters draft.
        left_out: [D] requests for which each does not; empty: there are none.
        layers: [D] seconds of one layer by each, 0 if it does not draft.
    """

    ar: ARPass
    alone: float
    curve: Curve
    rate: float
    enabled: tuple[bool, ...]
    left_out: Sequence[Sequence[Request]]
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

    def choose(self, requests: Sequence[Request], curve: Curve, ar: ARPass, alone: float | None = None) -> Price:
        """Settle which drafters draft, and what they cost (``Record.settle``)."""
        self._answers.begin([request.stats.steps for request in requests].count(0))
        for record in self.records:
            record.settle(requests, self._answers.length, curve, ar, alone)
        enabled, layers = zip(*map(attrgetter("on", "layer"), self.records), strict=True)
        left_out = [record.left_out for record in self.records]
        rate = ar.tokens * self.pace / curve.seconds[0]
        return Price(ar, alone or curve.seconds[0], curve, rate, enabled, left_out if any(left_out) else (), layers)

    def learn(self, price: Price, layers: int, nodes: int, outcomes: Sequence[Outcome]) -> float:
        """A step is over; returns the AR passes that it took, at the speed of the profile.

        ``layers``: that drafters made a pass for; ``nodes``: that were verified.
        """
        tokens, ar, verify = price.ar.tokens, price.curve.seconds[0], price.curve.seconds[nodes]
        drafters, cost, total = len(self.records), outcomes[0].step, verify
        gained, drafted, alone, taken = [0] * drafters, [0] * drafters, list[Request](), 0
        for outcome in outcomes:
            size, part = len(outcome.tree.tokens), outcome.tree.part
            if not size:
                alone.append(outcome.request)
            drafted[part] += size
            gained[part] += len(outcome.path[: outcome.taken - 1])
            taken += outcome.taken
        # what a drafter took: its own seconds, and its part of those of growing and learning
        part_seconds = cost.drafters or [cost.draft / drafters] * drafters
        passes = cost.drafters_passes or [layers] * drafters
        read = any([record.read(price.alone) for record in compress(self.records, price.enabled)])
        requests = [outcome.request for outcome in outcomes]
        shares = [record.drafts_for(requests) / len(requests) for record in self.records]
        drafting = [on and share > 0 for on, share in zip(price.enabled, shares, strict=True)]
        busy = [on and seconds > 0 for on, seconds in zip(drafting, part_seconds, strict=True)]
        scale, rest = verify / max(cost.verify, 1e-9), max(0.0, cost.draft - sum(part_seconds)) / max(1, sum(busy))
        for number, record in enumerate(self.records):
            took = 0.0
            if busy[number]:
                made = passes[number] if record.has_model else layers
                took = made * record.layer if read else record.measure((part_seconds[number] + rest) * scale, made)
                total += took
            asked = drafted[number] or (busy[number] and record.has_model)  # another may have drafted after it
            asked = asked or record.drafts_for(alone)
            if not price.enabled[number] or not asked:
                if shares[number] or not price.enabled[number]:  # otherwise it reads
                    record.rest()
                continue
            shared = max(0.0, verify - ar) * drafted[number] / max(1, nodes)
            record.steps, record.tokens = record.steps + 1, record.tokens + gained[number] / tokens
            record.seconds += took
            value = gained[number] / tokens - (took + shared) / ar
            record.drafting.add(value)
            record.prompts.add(value, shares[number])
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
