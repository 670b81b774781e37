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

    Attributes:
        profile: its measured costs.
    """

    profile: Profile
    settings: AutoSettings = DEFAULTS
    _curves: dict[tuple[int, int, int], Floats] = field(default_factory=dict, repr=False)
    _ar: deque[float] = field(init=False, repr=False)
    _drafted: float = field(default=0.0, repr=False)
    _weight: float = field(default=0.0, repr=False)
    _since_ar: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self._ar = deque(maxlen=int(self.settings.pseudo_count))

    def wants_ar(self, speedup: float) -> bool:
        """Has there been no AR step for long? It loses ``speedup`` - 1 AR passes, a ``learning_share`` of them all."""
        return self._since_ar >= max(self.settings.ar_interval, (speedup - 1) / self.settings.learning_share)

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
        self._weight *= keep
        self._drafted *= keep
        self._since_ar += 1
        if nodes:
            self._weight += 1
            self._drafted += ratio
        else:
            self._ar.append(ratio)
            self._since_ar = 0
