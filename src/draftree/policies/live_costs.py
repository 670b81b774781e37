"""What a target's passes cost, by its profile and by the passes that decoding makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..models.cost_profile import Profile

_CONTEXT_STEP = 128
"""Costs are looked up for contexts rounded to so many tokens."""
_DRIFT_STEP = 0.05
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


@dataclass(slots=True)
class _Drift:
    """Fading sums of log-ratios of passes to their profile, and of passes."""

    total: float = 0.0
    weight: float = 0.0


_OWN = 2.0
"""Passes of its size that count as much as the level of all drafted passes."""


_UNKNOWN = _Drift()


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
        self._told, self._kept = lru_cache(_MOST_CURVES)(self._profile_of), lru_cache(_MOST_CURVES)(self._curve)

    def curve(self, nodes: int, ar: ARPass) -> Curve:
        """Of up to ``nodes`` nodes behind about ``context`` tokens, at the speed that AR passes have."""
        context, tokens = ar.context // _CONTEXT_STEP * _CONTEXT_STEP, ar.tokens
        drifts = self._drifts(_size(tokens + 1), _size(tokens + nodes))
        return self._kept(nodes, ar._replace(context=context), drifts)

    def _drifts(self, first: int, last: int) -> tuple[int, ...]:
        """Log-ratios of passes over drafted nodes of these classes to their profile, less that of AR passes to theirs.

        In steps of ``_DRIFT_STEP``.
        """
        ar, drafted = self._ar, self._drafted
        if not (known := min(ar.weight, drafted.weight)):
            return (0,) * (last - first + 1)
        scale, common = known / (known + _PROFILE) / _DRIFT_STEP, _OWN * drafted.total / drafted.weight
        level, found = ar.total / ar.weight, list[int]()
        for size in range(first, last + 1):
            own = self._sizes.get(size, _UNKNOWN)
            found.append(round(scale * ((own.total + common) / (own.weight + _OWN) - level)))
        return tuple(found)

    def _profile_of(self, nodes: int, ar: ARPass) -> list[float]:
        return [self._of(tokens, ar) for tokens in range(ar.tokens, ar.tokens + nodes + 1)]

    def _curve(self, nodes: int, ar: ARPass, drifts: tuple[int, ...]) -> Curve:
        seconds, begin = self._told(nodes, ar).copy(), 1
        for size, drift in enumerate(drifts, start=_size(ar.tokens + 1)):
            end, slower = min(nodes, (1 << size) - ar.tokens) + 1, math.exp(drift * _DRIFT_STEP)
            seconds[begin:end] = [slower * second for second in seconds[begin:end]]
            begin = end
        return Curve(seconds, convex_below(seconds))

    def _of(self, tokens: int, ar: ARPass) -> float:
        return self._seconds(tokens / ar.batch, ar.context, ar.batch)

    @property
    def wants_ar(self) -> bool:
        """An AR pass is to be made now: there were too few of them."""
        return self._ar.weight < _AR_SHARE * math.sqrt(self._drafted.weight)

    def learn(self, nodes: int, ar: ARPass, measured: float) -> None:
        """A pass over ``nodes`` nodes in all took ``measured`` seconds; one that mostly reads prompts tells nothing."""
        if ar.other_tokens > ar.batch:
            return
        tokens = ar.tokens + nodes
        ratio = math.log(max(measured, 1e-9) / self._of(tokens, ar))
        own, other = (self._drafted, self._ar) if nodes else (self._ar, self._drafted)
        if seen := own if own.weight else other if other.weight else None:
            level = seen.total / seen.weight
            ratio = max(level - _MOST_DRIFT, min(level + _MOST_DRIFT, ratio))
        keep = _KEEP_DRIFT if nodes else _KEEP_DRAFTED
        for drift in (self._drafted, *self._sizes.values()):
            drift.total, drift.weight = keep * drift.total, keep * drift.weight
        self._ar.total, self._ar.weight = _KEEP_DRIFT * self._ar.total, _KEEP_DRIFT * self._ar.weight
        for drift in (own, self._sizes.setdefault(_size(tokens), _Drift())) if nodes else (own,):
            drift.total, drift.weight = drift.total + ratio, drift.weight + 1
