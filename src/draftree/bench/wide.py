"""Beams as contestants: ``beams:width=4:drafter=head:...``, an answer being the best request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..beams.engine import BeamEngine
from ..beams.params import BeamParams, EarlyStopping
from ..beams.sources import BeamSource
from ..config import SamplingParams
from ..errors import ConfigError
from ..models.huggingface import HFModel
from .record import Parts, Turn

_EARLY: Mapping[str, EarlyStopping] = {"yes": True, "no": False, "never": "never"}
_READ: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "width": ("width", int),
    "draft": ("draft_width", int),
    "depth": ("depth", int),
    "threshold": ("threshold", float),
    "least": ("min_width", int),
    "penalty": ("length_penalty", float),
    "early": ("early_stopping", _EARLY.__getitem__),
    "single": ("single_cache", {"yes": True, "no": False}.__getitem__),
    "warp": ("warp", str),
}
"""Setting -> field of ``BeamParams``, and how its text is read."""


def beam_params(text: str, settings: Mapping[str, str]) -> BeamParams:
    """The settings of a contestant ``text`` as one value.

    Raises:
        ConfigError: there is no such setting, or its value does not do.
    """
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in _READ:
            raise ConfigError(f"method {text!r} has no setting {key!r}: choose from {', '.join((*_READ, 'drafter'))}")
        name, read = _READ[key]
        try:
            values[name] = read(value)
        except (ValueError, KeyError):
            raise ConfigError(f"method {text!r}: {key} is {value!r}: see docs/bench.md for what it takes") from None
    return BeamParams(**values)


class BeamContestant:
    """An engine for beams.

    Args:
        target: the target, loaded.
        source: what drafts; None: nothing does.
        beams: how many there are.
    """

    def __init__(self, target: HFModel, source: BeamSource | None, beams: BeamParams) -> None:
        self._engine, self._beams = BeamEngine(target, source), beams

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """See ``Contestant``; the answer is the best request."""
        began = time.perf_counter()
        answer = self._engine.generate([prompt], params, self._beams)[0]
        total = time.perf_counter() - began
        best, s = answer.hypotheses[0], answer.stats.seconds
        parts = Parts(total, s.prefill, s.draft, s.verify, total - s.prefill - s.draft - s.verify)
        return Turn(
            prompt_tokens=len(prompt),
            ids=best.token_ids,
            text=best.text,
            finish=best.finish_reason,
            seconds=parts,
            passes=answer.stats.steps,
            layers=answer.stats.tokens,
            drafted_layers=answer.stats.drafted_layers,
        )
