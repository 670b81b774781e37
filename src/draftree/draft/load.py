"""Names to drafters, checked against the target."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Many
from pathlib import Path
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..errors import ConfigError, DraftreeWarning, UnknownNameError, VocabularyError
from ..models.base import LanguageModel
from ..models.head_file import fits, is_head, load_head, shipped_for, shipped_head
from ..models.head_model import HeadModel
from ..models.hf import HFModel
from ..models.load import load
from ..models.measure import kept_or_measured
from ..models.numerics import DEFAULT_NUMERICS, NUMERICS
from .base import Drafter, NoDrafter
from .drafter import TreeDrafter
from .guest import GuestSource
from .head import HeadSource
from .hierarchy import HierarchySource
from .levels import LevelName, is_hierarchy, levels_of
from .lookup import LookupSource
from .model import ModelSource
from .policy import GrowthPolicy
from .recycle import RecycleSource
from .source import Source
from .union import UnionSource

AUTO = DEFAULT_DRAFTER = "auto"
DRAFTERS = {
    AUTO: "lookup+recycle+head where a head comes for the target (head where children are drawn), else lookup",
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
_CHEAPER = ("int4", "int8", "fp16w")
_CHEAPER_MODELS: WeakKeyDictionary[PreTrainedModel, dict[str, HFModel]] = WeakKeyDictionary()
"""Targets once more, by their numerics."""
_LAYERS = "layers="
_CONTEXT = 512
"""Tokens behind which passes of levels are compared."""


def load_drafter(
    name: str | HFModel,
    target: HFModel,
    policy: GrowthPolicy,
    *,
    recycle_file: str | Path | None = None,
    learning: bool = True,
) -> Drafter:
    """Make a drafter by name.

    Args:
        name: "auto" (``resolved``), "lookup", "recycle", "head", "none", "self", the folder of a draft head, a model by
            any name that ``draftree.load`` takes, "layers=N", "int8", a loaded model, several names joined by "+" (the
            union of what they say) or by ">" (a hierarchy, the lowest level first).
        target: the model that it drafts for.
        policy: shapes its trees.
        recycle_file: where "recycle" keeps what it has learned from one run to the next.
        learning: "auto" may be what learns from all sequences; not so where children are drawn (``Scheme.draws``).

    Raises:
        UnknownNameError: no such drafter.
        VocabularyError: the drafting model has another vocabulary than the target.
        ConfigError: the policy, or the draft head, was made for other models, or the names do not go together.
        ModelFileError: the draft head cannot be read.
    """
    name = resolved(name, target, policy, learning=learning)
    check_recycle_file(name, recycle_file)
    if name == "none":
        return NoDrafter()
    called = name.capabilities.name if isinstance(name, HFModel) else name
    policy.check(target.capabilities.name, called)
    file = None if recycle_file is None else Path(recycle_file).expanduser()
    if isinstance(name, HFModel):
        return TreeDrafter(policy, _source(name, target, file, None), called)
    levels = levels_of(name)
    return TreeDrafter(policy, _hierarchy(levels, len(levels), target, file), called)


def _hierarchy(
    levels: Many[LevelName], count: int, target: HFModel, recycle_file: Path | None, judge: Source | None = None
) -> Source:
    """The source of the lowest levels of ``count``, below ``judge``; a union, or a single source, where it is one."""
    *below, top = levels
    try:
        source = _union(top.name, target, recycle_file, None if below else judge)
    except VocabularyError as error:
        raise VocabularyError(f"level {len(levels)} of {count}, {top.name}: {error}" if count > 1 else error) from None
    if not below:
        return source
    if source.model is not None:
        _warn_if_slow(len(levels), source.model, target)
    lower = _hierarchy(below, count, target, recycle_file, source)
    return HierarchySource(lower, source, below[-1].policy(), top.loop_back(), (below[-1].name, top.name))


def _warn_if_slow(level: int, model: LanguageModel, target: HFModel) -> None:
    """Say so where a level that verifies takes longer than the target, by their measured costs."""
    if model.capabilities == target.capabilities:
        return
    own, whole = (1e3 * kept_or_measured(m).seconds(1, _CONTEXT) for m in (model, target))
    if own > whole:
        warnings.warn(
            f"level {level}, {model.capabilities.name}: its pass takes {own:.1f} ms and the target's {whole:.1f} ms: "
            "the hierarchy is slower than its own target: leave that level out, or name a cheaper one",
            DraftreeWarning,
            stacklevel=2,
        )


def _union(name: str, target: HFModel, recycle_file: Path | None, judge: Source | None) -> Source:
    sources = tuple(_source(part, target, recycle_file, judge) for part in parts_of(name))
    return sources[0] if len(sources) == 1 else UnionSource(sources)


def resolved(name: str | HFModel, target: HFModel, policy: GrowthPolicy, *, learning: bool = True) -> str | HFModel:
    """What "auto" stands for: the best that is there for a target. Any other name stands for itself.

    It is the drafter that the policy was made for, if it was made for one that is there; else lookup+recycle+head for a
    target that a head comes for, without ``learning`` that head alone; else lookup.
    """
    if name != AUTO:
        return name
    shipped = shipped_for(target) is not None
    if policy.partner is not None and (shipped or policy.partner != "head"):
        return policy.partner
    if not shipped:
        return "lookup"
    return "lookup+recycle+head" if learning else "head"


def parts_of(name: str) -> tuple[str, ...]:
    """The names that a drafter's name joins by "+"; a folder may have one in its own name.

    Raises:
        ConfigError: a part is missing, there twice, or one of "none" and "auto".
    """
    parts = (name,) if Path(name).exists() else tuple(part.strip() for part in name.split("+"))
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
    own = name in DRAFTERS or name in _CHEAPER or name.startswith(_LAYERS) or is_hierarchy(name)
    return not own and len(parts_of(name)) == 1 and not is_head(Path(name).expanduser())


def learns(name: str | HFModel) -> bool:
    """What this drafter says depends on other sequences (``Source.learns``); "auto" goes by what is wanted.

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


def _source(name: str | HFModel, target: HFModel, recycle_file: Path | None, judge: Source | None) -> Source:
    if name == "lookup":
        return LookupSource()
    if name == "recycle":
        return RecycleSource(file=recycle_file)
    if isinstance(name, str) and isinstance(judge, ModelSource) and isinstance(judge.model, HFModel):
        folder = shipped_for(target) if name == "head" else Path(name).expanduser()
        if folder and is_head(folder) and fits(folder, target) and fits(folder, judge.model):
            target.track_features()  # committed tokens come with the target's hidden states
            return HeadSource(load_head(folder, judge.model), target.capabilities.vocab_size, judge=judge)
    model, vocab = drafting_model(name, target), target.capabilities.vocab_size
    if isinstance(name, str) and is_own(name) and isinstance(model, HFModel):
        return GuestSource(model.on_rows_of(target), vocab, target=target, near=name in _CHEAPER)
    return HeadSource(model, vocab) if isinstance(model, HeadModel) else ModelSource(model, vocab)


def drafting_model(name: str | HFModel, target: HFModel) -> HFModel | HeadModel:
    """What drafts by passes of its own.

    Args:
        name: "self", "head", "layers=...", "int8", "fp16w", the folder of a draft head, or a model, loaded or by a name
            for ``draftree.load``.
        target: the model that it drafts for.

    Raises:
        ConfigError: it does not fit the target.
        UnknownNameError: there is no such drafter.
        VocabularyError: it has another vocabulary than the target.
        ModelFileError: the draft head cannot be read.
    """
    if isinstance(name, str):
        if name == "self":
            return target.twin()
        if is_own(name):
            return _own(name, target)
        if name == "head":
            return shipped_head(target)
        if is_head(folder := Path(name).expanduser()):
            return load_head(folder, target)
        try:
            name = load(name, device=str(target.capabilities.device), numerics=_numerics(target))
        except UnknownNameError as error:
            raise UnknownNameError(f"no drafter {name!r}: not one of {', '.join(DRAFTERS)}, and {error}") from None
    check_vocabulary(target, name)
    return name


def layers_of(name: str, count: int) -> tuple[int, ...]:
    """The layers that "layers=N" or "layers=0-9.12" keeps of ``count``.

    Raises:
        ConfigError: it is written otherwise, or there are not so many.
    """
    text = name.removeprefix(_LAYERS)
    try:
        if text.isdecimal():
            if not 1 <= int(text) <= count:
                raise ConfigError(f"drafter {name!r}: the target has {count} layers: keep 1 to {count} of them")
            return tuple(range(int(text)))
        found: list[int] = []
        for part in text.split("."):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
        return tuple(found)
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(
            f"drafter {name!r}: write how many layers are kept, as layers=20, or which, as layers=0-9.12.15-29"
        ) from None


def is_own(name: str) -> bool:
    """It is the target itself, in other numerics or without some of its layers: it can draft on the target's rows."""
    return name in _CHEAPER or name.startswith(_LAYERS)


def _own(name: str, target: HFModel) -> HFModel:
    """The target in other numerics or without some of its layers, with a cache of its own.

    Raises:
        ConfigError: it cannot be had in these numerics, or has no such layers.
    """
    if name.startswith(_LAYERS):
        return target.with_layers(layers_of(name, target.layers), f"{target.capabilities.name}, {name}")
    known = _CHEAPER_MODELS.setdefault(target.model, {})
    if name not in known:
        known[name] = target.in_numerics(name)
    return known[name].twin()


def _numerics(target: HFModel) -> str:
    """The target's, for a model that drafts for it."""
    return target.capabilities.numerics if target.capabilities.numerics in NUMERICS else DEFAULT_NUMERICS


def check_vocabulary(target: HFModel, drafter: HFModel) -> None:
    """Make sure that a token id means the same to both; their output layers may be padded differently.

    Raises:
        VocabularyError: it does not; the message gives both sizes and the first token that differs.
    """
    names = (target.capabilities.name, drafter.capabilities.name)
    if target.tokenizer is None or drafter.tokenizer is None:
        sizes = (target.capabilities.vocab_size, drafter.capabilities.vocab_size)
        if sizes[0] != sizes[1]:
            raise VocabularyError(f"{names[1]} has {sizes[1]} tokens and {names[0]} {sizes[0]}: {_WAY_OUT}")
        return
    ours, theirs = ({i: t for t, i in m.tokenizer.get_vocab().items()} for m in (target, drafter) if m.tokenizer)
    if ours == theirs:
        return
    first = next(i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i))
    raise VocabularyError(
        f"drafter {names[1]} has {len(theirs)} tokens and target {names[0]} {len(ours)}; the first that differs is "
        f"id {first}: {theirs.get(first)!r} against {ours.get(first)!r}: {_WAY_OUT}"
    )


_WAY_OUT = "use a drafter with the target's vocabulary, or drafter 'lookup'"
