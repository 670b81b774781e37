"""The drafters by name: a new one is a file with its source, and a line of ``SOURCES`` and of ``DRAFTERS``.

lookup                                one source of drafts
lookup+head                           an ensemble: in each step the tree of one of them
lookup:method=static>head:tau=0.5     a cascade: A>B drafts by A, and B verifies that

A drafter is parsed once, into a ``DrafterSpec``, and loaded for a target.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..artifacts import is_path, user_path
from ..config import typed
from ..errors import ConfigError, DraftreeWarning, UnknownNameError
from ..importing import Imported, import_named, is_imported
from ..models.base import LanguageModel
from ..models.cost_profile import profile_of
from ..models.heads.head_folder import find_head, load_head, shipped_for, shipped_head
from ..models.loading import ModelOptions, load_here
from ..models.model_files import DEFAULT_MODEL, gguf_path
from ..models.protocols import DraftHead
from ..policies.auto import AutoTree
from ..policies.base import GrowthPolicy, Provenance, read_number
from ..policies.entropy import CHAIN, DynamicWindow, read_start
from ..policies.gain import CONTEXT
from ..policies.methods import find_method
from .base import Drafter, DraftSource
from .cascade import CascadeSource, LoopBack
from .default import advise, default_pays
from .draft_model import EagleSource, ModelSource
from .ensemble import EnsembleSource
from .fitting import fitted
from .grow import TreeDrafter
from .ngram import NgramSource

AUTO = DEFAULT_DRAFTER = "auto"
NONE = "none"
LOOKUP = "lookup"
"""Drafts from the request's own texts, a predicted output among them."""
SELF = "self"
METHOD = "hsddw"
"""The default method of a stage's proposals."""
_LOOP: Mapping[str, Callable[[str], Any]] = {
    "tau": partial(read_start, "tau"),
    "pending": lambda text: read_number(int, "pending", text, "use a whole number of tokens, at least 1"),
    "rejected": str,
}
"""Settings of ``LoopBack``, and how they are read."""


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

    def policy(self, window: DynamicWindow | None = None) -> GrowthPolicy:
        """The policy that shapes its proposals to the next stage, from "method" and the settings of that method.

        Args:
            window: in place of ``METHOD`` where the stage has no settings.
        """
        if window is not None and not self.settings:
            return window
        given = dict(self.settings)
        return find_method(given.pop("method", METHOD)).policy(given)

    def loop_back(self) -> LoopBack:
        """When it lets the stage before it draft again."""
        if wrong := [key for key in self.settings if key not in _LOOP]:
            raise ConfigError(f"the last stage, {self}, has no setting {wrong[0]!r}: it has {', '.join(_LOOP)}")
        return LoopBack(**{key: _LOOP[key](text) for key, text in self.settings.items()})


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
        if len(self.sources) > 1 and (alone := {AUTO, NONE}.intersection(self.sources)):
            raise ConfigError(f"drafter '{self}': {alone.pop()} joins no other: use it alone, or leave it out")
        if len(self.stages) > 2:
            raise ConfigError(f"drafter '{self}' has {len(self.stages)} stages: a cascade has two, A>B")
        if self.is_cascade:
            first, last = self.stages
            first.policy()
            last.loop_back()

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


def is_head(name: str) -> bool:
    """Whether this is the folder of a draft head.

    Raises:
        ConfigError: it is a head of a kind that is not read.
    """
    folder = user_path(name)
    return folder.is_dir() and find_head(folder) is not None


def load_draft_model(name: str, target: LanguageModel) -> LanguageModel:
    """A model that drafts for a target: on its device, with as many threads.

    Raises:
        UnknownNameError: nothing of that name was found.
        NoTreesError, VocabularyError: ``fitted``.
    """
    can, options = target.capabilities, ModelOptions()
    if can.device != "cpu":
        options["device"] = can.device
    elif gguf_path(name) is not None:
        options["threads"] = can.threads
    try:
        model = load_here(name, **options)
    except UnknownNameError as error:
        raise UnknownNameError(f"no drafter {name!r}: not one of {', '.join(DRAFTERS)}, and {error}") from None
    return fitted(model, target)


SOURCES: Mapping[str, Callable[[LanguageModel], DraftSource | LanguageModel]] = {
    "lookup": lambda target: NgramSource(),
    "head": shipped_head,
    SELF: lambda target: target.twin(),
}
"""Names, and what makes a source for a target, or a model whose passes one reads."""
DRAFTERS = {
    AUTO: "lookup+head where a head comes, but on llama.cpp; else lookup+smollm2 where that pays; else lookup",
    "lookup": "continuations of earlier occurrences in prompt and output; no model",
    "head": "a layer trained on the target's hidden states; comes for smollm2 and Qwen2.5-Coder-1.5B",
    SELF: "the target drafts for itself: every draft is accepted; for tests",
    NONE: "no drafting: AR decoding",
}
"""What ``draftree methods`` lists; any other name is a draft head's folder or a model (see ``draftree.load``)."""
COMPOSED = {
    "FOLDER": "a draft head that 'draftree train head' wrote",
    "MODEL": "any model; one of another vocabulary drafts text",
    "MODULE:NAME": "your own: a function, or a class, that makes a DraftSource for the target",
    "A+B": "an ensemble: A drafts a tree where it is sure of the next token, else B",
    "A>B": "a cascade: A proposes to B, which verifies and corrects that (settings: A:method=M, "
    "B:tau=H:pending=N:rejected=on|end)",
}
"""What else it lists: drafters that are named by what they are made of."""


def is_model(drafter: DrafterSpec) -> bool:
    """It is one draft model, to be loaded by ``draftree.load``."""
    (source, *more) = drafter.sources
    return isinstance(source, str) and source not in DRAFTERS and not more and not is_head(source)


def learns(drafter: DrafterSpec) -> bool:
    """As ``DraftSource.learns``; "auto" is chosen so that it may."""
    return len(drafter.sources) > 1


_RIGHT = 0.6
"""How often the first candidate of a head is right, about: a pass over it has to cost less than that gains."""


@typed
def load_drafter(
    name: str | DrafterSpec | LanguageModel,
    target: LanguageModel,
    policy: GrowthPolicy,
    *,
    learning: bool = True,
) -> Drafter:
    """Make a drafter by name.

    Args:
        name: as written (``DrafterSpec.parse``: names of ``DRAFTERS``, the folder of a draft head, a model by any name
            that ``draftree.load`` takes; A+B, A>B), parsed, or a loaded model; "auto" is ``resolved``.
        target: the model that it drafts for.
        policy: shapes its trees. A ``DynamicWindow`` over a cascade is HSDDW: it shapes the proposals of
            stages without a method of their own, and the run that the target verifies is a chain.
        learning: "auto" may be what learns from all requests; not so where children are drawn at random.

    Raises:
        UnknownNameError: no such drafter.
        NoTreesError, VocabularyError: ``fitted``.
        ConfigError: the policy, or the draft head, was made for other models, or the names do not go together.
        ModelFileError: the draft head cannot be read.
    """
    wanted = DrafterSpec.parse(name)
    drafter = resolved(wanted, target, policy, learning=learning)
    called = str(drafter)
    if (str(wanted), called) == (AUTO, LOOKUP) and policy.made_for is None:
        advise(target)
    if called == NONE:
        return Drafter()
    window = None
    if drafter.is_cascade and isinstance(policy, DynamicWindow):
        window, policy = policy, CHAIN  # HSDDW: the threshold of the run is the last stage's (``LoopBack``)
    source = load_source(drafter, target, window=window)
    check_made_for(policy.made_for, provenance(target, source, called))
    return TreeDrafter(policy, source, called)


def load_source(
    name: str | DrafterSpec | LanguageModel,
    target: LanguageModel,
    *,
    window: DynamicWindow | None = None,
) -> DraftSource:
    """Make the source of any drafter but "auto" and "none"; it raises the errors of ``load_drafter``.

    Args:
        name, target: as ``load_drafter``.
        window: shapes the proposals of stages that have no method of their own; None: their default does.
    """
    stages, made = DrafterSpec.parse(name).stages, list[DraftSource]()
    for stage in stages:
        parts = tuple(_source(part, target) for part in stage.sources)
        made.append(parts[0] if len(parts) == 1 else EnsembleSource(parts))
    if len(stages) == 1:
        return made[0]
    (below, stage), (lower, upper) = stages, made
    return CascadeSource(lower, upper, below.policy(window), stage.loop_back(), (below.name, stage.name))


_LOADED: WeakKeyDictionary[LanguageModel, WeakValueDictionary[str, LanguageModel]] = WeakKeyDictionary()
"""Target -> name -> a model that drafts for it, as long as a source does: sources of several methods share weights."""


def _loaded(name: str, target: LanguageModel) -> LanguageModel:
    """A head by its folder, or a draft model."""
    return load_head(user_path(name), target) if is_head(name) else load_draft_model(name, target)


def _source(name: Part, target: LanguageModel) -> DraftSource:
    """The source of one part."""
    made: DraftSource | LanguageModel
    if isinstance(name, Imported):
        return name.make(target)
    if not isinstance(name, str):
        made = fitted(name, target)
    else:
        shared = _LOADED.setdefault(target, WeakValueDictionary())
        made = shared.get(name) or SOURCES.get(name, partial(_loaded, name))(target)
        if isinstance(made, DraftSource):
            return made
        shared[name] = made
    vocab = target.capabilities.vocab_size
    return EagleSource(made, vocab) if isinstance(made, DraftHead) else ModelSource(made, vocab)


def provenance(target: LanguageModel, source: DraftSource, drafter: str) -> Provenance:
    """The models behind drafts of this source, which people call ``drafter``."""
    weights = "+".join(model.capabilities.fingerprint for model in source.models) or source.name
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


def resolved(
    drafter: DrafterSpec, target: LanguageModel, policy: GrowthPolicy, *, learning: bool = True
) -> DrafterSpec:
    """What "auto" stands for: the best that is there for a target. Any other drafter stands for itself.

    It is the drafter that the policy was made for, if it was made for one that is there; else lookup+head for
    a target that a head comes for, but not for a policy that weighs costs where a second token in a pass costs more
    than heads gain; else lookup+smollm2 where that is expected to pay (``default_pays``); else lookup. Without
    ``learning`` the head or the model drafts alone.
    """
    if str(drafter) != AUTO:
        return drafter
    shipped = shipped_for(target)
    if policy.made_for is not None and (shipped or policy.made_for.drafter != "head"):
        return DrafterSpec.parse(policy.made_for.drafter)
    if shipped and not (isinstance(policy, AutoTree) and _second_token(target) > _RIGHT):
        model = "head"
    elif default_pays(target):
        model = DEFAULT_MODEL
    else:
        return DrafterSpec.parse(LOOKUP)
    return DrafterSpec.parse(f"{LOOKUP}+{model}" if learning else model)


def _second_token(target: LanguageModel) -> float:
    """What a second token of a pass costs, in passes over one."""
    profile = profile_of(target)
    return profile.seconds(2, CONTEXT) / profile.seconds(1, CONTEXT) - 1
