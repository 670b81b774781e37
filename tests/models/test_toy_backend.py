"""A model of tables, without weights or abilities: what needs none decodes with it, and the rest is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftree.config import SamplingParams
from draftree.drafters.base import TokenSource
from draftree.drafters.cascade.stages import CascadeSource
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.drafters.registry import load_drafter, load_source, resolved
from draftree.drafters.spec import AUTO, DrafterSpec
from draftree.drafters.token_recycling import TokenRecyclingSource
from draftree.engine.engine import Engine
from draftree.errors import UnknownNameError, UnsupportedModelError
from draftree.models.abilities import (
    DraftHead,
    FeatureModel,
    SelfDraftingModel,
    TextModel,
    TimedModel,
    TrainableModel,
    trainable,
)
from draftree.models.base import ForestModel, LanguageModel
from draftree.models.probe import self_test
from draftree.policies.chains import CHAIN

from ..pairs import policy
from ..toy import ToyModel

VOCAB = 6
PROMPTS = [[1, 2, 3, 1, 2], [4, 0, 5]]
PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)

SOURCES: dict[str, Callable[[], TokenSource]] = {
    "lookup": NgramSource,
    "recycle": TokenRecyclingSource,
    "model": lambda: ModelSource(ToyModel(VOCAB, 1), VOCAB),
    "ensemble": lambda: EnsembleSource((NgramSource(), TokenRecyclingSource(), ModelSource(ToyModel(VOCAB, 1), VOCAB))),
    "cascade": lambda: CascadeSource(NgramSource(), ModelSource(ToyModel(VOCAB, 1), VOCAB), CHAIN),
}


def test_it_has_rows_and_no_ability_beside() -> None:
    toy = ToyModel(VOCAB)
    assert isinstance(toy, LanguageModel)
    assert isinstance(toy, ForestModel)
    for ability in (TextModel, FeatureModel, SelfDraftingModel, TrainableModel, DraftHead, TimedModel):
        assert not isinstance(toy, ability)


def test_the_self_test_needs_the_seam_alone() -> None:
    self_test(ToyModel(20))


@pytest.mark.parametrize("name", SOURCES)
def test_drafters_without_abilities_decode_as_ar_decoding(name: str) -> None:
    source = SOURCES[name]()
    want = Engine(ToyModel(VOCAB)).generate(PROMPTS, PARAMS)
    found = Engine(ToyModel(VOCAB), TreeDrafter(policy("opt-tree"), source), nodes=6).generate(PROMPTS, PARAMS)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]


def test_auto_is_what_it_can_do() -> None:
    toy = ToyModel(VOCAB)
    assert str(resolved(DrafterSpec.parse(AUTO), toy, policy("opt-tree"))) == "lookup"
    assert load_drafter(ToyModel(VOCAB, 1), toy, policy("opt-tree")).name == "toy"


@pytest.mark.parametrize("name", ["int4", "self", "head"])
def test_a_drafter_that_needs_an_ability_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises((UnsupportedModelError, UnknownNameError)) as caught:
        load_source(name, ToyModel(VOCAB))
    assert "\n" not in str(caught.value)
    assert "use drafter" in str(caught.value)


def test_a_head_cannot_be_trained_for_it() -> None:
    with pytest.raises(UnsupportedModelError):
        trainable(ToyModel(VOCAB))
