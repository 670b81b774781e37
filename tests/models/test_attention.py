"""grouped_sdpa against transformers' own SDPA, and what becomes of a model that uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftree.models.huggingface.attention import EAGER, NAME, attend_as_one, by_products, grouped_sdpa, take_over
from draftree.models.huggingface.hf_model import HFModel

from ..tiny import FAMILIES, WINDOWED, causal_logits, tiny

ROWS, SLOTS, DIM = 3, 23, 8
HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (8, 1)])


class Attention(nn.Module):
    """What transformers' attention functions read of their layer."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = True


def inputs(heads: int, kv_heads: int, width: int) -> tuple[Attention, Tensor, Tensor, Tensor, Tensor]:
    """A layer, a query, keys, values, and a random boolean mask in which each query sees the first slot."""
    noise = torch.Generator().manual_seed(heads * 100 + width)
    query = torch.randn((ROWS, heads, width, DIM), generator=noise)
    key, value = (torch.randn((ROWS, kv_heads, SLOTS, DIM), generator=noise) for _ in range(2))
    mask = torch.rand((ROWS, 1, width, SLOTS), generator=noise) < 0.5
    mask[..., 0] = True
    return Attention(heads // kv_heads), query, key, value, mask


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)


@HEADS
@pytest.mark.parametrize("width", [1, 2, 13])
@pytest.mark.parametrize("kind", ["additive", "boolean"])
def test_grouped_sdpa_equals_transformers_sdpa(heads: int, kv_heads: int, width: int, kind: str) -> None:
    layer, query, key, value, mask = inputs(heads, kv_heads, width)
    mask = additive(mask) if kind == "additive" else mask
    ours, _ = grouped_sdpa(layer, query, key, value, mask, scaling=0.5)
    theirs, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.5)
    assert ours.shape == (ROWS, width, heads, DIM)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@HEADS
@pytest.mark.parametrize("width", [1, 2, 13])
def test_query_heads_asked_as_further_queries_find_the_same(heads: int, kv_heads: int, width: int) -> None:
    layer, query, key, value, mask = inputs(heads, kv_heads, width)
    ours = attend_as_one(query, key, value, additive(mask), 0.5)
    theirs, _ = sdpa_attention_forward(layer, query, key, value, additive(mask), scaling=0.5)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("slots", [5, 64, 65, 128, 320])
@pytest.mark.parametrize("kind", ["additive", "boolean", "one for all"])
def test_products_find_what_sdpa_finds(kind: str, slots: int) -> None:
    noise = torch.Generator().manual_seed(slots)
    query, key, value = (torch.randn((ROWS, 3, n, DIM), generator=noise) for n in (6, slots + 9, slots + 9))
    key, value = key[:, :, :slots], value[:, :, :slots]
    seen = torch.rand((ROWS, 1, 1 if kind == "one for all" else 6, slots), generator=noise) < 0.5
    seen[..., 0] = True
    mask = seen if kind == "boolean" else additive(seen)
    for scaling in (None, 0.5):
        wanted = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        torch.testing.assert_close(by_products(query, key, value, mask, scaling), wanted, atol=1e-6, rtol=0)


@HEADS
def test_grouped_sdpa_reads_a_slice_of_longer_storage(heads: int, kv_heads: int) -> None:
    layer, query, key, value, mask = inputs(heads, kv_heads, 5)
    ours, _ = grouped_sdpa(layer, query, key[:, :, :17], value[:, :, :17], mask[..., :17])
    theirs, _ = sdpa_attention_forward(layer, query, key[:, :, :17].clone(), value[:, :, :17].clone(), mask[..., :17])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_grouped_sdpa_without_a_mask_is_causal() -> None:
    layer, query, _, _, _ = inputs(4, 2, SLOTS)
    _, _, key, value, _ = inputs(4, 2, SLOTS)
    causal = torch.ones(SLOTS, SLOTS, dtype=torch.bool).tril().expand(ROWS, 1, -1, -1)
    ours, _ = grouped_sdpa(layer, query, key, value, None)
    theirs, _ = grouped_sdpa(layer, query, key, value, causal)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_a_position_bias_is_left_to_transformers() -> None:
    layer, query, key, value, mask = inputs(4, 4, 5)
    bias = torch.randn((1, 4, 5, SLOTS), generator=torch.Generator().manual_seed(0))
    ours, _ = grouped_sdpa(layer, query, key, value, additive(mask), position_bias=bias)
    theirs, _ = sdpa_attention_forward(layer, query, key, value, additive(mask), position_bias=bias)
    assert torch.equal(ours, theirs)


def test_a_softcap_is_refused_as_transformers_refuses_it() -> None:
    layer, query, key, value, mask = inputs(4, 2, 5)
    with pytest.raises(ValueError, match="softcap"):
        grouped_sdpa(layer, query, key, value, mask, softcap=30.0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "gemma"])
def test_a_model_on_sdpa_is_switched(kind: str) -> None:
    model = tiny(kind, attention="sdpa")
    take_over(model)
    assert model.config._attn_implementation == NAME


def test_a_model_on_eager_attention_keeps_its_own() -> None:
    model = tiny("llama", attention="eager")
    before = causal_logits(model, range(20))
    take_over(model)
    assert model.config._attn_implementation == EAGER
    assert torch.equal(causal_logits(model, range(20)), before)


@pytest.mark.parametrize("kind", [*FAMILIES, *WINDOWED])
def test_generate_of_transformers_gives_the_same_ids_as_before(kind: str) -> None:
    model: Any = tiny(kind)
    prompts, real = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 3]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    options = {"attention_mask": real, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}

    def generate() -> list[list[int]]:
        return [row.tolist() for row in model.generate(prompts, **options)]

    before = generate()
    HFModel(model)
    assert generate() == before


@pytest.mark.parametrize("kind", [*FAMILIES, *WINDOWED])
def test_a_plain_forward_gives_the_same_logits_as_before(kind: str) -> None:
    model = tiny(kind)
    before = causal_logits(model, range(20))
    HFModel(model)
    torch.testing.assert_close(causal_logits(model, range(20)), before, atol=1e-6, rtol=0)


def test_a_saved_config_does_not_ask_for_our_attention() -> None:
    model = tiny("llama")
    HFModel(model)
    assert NAME not in model.config.to_json_string(use_diff=False)
