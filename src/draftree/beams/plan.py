"""How deep to draft beams where nobody has said: as deep as is likely to be fastest, or not at all.

By what passes cost, which was measured once and is kept (``models/profile.py``), and by how often drafted layers have
gone on. Sampled beams ask their own request alone, and never the clock, so that a seed repeats them; and since only
steps that are over count, the law of the next one is the same at any depth.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..models.base import LanguageModel
from ..models.measure import kept_or_measured
from ..models.profile import Profile
from .params import DEEPEST
from .request import Request
from .sources import BeamSource

_PRIOR = 2.0
"""Layers that hope counts for. As the record fades, hope returns, and drafts are tried again."""
_MARGIN = 1.1
"""Drafts must promise to be so much faster than none: no profile has the costs of laws and draws, or its own error."""


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
        self._costs()
        self.source.prepare()

    def opens(self, request: Request) -> bool:
        """Whether all that drafts may save of a new request is worth having the source read its prompt."""
        self.prepare()
        depth, rate, undrafted = self._best(request, request.beams.width, len(request.ids))
        return depth > 0 and request.limit * (1 / undrafted - 1 / rate) > self.source.reading(len(request.ids))

    def depth(self, request: Request) -> int:
        """Layers to draft in the next step, from 0 to ``DEEPEST``, at most as many as there is room for.

        A step that drafts d layers gains 1 + a + ... + a^d layers, where a drafted layer goes on with probability a.
        """
        if not request.drafting:
            return 0
        self.prepare()
        best, _, _ = self._best(request, len(request.running), len(request.ids) + request.length)
        return min(best, self.source.room(request), request.limit - request.length - 1)

    def _best(self, request: Request, beams: int, context: int) -> tuple[int, float, float]:
        """The depth that is likely to be fastest, and the layers a second of it and of none."""
        odds, verify = request.odds, self._costs()
        a = (odds.went_on + _PRIOR * self.source.hope**beams) / (odds.reached + _PRIOR)
        nodes = (odds.nodes + _PRIOR * request.drafted) / (odds.layers + _PRIOR)
        undrafted = 1 / verify.seconds(beams, context)
        best, rate, gain, drafting = 0, _MARGIN * undrafted, 1.0, 0.0
        for depth in range(1, DEEPEST + 1):
            gain += a**depth
            drafting += self.source.seconds(nodes if depth > 1 else beams, context)
            found = gain / (drafting + verify.seconds(beams + depth * nodes, context))
            if found > rate:
                best, rate = depth, found
        return best, rate, undrafted

    def _costs(self) -> Profile:
        self._verify = self._verify or kept_or_measured(self.target)
        return self._verify
