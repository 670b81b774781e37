"""The models behind drafts, against those that a policy was made for."""

from __future__ import annotations

import warnings

from ..errors import ConfigError, DraftreeWarning
from ..models.base import LanguageModel
from ..policies.base import Provenance
from .base import DraftSource


def provenance(target: LanguageModel, source: DraftSource | None, drafter: str) -> Provenance:
    """The models behind drafts of this source, which people call ``drafter``; None drafts nothing."""
    models = source.models if source else ()
    weights = "+".join(model.capabilities.fingerprint for model in models) or (source.name if source else "")
    return Provenance(target.capabilities.name, drafter, target.capabilities.fingerprint, weights)


def check_made_for(made_for: Provenance | None, used: Provenance) -> None:
    """Compare the models that a policy was made for with those in use.

    Weights that are recorded are compared, and others are warned of; else names must agree, of which folders and hub
    ids count by their last part.

    Raises:
        ConfigError: the names differ.
    """
    if made_for is None:
        return
    if not made_for.target_weights:
        for role in ("target", "drafter"):
            wanted, given = getattr(made_for, role), getattr(used, role)
            if short_name(wanted) != short_name(given):
                raise ConfigError(
                    f"the tree was made for {role} {wanted!r}, not {given!r}: "
                    "make one for these models with 'draftree calibrate'"
                )
    elif (used.target_weights, used.drafter_weights) != (made_for.target_weights, made_for.drafter_weights):
        warnings.warn(
            f"the classifier learned from {made_for}, not from {used}: drafts may be worse; train one for these with "
            "'draftree train classifier'",
            DraftreeWarning,
            stacklevel=3,
        )


def short_name(model: str) -> str:
    """The last part of a folder or hub id: what stays the same on another machine."""
    return model.replace("\\", "/").rstrip("/").rpartition("/")[2] or model
