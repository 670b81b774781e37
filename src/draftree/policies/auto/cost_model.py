"""Seconds of verifying now: the target's cost profile, corrected by how passes have drifted from it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...models.cost_profile import Profile
from .settings import DEFAULTS, AutoSettings

Floats: TypeAlias = NDArray[np.float64]


class ARPass(NamedTuple):
    """A pass without drafts: over ``batch`` requests of up to ``context`` tokens, and ``other_tokens`` of others."""

    context: int
    batch: int
    other_tokens: int = 0

    @property
    def tokens(self) -> int:
        """That it computes, and as many it yields: one read of a prompt counts as one generated."""
        return self.batch + self.other_tokens


def convex_below(curve: Floats) -> Floats:
    """The largest convex curve that is nowhere above ``curve``."""
    corners = list[int]()
    for at in range(len(curve)):
        while len(corners) > 1:
            first, middle = corners[-2:]
            if (curve[middle] - curve[first]) * (at - first) < (curve[at] - curve[first]) * (middle - first):
                break
            corners.pop()  # it is on or above the line from the corner before it
        corners.append(at)
    return np.interp(np.arange(len(curve)), corners, curve[corners])


@dataclass(slots=True)
class CostModel:
    """A target's seconds by tokens, context and batch: a pass computes no more than the tokens of its requests.

    A profile repeats one pass; between passes that draft, a pass finds its weights less often in the processor's
    caches. So AR passes drift from it and passes over drafted nodes do. A factor common to both (another load on the
    machine) changes no choice and is left out.
    """

    profile: Profile
    settings: AutoSettings = DEFAULTS
    _curves: dict[tuple[int, int], list[float]] = field(default_factory=dict, repr=False)
    _ar: deque[float] = field(default_factory=lambda: deque(maxlen=6), repr=False)  # log-ratios to the profile
    _drafted: float = field(default=0.0, repr=False)
    _weight: float = field(default=0.0, repr=False)

    def curve(self, nodes: int, ar: ARPass) -> Floats:
        """[N + 1] seconds of verifying 0, 1, ... nodes in all, behind about ``context`` tokens."""
        step = self.settings.context_step
        context, last = ar.context // step * step, ar.tokens + nodes
        seconds = self._curves.setdefault((context, ar.batch), [])  # of passes over 0, 1, ... tokens
        for tokens in range(len(seconds), last + 1):
            seconds.append(self.profile.seconds(tokens / ar.batch, context, ar.batch))
        verify = np.array(seconds[ar.tokens : last + 1])
        verify[0] *= math.exp(self.drift)
        return verify

    @property
    def drift(self) -> float:
        """Log-ratio of AR passes to their profile, less that of passes over drafted nodes to theirs."""
        if not self._ar or not self._weight:
            return 0.0
        ar, count = median(self._ar), len(self._ar)
        return count / (count + 1) * (ar - (self._drafted + ar) / (self._weight + 1))

    def learn(self, nodes: int, ar: ARPass, measured: float) -> None:
        """A pass over ``nodes`` nodes in all took ``measured`` seconds; one that mostly reads prompts tells nothing."""
        if ar.other_tokens > ar.batch:
            return
        most, keep = math.log(self.settings.max_drift), self.settings.fast_decay
        expected = self.profile.seconds((ar.tokens + nodes) / ar.batch, ar.context, ar.batch)
        ratio = math.log(max(measured, 1e-9) / expected)
        level = median(self._ar) if self._ar else self._drafted / self._weight if self._weight else ratio
        ratio = max(level - most, min(level + most, ratio))  # a profile by a table knows shapes better than levels
        self._weight = keep * self._weight + (nodes > 0)
        self._drafted = keep * self._drafted + (ratio if nodes else 0.0)
        if not nodes:
            self._ar.append(ratio)
