"""The heads that come with the package, each known to be a target's by that target's embeddings."""

from __future__ import annotations

from pathlib import Path

from ...errors import UnknownNameError, UnsupportedModelError
from ..base import LanguageModel
from ..protocols import DraftHead, feature_model
from .head_folder import find_head, load_head

SHIPPED = Path(__file__).parents[2] / "heads"
"""Folder of the heads that come with the package."""


def shipped_for(target: LanguageModel) -> Path | None:
    """Folder of the head that comes with the package for a target, by whatever name it was loaded; None: there is none.

    Reads no weights but the samples of those heads that have the target's sizes.

    Raises:
        ModelFileError: the package is not whole.
    """
    try:
        given = feature_model(target)
        heads = [head for folder in sorted(SHIPPED.glob("*/")) if (head := find_head(folder))]
        return next((head.folder for head in heads if not head.mismatch(given)), None)
    except (AttributeError, NotImplementedError, UnsupportedModelError):  # it has embeddings of its own kind, or none
        return None


def shipped_head(target: LanguageModel) -> DraftHead:
    """The head that comes with the package for a target, by whatever name it was loaded.

    Raises:
        UnknownNameError: there is none.
        ModelFileError: the package is not whole.
    """
    if folder := shipped_for(target):
        return load_head(folder, target)
    name = target.capabilities.name
    raise UnknownNameError(
        f"no draft head comes with draftree for {name}: train one with 'draftree train head --target {name}' and give "
        "its folder, or use drafter 'auto'"
    )
