"""Seconds of verifying: the target's cost profile, corrected by how its passes drift from it as decoding goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...models.cost_profile import Profile

_CONTEXT_STEP = 64
"""Costs are looked up for contexts rounded to so many tokens."""
_DRIFT_STEP = 0.02
"""And for log-ratios rounded to this."""
_MOST_CURVES = 256
_KEEP = 0.95
"""Share of what passes have shown that each further one leaves."""
_MOST = math.log(4.0)
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
        self.total, self.weight = _KEEP * self.total + ratio, _KEEP * self.weight + 1

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
        self._profile, self._ar, self._drafted = profile, _Drift(), _Drift()
        self._kept = lru_cache(_MOST_CURVES)(self._curve)

    def curve(self, nodes: int, ar: ARPass) -> Curve:
        """Of up to ``nodes`` nodes behind about ``context`` tokens, at the speed that AR passes have."""
        context = ar.context // _CONTEXT_STEP * _CONTEXT_STEP
        return self._kept(nodes, ar._replace(context=context), round(self.drift / _DRIFT_STEP))

    def _curve(self, nodes: int, ar: ARPass, drift: int) -> Curve:
        sizes = range(ar.tokens, ar.tokens + nodes + 1)
        seconds = [self._profile.seconds(tokens / ar.batch, ar.context, ar.batch) for tokens in sizes]
        seconds[1:] = [second * math.exp(drift * _DRIFT_STEP) for second in seconds[1:]]
        return Curve(seconds, convex_below(seconds))

    @property
    def drift(self) -> float:
        """Log-ratio of passes over drafted nodes to their profile, less that of AR passes to theirs."""
        known = min(self._ar.weight, self._drafted.weight)
        return known / (known + 1) * (self._drafted.mean - self._ar.mean) if known else 0.0

    def learn(self, nodes: int, ar: ARPass, measured: float) -> None:
        """A pass over ``nodes`` nodes in all took ``measured`` seconds; one that mostly reads prompts tells nothing."""
        if ar.other_tokens > ar.batch:
            return
        expected = self._profile.seconds((ar.tokens + nodes) / ar.batch, ar.context, ar.batch)
        ratio = math.log(max(measured, 1e-9) / expected)
        own, other = (self._drafted, self._ar) if nodes else (self._ar, self._drafted)
        if own.weight or other.weight:
            level = own.mean if own.weight else other.mean
            ratio = max(level - _MOST, min(level + _MOST, ratio))
        own.add(ratio)
        if not nodes:  # one slow pass over drafts would keep all others from being drafted
            self._drafted.weight, self._drafted.total = _KEEP * self._drafted.weight, _KEEP * self._drafted.total
