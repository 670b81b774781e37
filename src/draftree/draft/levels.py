"""How a hierarchy of drafters is written: ``A>B>C``, the lowest first; each level may have settings.

lookup>layers=20    lookup>int8:loop=never    head:method=static:width=2>layers=24:tau=0.5:pending=16>int8

Loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from .loop import NEVER, LoopBack
from .methods import find_policy
from .policy import GrowthPolicy
from .window import read_start

METHOD = "dynamic-window"
"""What shapes a level's proposals by default."""
_OWN = ("loop", "tau", "pending")


@dataclass(frozen=True, slots=True)
class LevelName:
    """One level as it is written.

    Attributes:
        name: of its source.
        settings: what follows it.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As it is written."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.settings.items())])

    def policy(self) -> GrowthPolicy:
        """What shapes its proposals to the level above: "method" and that method's own settings.

        Raises:
            InputError: there is no such method or setting.
        """
        given = {key: value for key, value in self.settings.items() if key not in _OWN}
        return find_policy(given.pop("method", METHOD), given)

    def loop_back(self) -> LoopBack:
        """When it asks the level below again: "loop", "tau" and "pending".

        Raises:
            ConfigError: a value is out of range.
        """
        default = LoopBack()
        pending = self.settings.get("pending", str(default.pending))
        if not pending.isdecimal():
            raise ConfigError(f"pending is {pending!r}: use a whole number of tokens, at least 1")
        tau = read_start("tau", self.settings.get("tau", "first"))
        return LoopBack(self.settings.get("loop", default.rule), tau, int(pending), default.memory)


def levels_of(name: str) -> tuple[LevelName, ...]:
    """The levels of a drafter's name, the lowest first; one where it is no hierarchy.

    Raises:
        InputError: a level has no name, or settings that it cannot have.
    """
    if Path(name).exists() or ">" not in name:
        return (LevelName(name),)
    levels = tuple(_level(part.strip(), name) for part in name.split(">"))
    for lower in levels[:-1]:
        lower.policy()
    for upper in levels[1:]:
        upper.loop_back()
    for where, level, keys in (("lowest", levels[0], _OWN), ("highest", levels[-1], None)):
        wrong = [key for key in level.settings if (key in keys if keys else key not in _OWN)]
        if wrong:
            has = "method and its settings" if keys else ", ".join(_OWN)
            raise ConfigError(f"drafter {name!r}: its {where} level has no setting {wrong[0]!r}: it has {has}")
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


def _level(text: str, whole: str) -> LevelName:
    if text and Path(text).exists():
        return LevelName(text)
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
    return LevelName(name, settings)
