"""The direct pass: for which models, with what output, and without transformers' own forward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftree.models.base import Nodes
from draftree.models.cpu.fused_model import Norm, direct, merge_layers
from draftree.models.cpu.quantization import convert
from draftree.models.huggingface.attention import take_over
from draftree.models.huggingface.features import feature_row
from draftree.models.huggingface.hf_model import HFModel

from ...references import extended, prefilled
from ...tiny import FAMILIES, tiny
from .test_fused_layers import LLAMA_KIND

PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
TREES = [Nodes.of([9, 2, 6, 5], [-1, -1, 1, 2]), Nodes.chain([7])]

llama_kind = pytest.mark.parametrize("kind", sorted(LLAMA_KIND))


def passes(model: HFModel) -> list[Tensor]:
    """Logits and hidden states of two prompts, of trees below them, and of what follows a commit."""
    model.track_features()
    rows, first = zip(*(prefilled(model, prompt) for prompt in PROMPTS), strict=True)
    found = list(first)
    logits = extended(model, rows, TREES)
    found += [logits[0], logits[1, :1]]
    model.commit(rows[0], [1, 2])
    model.commit(rows[1], [0])
    found.append(extended(model, rows[:1], [Nodes.chain([8, 7])])[0])
    return found + [feature_row(row).waiting_features() for row in rows]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_models_of_merged_layers_have_one_and_no_others(kind: str, attention: str) -> None:
    model = tiny(kind, attention=attention)
    take_over(model)
    merge_layers(model)
    convert(model)
    assert (direct(model) is not None) == (kind in LLAMA_KIND)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@llama_kind
def test_logits_and_hidden_states_are_those_of_transformers(kind: str, attention: str) -> None:
    stock, own = (
        HFModel(tiny(kind, attention=attention), weight_format=weight_format) for weight_format in (None, "fp32")
    )
    for want, got in zip(passes(stock), passes(own), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_passes_leave_transformers_forward_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(tiny(), weight_format="fp32")
    model.track_features()

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model's own forward was called")

    monkeypatch.setattr(type(model.model), "forward", never)
    monkeypatch.setattr(type(model.model.base_model), "forward", never)
    passes(model)


def test_a_model_that_does_more_has_none() -> None:
    """Logits that are scaled or capped after the output layer: only trying tells."""
    model: Any = tiny()
    take_over(model)
    merge_layers(model)
    convert(model)
    forward = model.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = 5 * (out.logits / 5).tanh()
        return out

    model.forward = capped
    assert direct(model) is None


def test_a_model_with_one_stock_layer_has_none() -> None:
    model: Any = tiny()
    take_over(model)
    model.model.layers[1].self_attn.q_norm = nn.Identity()
    assert merge_layers(model) == 1
    convert(model)
    assert direct(model) is None


def test_another_attention_can_be_set_afterwards() -> None:
    model = HFModel(tiny(), weight_format="fp32")
    before = passes(model)
    model.model.set_attn_implementation("eager")
    for want, got in zip(before, passes(model.twin()), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_a_model_that_nobody_holds_is_freed() -> None:
    model = HFModel(tiny(), weight_format="fp32")
    alive = weakref.ref(model.model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_norm_is_that_of_transformers(scale: float) -> None:
    stock: Any = tiny().model.norm
    stock.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn((2, 3, 32), generator=torch.Generator().manual_seed(1)) * scale
    with torch.no_grad():
        torch.testing.assert_close(Norm(stock)(x), stock(x), atol=1e-5, rtol=1e-5)
