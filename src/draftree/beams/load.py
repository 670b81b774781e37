"""Names to an engine for beams, checked against the target."""

from __future__ import annotations

from pathlib import Path

from ..draft.load import AUTO, DEFAULT_DRAFTER, DRAFTERS, check_vocabulary, numerics_of
from ..errors import ConfigError, UnknownNameError
from ..models.head_file import is_head, load_head, shipped_for, shipped_head
from ..models.hf import HFModel
from ..models.load import DEFAULT_MODEL, load
from ..models.numerics import DEFAULT_NUMERICS
from .engine import BeamEngine
from .sources import BeamSource, HeadBeams, LookupBeams, ModelBeams

_CAN = "beams are drafted by a drafting model, head, self, none or, for beam search, lookup"


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
    if name == "recycle" or "+" in name:
        raise ConfigError(f"drafter {name} drafts one sequence, not beams: {_CAN}")


def load_beam_source(name: str | HFModel, target: HFModel, *, sampled: bool = False) -> BeamSource | None:
    """Make what drafts beams, by name; None drafts nothing.

    Args:
        name: "auto" (the head that comes for the target, else lookup, or none where beams are sampled), "head",
            "lookup", "self", "none", the folder of a draft head, or a model, loaded or by a name for ``draftree.load``.
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
    vocab = target.capabilities.vocab_size
    if isinstance(name, HFModel):
        check_vocabulary(target, name)
        return ModelBeams(name, vocab)
    if name == "none":
        return None
    if name == "lookup":
        return LookupBeams()
    if name == "self":
        return ModelBeams(target.twin(), vocab, name)
    if name == "head":
        return HeadBeams(shipped_head(target), name)
    if is_head(folder := Path(name).expanduser()):
        return HeadBeams(load_head(folder, target), name)
    try:
        model = load(name, device=str(target.capabilities.device), numerics=numerics_of(target))
    except UnknownNameError as error:
        raise UnknownNameError(f"no drafter {name!r}: not one of {', '.join(DRAFTERS)}, and {error}") from None
    check_vocabulary(target, model)
    return ModelBeams(model, vocab, name)
