"""How deep to draft beams where the caller sets no depth: as deep as is likely to be fastest, or not at all.

By what passes cost, measured once and kept (``models/cost_profile.py``), and by how often drafted layers have
gone on. Sampled beams ask their own request alone, and never the clock, so that a seed repeats them; and since only
steps that are over count, the law of the next one is the same at any depth. Where the passes of a model cannot be
measured, ``DEFAULT_DEPTH`` layers are drafted.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ..errors import DraftreeError, DraftreeWarning
from ..models.base import LanguageModel
from ..models.cost_profile import Profile, kept_or_measured
from .layer import expected_layers
from .params import DEEPEST, DEFAULT_DEPTH
from .request import BeamRequest
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
    _unmeasurable: bool = False

    def prepare(self) -> None:
        """Find the costs, kept or measured now (seconds, once); warn where they cannot be measured."""
        if self._unmeasurable:
            return
        try:
            self._verify = self._verify or kept_or_measured(self.target)
            self.source.prepare()
        except DraftreeError as error:
            self._verify, self._unmeasurable = None, True
            message = f"passes cannot be measured ({error}): beams are drafted {DEFAULT_DEPTH} layers deep"
            warnings.warn(message, DraftreeWarning, stacklevel=2)

    def opens(self, request: BeamRequest) -> bool:
        """Whether all that drafts may save of a new request is worth having the source read its prompt."""
        self.prepare()
        if self._verify is None:
            return True
        depth, rate, undrafted = self._best(self._verify, request, request.beams.width, len(request.ids))
        return depth > 0 and request.limit * (1 / undrafted - 1 / rate) > self.source.reading(len(request.ids))

    def depth(self, request: BeamRequest) -> int:
        """Layers to draft in the next step, from 0 to ``DEEPEST``, at most as many as there is room for.

        A step that drafts d layers gains ``expected_layers`` of the probability a that a drafted layer goes on.
        """
        if not request.drafting:
            return 0
        self.prepare()
        best = DEFAULT_DEPTH
        if self._verify is not None:
            best, _, _ = self._best(self._verify, request, len(request.running), len(request.ids) + request.length)
        return min(best, self.source.room(request), request.limit - request.length - 1)

    def _best(self, verify: Profile, request: BeamRequest, beams: int, context: int) -> tuple[int, float, float]:
        """The depth that is likely to be fastest, and the layers a second of it and of none."""
        odds = request.odds
        a = (odds.went_on + _PRIOR * self.source.hope**beams) / (odds.reached + _PRIOR)
        nodes = (odds.nodes + _PRIOR * request.drafted) / (odds.layers + _PRIOR)
        undrafted = 1 / verify.seconds(beams, context)
        best, rate, drafting = 0, _MARGIN * undrafted, 0.0
        for depth in range(1, DEEPEST + 1):
            drafting += self.source.seconds(nodes if depth > 1 else beams, context)
            found = expected_layers(a, depth) / (drafting + verify.seconds(beams + depth * nodes, context))
            if found > rate:
                best, rate = depth, found
        return best, rate, undrafted
