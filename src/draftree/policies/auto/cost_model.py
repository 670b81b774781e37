"""What verifying costs now: the profile, and how passes have drifted from it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ...models.cost_profile import Profile
from .calibration import Floats

_CONTEXT_GRAIN = 64
"""Costs are looked up for contexts rounded to this."""
_FRESH = 16
"""Steps for which a corrected curve serves."""
_MEMORY = 0.95
"""Share of the record of drift that each new pass leaves."""
_PRIOR = 4.0
"""Passes that the common drift counts for beside a size's own."""
_FEW = 1.0
"""Passes over drafted nodes that are taken to have drifted as plain ones have: one slow pass is no drift."""
_PLAIN = 5
"""Plain passes that are remembered: the median of them counts."""
_PLAIN_EVERY, _PLAIN_SELDOM, _CLEAR = 16, 64, 1.2
"""Steps between two plain passes at most; and where drafting is at least so much faster."""
_MOST_DRIFT = math.log(4)
"""A pass that took more than four times as long as it should counts as four times."""


@dataclass(slots=True)
class CostDrift:
    """How much longer passes take than the profile says: plain ones, and those over drafted nodes by their number.

    A common factor (another load on the machine) changes no choice; what counts is one size against another. A profile
    repeats one pass; between passes that draft, a pass finds its weights less often in the processor's caches.
    """

    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=_PLAIN), repr=False)
    _weight: dict[int, float] = field(default_factory=dict, repr=False)
    _ratio: dict[int, float] = field(default_factory=dict, repr=False)

    def learn(self, nodes: int, measured: float, expected: float) -> None:
        """A pass over the root and ``nodes`` nodes took ``measured`` seconds where ``expected`` were expected."""
        ratio = max(-_MOST_DRIFT, min(_MOST_DRIFT, math.log(measured / expected)))
        for size in self._weight:
            self._weight[size] *= _MEMORY
            self._ratio[size] *= _MEMORY
        if not nodes:
            self._plain.append(ratio)
            return
        self._weight[nodes] = self._weight.get(nodes, 0.0) + 1
        self._ratio[nodes] = self._ratio.get(nodes, 0.0) + ratio

    def correct(self, verify: Floats) -> Floats:
        """[N + 1] seconds of passes over 1, 2, ... tokens, as they have become; relative to one another."""
        if not self._weight:
            return verify
        plain, drafted = median(self._plain or [0.0]), sum(self._weight.values())
        prior = _FEW if self._plain else 0.0
        common = (sum(self._ratio.values()) + prior * plain) / (drafted + prior)
        factors = np.ones_like(verify)
        if self._plain:
            sure = len(self._plain) / (len(self._plain) + 1)
            factors[0] = math.exp(sure * (plain - common))
        for nodes, weight in self._weight.items():
            if nodes < len(verify):
                own = (self._ratio[nodes] + _PRIOR * common) / (weight + _PRIOR)
                factors[nodes] = math.exp(own - common)
        return verify * factors


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of target passes in one context and batch.

    Attributes:
        expected: [N + 1] of passes over 1, 2, ... N + 1 tokens, as the profile has them.
        now: [N + 1] the same, corrected for drift.
        plain: of plain decoding, ``now[0]``.
        least: more than that, of the cheapest pass with drafted nodes; may be negative.
        slope: mean price of a node.
    """

    expected: Floats
    now: Floats
    plain: float
    least: float
    slope: float

    @classmethod
    def of(cls, expected: Floats, now: Floats) -> Curve:
        """With the figures that follow."""
        plain, last = float(now[0]), float(now[-1])
        return cls(expected, now, plain, float(now[1:].min()) - plain, max(0.0, last - plain) / (len(now) - 1))


@dataclass(slots=True)
class Curves:
    """The curves of a target, as they are asked for.

    Attributes:
        profile: its measured costs.
    """

    profile: Profile
    _drift: CostDrift = field(default_factory=CostDrift, repr=False)
    _known: dict[tuple[int, int, int], tuple[int, Curve]] = field(default_factory=dict, repr=False)
    _steps: int = field(default=0, repr=False)
    _plain_at: int = field(default=0, repr=False)

    def want_plain(self, speedup: float) -> bool:
        """Has there been no plain pass for long? Only beside one does a ``speedup`` over plain decoding mean much."""
        return self._steps - self._plain_at >= (_PLAIN_SELDOM if speedup > _CLEAR else _PLAIN_EVERY)

    def at(self, nodes: int, context: int, batch: int) -> Curve:
        """The curve up to ``nodes`` drafted nodes behind about ``context`` tokens."""
        key = (nodes, context // _CONTEXT_GRAIN * _CONTEXT_GRAIN, batch)
        made, curve = self._known.get(key, (0, None))
        if curve is None or self._steps - made >= _FRESH:
            expected = np.array(self.profile.curve(*key)) if curve is None else curve.expected
            curve = Curve.of(expected, self._drift.correct(expected))
            self._known[key] = (self._steps, curve)
        return curve

    def learn(self, curve: Curve, nodes: int, measured: float) -> None:
        """A pass over the root and ``nodes`` nodes took ``measured`` seconds."""
        self._steps += 1
        if not nodes:
            self._plain_at = self._steps
        self._drift.learn(nodes, max(measured, 1e-9), float(curve.expected[nodes]))
