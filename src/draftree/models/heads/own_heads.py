"""The heads that a user trains without naming a place: folders in the user's data folder, one for each target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

from ...artifacts import JsonFormat
from ...errors import UnknownNameError
from ..base import LanguageModel

_NO_NAME = re.compile(r"[^A-Za-z0-9.-]+")
"""What no name of a folder has."""


def heads_folder() -> Path:
    """Where the heads are that users train without naming a place."""
    import platformdirs

    return platformdirs.user_data_path("draftree") / "heads"


def own_heads() -> list[Path]:
    """Folders of these heads, finished or not."""
    return sorted(path for path in heads_folder().glob("[!.]*") if path.is_dir())


def own_heads_for(target: LanguageModel) -> list[Path]:
    """Those of them that were begun for a target's very weights, whatever it was called; first that by its name."""
    end, named = f"-{target.capabilities.fingerprint}", _named(target)
    found = [path for path in own_heads() if path.name.endswith(end) and end != "-"]
    return sorted(found, key=lambda path: path != named)


def own_head_for(target: LanguageModel) -> Path:
    """Where the head for a target goes among them: on in one that was begun, or by its name and fingerprint."""
    return next(iter(own_heads_for(target)), _named(target))


def _named(target: LanguageModel) -> Path:
    can = target.capabilities
    name = can.name.replace("\\", "/").rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    name = _NO_NAME.sub("-", name)[-60:].lstrip(".-") or "model"  # files that begin with a dot are not listed
    return heads_folder() / f"{name}-{can.fingerprint}"


def named_head(name: str, others: Sequence[Path] = ()) -> Path:
    """The one folder among these heads, and others, that has a name or alone begins with it.

    Raises:
        UnknownNameError: there is none, or there are several.
    """
    folders = [*own_heads(), *others]
    found = [f for f in folders if f.name == name] or [f for f in folders if name and f.name.startswith(name)]
    if len(found) != 1:
        what = "several heads begin with" if found else "no head" if others else "you have no head"
        names = ", ".join(f.name for f in found or folders)
        way_out = f"name one ({names})" if names else "train one with 'draftree train head MODEL'"
        raise UnknownNameError(f"{what} {name!r}: {way_out}")
    return found[0]


Acceptance = tuple[tuple[float, ...], ...]
"""At each depth the share of drafts whose true token is among the most probable 1, 2 and 4, given the ones above."""


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """How far the training of a head has come.

    Attributes:
        steps: of the fit.
        held_out: responses that it was measured on.
    """

    steps: int
    held_out: int
    acceptance: Acceptance

    @property
    def mal(self) -> float:
        """Acceptance length of its chains."""
        return 1.0 + sum(accumulate([row[0] for row in self.acceptance], mul), 0.0)


HEAD_RECORD = JsonFormat("draftree-head", 1, "record of a head", "remove it, and train the head again", HeadRecord)
RECORD = "figures.json"
"""Where it lies in a head's folder."""
