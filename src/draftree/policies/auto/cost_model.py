"""Seconds of verifying now: the target's cost profile, corrected by how passes have drifted from it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...models.cost_profile import Profile
from .settings import DEFAULTS, AutoSettings

Floats: TypeAlias = NDArray[np.float64]


@dataclass(slots=True)
class CostModel:
    """A target's seconds by tokens, context and batch.

    A profile repeats one pass; between passes that draft, a pass finds its weights less often in the processor's
    caches. So AR passes drift from it and passes over drafted nodes do. A factor common to both (another load on the
    machine) changes no choice and is left out.
    """

    profile: Profile
    settings: AutoSettings = DEFAULTS
    _curves: dict[tuple[int, int, int], Floats] = field(default_factory=dict, repr=False)
    _ar: deque[float] = field(default_factory=lambda: deque(maxlen=6), repr=False)  # log-ratios to the profile
    _drafted: float = field(default=0.0, repr=False)
    _weight: float = field(default=0.0, repr=False)

    def curve(self, nodes: int, context: int, batch: int) -> Floats:
        """[N + 1] seconds of passes over 1, 2, ... tokens behind about ``context`` tokens; the first is an AR pass."""
        step = self.settings.context_step
        key = (nodes, context // step * step, batch)
        if key not in self._curves:
            self._curves[key] = np.array(self.profile.curve(*key))
        verify = self._curves[key].copy()
        verify[0] *= math.exp(self.drift)
        return verify

    @property
    def drift(self) -> float:
        """Log-ratio of AR passes to their profile, less that of passes over drafted nodes to theirs."""
        if not self._ar or not self._weight:
            return 0.0
        ar, count = median(self._ar), len(self._ar)
        return count / (count + 1) * (ar - (self._drafted + ar) / (self._weight + 1))

    def learn(self, nodes: int, context: int, batch: int, measured: float) -> None:
        """A pass over the root and ``nodes`` nodes of each request took ``measured`` seconds."""
        most, keep = math.log(self.settings.max_drift), self.settings.fast_decay
        expected = self.profile.seconds(nodes + 1, context, batch)
        ratio = max(-most, min(most, math.log(max(measured, 1e-9) / expected)))
        self._weight = keep * self._weight + (nodes > 0)
        self._drafted = keep * self._drafted + (ratio if nodes else 0.0)
        if not nodes:
            self._ar.append(ratio)
