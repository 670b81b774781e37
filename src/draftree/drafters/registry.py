"""The drafters by name: a new one is a file with its source, and a line of ``SOURCES`` and of ``DRAFTERS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..artifacts import user_path
from ..config import typed
from ..errors import UnknownNameError
from ..importing import Imported, import_named
from ..models.base import LanguageModel
from ..models.heads.head_folder import find_head, load_head, load_head_for
from ..models.loading import ModelOptions, load_here
from ..models.model_files import gguf_path
from ..models.protocols import DraftHead, FeatureModel
from ..policies.base import GrowthPolicy
from .base import Drafter, DraftSource
from .default import advise, resolved
from .draft_model import EagleSource, ModelSource
from .ensemble import EnsembleSource
from .fitting import fitted
from .grow import TreeDrafter
from .ngram import NgramSource
from .provenance import check_made_for, provenance
from .spec import AUTO, CASCADE, LOOKUP, NONE, SELF, DrafterSpec, Part


def is_head(name: str) -> bool:
    """Whether this is the folder of a draft head.

    Raises:
        ConfigError: it is a head of a kind that is not read.
    """
    folder = user_path(name)
    return folder.is_dir() and find_head(folder) is not None


def load_draft_model(name: str, target: LanguageModel) -> LanguageModel:
    """A model that drafts for a target: on its device, by its runner, with as many threads.

    Raises:
        UnknownNameError: nothing of that name was found.
        NoTreesError, VocabularyError: ``fitted``.
    """
    can, options = target.capabilities, ModelOptions()
    if can.device != "cpu":
        options["device"] = can.device
        if isinstance(target, FeatureModel):  # not one over several processes: that is eager whoever drafts for it
            options["runner"] = can.runner
    elif gguf_path(name) is not None:
        options["threads"] = can.threads
    try:
        model = load_here(name, **options)
    except UnknownNameError as error:
        raise UnknownNameError(f"no drafter {name!r}: not one of {', '.join(DRAFTERS)}, and {error}") from None
    return fitted(model, target)


SOURCES: Mapping[str, Callable[[LanguageModel], DraftSource | LanguageModel]] = {
    "lookup": lambda target: NgramSource(),
    "head": load_head_for,
    SELF: lambda target: target.twin(),
}
"""Names, and what makes a source for a target, or a model whose passes one reads."""
DRAFTERS = {
    AUTO: "lookup+head where a head comes; else lookup+head+smollm2, less what is not there or is not expected to pay",
    "lookup": "continuations of earlier occurrences in prompt and output; no model",
    "head": "a layer trained on the target's hidden states: yours, one in its file, smollm2's or Qwen2.5-Coder-1.5B's",
    SELF: "the target drafts for itself: every draft is accepted; for tests",
    NONE: "no drafting: AR decoding",
}
"""What ``draftree methods`` lists; any other name is a draft head's folder or a model (see ``draftree.load``)."""
COMPOSED = {
    "FOLDER": "a draft head that 'draftree train head' wrote",
    "MODEL": "any model; one of another vocabulary drafts text",
    "MODULE:NAME": "your own: a function, or a class, that makes a DraftSource for the target",
    "A+B": "an ensemble: the first that is sure of the next token drafts; those without a model come first",
    "A>B": "a cascade: A proposes to B, which verifies and corrects that (settings: A:method=M, "
    "B:tau=H:pending=N:rejected=end|on)",
}
"""What else it lists: drafters that are named by what they are made of."""


def is_model(drafter: DrafterSpec) -> bool:
    """It is one draft model, to be loaded by ``draftree.load``."""
    (source, *more) = drafter.sources
    return isinstance(source, str) and source not in DRAFTERS and not more and not is_head(source)


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
        policy: shapes its trees; of a cascade the proposals, if it says so (``GrowthPolicy.over_cascade``) and the
            stage has no method of its own.
        learning: "auto" may be what learns from all requests; not so where children are drawn at random.

    Raises:
        UnknownNameError: no such drafter.
        NoTreesError, VocabularyError: ``fitted``.
        ConfigError: the policy, or the draft head, was made for other models, or the names do not go together.
        ModelFileError: the draft head cannot be read.
    """
    spec = DrafterSpec.parse(name)
    drafter = resolved(spec, target, policy, learning=learning)
    called = str(drafter)
    if (str(spec), called) == (AUTO, LOOKUP) and policy.made_for is None:
        advise(target)
    if called == NONE:
        return Drafter()
    proposals = None
    if drafter.is_cascade and policy.over_cascade:
        proposals, policy = policy, policy.over_cascade
    source = load_source(drafter, target, proposals=proposals)
    check_made_for(policy.made_for, provenance(target, source, called))
    return TreeDrafter(policy, source, called)


def load_source(
    name: str | DrafterSpec | LanguageModel,
    target: LanguageModel,
    *,
    proposals: GrowthPolicy | None = None,
) -> DraftSource:
    """Make the source of any drafter but "auto" and "none"; it raises the errors of ``load_drafter``.

    Args:
        name, target: as ``load_drafter``.
        proposals: shapes those of a cascade's stage that has no method of its own; None: its default does.
    """
    stages, sources = DrafterSpec.parse(name).stages, list[DraftSource]()
    for stage in stages:
        parts = tuple(_source(part, target) for part in stage.sources)
        sources.append(parts[0] if len(parts) == 1 else EnsembleSource(parts))
    if len(stages) == 1:
        return sources[0]
    join = import_named("drafter", f"{CASCADE}:join", DraftSource)  # type: ignore[type-abstract]
    return join.make(stages, sources, proposals)


_LOADED: WeakKeyDictionary[LanguageModel, WeakValueDictionary[str, LanguageModel]] = WeakKeyDictionary()
"""Target -> name -> a model that drafts for it, as long as a source does: sources of several methods share weights."""


def _loaded(name: str, target: LanguageModel) -> LanguageModel:
    """A head by its folder, or a draft model."""
    return load_head(user_path(name), target) if is_head(name) else load_draft_model(name, target)


def _source(name: Part, target: LanguageModel) -> DraftSource:
    """The source of one part."""
    model: DraftSource | LanguageModel
    if isinstance(name, Imported):
        return name.make(target)
    if not isinstance(name, str):
        model = fitted(name, target)
    else:
        shared = _LOADED.setdefault(target, WeakValueDictionary())
        model = shared.get(name) or SOURCES.get(name, partial(_loaded, name))(target)
        if isinstance(model, DraftSource):
            return model
        shared[name] = model
    vocab = target.capabilities.vocab_size
    return EagleSource(model, vocab) if isinstance(model, DraftHead) else ModelSource(model, vocab)
