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
class CostDrift:
    """How much longer passes take than the profile says: AR passes, and passes over drafted nodes by their number.

    A common factor (another load on the machine) changes no choice: what counts is one size against another. A profile
    repeats one pass; between passes that draft, a pass finds its weights less often in the processor's caches.
    """

    settings: AutoSettings = DEFAULTS
    _ar: deque[float] = field(default_factory=lambda: deque(maxlen=5), repr=False)
    _weight: dict[int, float] = field(default_factory=dict, repr=False)
    _ratio: dict[int, float] = field(default_factory=dict, repr=False)

    def learn(self, nodes: int, measured: float, expected: float) -> None:
        """A pass over the root and ``nodes`` nodes took ``measured`` seconds where ``expected`` were expected."""
        most = math.log(self.settings.max_drift)
        ratio = max(-most, min(most, math.log(max(measured, 1e-9) / expected)))
        for size in self._weight:
            self._weight[size] *= self.settings.fast_decay
            self._ratio[size] *= self.settings.fast_decay
        if nodes:
            self._weight[nodes] = self._weight.get(nodes, 0.0) + 1
            self._ratio[nodes] = self._ratio.get(nodes, 0.0) + ratio
        else:
            self._ar.append(ratio)

    def correct(self, verify: Floats) -> Floats:
        """[N + 1] seconds of passes over 1, 2, ... tokens as they have become, relative to one another.

        A size that was seldom seen has drifted as all drafted ones together, and these as AR passes.
        """
        if not self._weight:
            return verify
        ar, drafted = median(self._ar or [0.0]), sum(self._weight.values())
        prior = 1.0 if self._ar else 0.0
        common = (sum(self._ratio.values()) + prior * ar) / (drafted + prior)
        factors = np.ones_like(verify)
        if self._ar:
            factors[0] = math.exp(len(self._ar) / (len(self._ar) + 1) * (ar - common))
        for nodes, weight in self._weight.items():
            if nodes < len(verify):
                count = self.settings.pseudo_count
                factors[nodes] = math.exp((self._ratio[nodes] - weight * common) / (weight + count))
        return verify * factors


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of target passes in one context and batch.

    Attributes:
        expected: [N + 1] of passes over 1, 2, ... N + 1 tokens by the profile.
        now: [N + 1] the same, corrected for drift.
        ar: of AR decoding, ``now[0]``.
        least: what the cheapest pass over drafted nodes takes beyond that; may be negative.
        slope: mean price of a node.
    """

    expected: Floats
    now: Floats
    ar: float
    least: float
    slope: float

    @classmethod
    def of(cls, expected: Floats, now: Floats) -> Curve:
        """With the figures that follow."""
        ar, last = float(now[0]), float(now[-1])
        return cls(expected, now, ar, float(now[1:].min()) - ar, max(0.0, last - ar) / (len(now) - 1))


@dataclass(slots=True)
class CostModel:
    """Curves of a target by context and batch; a corrected one serves for ``ar_interval`` steps.

    Attributes:
        profile: its measured costs.
    """

    profile: Profile
    settings: AutoSettings = DEFAULTS
    _drift: CostDrift = field(init=False, repr=False)
    _curves: dict[tuple[int, int, int], tuple[int, Curve]] = field(default_factory=dict, repr=False)
    _steps: int = field(default=0, repr=False)
    _ar_step: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self._drift = CostDrift(self.settings)

    def wants_ar(self, speedup: float) -> bool:
        """Has there been no AR step for long? It loses ``speedup`` - 1 AR passes, a ``learning_share`` of them all."""
        loss = (speedup - 1) / self.settings.learning_share
        return self._steps - self._ar_step >= max(self.settings.ar_interval, loss)

    def at(self, nodes: int, context: int, batch: int) -> Curve:
        """The curve up to ``nodes`` drafted nodes behind about ``context`` tokens."""
        step = self.settings.context_step
        key = (nodes, context // step * step, batch)
        made, curve = self._curves.get(key, (0, None))
        if curve is None or self._steps - made >= self.settings.ar_interval:
            expected = np.array(self.profile.curve(*key)) if curve is None else curve.expected
            curve = Curve.of(expected, self._drift.correct(expected))
            self._curves[key] = (self._steps, curve)
        return curve

    def learn(self, curve: Curve, nodes: int, measured: float) -> None:
        """A pass over the root and ``nodes`` nodes took ``measured`` seconds."""
        self._steps += 1
        if not nodes:
            self._ar_step = self._steps
        self._drift.learn(nodes, measured, float(curve.expected[nodes]))
