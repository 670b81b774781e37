"""Names to engines, of requests and of beams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .artifacts import is_path
from .beams.beam_engine import BeamEngine
from .drafters.registry import fast_in_int4, load_drafter, load_source
from .drafters.source import TokenSource
from .drafters.spec import AUTO, DEFAULT_DRAFTER, check_recycle_file, is_hierarchy, learns, parts_of
from .engine import Engine
from .errors import ConfigError
from .models.cpu.quantization import DEFAULT_NUMERICS, DRAFTING
from .models.eagle_file import shipped_for
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


_BEAM_DRAFTERS = "beams are drafted by a draft model, head, int4, int8, fp16w, self, none or, for beam search, lookup"


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
    name = resolved(drafter, model, sampled)
    called = name if isinstance(name, str) else name.capabilities.name
    return BeamEngine(model, load_beam_source(name, model, sampled=sampled), name=called)


def check_beam_drafter(name: str | HFModel, sampled: bool) -> None:
    """Make sure that a drafter of this name can draft beams.

    Raises:
        InputError: it cannot, or is not written as a drafter is.
    """
    if not isinstance(name, str) or is_path(name):
        return
    if is_hierarchy(name):
        raise ConfigError(f"drafter {name}: a cascade drafts one sequence, not beams: {_BEAM_DRAFTERS}")
    parts = parts_of(name)
    if "recycle" in parts:
        raise ConfigError(f"drafter {name}: recycle drafts one sequence, not beams: {_BEAM_DRAFTERS}")
    if len(parts) > 1:
        raise ConfigError(f"drafter {name}: an ensemble drafts one sequence, not beams: {_BEAM_DRAFTERS}")
    if sampled and name == "lookup":
        raise ConfigError(
            "drafter lookup gives no probabilities to draw beams from, and the temperature is above 0: "
            f"{_BEAM_DRAFTERS}"
        )


@typed
def load_beam_source(name: str | HFModel, target: HFModel, *, sampled: bool = False) -> TokenSource | None:
    """Make what drafts beams, by name; None drafts nothing.

    Args:
        name: "auto" (``resolved``), "none", or one drafter that ``load_drafter`` takes: no ensemble, no cascade.
        target: the model that it drafts for.
        sampled: beams will be sampled: it must give probabilities.

    Raises:
        ConfigError: it cannot draft beams.
        UnknownNameError: there is no such drafter.
        VocabularyError: the drafting model has another vocabulary than the target.
        ModelFileError: the draft head cannot be read.
    """
    check_beam_drafter(name, sampled)
    name = resolved(name, target, sampled)
    return None if name == "none" else load_source(name, target)


def resolved(name: str | HFModel, target: HFModel, sampled: bool) -> str | HFModel:
    """What "auto" stands for; any other name stands for itself.

    It is the target itself in int4 where it computes in float32 on a CPU that is fast in it (``fast_in_int4``). Else
    the head that comes for it; else lookup for searched beams and nothing for sampled ones.
    """
    if name != AUTO:
        return name
    if fast_in_int4(target):
        return DRAFTING
    return "head" if shipped_for(target) is not None else "none" if sampled else "lookup"
