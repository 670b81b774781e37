"""Draft heads in folders, whatever their format: draftree's own, and published ones."""

from __future__ import annotations

from pathlib import Path

from ..abilities import DraftHead, MarginalHead
from ..base import LanguageModel
from . import eagle_file
from .published_head import published_head


def is_head(folder: Path) -> bool:
    """Whether there is a head in this folder, whole or not.

    Raises:
        ConfigError: it is of a kind that is not read.
    """
    return eagle_file.is_head(folder) or published_head(folder) is not None


def load_head(folder: Path, target: LanguageModel) -> DraftHead | MarginalHead:
    """The head in a folder, for a target.

    Raises:
        UnknownNameError, ModelFileError: there is none that can be read.
        ConfigError: it was made for another target, or is of a kind that is not read.
        UnsupportedModelError: the target's hidden states cannot be read.
    """
    if not eagle_file.is_head(folder) and (head := published_head(folder)) is not None:
        return head.load(target)
    return eagle_file.load_head(folder, target)


def describe(folder: Path) -> dict[str, str]:
    """What a head is, and for which target, in words.

    Raises:
        UnknownNameError, ModelFileError: there is none that can be read.
        ConfigError: it is of a kind that is not read.
    """
    if not eagle_file.is_head(folder) and (head := published_head(folder)) is not None:
        return head.describe()
    return eagle_file.describe(folder)
