"""The verification schemes by name: match, its lossy relaxation, and those of ``sampled.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..config import Checked
from ..errors import ConfigError, unknown_name
from ..importing import import_named
from ..sampling.warping import largest
from .base import NodeByNode, Scheme, UniformDraws, Visit, log, match
from .sampled import MultiRound, MultiRoundReplacement, TopAndOne

COUPLED = "coupled"
CANDIDATES = {COUPLED: True, "plain": False}
"""Which tokens are candidates under match: the likeliest draws of the target given the noise that it shares, or the
most probable ones of the draft distribution alone (the papers' setting). Without a temperature both are the same."""


class Match(Scheme):
    """See ``match``; the text is the same with all ``CANDIDATES``."""

    name = "match"
    summary = "the target's own draw is followed for as long as it was drafted: the same text as AR decoding"

    def __init__(self, candidates: str = COUPLED) -> None:
        if candidates not in CANDIDATES:
            raise ConfigError(f"candidates are {candidates!r}: choose from {', '.join(CANDIDATES)}")
        self.coupled = CANDIDATES[candidates]

    verify = staticmethod(match)


def allowed_by_entropy(entropy: float) -> int:
    """The default of ``Relaxed``: 0 below 1 nat, then ceil(H)."""
    return math.ceil(entropy) if entropy >= 1 else 0


@dataclass(frozen=True, slots=True)
class Relaxed(Checked, NodeByNode):
    """*match*, but where the target is unsure one of its best tokens will do (lossy; Gunjur & Waitz, Section 6.1).

    The target draws y ~ p; when y is no child, the child that p ranks highest is taken if it is among the target's
    ``allowed(H)`` most probable tokens. At temperature 0 entropy and ranks are those at temperature 1.

    Attributes:
        allowed: entropy in nats -> how many of the target's most probable tokens will do.
        when: whose entropy H is: the target's, or with "both" the lesser of that and the entropy of the draft
            distribution, so that the draft must be unsure too (the paper's idea).

    Raises:
        ConfigError: ``when`` is none of them.
    """

    allowed: Callable[[float], int] = allowed_by_entropy
    when: Literal["target", "both"] = "target"

    name: ClassVar[str] = "relaxed"
    summary: ClassVar[str] = "lossy: match, but where the target's entropy is high one of its best tokens will do"
    lossy: ClassVar[bool] = True

    def decide(self, visit: Visit, draws: UniformDraws) -> int:
        token = draws.draw(visit.logits, visit.depth)
        if token in visit.children:
            return token
        p = visit.p
        entropy = -float((p * np.where(p > 0, log(p), 0.0)).sum())
        if self.when == "both":
            entropy = min(entropy, visit.entropy)
        count = self.allowed(entropy)
        if not isinstance(count, int) or count < 0:
            rule = "return 0 or more"
            raise ConfigError(f"relaxed: the function of entropy gave {count!r} for {entropy:.3g} nats: {rule}")
        for candidate in largest(visit.logits, min(count, len(visit.logits))).tolist():
            if candidate in visit.children and visit.logits[candidate] > -math.inf:
                return int(candidate)
        return token


SCHEMES: dict[str, Scheme] = {
    s.name: s for s in (Match(), MultiRound(), MultiRoundReplacement(), TopAndOne(), Relaxed())
}
DEFAULT_SCHEME = Match.name


def find_scheme(scheme: str | Scheme, candidates: str | None = None) -> Scheme:
    """A scheme by its name, or the scheme itself.

    Args:
        scheme: its name, or the scheme.
        candidates: of match, one of ``CANDIDATES``; None: as the scheme has them.

    Raises:
        UnknownNameError: there is no such scheme.
        ConfigError: there are no such candidates, or the scheme has one kind alone.
    """
    if candidates is not None:
        if not isinstance(named := find_scheme(scheme), Match):
            raise ConfigError(
                f"candidates are {candidates!r} but those of verification {named.name} are always {named.candidates}: "
                "leave candidates out, or use verification match"
            )
        chosen = copy(named)  # it may be a user's own
        chosen.coupled = Match(candidates).coupled
        return chosen
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise unknown_name("verification", scheme, SCHEMES)
    return SCHEMES[scheme]


def read_scheme(text: str) -> str | Scheme:
    """The scheme that a command line names: MODULE:NAME is imported, another text is the name of a scheme.

    The attribute is a scheme, which is copied, or returns one when it is called without arguments.

    Raises:
        UnknownNameError: there is no such attribute.
        ConfigError: the module cannot be imported, or no scheme is returned.
        RunError: the call raised.
    """
    return import_named("verification", text, Scheme).make() if ":" in text else text  # type: ignore[type-abstract]
