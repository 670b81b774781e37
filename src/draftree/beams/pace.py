"""How deep to draft beams that are searched: as deep as has been fastest on this machine, or not at all.

Searched beams are the same whatever was drafted, so the clock may decide. Sampled ones depend on what was drafted for
them, so theirs is always as deep as asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 0.9
"""Share of the record of a depth that each new step with it leaves."""
_FIRST = 2
"""Steps that a depth gets before it is compared."""
_SOON, _SELDOM = 8, 64
"""Steps between two tries of a depth that is not the fastest: the first, doubled at each try up to the last."""


@dataclass(slots=True)
class Pace:
    """Layers a second by depth, with a fading memory.

    Attributes:
        chosen: how often each depth was used.
    """

    chosen: dict[int, int] = field(default_factory=dict)
    _layers: dict[int, float] = field(default_factory=dict, repr=False)
    _seconds: dict[int, float] = field(default_factory=dict, repr=False)
    _since: int = field(default=0, repr=False)
    _pause: int = field(default=_SOON, repr=False)
    _tried: int = field(default=0, repr=False)

    def depth(self, most: int) -> int:
        """Layers to draft in the next step, from 0 to ``most``."""
        for depth in range(most, -1, -1):
            if self.chosen.get(depth, 0) < _FIRST:
                return depth
        best = max(range(most + 1), key=lambda d: self._layers[d] / self._seconds[d])
        self._since += 1
        if self._since < self._pause or not most:
            return best
        self._since, self._pause, self._tried = 0, min(2 * self._pause, _SELDOM), self._tried + 1
        others = [d for d in range(most + 1) if d != best]
        return others[self._tried % len(others)]

    def learn(self, depth: int, layers: float, seconds: float) -> None:
        """A step that drafted ``depth`` layers gained ``layers`` of beams in so many seconds."""
        self.chosen[depth] = self.chosen.get(depth, 0) + 1
        self._layers[depth] = _MEMORY * self._layers.get(depth, 0.0) + layers
        self._seconds[depth] = _MEMORY * self._seconds.get(depth, 0.0) + max(seconds, 1e-9)
