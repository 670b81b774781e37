"""Names to engines, of requests and of beams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from .beams.beam_engine import BeamEngine
from .config import typed
from .drafters.base import DraftSource
from .drafters.registry import load_source
from .drafters.spec import AUTO, DEFAULT_DRAFTER, NONE, DrafterSpec
from .engine.engine import Engine
from .engine.scheduler import SchedulerParams
from .engine.speculation import Observer, SpeculationParams
from .errors import ConfigError
from .models.base import LanguageModel
from .models.heads.shipped_heads import shipped_for
from .models.loading import ModelOptions, load
from .models.model_files import DEFAULT_MODEL


@typed
def load_engine(
    target: str = DEFAULT_MODEL,
    speculation: SpeculationParams | None = None,
    *,
    observers: Sequence[Observer] = (),
    scheduling: SchedulerParams | None = None,
    **options: Unpack[ModelOptions],
) -> Engine:
    """An engine from names alone: ``load`` and ``Engine`` for the arguments; by default the default speculation."""
    speculation = speculation or SpeculationParams()
    return Engine(load(target, **options), speculation, observers=observers, scheduling=scheduling)


_BEAM_DRAFTERS = "beams are drafted by a draft model, head, self, none or, for beam search, lookup"


@typed
def load_beam_engine(
    target: str = DEFAULT_MODEL,
    *,
    drafter: str | DrafterSpec | LanguageModel = DEFAULT_DRAFTER,
    sampled: bool = False,
    **options: Unpack[ModelOptions],
) -> BeamEngine:
    """An engine for beams from names alone.

    Args:
        target, options: as ``draftree.load``.
        drafter: as ``load_beam_source``.
        sampled: beams will be sampled, not searched.

    Raises:
        InputError: a name is unknown or does not fit; what needs no model is checked before one is loaded.
    """
    spec = beam_drafter(drafter, sampled)
    model = load(target, **options)
    spec = resolved_for_beams(spec, model, sampled)
    return BeamEngine(model, load_beam_source(spec, model, sampled=sampled), name=str(spec))


def beam_drafter(name: str | DrafterSpec | LanguageModel, sampled: bool) -> DrafterSpec:
    """Parse a drafter and check that it can draft beams.

    Raises:
        InputError: it cannot, or is not written as a drafter is.
    """
    spec = DrafterSpec.parse(name)
    kinds = {
        "a cascade": spec.is_cascade,
        "recycle": "recycle" in spec.sources,
        "an ensemble": len(spec.sources) > 1,
    }
    for kind, found in kinds.items():
        if found:
            raise ConfigError(f"drafter {spec}: {kind} drafts one sequence, not beams: {_BEAM_DRAFTERS}")
    if sampled and str(spec) == "lookup":
        raise ConfigError(
            "drafter lookup gives no probabilities to draw beams from, and the temperature is above 0: "
            f"{_BEAM_DRAFTERS}"
        )
    return spec


@typed
def load_beam_source(
    name: str | DrafterSpec | LanguageModel, target: LanguageModel, *, sampled: bool = False
) -> DraftSource | None:
    """Make what drafts beams, by name; None drafts nothing.

    Args:
        name: "auto" (``resolved_for_beams``), "none", or a drafter of ``load_drafter``: no ensemble, no cascade.
        target: the model that it drafts for.
        sampled: beams will be sampled: it must give probabilities.

    Raises:
        ConfigError: it cannot draft beams.
        UnknownNameError: there is no such drafter.
        VocabularyError: the draft model has another vocabulary than the target.
        ModelFileError: the draft head cannot be read.
    """
    spec = resolved_for_beams(beam_drafter(name, sampled), target, sampled)
    return None if str(spec) == NONE else load_source(spec, target)


def resolved_for_beams(drafter: DrafterSpec, target: LanguageModel, sampled: bool) -> DrafterSpec:
    """What "auto" stands for; any other drafter stands for itself.

    It is the head that comes for a target on transformers, else lookup for searched beams and nothing for sampled ones.
    """
    if str(drafter) != AUTO:
        return drafter
    return DrafterSpec.parse("head" if shipped_for(target) else NONE if sampled else "lookup")
