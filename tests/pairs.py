"""Pairs of tiny target and drafter, and what transformers says, for tests of whole decodings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter, DraftSource
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.speculation import EngineRequest
from draftree.engine.step import Stepper
from draftree.models.cost_profile import Identity, Point, Profile
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.c2t import DEFAULT, ClassifierTree, read_classifier
from draftree.papers.cascade import CascadeSource
from draftree.policies.auto import AutoTree
from draftree.policies.base import GrowthPolicy, Provenance
from draftree.policies.fixed import TREE_FILE, Counts, RankTree, TreeFile, expected_acceptance_length
from draftree.policies.methods import METHODS
from draftree.request import Request

from .tiny import VOCAB, tiny

DRAFTERS = ("lookup", "self", "relative", "stranger")
"""A "relative" is the target with noise on its weights, so it is often right; a "stranger" has weights of its own."""


def target(kind: str = "llama", eos: int | None = None) -> HFModel:
    """A tiny target; ``eos`` ends its requests."""
    model = tiny(kind)
    if eos is not None and model.generation_config is not None:
        model.generation_config.eos_token_id = eos
    return HFModel(model, self_test=False)


def relative(kind: str = "llama", noise: float = 0.03) -> PreTrainedModel:
    """The target's weights with noise."""
    model = tiny(kind)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=noise)
    return model


def source(name: str, model: HFModel, kind: str = "llama") -> DraftSource:
    """A source for ``model`` by name (``DRAFTERS``, or several joined by "+")."""
    if "+" in name:
        return EnsembleSource(tuple(source(part, model, kind) for part in name.split("+")))
    if name == "lookup":
        return NgramSource(shortest=1)
    if name == "self":
        return ModelSource(model.twin(), VOCAB)
    weights = relative(kind) if name == "relative" else tiny(kind, seed=5)
    return ModelSource(HFModel(weights, self_test=False), VOCAB)


def drafter(name: str, model: HFModel, policy: GrowthPolicy, kind: str = "llama") -> Drafter:
    """A drafter for ``model`` by name (as ``source``, or "none")."""
    return Drafter() if name == "none" else TreeDrafter(policy, source(name, model, kind))


class Endless(CascadeSource):
    """Makes a round below every token."""

    def goes_on(self, request: Request, depth: int, entropy: float) -> bool:
        return True


def endless(cascade: CascadeSource) -> CascadeSource:
    """A cascade that loops back for as long as its trees grow, so that they are those of its upper level alone."""
    settings = replace(cascade.settings, rejected="on")
    return Endless(cascade.lower, cascade.upper, cascade.policy, settings, cascade.called)


TREE = ((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (2,), (1, 0), (3,))
"""A tree that a calibration could have found."""


def costs(seconds: float) -> Profile:
    """A machine on which passes of all sizes cost the same."""
    identity = Identity("tiny", "Tiny", 1, "stock", "float32", "sdpa", "eager", "cpu", "torch 1", "torch", 1)
    return Profile(identity, (Point(1, 64, (1, 64), (seconds, seconds)),))


def policy(method: str) -> GrowthPolicy:
    """A method with its defaults; ``TREE`` for the one that reads a file, and costs for the one that asks for them.

    The classifiers that ship may score for any models.
    """
    if method == "auto":
        return AutoTree(target=costs(1.0), drafter=costs(0.01))
    if method == "c2t":
        return ClassifierTree(read_classifier(DEFAULT).classifier)
    made = METHODS[method]
    return RankTree(TREE) if made.name == "sequoia" else made.policy()


def save_tree(path: Path, target: str, drafter: str) -> Path:
    """Save ``TREE`` as a file for these models."""
    counts = Counts((10, 6, 3), ((5, 2, 1, 1), (3, 1, 0, 0), (2, 0, 0, 0)))
    length = expected_acceptance_length(counts.acceptance, TREE)
    TREE_FILE.write(path, TreeFile(Provenance(target, drafter), 0.0, 4, counts, length, TREE))
    return path


def generated(model: PreTrainedModel, prompt: Sequence[int], tokens: int, **options: object) -> list[int]:
    """What transformers' ``generate`` adds to ``prompt``, greedily."""
    ids = torch.tensor([list(prompt)])
    out = cast(Any, model).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, **options
    )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


def mixed(count: int, tokens: int, temperature: float = 1.0) -> list[SamplingParams]:
    """Parameters of requests that run together: the first is greedy, the others are sampled."""
    temperatures = [0.0] + [temperature] * (count - 1)
    return [SamplingParams(max_tokens=tokens, temperature=t, seed=4 + i) for i, t in enumerate(temperatures)]


def begun(stepper: Stepper, request: EngineRequest) -> EngineRequest:
    """Begin a request, read its prompt and draw its first token."""
    stepper.open_row(request)
    try:
        stepper.step([request])
    except BaseException:
        stepper.close(request)
        raise
    return request
