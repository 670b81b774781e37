"""Names to an engine: the target, what drafts for it, how trees grow and how they are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .draft.load import load_drafter
from .draft.methods import DEFAULT_METHOD, find_policy
from .draft.names import DEFAULT_DRAFTER, check_recycle_file, learns
from .draft.policy import GrowthPolicy, node_budget
from .engine import Engine
from .models.hf import HFModel
from .models.load import DEFAULT_MODEL, load
from .models.numerics import DEFAULT_NUMERICS
from .observer import Observer
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
