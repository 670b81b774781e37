"""What drafters are called: single ones, unions A+B and hierarchies A>B. Loads nothing (``load.py`` does)."""

from __future__ import annotations

import re
from pathlib import Path

from ..artifacts import is_path, user_path
from ..errors import ConfigError
from ..models.eagle_head import is_head
from ..models.huggingface import HFModel
from .levels import is_hierarchy, levels_of

AUTO = DEFAULT_DRAFTER = "auto"
DRAFTERS = {
    AUTO: "int4 where a float32 target is on a CPU that is fast in it, else lookup+recycle+head where a head comes for "
    "the target (head where children are drawn), else lookup",
    "lookup": "continuations of earlier occurrences in prompt and output; no model",
    "recycle": "what the target found probable when it last saw the same token; no model",
    "head": "a layer trained on the target's hidden states; comes with smollm2",
    "layers=N": "the target's first N layers; layers=0-9.12.15-29 names those that are kept",
    "int4, int8, fp16w": "the target itself in these numerics, on its own cache: mostly right, cheaper than float32",
    "none": "no drafting: plain decoding",
    "self": "the target drafts for itself: every draft is accepted; for tests",
}
"""Drafters by name; any other is a draft head's folder or a model (see ``draftree.load``). A+B is a union, and A>B a
hierarchy in which A proposes and B verifies (``levels.py``)."""
CHEAPER = ("int4", "int8", "fp16w")
"""Numerics in which the target drafts for itself."""
LAYERS = "layers="
_KEPT = re.compile(r"\d{1,6}(-\d{1,6})?(\.\d{1,6}(-\d{1,6})?)*", re.ASCII)
"""What follows: a number of layers, or those that are kept."""


def parts_of(name: str) -> tuple[str, ...]:
    """The names that a drafter's name joins by "+"; a folder may have one in its own name.

    Raises:
        ConfigError: a part is missing, there twice, or one of "none" and "auto".
    """
    parts = (name,) if is_path(name) else tuple(part.strip() for part in name.split("+"))
    if len(parts) == 1:
        return (name,)
    if not all(parts):
        raise ConfigError(f"drafter {name!r} has a part without a name: write it as lookup+recycle")
    for part in parts:
        if parts.count(part) > 1:
            raise ConfigError(f"drafter {name!r} has {part} twice: name each part once")
    if "none" in parts:
        raise ConfigError(f"drafter {name!r}: none drafts nothing and joins nothing: leave it out")
    if AUTO in parts:
        raise ConfigError(f"drafter {name!r}: auto chooses all parts itself: use it alone, or name what it should join")
    return parts


def names_model(name: str) -> bool:
    """It is one drafting model's, to be loaded by ``draftree.load``.

    Raises:
        ConfigError: as ``parts_of``.
    """
    own = name in DRAFTERS or name in CHEAPER or name.startswith(LAYERS) or is_hierarchy(name)
    return not own and len(parts_of(name)) == 1 and not is_head(user_path(name))


def learns(name: str | HFModel) -> bool:
    """What this drafter says depends on other requests (``Source.learns``); "auto" goes by what is wanted.

    Raises:
        ConfigError: as ``parts_of``.
    """
    if isinstance(name, HFModel):
        return False
    return is_hierarchy(name) or len(parts := parts_of(name)) > 1 or parts == ("recycle",)


def check_recycle_file(name: str | HFModel, file: str | Path | None) -> None:
    """Make sure that a file is for a drafter that recycles; what "auto" stands for is not known yet.

    Raises:
        ConfigError: it is for none, or as ``parts_of``.
    """
    if file is None or name == AUTO:
        return
    if isinstance(name, HFModel) or not any("recycle" in parts_of(level.name) for level in levels_of(name)):
        called = name.capabilities.name if isinstance(name, HFModel) else name
        raise ConfigError(
            f"recycle file {file}: drafter {called} does not recycle: use drafter recycle or lookup+recycle"
        )


def layers_of(name: str, count: int) -> tuple[int, ...]:
    """The layers that "layers=N" or "layers=0-9.12" keeps of ``count``.

    Raises:
        ConfigError: it is written otherwise, or there are not so many.
    """
    text = name.removeprefix(LAYERS)
    if not _KEPT.fullmatch(text):
        raise ConfigError(
            f"drafter {name!r}: write how many layers are kept, as layers=20, or which, as layers=0-9.12.15-29"
        )
    if text.isdecimal():
        if not 1 <= int(text) <= count:
            raise ConfigError(f"drafter {name!r}: the target has {count} layers: keep 1 to {count} of them")
        return tuple(range(int(text)))
    found: list[int] = []
    for part in text.split("."):
        first, _, last = part.partition("-")
        if int(last or first) >= count:
            raise ConfigError(f"drafter {name!r}: the target has {count} layers: give numbers from 0 to {count - 1}")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def is_own(name: str) -> bool:
    """It is the target itself, in other numerics or without some of its layers: it can draft on the target's rows."""
    return name in CHEAPER or name.startswith(LAYERS)
