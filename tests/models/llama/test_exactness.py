"""What the self-test of trees over llama.cpp finds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import draftree
from draftree import Engine, SamplingParams, SpeculationParams
from draftree.engine.replay import first_difference
from draftree.errors import DraftreeWarning, NoTreesError
from draftree.models.base import Nodes, Row
from draftree.models.llama.linear_model import LinearModel
from draftree.models.llama.llama_model import EXACT, LlamaModel, exactness
from draftree.models.loading import load_llama
from draftree.scores import NumpyScores, Scores
from draftree.text.encoding import encode

from ... import tiny_gguf


@pytest.mark.parametrize("weights", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantized_weights_give_exact_trees(weights: str, tmp_path: Path) -> None:
    model = LlamaModel(tiny_gguf.write(tmp_path / "tiny.gguf", weights=weights))
    assert (model.capabilities.trees, model.capabilities.rounding) == (EXACT, 0.0)
    assert exactness(model, tokens=600) == (EXACT, 0.0)


def test_floats_round_otherwise_in_wider_passes_and_texts_differ_by_near_ties_alone(tmp_path: Path) -> None:
    """llama.cpp has other kernels for one token of floats than for several."""
    model = LlamaModel(tiny_gguf.write(tmp_path / "tiny.gguf", weights="F16"))
    assert re.search(r"near-ties: .* by up to 0\.0*[1-9]", model.capabilities.trees)
    assert "F16" in model.capabilities.trees
    assert model.capabilities.rounding is not None
    assert 0 < model.capabilities.rounding < 0.1
    params = SamplingParams(max_tokens=60)
    engine = Engine(model, SpeculationParams(drafter="lookup", method="opt-tree", nodes=8))
    for text in ("the cat in the hat, the cat in the", "one two one two", "a b a b a"):
        prompt = encode(model.tokenizer, text)
        alone = Engine(model).generate([prompt], params)[0].token_ids
        difference = first_difference(model, prompt, alone, engine.generate([prompt], params)[0].token_ids, params)
        assert difference is None or difference.near_tie, difference


@pytest.mark.parametrize("weights", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "MXFP4"])
def test_formats_that_the_native_engine_lacks_are_drafted_for(weights: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", weights=weights, layers=1, hidden=256, heads=8)
    with pytest.warns(DraftreeWarning, match=f"llama.cpp: .*{weights} .*token_embd"):
        model = draftree.load(str(path))
    assert model.capabilities.weight_format == weights
    params, prompt = SamplingParams(max_tokens=12, ignore_eos=True), encode(model.tokenizer, "the cat, the cat, the")
    alone = Engine(model).generate([prompt], params)[0].token_ids
    drafted = Engine(model, SpeculationParams(drafter="lookup", method="opt-tree", nodes=6)).generate([prompt], params)[
        0
    ]
    difference = first_difference(model, prompt, alone, drafted.token_ids, params)
    assert difference is None or difference.near_tie, difference


def test_a_model_whose_trees_see_other_tokens_decodes_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, extend = tiny_gguf.write(tmp_path / "tiny.gguf", weights="Q8_0"), LlamaModel.extend
    params, drafted = SamplingParams(max_tokens=12), SpeculationParams(drafter="lookup")
    expected = Engine(LlamaModel(path)).generate(["the cat the cat"], params)[0].token_ids

    def blind(model: LlamaModel, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        logits = extend(model, rows, nodes).logits(range(nodes[0].scored))
        return NumpyScores(logits[::-1], [len(logits)])

    monkeypatch.setattr(LlamaModel, "extend", blind)
    with pytest.raises(NoTreesError, match="self-test"):
        LlamaModel(path)
    model = load_llama(str(path))
    assert isinstance(model, LinearModel) and "fails the tree self-test" in model.capabilities.no_trees
    with pytest.warns(DraftreeWarning, match="without drafts: .*self-test"):
        generation = Engine(model, drafted).generate(["the cat the cat"], params)[0]
    assert generation.token_ids == expected and not generation.stats.drafted
