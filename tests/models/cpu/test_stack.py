"""All layers in one TorchScript call: with which results, for what it is taken, and what it leaves behind."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftree.models.cpu.fused_model import Merged, direct, one_plan, scripted
from draftree.models.cpu.kernels import KERNELS, working
from draftree.models.huggingface.hf_model import HFModel

from ...tiny import tiny
from .test_fused_layers import LLAMA_KIND
from .test_fused_model import passes

HERE = [weight_format for weight_format in KERNELS if working(weight_format)]


@pytest.mark.parametrize("weight_format", HERE)
@pytest.mark.parametrize("kind", sorted(LLAMA_KIND))
def test_prompts_chains_trees_and_ragged_batches_give_the_results_of_transformers_forward(
    kind: str, weight_format: str
) -> None:
    """On the same layers: of what differs, the final norm, there is rounding."""
    model = HFModel(tiny(kind), weight_format=weight_format)
    other = HFModel(tiny(kind), weight_format=weight_format)
    assert model._decoder is not None
    other._decoder = None
    for want, got in zip(passes(other), passes(model), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class Unscriptable(nn.Module):
    """SiLU in Python that TorchScript has no words for."""

    def forward(self, x: Tensor) -> Tensor:
        made: list[Any] = [lambda y, **_: torch.nn.functional.silu(y)]
        out: Tensor = made[0](x)
        return out


def test_a_model_that_torchscript_does_not_take_keeps_transformers_forward() -> None:
    stock, odd = tiny(), tiny()
    model: Any = odd
    for layer in model.model.layers:
        layer.mlp.act_fn = Unscriptable()
    mine, plain = HFModel(odd, weight_format="fp32"), HFModel(stock, weight_format="fp32")
    assert mine._decoder is None
    for want, got in zip(passes(plain), passes(mine), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_one_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(tiny(), weight_format="fp32").model
    after = Merged.after
    monkeypatch.setattr(Merged, "after", lambda self, *given: after(self, *given) * (1 + 1e-3))
    assert direct(model) is None


def test_what_is_first_called_for_one_plan_is_not_watched_for_another() -> None:
    """Left alone, TorchScript runs a first time to see shapes, and compiles again for them."""

    def watched(module: nn.Module) -> bool:
        module(torch.ones(2))
        return "prim::profile" in str(torch._C._last_executed_optimized_graph())

    assert watched(scripted(Twice()))
    with one_plan():
        made = scripted(Other())
        assert not watched(made)
    assert not watched(made)


def test_nothing_is_left_changed_for_others_torchscript() -> None:
    mine = [("STATIC", 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        before = torch.jit.set_fusion_strategy(mine)
        HFModel(tiny(), weight_format="fp32")
        assert torch.jit.set_fusion_strategy(before) == mine
