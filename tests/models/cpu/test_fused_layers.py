"""Merged decoder layers: for which models, with what output, and what becomes of the stock layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from draftree.models.cpu.fused_model import merge_layers
from draftree.models.huggingface.hf_model import HFModel

from ...tiny import FAMILIES, causal_logits, tiny

LLAMA_KIND = {"llama", "llama_mha", "qwen2", "mistral"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_of_the_llama_kind_are_merged_and_no_others(kind: str) -> None:
    assert merge_layers(tiny(kind)) == (2 if kind in LLAMA_KIND else 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_stay_the_same(kind: str, attention: str) -> None:
    model = tiny(kind, attention=attention)
    before = causal_logits(model, range(20))
    merge_layers(model)
    torch.testing.assert_close(causal_logits(model, range(20)), before, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", sorted(LLAMA_KIND))
def test_generate_of_transformers_gives_the_same_ids_as_before(kind: str) -> None:
    model: Any = tiny(kind)
    prompts, real = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 3]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    options = {"attention_mask": real, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    before = model.generate(prompts, **options).tolist()
    merge_layers(model)
    assert model.generate(prompts, **options).tolist() == before


def test_hidden_states_of_all_layers_can_still_be_asked_for() -> None:
    model = tiny("llama")
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before = model(input_ids=ids, output_hidden_states=True).hidden_states
        merge_layers(model)
        after = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(after) == len(before) == 3
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_merging_copies_no_weights() -> None:
    model: Any = tiny("llama")
    query = model.model.layers[0].self_attn.q_proj.weight
    merge_layers(model)
    merged: Any = model.model.layers[0].merged.qkv
    assert next(merged.parameters()) is query
    assert merged.weight.shape == (merged.out_features, merged.in_features)


def test_a_layer_whose_output_differs_stays_as_it_is() -> None:
    """Granite's residual multiplier has the same parts; only trying tells."""
    model: Any = tiny("llama")
    layer = model.model.layers[0]
    stock = type(layer).forward
    vars(layer)["forward"] = lambda *args, **kwargs: stock(layer, *args, **kwargs) * 1.01
    before = causal_logits(model, range(9))
    assert merge_layers(model) == 1
    assert hasattr(layer, "self_attn")
    torch.testing.assert_close(causal_logits(model, range(9)), before, atol=2e-5, rtol=0)


def test_a_layer_with_another_part_stays_as_it_is() -> None:
    model: Any = tiny("llama")
    model.model.layers[1].self_attn.q_norm = nn.Identity()
    assert merge_layers(model) == 1


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model: Any = tiny("llama")
    merge_layers(model)
    layer = model.model.layers[0]
    noise = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn((3, 4, layer.merged.width), generator=noise) for _ in range(2))
    turn = model.model.rotary_emb(hidden, position_ids=torch.arange(4).expand(3, -1))
    other[1] = hidden[1]
    with torch.inference_mode():
        assert torch.equal(layer(hidden, position_embeddings=turn)[1], layer(other, position_embeddings=turn)[1])


def test_a_model_on_merged_layers_passes_the_self_test() -> None:
    model = tiny("qwen2")
    merge_layers(model)
    HFModel(model)
