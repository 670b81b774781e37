"""What "auto" stands for: the best drafter that is there for a target; and what would draft for it better."""

from __future__ import annotations

import warnings
from functools import cache

from ..errors import DraftreeWarning, NotNativeError, UnknownNameError
from ..installation import install_data
from ..models.base import LanguageModel
from ..models.cost_profile import profile_of
from ..models.heads.head_folder import head_for
from ..models.heads.own_heads import own_heads
from ..models.heads.published_heads import published_for
from ..models.model_files import DEFAULT_MODEL, gguf_path
from ..models.native.native_model import UnloadedModel, unloaded
from ..policies.base import GrowthPolicy
from ..policies.gain import CONTEXT, may_pay
from .spec import AUTO, LOOKUP, DrafterSpec

_RIGHT = 0.6
"""How often the first candidate of a head is right, about: a pass over it has to cost less than that gains."""


def resolved(
    drafter: DrafterSpec, target: LanguageModel, policy: GrowthPolicy, *, learning: bool = True
) -> DrafterSpec:
    """What "auto" stands for: the best that is there for a target. Any other drafter stands for itself.

    It is the drafter that the policy was made for, if it was made for one that is there. Else lookup drafts, with the
    target's head, but not for a policy that weighs costs where a second token in a pass costs more than heads gain; and
    with the model that ships where that is expected to pay (``default_pays``) and no head drafts, or one of the user's
    own, whose training may have been short: then a policy that weighs costs leaves out what does not pay as it decodes.
    Without ``learning`` the head or the model drafts alone.
    """
    if str(drafter) != AUTO:
        return drafter
    head, weighs = head_for(target), bool(policy.report)
    if policy.made_for is not None and (head or policy.made_for.drafter != "head"):
        return DrafterSpec.parse(policy.made_for.drafter)
    models = ["head"] if head and not (weighs and _second_token(target) > _RIGHT) else []
    if (not models or (weighs and head in own_heads())) and default_pays(target):
        models.append(DEFAULT_MODEL)
    return DrafterSpec.parse("+".join([LOOKUP, *models]) if learning else (models or [LOOKUP])[0])


def _second_token(target: LanguageModel) -> float:
    """What a second token of a pass costs, in passes over one."""
    profile = profile_of(target)
    return profile.seconds(2, CONTEXT) / profile.seconds(1, CONTEXT) - 1


def default_pays(target: LanguageModel) -> bool:
    """Whether the model that ships is expected to draft for a target in less time than that saves.

    By the costs of both, before its weights are read. It drafts on a CPU, for targets with a tokenizer.
    """
    can = target.capabilities
    if target.tokenizer is None or can.device != "cpu":
        return False
    try:
        return may_pay(profile_of(target), profile_of(_default(can.threads)))
    except (UnknownNameError, NotNativeError):
        return False


@cache
def _default(threads: int) -> UnloadedModel:
    path = gguf_path(DEFAULT_MODEL)
    assert path is not None  # noqa: S101 - or UnknownNameError
    return unloaded(path, DEFAULT_MODEL, threads)


def advice(target: LanguageModel) -> str:
    """What would draft for a target better than what is here; "": nothing that is known.

    That is the model that ships, where its package is missing, and a published head.
    """
    if target.tokenizer is None or target.capabilities.no_trees or head_for(target):
        return ""
    ways = list[str]()
    if _lacks_default() and target.capabilities.device == "cpu":
        ways.append(f"'{install_data(DEFAULT_MODEL)}' lets a small model draft where that pays")
    if head := published_for(target):
        ways.append(f"{head.name} is a published head for {head.target}: {head.use}")
    return "; ".join(ways)


def _lacks_default() -> bool:
    try:
        gguf_path(DEFAULT_MODEL)
    except UnknownNameError:
        return True
    return False


_ADVISED = set[str]()
"""Packages that a target was drafted for without, as this process has said."""


def advise(target: LanguageModel) -> None:
    """Say once that ``lookup`` alone drafts for a target because a package is missing."""
    if DEFAULT_MODEL in _ADVISED or not _lacks_default() or not (better := advice(target)):
        return
    _ADVISED.add(DEFAULT_MODEL)
    name = target.capabilities.name
    warnings.warn(f"only texts that repeat themselves are drafted for {name}: {better}", DraftreeWarning, stacklevel=4)
