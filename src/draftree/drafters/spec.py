"""Drafters as they are written.

lookup                                one source of drafts
lookup+head                           an ensemble: in each step the tree of one of them
lookup:method=static>head:tau=0.5     a cascade: A>B drafts by A, and B verifies that

A drafter is parsed once, into a ``DrafterSpec``, and loaded for a target (``registry.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..artifacts import is_path
from ..errors import ConfigError
from ..importing import Imported, import_named, is_imported
from ..models.base import LanguageModel
from .base import DraftSource

AUTO = DEFAULT_DRAFTER = "auto"
NONE = "none"
LOOKUP = "lookup"
"""Drafts from the request's own texts, a predicted output among them."""
SELF = "self"
CASCADE = "draftree.papers.cascade"
"""The module that reads the stages of cascades and joins their sources."""


Part = str | LanguageModel | Imported[DraftSource]
"""What drafts, alone or beside others: a name of ``SOURCES``, a folder or a model; a loaded model; code of a user."""


def _name(part: Part) -> str:
    return part.capabilities.name if isinstance(part, LanguageModel) else str(part)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of a cascade, or a whole drafter that is no cascade.

    Attributes:
        sources: several are an ensemble; a loaded model is the only one.
        settings: as written.
    """

    sources: tuple[Part, ...]
    settings: Mapping[str, str] = field(default_factory=dict)

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
        """The name of the drafter, without its settings."""
        return "+".join(map(_name, self.sources))

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.settings.items())])


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter: a cascade of stages, the first to draft first; a single stage is no cascade.

    Raises:
        InputError: a setting does not exist or is out of range, a source has no name or stands in a stage
            twice, or "auto" or "none" is joined.
    """

    stages: tuple[StageSpec, ...]

    def __post_init__(self) -> None:
        if "" in self.sources:
            raise ConfigError(f"drafter '{self}' has a part without a name: write it as lookup+head or lookup>head")
        if any(stage.sources.count(part) > 1 for stage in self.stages for part in stage.sources):
            raise ConfigError(f"drafter '{self}' has a part twice: name each part once")
        if len(self.sources) > 1 and (alone := next((name for name in (AUTO, NONE) if name in self.sources), None)):
            raise ConfigError(f"drafter '{self}': {alone} joins no other: use it alone, or leave it out")
        if len(self.stages) > 2:
            raise ConfigError(f"drafter '{self}' has {len(self.stages)} stages: a cascade has two, A>B")
        if self.is_cascade:
            import_named("drafter", f"{CASCADE}:read_stages", tuple).make(*self.stages)

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
        return cls(tuple(StageSpec.parse(part.strip()) for part in drafter.split(">")))

    def __str__(self) -> str:
        return ">".join(map(str, self.stages))

    @property
    def is_cascade(self) -> bool:
        """Whether the drafter is a cascade."""
        return len(self.stages) > 1

    @property
    def sources(self) -> tuple[Part, ...]:
        """The sources of all stages."""
        return tuple(source for stage in self.stages for source in stage.sources)


def _sources(text: str) -> tuple[str, ...]:
    return (text.strip(),) if is_path(text) else tuple(part.strip() for part in text.split("+"))


def read_drafter(text: str) -> str | DrafterSpec:
    """The drafter that a command line names: each part MODULE:NAME of it is imported, unless it is a path.

    The attribute returns a ``DraftSource`` when it is called with the target, or is one, which is copied.

    Raises:
        InputError: a module cannot be imported, has no such attribute, or the text cannot be a drafter.
    """
    spec = DrafterSpec.parse(text)
    stages = [replace(stage, sources=tuple(map(_imported, stage.sources))) for stage in spec.stages]
    return text if (*stages,) == spec.stages else DrafterSpec((*stages,))


def _imported(part: Part) -> Part:
    if not isinstance(part, str) or not is_imported(part) or is_path(part):
        return part
    return import_named("drafter", part, DraftSource)  # type: ignore[type-abstract]


def learns(drafter: DrafterSpec) -> bool:
    """As ``DraftSource.learns``; "auto" is chosen so that it may."""
    return len(drafter.sources) > 1
