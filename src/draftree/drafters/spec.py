"""A drafter as people write it, parsed once into a value that travels.

lookup                                one source of drafts
lookup+recycle                        an ensemble: in each step the tree of one of them
lookup:method=static>head:tau=0.5     a cascade: A>B drafts by A, and B verifies that
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..artifacts import is_path
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..policies.base import GrowthPolicy, read_number
from ..policies.entropy import FIRST, DynamicWindow, Window, read_start
from ..policies.methods import find_method
from .cascade import LoopBack

AUTO = DEFAULT_DRAFTER = "auto"
NONE = "none"
LOOKUP = "lookup"
"""Drafts from the request's own texts, a predicted output among them."""
METHOD = "hsddw"
"""The default method of a stage's proposals."""
_LOOP = ("tau", "pending")
"""Settings of ``LoopBack``."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of a cascade, or a whole drafter that is no cascade.

    Attributes:
        sources: names of ``registry.SOURCES``, folders and models, or one loaded model; several are an ensemble.
        settings: as written.

    Raises:
        InputError: a source has no name, stands there twice or cannot be joined; a setting does not exist or is out of
            range.
    """

    sources: tuple[str | LanguageModel, ...]
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.sources) > 1:
            if not all(self.sources):
                raise ConfigError(f"drafter {self.name!r} has a part without a name: write it as lookup+recycle")
            for part in self.sources:
                if self.sources.count(part) > 1:
                    raise ConfigError(f"drafter {self.name!r} has {part} twice: name each part once")
            if NONE in self.sources:
                raise ConfigError(f"drafter {self.name!r}: none drafts nothing and joins nothing: leave it out")
            if AUTO in self.sources:
                raise ConfigError(
                    f"drafter {self.name!r}: auto chooses all parts itself: use it alone, or name what it should join"
                )

    @classmethod
    def parse(cls, text: str) -> StageSpec:
        """Read A+B:KEY=VALUE:KEY=VALUE; the name of a model or a folder may hold colons, that of a folder any sign."""
        if text and is_path(text):
            return cls((text,))
        head, *rest = text.split(":")
        settings: dict[str, str] = {}
        while rest and "=" in rest[-1]:
            key, _, value = rest.pop().partition("=")
            settings = {key.strip(): value.strip()} | settings
        return cls(_sources(":".join([head, *rest])), settings)

    @property
    def name(self) -> str:
        """Without the settings."""
        return "+".join(s if isinstance(s, str) else s.capabilities.name for s in self.sources)

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.settings.items())])

    @property
    def loop_settings(self) -> list[str]:
        """Names of its settings that are of ``LoopBack``, and not of its method."""
        return [key for key in self.settings if key in _LOOP]

    def policy(self, window: Window | None = None) -> GrowthPolicy:
        """A new policy that shapes its proposals to the next stage, from "method" and the settings of that method.

        Args:
            window: of ``hsddw``, in place of ``METHOD`` where the stage has no such settings.
        """
        given = {key: value for key, value in self.settings.items() if key not in self.loop_settings}
        if window is not None and not given:
            return DynamicWindow(window)
        return find_method(given.pop("method", METHOD)).policy(given)

    def loop_back(self) -> LoopBack:
        """When it lets the stage before it draft again: the settings ``_LOOP``."""
        pending = self.settings.get("pending", str(LoopBack().pending))
        most = read_number(int, "pending", pending, "use a whole number of tokens, at least 1")
        return LoopBack(read_start("tau", self.settings.get("tau", FIRST)), most)


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter: a cascade of stages, the first to draft first; a single stage is no cascade.

    Raises:
        InputError: a setting does not exist or is out of range, or a stage is "auto" or "none".
    """

    stages: tuple[StageSpec, ...]

    def __post_init__(self) -> None:
        if not self.is_cascade:
            return
        if len(self.stages) > 2:
            raise ConfigError(f"drafter '{self}' has {len(self.stages)} stages: a cascade has two, A>B")
        first, last = self.stages
        if wrong := first.loop_settings:
            raise ConfigError(
                f"drafter '{self}': its first stage has no setting {wrong[0]!r}: it has method and its settings"
            )
        if wrong := [key for key in last.settings if key not in _LOOP]:
            raise ConfigError(
                f"drafter '{self}': its last stage has no setting {wrong[0]!r}: it has {', '.join(_LOOP)}"
            )
        first.policy()
        last.loop_back()
        for stage in self.stages:
            if stage.name in (AUTO, NONE):
                raise ConfigError(f"drafter '{self}': {stage.name} is no stage of a cascade: name a drafter instead")

    @classmethod
    def parse(cls, drafter: str | LanguageModel | DrafterSpec) -> DrafterSpec:
        """Read A>B, each stage as ``StageSpec.parse`` reads it; a loaded model drafts alone, a parsed drafter is ready.

        Raises:
            InputError: it cannot be one.
        """
        if isinstance(drafter, DrafterSpec):
            return drafter
        if not isinstance(drafter, str) or is_path(drafter):
            return cls((StageSpec((drafter,)),))
        if ">" not in drafter:
            return cls((StageSpec(_sources(drafter)),))
        stages = tuple(StageSpec.parse(part.strip()) for part in drafter.split(">"))
        if not all(stage.name for stage in stages):
            raise ConfigError(f"drafter {drafter!r} has a stage without a name: write it as lookup>head")
        return cls(stages)

    def __str__(self) -> str:
        return ">".join(map(str, self.stages))

    @property
    def is_cascade(self) -> bool:
        """It has several stages."""
        return len(self.stages) > 1

    @property
    def sources(self) -> tuple[str | LanguageModel, ...]:
        """The sources of all stages."""
        return tuple(source for stage in self.stages for source in stage.sources)


def _sources(text: str) -> tuple[str, ...]:
    return (text.strip(),) if is_path(text) else tuple(part.strip() for part in text.split("+"))
