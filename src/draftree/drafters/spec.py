"""Names of drafters, parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..artifacts import is_path, user_path
from ..errors import ConfigError
from ..models.eagle_file import is_head
from ..models.huggingface import HFModel
from ..policies.base import GrowthPolicy
from ..policies.chains import DynamicWindow, Window, read_memory, read_start
from ..policies.methods import find_method
from .cascade.stopping_rule import NEVER, LoopBack

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
    """What this drafter says depends on other requests (``TokenSource.learns``); "auto" goes by what is wanted.

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


METHOD = "dynamic-window"
"""What shapes a level's proposals by default."""
_LOOP = ("loop", "tau", "pending", "memory")
"""Settings of looping back; "memory" may be one of a method too."""


@dataclass(frozen=True, slots=True)
class LevelName:
    """One level as it is written.

    Attributes:
        name: of its source.
        settings: what follows it.
        verifies: there is a level below it.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    verifies: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """As it is written."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.settings.items())])

    def policy(self, window: Window | None = None) -> GrowthPolicy:
        """What shapes its proposals to the level above: "method" and that method's own settings.

        Args:
            window: of ``hsddw``, in place of ``METHOD`` where it has no such settings.

        Raises:
            InputError: there is no such method or setting.
        """
        method = find_method(self.settings.get("method", METHOD))
        loop = [key for key in _LOOP if self.verifies and key not in method.settings]
        given = {key: value for key, value in self.settings.items() if key not in loop}
        if window is not None and not given:
            return DynamicWindow(window)
        given.pop("method", None)
        return method.policy(given)

    def loop_back(self) -> LoopBack:
        """When it asks the level below again: ``_LOOP``.

        Raises:
            ConfigError: a value is out of range.
        """
        default = LoopBack()
        pending, memory = (self.settings.get(key, str(getattr(default, key))) for key in ("pending", "memory"))
        try:
            most = int(pending)
        except ValueError:
            raise ConfigError(f"pending is {pending!r}: use a whole number of tokens, at least 1") from None
        tau = read_start("tau", self.settings.get("tau", "first"))
        return LoopBack(self.settings.get("loop", default.rule), tau, most, read_memory(memory))


def levels_of(name: str) -> tuple[LevelName, ...]:
    """The levels of a drafter's name, the lowest first; one where it is no hierarchy.

    Raises:
        InputError: a level has no name, or settings that it cannot have.
    """
    if is_path(name) or ">" not in name:
        return (LevelName(name),)
    levels = tuple(_level(part.strip(), name, verifies=i > 0) for i, part in enumerate(name.split(">")))
    for where, level, wrong in (
        ("lowest", levels[0], [key for key in levels[0].settings if key in ("loop", "tau", "pending")]),
        ("highest", levels[-1], [key for key in levels[-1].settings if key not in _LOOP]),
    ):
        if wrong:
            has = "method and its settings" if level is levels[0] else ", ".join(_LOOP)
            raise ConfigError(f"drafter {name!r}: its {where} level has no setting {wrong[0]!r}: it has {has}")
    for lower in levels[:-1]:
        lower.policy()
    for upper in levels[1:]:
        upper.loop_back()
    for level in levels:
        if level.name in ("none", "auto"):
            raise ConfigError(f"drafter {name!r}: {level.name} is no level of a hierarchy: name what it should ask")
    return levels


def is_hierarchy(name: str) -> bool:
    """It is written as one.

    Raises:
        InputError: as ``levels_of``.
    """
    return len(levels_of(name)) > 1


def without_loop_back(name: str) -> str:
    """The same hierarchy with one round a proposal on every level: the paper's ablation.

    Raises:
        InputError: it is no hierarchy, or a level has a rule of its own; or as ``levels_of``.
    """
    lowest, *above = levels_of(name)
    if not above:
        raise ConfigError(
            f"drafter {name!r} is no hierarchy and never loops back: leave --no-loop-back out, or name one as "
            "lookup>int8"
        )
    for level in above:
        if level.settings.get("loop", NEVER) != NEVER:
            raise ConfigError(
                f"drafter {name!r}: level {level.name} has loop={level.settings['loop']}: leave that out, or "
                "--no-loop-back"
            )
    return ">".join(map(str, [lowest, *(LevelName(x.name, {**x.settings, "loop": NEVER}) for x in above)]))


def _level(text: str, whole: str, *, verifies: bool) -> LevelName:
    if text and is_path(text):
        return LevelName(text, verifies=verifies)
    head, *rest = text.split(":")
    settings: dict[str, str] = {}
    while rest:
        key, sign, value = rest[-1].partition("=")
        if not sign:
            break
        settings = {key.strip(): value.strip()} | settings
        rest.pop()
    name = ":".join([head, *rest]).strip()
    if not name:
        raise ConfigError(f"drafter {whole!r} has a level without a name: write it as lookup>layers=20")
    return LevelName(name, settings, verifies)
