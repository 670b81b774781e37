"""How a hierarchy of drafters is written: ``A>B>C``, the lowest first; each level may have settings.

lookup>layers=20    lookup>int8:loop=never    head:method=hsddw:memory=20>layers=24:tau=0.5:memory=20>int8

Loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..artifacts import is_path
from ..errors import ConfigError
from ..policies.base import GrowthPolicy
from ..policies.chains import DynamicWindow, Window, read_memory, read_start
from ..policies.methods import find_method
from .loop import NEVER, LoopBack

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
