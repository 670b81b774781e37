"""Draft heads of tiny targets, untrained and trained."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from draftree.models.base import Capabilities
from draftree.models.cost_table import shipped_table
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.heads.eagle_network import EagleNetwork
from draftree.models.heads.head_format import EagleConfig
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.inspection import fingerprint
from draftree.train.eagle_fit import Fit, FitRecipe, Frozen, evaluate
from draftree.train.eagle_training import draft_vocabulary
from draftree.train.head_architectures import new_eagle, regress
from draftree.train.responses import Response, respond

from .tiny import VOCAB
from .toy import ToyModel

DRAFTED = torch.arange(0, VOCAB, 2)
"""A draft vocabulary that leaves out half of the tokens."""
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(4 + i)] for i in range(4)]


def random_network(target: HFModel, seed: int = 0) -> EagleNetwork:
    """Wide random weights: what leaks or is off by one moves logits."""
    return randomised(new_eagle(EagleConfig.like(target, embedding_scale=1.3), 0), 0.3, seed)


def randomised(network: EagleNetwork, std: float, seed: int = 0) -> EagleNetwork:
    """The network with random weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for weight in network.parameters():
            weight.normal_(std=std)
    return network


def random_head(target: HFModel, vocabulary: torch.Tensor = DRAFTED, seed: int = 0) -> HeadModel:
    """A head of a ``random_network``."""
    return HeadModel(random_network(target, seed), vocabulary, target, "random head")


def responses(target: HFModel) -> list[Response]:
    """The target's responses to ``PROMPTS``."""
    target.track_features()
    drawn = respond(target, PROMPTS, range(len(PROMPTS)), rows=4, max_tokens=40, seed=0)
    return sorted(drawn, key=lambda r: r.number)


def frozen(target: HFModel, vocabulary: torch.Tensor) -> Frozen:
    """The target's parts that a head stands on."""
    return Frozen(target.embeddings(torch.arange(VOCAB)), vocabulary, *target.output_rows(vocabulary))


def trained(target: HFModel) -> HeadModel:
    """A head that has learned the first two of ``responses``, which are greedy, by heart."""
    weights = fingerprint(target.model.parameters())
    if weights not in _LEARNED:
        _LEARNED[weights] = _learned(target)
    network, vocabulary = _LEARNED[weights]
    return HeadModel(deepcopy(network), vocabulary, target, "trained head")


_LEARNED: dict[str, tuple[EagleNetwork, torch.Tensor]] = {}
"""By the target's weights: many tests have a target of their own with the same ones."""


def _learned(target: HFModel) -> tuple[EagleNetwork, torch.Tensor]:
    learned = responses(target)[:2]
    vocabulary = draft_vocabulary(learned, VOCAB, 40)
    network = new_eagle(EagleConfig.like(target), 0)
    regress(network, frozen(target, vocabulary), learned)
    fit = Fit(FitRecipe(learning_rate=1.5e-2, batch=2), network, frozen(target, vocabulary), learned, 320, "")
    assert list(fit.run())[-1] == 320
    assert evaluate(network, fit.frozen, learned, 2)[0][0] == 1, "not by heart on this machine: more steps"
    return network, vocabulary


_OF_WEIGHTS = ("parameters", "weights", "weight_bytes", "expert_bytes", "expert_share", "weight_format", "fingerprint")


def check_same_costs(one: Capabilities, other: Capabilities) -> None:
    """Two heads of the same weights for targets of different ones cost what a model without experts does."""
    names = (*_OF_WEIGHTS, "slot_bytes")
    assert {name: getattr(one, name) for name in names} == {name: getattr(other, name) for name in names}
    alike = {name: getattr(one, name) for name in ("tier", "threads", "weights", "weight_bytes", "slot_bytes")}
    model, table = replace(ToyModel().capabilities, **alike), shipped_table(one.tier)
    for tokens, context in ((1, 0), (2, 100), (8, 1000), (64, 1)):
        seconds = table.seconds(model, tokens, context)
        assert seconds > 0
        assert [table.seconds(can, tokens, context) for can in (one, other)] == [pytest.approx(seconds)] * 2
