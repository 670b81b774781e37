"""Names to engines, of requests and of beams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from .artifacts import is_path
from .beams.beam_engine import BeamEngine
from .beams.cascades import HierarchyBeams, UnionBeams
from .beams.sources import BeamSource, GuestBeams, HeadBeams, LookupBeams, ModelBeams, PassBeams
from .drafters.registry import drafting_model, fast_in_int4, load_drafter
from .drafters.spec import AUTO, DEFAULT_DRAFTER, check_recycle_file, is_own, learns, levels_of, parts_of
from .engine import Engine
from .errors import ConfigError
from .models.cpu.quantization import DEFAULT_NUMERICS, DRAFTING
from .models.eagle_file import shipped_for
from .models.eagle_model import HeadModel
from .models.huggingface import HFModel
from .models.load import DEFAULT_MODEL, load
from .policies.base import GrowthPolicy, node_budget
from .policies.methods import DEFAULT_METHOD, find_policy
from .trace import Observer
from .typed import typed
from .verify.schemes import DEFAULT_SCHEME, Scheme, find_scheme


@typed
def load_engine(
    target: str = DEFAULT_MODEL,
    *,
    drafter: str | HFModel = DEFAULT_DRAFTER,
    method: str | GrowthPolicy = DEFAULT_METHOD,
    settings: Mapping[str, float | str] | None = None,
    nodes: int | None = None,
    verification: str | Scheme = DEFAULT_SCHEME,
    candidates: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    numerics: str = DEFAULT_NUMERICS,
    observers: Sequence[Observer] = (),
    recycle_file: str | Path | None = None,
) -> Engine:
    """An engine from names alone: ``load``, ``load_drafter`` and ``Engine`` for the arguments."""
    policy, scheme = find_policy(method, settings), find_scheme(verification, candidates)
    check_recycle_file(drafter, recycle_file)
    budget = node_budget(policy, nodes)
    if drafter != "none":
        scheme.check(policy, budget, learns(drafter))  # before a model is loaded
    model = load(target, dtype=dtype, device=device, numerics=numerics)
    made = load_drafter(drafter, model, policy, recycle_file=recycle_file, learning=not scheme.draws)
    return Engine(model, made, nodes=nodes, verification=scheme, observers=observers)


_CAN = (
    "beams are drafted by a drafting model, head, int4, int8, fp16w, self, none, a hierarchy of these such "
    "as lookup>int8 or, for beam search, by lookup and unions"
)
_NEAR = ("int4", "int8", "fp16w", "self")
"""The target's weights."""


@typed
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
        InputError: it cannot, or is not written as a drafter is.
    """
    if not isinstance(name, str) or is_path(name):
        return
    *below, top = levels_of(name)
    for level in (*below, top):
        if level.settings:
            key, value = next(iter(level.settings.items()))
            raise ConfigError(
                f"drafter {name!r}: {level.name}:{key}={value} shapes the trees of one sequence: leave it out, "
                "levels that draft beams have no settings"
            )
        if "recycle" in parts_of(level.name):
            raise ConfigError(f"drafter {name}: recycle drafts one sequence, not beams: {_CAN}")
    for level in (*below[1:], top) if below else ():
        if level.name == "lookup" or len(parts_of(level.name)) > 1:
            raise ConfigError(
                f"drafter {name}: {level.name} makes no passes that a level below could save: put a drafting model or "
                "a head above the lowest level"
            )
    if sampled and (top.name == "lookup" or len(parts_of(top.name)) > 1):
        why = "gives no probabilities" if top.name == "lookup" else "has no law of its own"
        raise ConfigError(f"drafter {name} {why} to draw beams from, and the temperature is above 0: {_CAN}")


@typed
def load_beam_source(name: str | HFModel, target: HFModel, *, sampled: bool = False) -> BeamSource | None:
    """Make what drafts beams, by name; None drafts nothing.

    Args:
        name: "auto" (``resolved``), "lookup", "none", what ``draft.load.drafting_model`` takes, several of these joined
            by "+" (a union), or by ">" (a hierarchy, the lowest level first).
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
        name = resolved(target, sampled)
    if name == "none":
        return None
    if not isinstance(name, str):
        return _source(name, target)
    first, *above = levels_of(name)
    own = [part for level in (first, *above) for part in parts_of(level.name) if is_own(part)]
    source = _union(first.name, target, alone=len(own) == 1)
    for number, level in enumerate(above, start=2):
        upper = _source(level.name, target, alone=len(own) == 1)
        if isinstance(upper, ModelBeams) and isinstance(source, HeadBeams) and isinstance(upper.model, HFModel):
            upper.model.track_features()  # the head goes on from them where the target has not been yet
        called = ">".join(each.name for each in (first, *above)[:number])
        source = HierarchyBeams(source, cast(PassBeams, upper), called)
    return source


def resolved(target: HFModel, sampled: bool) -> str:
    """What "auto" stands for.

    It is the target itself in int4 where it computes in float32 on a CPU that is fast in it (``fast_in_int4``). Else
    the head that comes for it; else lookup for searched beams and nothing for sampled ones.
    """
    if fast_in_int4(target):
        return DRAFTING
    return "head" if shipped_for(target) is not None else "none" if sampled else "lookup"


def _union(name: str, target: HFModel, alone: bool) -> BeamSource:
    parts = [_source(part, target, alone) for part in parts_of(name)]
    return parts[0] if len(parts) == 1 else UnionBeams(parts, name)


def _source(name: str | HFModel, target: HFModel, alone: bool = False) -> BeamSource:
    """``alone``: where the target itself drafts, it is the only source that does: on its own rows."""
    if name == "lookup":
        return LookupBeams()
    model, called = drafting_model(name, target), name if isinstance(name, str) else name.capabilities.name
    if isinstance(model, HeadModel):
        return HeadBeams(model, called)
    vocab, near = target.capabilities.vocab_size, name in _NEAR
    if alone and isinstance(name, str) and is_own(name):
        return GuestBeams(model.on_rows_of(target), vocab, called, near)
    return ModelBeams(model, vocab, called, near)
