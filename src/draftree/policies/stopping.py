"""``dynamic-window``: a chain that ends where another token no longer pays, by measured costs.

How often tokens are accepted is counted by the entropy of the draft law that they were taken from; what drafting and
verifying them takes is measured. The least a draft has is one token, whatever its entropy: so counts of all entropies
go on, and nothing can freeze. Seconds are the profile's, so that another load on the machine changes no choice.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch

from ..config import Budget
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..models.cost_profile import Profile, kept_or_measured
from ..outcome import Outcome
from ..request import Request
from .auto.calibration import Record, with_odds
from .base import Frontier, Growth, GrowthPolicy, SourceInfo
from .chains import check_lengths

_EDGES = (0.3, 1.0, 2.0)
"""Bounds of the bins of entropy, in nats."""
_PRIOR = 4.0
"""Trials that exp(-H) counts for: a law of entropy H is as wide as exp(H) tokens that are equally likely."""
_MEMORY = 0.998
"""Share of the counts that each new proposal leaves."""
_NEAR = 0.98
"""Share of the tokens and seconds of the steps before that each new step leaves."""
_LATELY = 0.95
"""Share of a request's own record that each new step of it leaves."""
_AHEAD = 4
"""Tokens that are looked ahead: on a CPU a pass over one more may cost more than over two more."""
_GRAIN = 64
"""Costs are looked up for contexts rounded to this."""


@dataclass(slots=True)
class PayingChain(GrowthPolicy):
    """Drafts on while the next tokens are expected to give more than their seconds give elsewhere.

    After d tokens the next j pay if P (a + ... + a^j) > rate x (j x t + v(d + 1 + j) - v(d + 1)): P is the product of
    the acceptances by the entropies of the d tokens, a the mean acceptance, t a draft pass, v(n) a pass of the target
    over n tokens, and rate one request's tokens a second lately, but no fewer than plain decoding gives. Acceptances
    are those of all requests; each request has a factor of its own on their odds.

    Attributes:
        floor, cap: least and most tokens of a draft.
        target: the costs of who verifies; ``prepare`` finds them.
        drafter: seconds of a draft pass; ``prepare`` finds them. Where no profile tells, it is what steps took.

    Raises:
        ConfigError: the floor or the cap is out of range.
    """

    floor: int = 1
    cap: int = 10
    target: Profile | None = None
    drafter: float | None = None
    _trials: list[float] = field(default_factory=lambda: [0.0] * (len(_EDGES) + 1), repr=False, compare=False)
    _hits: list[float] = field(default_factory=lambda: [0.0] * (len(_EDGES) + 1), repr=False, compare=False)
    _tokens: float = field(default=0.0, repr=False, compare=False)
    _seconds: float = field(default=0.0, repr=False, compare=False)
    _profiles: Sequence[Profile] = field(default=(), repr=False, compare=False)
    _pass: float = field(default=0.0, repr=False, compare=False)
    _untold: bool = field(default=False, repr=False, compare=False)
    _curves: dict[tuple[int, int], list[float]] = field(default_factory=dict, repr=False, compare=False)
    _paths: list[float] = field(default_factory=list, repr=False, compare=False)
    _odds: list[float] = field(default_factory=list, repr=False, compare=False)
    _records: WeakKeyDictionary[Request, Record] = field(default_factory=WeakKeyDictionary, repr=False, compare=False)
    _verify: list[list[float]] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_lengths(self.floor, self.cap)

    def width_for(self, nodes: int) -> int:
        """One: it is a chain."""
        return 1

    def prepare(self, target: LanguageModel, sources: Sequence[SourceInfo]) -> None:
        """Find the costs, unless they were given: kept from an earlier start, or measured now (seconds, once)."""
        self.target = self.target or kept_or_measured(target)
        self._untold = any(source.costly and source.model is None for source in sources)
        if self.drafter is None:
            self._profiles = [kept_or_measured(source.model) for source in sources if source.model is not None]
            self.drafter = self._each(1)

    def _each(self, batch: int) -> float:
        """Seconds of a draft pass for so many requests."""
        if not self._profiles:
            return self.drafter or 0.0
        return sum(profile.seconds(1, profile.points[0].context, batch) for profile in self._profiles)

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> Sequence[Budget]:
        """Look up what verifying costs behind these requests."""
        self._paths, self._odds = [1.0] * len(requests), [self.record(request).odds for request in requests]
        self._verify = [self._curve(len(request.ids), len(requests)) for request in requests]
        self._pass = self._each(len(requests))
        return budgets

    def _curve(self, context: int, batch: int) -> list[float]:
        """Seconds of passes over 1, 2, ... tokens."""
        if self.target is None:
            raise ConfigError(
                "dynamic-window has no measured costs: give its drafter to an Engine, which measures them, or use hsddw"
            )
        key = context // _GRAIN, batch
        if key not in self._curves:
            self._curves[key] = self.target.curve(self.cap + _AHEAD, key[0] * _GRAIN, batch)
        return self._curves[key]

    def record(self, request: Request) -> Record:
        """A request's own luck."""
        return self._records.setdefault(request, Record())

    def acceptance(self, entropy: float) -> float:
        """How often a token is accepted that was taken from a law of this entropy, given that those before it were."""
        at = bisect(_EDGES, entropy)
        return (self._hits[at] + _PRIOR * math.exp(-entropy)) / (self._trials[at] + _PRIOR)

    def pays(self, path: float, depth: int, odds: float, verify: Sequence[float]) -> bool:
        """Whether to go on after ``depth`` tokens, which are accepted with probability ``path``.

        Args:
            path, depth: of the draft so far.
            odds: factor on the odds of each token of the request.
            verify: seconds of passes over 1, 2, ... tokens.
        """
        mean = with_odds((sum(self._hits) + 1) / (sum(self._trials) + 2), odds)
        rate = max(self._tokens / self._seconds if self._seconds else 0.0, 1 / verify[0])
        gains = accumulate(path * mean**j for j in range(1, _AHEAD + 1))
        each, now = self._pass or self.drafter or 0.0, verify[depth]
        return any(gain > rate * (j * each + verify[depth + j] - now) for j, gain in enumerate(gains, start=1))

    def grow(self, frontier: Frontier) -> Growth:
        """The most probable token; another one below it while that pays."""
        keep = torch.zeros_like(frontier.candidates.logprobs, dtype=torch.bool)
        keep[:, 0] = True
        depth, on = frontier.depth + 1, []
        for b, entropy in zip(frontier.rows.tolist(), frontier.candidates.entropies.tolist(), strict=True):
            self._paths[b] *= with_odds(self.acceptance(entropy), self._odds[b])
            more = depth < self.floor or self.pays(self._paths[b], depth, self._odds[b], self._verify[b])
            on.append(more and depth < self.cap)
        return Growth(keep, torch.tensor(on)[:, None].expand_as(keep))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Count what was accepted, by entropy; nothing of what lay behind a request's end."""
        self._trials, self._hits = ([_MEMORY * n for n in counts] for counts in (self._trials, self._hits))
        for outcome in outcomes:
            right = min(len(outcome.path), outcome.taken)
            judged = right + (outcome.taken == len(outcome.tokens))
            record = self.record(outcome.request)
            record.hits, record.expected = _LATELY * record.hits, _LATELY * record.expected
            for i, entropy in enumerate(outcome.tree.entropies[:judged].tolist()):
                at = bisect(_EDGES, entropy)
                record.expected += self.acceptance(entropy)
                record.hits += i < right
                self._trials[at] += 1
                self._hits[at] += i < right
        self._learn_rate(outcomes)

    def _learn_rate(self, outcomes: Sequence[Outcome]) -> None:
        """Tokens of each request, and seconds of the step, which is all requests' at once."""
        deepest = max((len(o.tree) for o in outcomes), default=0)
        fresh = any(o.request.stats.steps == 0 for o in outcomes)  # models read their prompts
        if self._untold and deepest and not fresh:
            took = outcomes[0].step.draft / deepest
            self.drafter = _NEAR * self.drafter + (1 - _NEAR) * took if self.drafter else took
        for outcome, verify in zip(outcomes, self._verify, strict=True):
            seconds = deepest * self._pass + verify[min(deepest, len(verify) - 1)]
            self._tokens += outcome.taken
            self._seconds += seconds
        self._tokens, self._seconds = _NEAR * self._tokens, _NEAR * self._seconds
