"""How deep to draft beams where nobody has said: as deep as is likely to be fastest, or not at all.

By what passes cost, which was measured once and is kept (``models/profile.py``), and by how often drafted layers have
gone on. Sampled beams ask their own request alone, and never the clock, so that a seed repeats them; and since only
steps that are over count, the law of the next one is the same at any depth.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..models.base import LanguageModel
from ..models.profile import Profile, kept_or_measured
from .params import DEEPEST
from .request import Request
from .sources import BeamSource

_PRIOR = 2.0
"""Layers that hope counts for. As the record fades, hope returns, and drafts are tried again."""
_MARGIN = 1.1
"""Drafts must promise to be so much faster than none:
no profile has the costs of laws and draws, or its own error."""


@dataclass(slots=True)
class Plan:
    """Chooses depths.

    Attributes:
        target: judges drafts.
        source: makes them.
    """

    target: LanguageModel
    source: BeamSource
    _verify: Profile | None = None

    def prepare(self) -> None:
        """Find the costs, kept or measured now (seconds, once)."""
        if self._verify is None:
            self._verify = kept_or_measured(self.target)
            self.source.prepare()

    def depth(self, request: Request) -> int:
        """Layers to draft in the next step, from 0 to ``DEEPEST``, at most as many as there is room for.

        A step that drafts d layers gains 1 + a + ... + a^d layers, where a drafted layer goes on with probability a.
        """
        if self._verify is None:
            self.prepare()
            return self.depth(request)
        odds, beams, context = request.odds, len(request.running), len(request.ids) + request.length
        a = (odds.went_on + _PRIOR * self.source.hope**beams) / (odds.reached + _PRIOR)
        nodes = (odds.nodes + _PRIOR * request.drafted) / (odds.layers + _PRIOR)
        best, rate, gain, drafting = 0, 0.0, 0.0, 0.0
        for depth in range(DEEPEST + 1):
            gain += a**depth
            drafting += self.source.seconds(nodes if depth > 1 else beams, context) if depth else 0.0
            found = gain / (drafting + self._verify.seconds(beams + depth * nodes, context))
            if found > rate:
                best, rate = depth, found * (1 if depth else _MARGIN)
        return min(best, self.source.room(request), request.limit - request.length - 1)
