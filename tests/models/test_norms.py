"""RMS norms as one kernel each: the same model, and only those that are what they are called."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftree.models.huggingface.norms import fuse

from ..tiny import VOCAB

IDS = torch.tensor([[5, 9, 2, 60, 33, 7]])


def model(kind: type[PreTrainedModel], config: type, dtype: torch.dtype) -> PreTrainedModel:
    """A small one whose norms weigh, and whose epsilon matters."""
    torch.manual_seed(3)
    made = kind(
        config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-3,
        )
    )
    for name, weight in made.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    torch.nn.Module.to(made, dtype=dtype)
    made.eval()
    return made


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_logits_are_those_of_the_modeling_code(dtype: torch.dtype, close: float) -> None:
    made = model(LlamaForCausalLM, LlamaConfig, dtype)
    wanted = made(IDS).logits
    assert fuse(made) == 5
    torch.testing.assert_close(made(IDS).logits, wanted, atol=close, rtol=close)
    copied = deepcopy(made)
    for weight in made.parameters():
        weight.zero_()
    torch.testing.assert_close(copied(IDS).logits, wanted, atol=close, rtol=close)


@torch.inference_mode()
def test_a_norm_that_computes_something_else_stays_as_it_is() -> None:
    made = model(GemmaForCausalLM, GemmaConfig, torch.float32)
    wanted = made(IDS).logits
    assert fuse(made) == 0
    assert torch.equal(made(IDS).logits, wanted)


class OwnRMSNorm(torch.nn.Module):
    """One of somebody's own, which may compute something else."""

    def __init__(self, fault: str, weight: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.fault, self.eps = fault, 1e-6
        self.weight = torch.nn.Parameter(torch.full((32,), weight, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True) if self.fault == "mean" else wide
        eps = 1e-5 if self.fault == "epsilon" else self.eps
        found = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return (found.double() if self.fault == "dtype" else found.to(x.dtype)) * self.weight


class GatedRMSNorm(OwnRMSNorm):
    """One that takes a gate."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * gate


class Norms(PreTrainedModel):
    """A model of one norm."""

    config_class = LlamaConfig

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__(LlamaConfig())
        self.norm = norm


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [1.5, 0.01])
@pytest.mark.parametrize("fault", ["", "epsilon", "mean", "dtype"])
def test_what_a_norm_computes_is_looked_at_and_not_its_name(fault: str, weight: float, dtype: torch.dtype) -> None:
    assert fuse(Norms(OwnRMSNorm(fault, weight, dtype))) == (not fault)


@torch.inference_mode()
def test_a_norm_that_takes_more_or_has_a_forward_of_its_own_stays_as_it_is() -> None:
    assert fuse(Norms(GatedRMSNorm("", 1.5, torch.float32))) == 0
    hooked = OwnRMSNorm("", 1.5, torch.float32)
    hooked.forward = hooked.forward  # type: ignore[method-assign]
    assert fuse(Norms(hooked)) == 0
