"""Names to an engine for beams, checked against the target."""

from __future__ import annotations

from pathlib import Path

from ..draft.levels import is_hierarchy
from ..draft.load import AUTO, DEFAULT_DRAFTER, drafting_model
from ..errors import ConfigError
from ..models.head_file import shipped_for
from ..models.head_model import HeadModel
from ..models.hf import HFModel
from ..models.load import DEFAULT_MODEL, load
from ..models.numerics import DEFAULT_NUMERICS
from .engine import BeamEngine
from .sources import BeamSource, HeadBeams, LookupBeams, ModelBeams

_CAN = "beams are drafted by a drafting model, head, int8, fp16w, layers=N, self, none or, for beam search, lookup"


def load_beam_engine(
    target: str = DEFAULT_MODEL,
    *,
    drafter: str | HFModel = DEFAULT_DRAFTER,
    sampled: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    numerics: str = DEFAULT_NUMERICS,
) -> BeamEngine:
    """An engine for beams from names alone.

    Args:
        target, dtype, device, numerics: as ``draftree.load``.
        drafter: as ``load_beam_source``.
        sampled: beams will be sampled, not searched.

    Raises:
        InputError: a name is unknown or does not fit; what needs no model is checked before one is loaded.
    """
    check_beam_drafter(drafter, sampled)
    model = load(target, dtype=dtype, device=device, numerics=numerics)
    return BeamEngine(model, load_beam_source(drafter, model, sampled=sampled))


def check_beam_drafter(name: str | HFModel, sampled: bool) -> None:
    """Make sure that a drafter of this name can draft beams.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(name, str) or Path(name).expanduser().exists():
        return
    if name == "lookup" and sampled:
        raise ConfigError(
            f"drafter lookup gives no probabilities to draw beams from, the temperature is above 0: {_CAN}"
        )
    if name == "recycle" or "+" in name or is_hierarchy(name):
        raise ConfigError(f"drafter {name} drafts one sequence, not beams: {_CAN}")


def load_beam_source(name: str | HFModel, target: HFModel, *, sampled: bool = False) -> BeamSource | None:
    """Make what drafts beams, by name; None drafts nothing.

    Args:
        name: "auto" (the head that comes for the target, else lookup, or none where beams are sampled), "lookup",
            "none", or what ``draft.load.drafting_model`` takes.
        target: the model that it drafts for.
        sampled: beams will be sampled: it must give probabilities.

    Raises:
        ConfigError: it cannot draft beams.
        UnknownNameError: there is no such drafter.
        VocabularyError: the drafting model has another vocabulary than the target.
        ModelFileError: the draft head cannot be read.
    """
    check_beam_drafter(name, sampled)
    if name == AUTO:
        name = "head" if shipped_for(target) is not None else "none" if sampled else "lookup"
    if name == "none":
        return None
    if name == "lookup":
        return LookupBeams()
    model, called = drafting_model(name, target), name if isinstance(name, str) else name.capabilities.name
    if isinstance(model, HeadModel):
        return HeadBeams(model, called)
    return ModelBeams(model, target.capabilities.vocab_size, called)
