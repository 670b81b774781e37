"""Names to drafters, checked against the target."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..artifacts import user_path
from ..errors import ConfigError, DraftreeWarning, UnknownNameError, VocabularyError
from ..models.base import LanguageModel
from ..models.cost_profile import kept_or_measured
from ..models.cpu.quantization import DEFAULT_NUMERICS, DRAFTING, NUMERICS, price
from ..models.eagle_file import fits, is_head, load_head, shipped_for, shipped_head
from ..models.eagle_model import HeadModel
from ..models.huggingface import HFModel
from ..models.load import load
from ..policies.base import GrowthPolicy, Provenance
from ..policies.chains import CHAIN, DynamicWindow, Window
from ..typed import typed
from .base import Drafter, NoDrafter, TreeDrafter
from .cascade.stages import CascadeSource
from .draft_model import ModelSource, SelfSpeculationSource
from .eagle import EagleSource
from .ensemble import EnsembleSource
from .ngram import NgramSource
from .source import TokenSource
from .spec import AUTO, CHEAPER, DRAFTERS, LevelName, check_recycle_file, is_hierarchy, is_own, levels_of, parts_of
from .token_recycling import TokenRecyclingSource

_OWN: WeakKeyDictionary[PreTrainedModel, dict[str, HFModel]] = WeakKeyDictionary()
"""Targets once more, by their numerics."""
_CHEAP = 0.6
"""Share of the target's time for linear layers that the same ones may take in other numerics to draft for it: right 97
times in 100, eight in a row are 1.3 times as fast as plain decoding if verifying them takes 1.5 of its passes."""
_CONTEXT = 512
"""Tokens behind which passes of levels are compared."""


@dataclass(frozen=True, slots=True)
class _Making:
    """Makes the sources of one drafter.

    Attributes:
        target: whom it drafts for.
        recycle_file: where "recycle" keeps what it has learned.
        alone: the target itself is one of the sources, and no other is: it drafts on its own rows.
        window: shapes the proposals of levels that have no method of their own; None: their default does.
    """

    target: HFModel
    recycle_file: Path | None
    alone: bool
    window: Window | None = None

    def hierarchy(self, levels: Sequence[LevelName], count: int = 0, judge: TokenSource | None = None) -> TokenSource:
        """The source of the lowest levels of ``count``, below ``judge``; of one level a union, or a single source."""
        *below, top = levels
        count = count or len(levels)
        try:
            source = self._union(top.name, None if below else judge)
        except VocabularyError as error:
            place = f"level {len(levels)} of {count}, {top.name}: " if count > 1 else ""
            raise VocabularyError(f"{place}{error}") from None
        if not below:
            return source
        if source.model is not None:
            _warn_if_slow(len(levels), source.model, self.target)
        lower = self.hierarchy(below, count, source)
        policy = below[-1].policy(self.window)
        return CascadeSource(lower, source, policy, top.loop_back(), (below[-1].name, top.name))

    def _union(self, name: str, judge: TokenSource | None) -> TokenSource:
        sources = tuple(self._source(part, judge) for part in parts_of(name))
        return sources[0] if len(sources) == 1 else EnsembleSource(sources)

    def _source(self, name: str, judge: TokenSource | None) -> TokenSource:
        target = self.target
        if name == "lookup":
            return NgramSource()
        if name == "recycle":
            return TokenRecyclingSource(file=self.recycle_file)
        if isinstance(judge, ModelSource) and isinstance(judge.model, HFModel):
            folder = shipped_for(target) if name == "head" else user_path(name)
            if folder and is_head(folder) and fits(folder, target) and fits(folder, judge.model):
                target.track_features()  # committed tokens come with the target's hidden states
                return EagleSource(load_head(folder, judge.model), target.capabilities.vocab_size, verifier=judge)
        return _model_source(name, target, guest=self.alone and is_own(name))


@typed
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
            any name that ``draftree.load`` takes, "int8", a loaded model, several names joined by "+" (the
            union of what they say) or by ">" (a hierarchy, the lowest level first).
        target: the model that it drafts for.
        policy: shapes its trees. A ``DynamicWindow`` over a hierarchy is HSDDW: it shapes the proposals of
            levels without a method of their own, and the run that the target verifies is a chain.
        recycle_file: where "recycle" keeps what it has learned from one run to the next.
        learning: "auto" may be what learns from all requests; not so where children are drawn (``Scheme.draws``).

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
    window = None
    if isinstance(policy, DynamicWindow) and isinstance(name, str) and is_hierarchy(name):
        window, policy = policy.window, CHAIN  # HSDDW: the threshold of the run is the upper level's (``LoopBack``)
    source = load_source(name, target, recycle_file=recycle_file, window=window)
    check_made_for(policy.made_for, provenance(target, source, called))
    return TreeDrafter(policy, source, called)


def load_source(
    name: str | HFModel, target: HFModel, *, recycle_file: str | Path | None = None, window: Window | None = None
) -> TokenSource:
    """Make what drafts, by any name of ``load_drafter`` but "auto" and "none"; it raises the same errors.

    Args:
        name, target, recycle_file: as ``load_drafter``.
        window: shapes the proposals of stages that have no method of their own; None: their default does.
    """
    if isinstance(name, HFModel):
        return _model_source(name, target)
    levels = levels_of(name)
    own = [part for level in levels for part in parts_of(level.name) if is_own(part)]
    file = None if recycle_file is None else user_path(recycle_file)
    return _Making(target, file, alone=len(own) == 1, window=window).hierarchy(levels)


def provenance(target: LanguageModel, source: TokenSource, drafter: str) -> Provenance:
    """The models behind drafts of this source, which people call ``drafter``."""
    weights = "+".join(part.fingerprint for part in source.parts)
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


def resolved(name: str | HFModel, target: HFModel, policy: GrowthPolicy, *, learning: bool = True) -> str | HFModel:
    """What "auto" stands for: the best that is there for a target. Any other name stands for itself.

    It is the drafter that the policy was made for, if it was made for one that is there; else the target itself in
    int4, where that is fast; else lookup+recycle+head for a target that a head comes for, without ``learning`` that
    head alone; else lookup.
    """
    if name != AUTO:
        return name
    shipped = shipped_for(target) is not None
    if policy.made_for is not None and (shipped or policy.made_for.drafter != "head"):
        return policy.made_for.drafter
    if fast_in_int4(target):
        return DRAFTING
    if not shipped:
        return "lookup"
    return "lookup+recycle+head" if learning else "head"


def _model_source(name: str | HFModel, target: HFModel, guest: bool = False) -> ModelSource:
    model, vocab = drafting_model(name, target), target.capabilities.vocab_size
    if isinstance(model, HeadModel):
        return EagleSource(model, vocab)
    if guest:
        return SelfSpeculationSource(model.on_rows_of(target), vocab, target=target, near=name in CHEAPER)
    return ModelSource(model, vocab, near=name in CHEAPER)


def fast_in_int4(target: HFModel) -> bool:
    """It computes in float32 on a CPU that takes ``_CHEAP`` of the time for the same in int4."""
    return target.capabilities.numerics == DEFAULT_NUMERICS and price(target.model, DRAFTING) <= _CHEAP


def drafting_model(name: str | HFModel, target: HFModel) -> HFModel | HeadModel:
    """What drafts by passes of its own.

    Args:
        name: "self", "head", "int8", "fp16w", the folder of a draft head, or a model, loaded or by a name
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
        if is_head(folder := user_path(name)):
            return load_head(folder, target)
        try:
            name = load(name, device=str(target.capabilities.device), numerics=_numerics(target))
        except UnknownNameError as error:
            raise UnknownNameError(f"no drafter {name!r}: not one of {', '.join(DRAFTERS)}, and {error}") from None
    check_vocabulary(target, name)
    return name


def _own(name: str, target: HFModel) -> HFModel:
    """The target in other numerics, with a cache of its own.

    Raises:
        ConfigError: it cannot be had in these numerics.
    """
    known = _OWN.setdefault(target.model, {})
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
