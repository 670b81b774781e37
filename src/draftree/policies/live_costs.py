"""What a target's passes cost, by its profile and by the passes that decoding makes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..models.cost_profile import Profile

CONTEXT_STEP = 128
"""Costs are looked up for contexts rounded down to so many tokens."""
_DRIFT_STEP = 0.05
"""And for log-ratios rounded to this."""
_MOST_CURVES, MOST_COSTS = 256, 4096
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
    """A pass without drafts.

    Attributes:
        context: tokens of the longest request, about.
        batch: requests.
        tokens: that it computes, those of prompts included, and as many it yields: one read counts as one generated.
    """

    context: int
    batch: int
    tokens: int


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
    filled = curve[:1]
    for left, right in zip(corners, corners[1:], strict=False):
        slope = (curve[right] - curve[left]) / (right - left)
        filled += [curve[left] + slope * step for step in range(1, right - left + 1)]
    return filled


@dataclass(slots=True)
class _Drift:
    """Fading sums of log-ratios of passes to their profile, and of passes."""

    total: float = 0.0
    weight: float = 0.0


_OWN = 2.0
"""Passes of its size that count as much as the level of all drafted passes."""


_UNKNOWN = _Drift()


class CostModel:
    """A target's seconds by tokens, context and batch: a pass computes no more than the tokens of its requests.

    A profile may have the wrong shape, and repeats one pass; between passes that draft, a pass finds its weights less
    often in the processor's caches. So what live passes take overrules it: AR passes have their log-ratio to it, and
    passes over drafted nodes one for each class of sizes, shrunk to that of all of them. A factor common to all
    (another load on the machine) changes no choice and is left out.

    A class of sizes is the bit length of one less than a pass's tokens: 1, 2, 3 to 4, 5 to 8, 9 to 16, ... tokens.
    """

    def __init__(self, profile: Profile) -> None:
        self._seconds = lru_cache(MOST_COSTS)(profile.seconds)
        self._ar, self._drafted = _Drift(), _Drift()
        self._sizes: dict[int, _Drift] = {}
        self._told, self._kept = lru_cache(_MOST_CURVES)(self._profile_of), lru_cache(_MOST_CURVES)(self._curve)

    def curve(self, nodes: int, ar: ARPass) -> Curve:
        """Of up to ``nodes`` nodes, at the speed that AR passes have."""
        return self._kept(nodes, ar, self._drifts(ar.tokens.bit_length(), (ar.tokens + nodes - 1).bit_length()))

    def alone(self, ar: ARPass) -> float:
        """Seconds of an AR pass without the tokens of other requests."""
        return self._seconds(1.0, ar.context, ar.batch)

    def _drifts(self, first: int, last: int) -> tuple[int, ...]:
        """Log-ratios of passes over drafted nodes of these classes to their profile, less that of AR passes to theirs.

        In steps of ``_DRIFT_STEP``.
        """
        ar, drafted = self._ar, self._drafted
        if not (known := min(ar.weight, drafted.weight)):
            return (0,) * (last - first + 1)
        scale, common = known / (known + _PROFILE) / _DRIFT_STEP, _OWN * drafted.total / drafted.weight
        level, shifts = ar.total / ar.weight, list[int]()
        for size in range(first, last + 1):
            drift = self._sizes.get(size, _UNKNOWN)
            shifts.append(round(scale * ((drift.total + common) / (drift.weight + _OWN) - level)))
        return tuple(shifts)

    def _profile_of(self, nodes: int, ar: ARPass) -> list[float]:
        sizes = range(ar.tokens, ar.tokens + nodes + 1)
        return [self._seconds(tokens / ar.batch, ar.context, ar.batch) for tokens in sizes]

    def _curve(self, nodes: int, ar: ARPass, drifts: tuple[int, ...]) -> Curve:
        seconds, begin = self._told(nodes, ar).copy(), 1
        for size, drift in enumerate(drifts, start=ar.tokens.bit_length()):
            end, slower = min(nodes, (1 << size) - ar.tokens) + 1, math.exp(drift * _DRIFT_STEP)
            seconds[begin:end] = [slower * second for second in seconds[begin:end]]
            begin = end
        return Curve(seconds, convex_below(seconds))

    @property
    def wants_ar(self) -> bool:
        """An AR pass is to be made now: there were too few of them."""
        return self._ar.weight < _AR_SHARE * math.sqrt(self._drafted.weight)

    def learn(self, nodes: int, ar: ARPass, measured: float) -> None:
        """A pass over ``nodes`` nodes in all took ``measured`` seconds; one that mostly reads prompts tells nothing."""
        if ar.tokens > 2 * ar.batch:
            return
        tokens = ar.tokens + nodes
        ratio = math.log(max(measured, 1e-9) / self._seconds(tokens / ar.batch, ar.context, ar.batch))
        same_kind, other_kind = (self._drafted, self._ar) if nodes else (self._ar, self._drafted)
        if seen := same_kind if same_kind.weight else other_kind if other_kind.weight else None:
            level = seen.total / seen.weight
            ratio = max(level - _MOST_DRIFT, min(level + _MOST_DRIFT, ratio))
        keep = _KEEP_DRIFT if nodes else _KEEP_DRAFTED
        for drift in (self._drafted, *self._sizes.values()):
            drift.total, drift.weight = keep * drift.total, keep * drift.weight
        self._ar.total, self._ar.weight = _KEEP_DRIFT * self._ar.total, _KEEP_DRIFT * self._ar.weight
        learning = [same_kind]
        if nodes:
            learning.append(self._sizes.setdefault((tokens - 1).bit_length(), _Drift()))
        for drift in learning:
            drift.total, drift.weight = drift.total + ratio, drift.weight + 1
