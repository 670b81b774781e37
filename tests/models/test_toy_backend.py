"""Models of tables: what needs no ability decodes with them, heads with one that has hidden states, and the rest is
refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftree.config import SamplingParams
from draftree.drafters.base import DraftSource
from draftree.drafters.default import resolved
from draftree.drafters.draft_model import EagleSource, ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.drafters.registry import load_drafter, load_source
from draftree.drafters.spec import AUTO, DrafterSpec
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import ConfigError, UnknownNameError, UnsupportedModelError
from draftree.models.base import STOCK, LanguageModel, prefill
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.heads.eagle_network import EagleNetwork, save_head
from draftree.models.heads.head_folder import find_head, load_head
from draftree.models.heads.head_format import EagleConfig
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.inspection import self_test
from draftree.models.protocols import DraftHead, FeatureModel, feature_model
from draftree.papers.cascade import CascadeSource
from draftree.policies.fixed import CHAIN
from draftree.train.head_architectures import new_eagle

from ..heads import randomised
from ..pairs import policy
from ..toy import ToyFeatureModel, ToyModel

VOCAB = 6
PROMPTS = [[1, 2, 3, 1, 2], [4, 0, 5]]
PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)

SOURCES: dict[str, Callable[[], DraftSource]] = {
    "lookup": NgramSource,
    "model": lambda: ModelSource(ToyModel(VOCAB, 1), VOCAB),
    "ensemble": lambda: EnsembleSource((NgramSource(), ModelSource(ToyModel(VOCAB, 1), VOCAB))),
    "cascade": lambda: CascadeSource(NgramSource(), ModelSource(ToyModel(VOCAB, 1), VOCAB), CHAIN),
}


def test_it_has_rows_and_no_ability_beside() -> None:
    toy = ToyModel(VOCAB)
    assert isinstance(toy, LanguageModel)
    for ability in (FeatureModel, DraftHead):
        assert not isinstance(toy, ability)


def test_the_self_test_needs_the_seam_alone() -> None:
    self_test(ToyModel(20))


@pytest.mark.parametrize("name", SOURCES)
def test_drafters_without_abilities_decode_as_ar_decoding(name: str) -> None:
    source = SOURCES[name]()
    want = Engine(ToyModel(VOCAB)).generate(PROMPTS, PARAMS)
    found = Engine(ToyModel(VOCAB), Speculation(TreeDrafter(policy("opt-tree"), source), 6)).generate(PROMPTS, PARAMS)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]


def test_auto_is_what_it_can_do() -> None:
    toy = ToyModel(VOCAB)
    assert str(resolved(DrafterSpec.parse(AUTO), toy, policy("opt-tree"))) == "lookup"
    assert load_drafter(ToyModel(VOCAB, 1), toy, policy("opt-tree")).name == "toy"


@pytest.mark.parametrize("name", ["self", "head"])
def test_a_drafter_that_needs_an_ability_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises((UnsupportedModelError, UnknownNameError)) as caught:
        load_source(name, ToyModel(VOCAB))
    assert "\n" not in str(caught.value)
    assert "use drafter" in str(caught.value)


def test_a_head_cannot_be_trained_for_it() -> None:
    with pytest.raises(UnsupportedModelError):
        feature_model(ToyModel(VOCAB))


DRAFTED = torch.tensor([0, 2, 3, 5])
"""A draft vocabulary: other tokens join it as a text brings them."""


def network() -> EagleNetwork:
    """Of random weights."""
    config = EagleConfig(
        hidden_size=VOCAB,
        vocab_size=VOCAB,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    return randomised(new_eagle(config, 0), 0.5)


def head_of(target: LanguageModel) -> HeadModel:
    return HeadModel(network(), DRAFTED, target, "head of the toy")


def test_hidden_states_make_it_a_feature_model() -> None:
    assert isinstance(ToyFeatureModel(), FeatureModel)
    self_test(ToyFeatureModel(20))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["opt-tree", "chain", "static"])
def test_a_head_drafts_for_it_as_ar_decoding(method: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=14, ignore_eos=True, temperature=temperature, seed=3)
    want = Engine(ToyFeatureModel()).generate(PROMPTS, params)
    target = ToyFeatureModel()
    drafter = TreeDrafter(policy(method), EagleSource(head_of(target), VOCAB))
    found = Engine(target, Speculation(drafter, 6)).generate(PROMPTS, params)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]
    assert sum(sum(g.stats.accepted) for g in found) > 0
    assert sum(g.stats.draft_passes for g in found) > 0


def test_a_head_scores_its_vocabulary_and_the_texts_tokens_with_their_biases() -> None:
    target = ToyFeatureModel()
    head, row = head_of(target), prefill(target, [1, 2, 4])
    fed = head.open()
    logits = head.advance([fed], [[2, 4]], [feature_row(row).last_features()[:-1]]).tensor[0]
    tokens = head.vocabulary_of(fed)
    assert tokens.tolist() == [*DRAFTED.tolist(), 4]
    assert torch.allclose(logits[:5], (fed.predicted[0] + target.bias)[tokens], atol=1e-5)
    assert bool((logits[5:] == float("-inf")).all())


def test_a_head_of_a_quantized_backend_computes_in_float32() -> None:
    can = head_of(ToyFeatureModel(weight_format="Q4_1")).capabilities
    assert can.weight_format == STOCK
    assert (can.dtype, can.device, can.attention) == ("float32", "cpu", "sdpa")


def test_a_head_in_a_folder_knows_it_by_its_embeddings(tmp_path: Path) -> None:
    target, other = ToyFeatureModel(), ToyFeatureModel(seed=7)
    save_head(tmp_path, network(), DRAFTED, target)
    quantized = ToyFeatureModel()
    quantized.table = (quantized.table * 4).round() / 4
    for model in (target, quantized):
        assert load_head(tmp_path, model).capabilities.vocab_size == VOCAB
    with pytest.raises(ConfigError, match="embeddings"):
        load_head(tmp_path, other)


def test_without_hidden_states_a_head_in_a_folder_is_refused(tmp_path: Path) -> None:
    save_head(tmp_path, network(), DRAFTED, ToyFeatureModel())
    assert find_head(tmp_path) is not None
    with pytest.raises(UnsupportedModelError, match="'native' or 'transformers'"):
        load_head(tmp_path, ToyModel(VOCAB))
