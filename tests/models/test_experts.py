"""Experts on transformers: what a token is multiplied with, as passes are estimated from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma4TextConfig,
    Llama4TextConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from draftree.models.huggingface.inspection import capabilities

from ..tiny import MAX_LENGTH, VOCAB, tiny

HIDDEN, INNER, EXPERTS, CHOSEN, LAYERS = 32, 16, 8, 2, 3
ONE_EXPERT = 3 * HIDDEN * INNER
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
    "num_experts_per_tok": CHOSEN,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_MOE: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "num_experts": EXPERTS, "moe_intermediate_size": INNER}
_LATENT: dict[str, Any] = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "n_routed_experts": EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_GEMMA: dict[str, Any] = {
    **{key: value for key, value in _MOE.items() if key != "num_experts_per_tok"},
    "head_dim": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 0,
}
MIXTURES: dict[str, tuple[Callable[[], PretrainedConfig], int]] = {
    "qwen3": (lambda: Qwen3MoeConfig(**_MOE), LAYERS),
    "qwen2, shared": (lambda: Qwen2MoeConfig(**_MOE, shared_expert_intermediate_size=24), LAYERS),
    "mixtral": (lambda: MixtralConfig(**_SIZES, intermediate_size=INNER, num_local_experts=EXPERTS), LAYERS),
    "olmoe": (lambda: OlmoeConfig(**_SIZES, intermediate_size=INNER, num_experts=EXPERTS), LAYERS),
    "deepseek, shared": (lambda: DeepseekV3Config(**_MOE, **_LATENT, n_shared_experts=1), LAYERS - 1),
    "gemma": (
        lambda: Gemma4TextConfig(**_GEMMA, enable_moe_block=True, top_k_experts=CHOSEN),
        LAYERS,
    ),
}
"""Name -> the configuration, and how many layers have experts."""


def made(configuration: Callable[[], PretrainedConfig]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(configuration())
    return model


def weights_of(model: PreTrainedModel) -> int:
    """All weights but the embeddings, which a pass looks up."""
    embeddings: Any = model.get_input_embeddings()
    return sum(p.numel() for p in model.parameters() if p is not embeddings.weight)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_token_is_multiplied_with_its_own_experts_alone(name: str) -> None:
    """All experts counted: a pass over one token of 128 experts, 8 of them its own, was estimated nine times too dear.

    Experts that all tokens share count whole.
    """
    configuration, layers = MIXTURES[name]
    model = made(configuration)
    can = capabilities(model, name)
    assert can.expert_share == CHOSEN / EXPERTS
    assert can.expert_bytes == 4 * layers * CHOSEN * ONE_EXPERT
    assert can.weights == weights_of(model) - layers * (EXPERTS - CHOSEN) * ONE_EXPERT
    assert can.weight_bytes == 4 * can.weights
    assert can.parameters == sum(p.numel() for p in model.parameters())


def test_experts_that_are_modules_of_a_list_count_as_those_in_one_tensor() -> None:
    """As modeling code has them that comes with a checkpoint."""
    model = made(MIXTURES["qwen3"][0])
    wanted = capabilities(model, "one tensor")
    decoder: Any = model.get_decoder()
    for layer in decoder.layers:
        one = [nn.Linear(HIDDEN, 3 * INNER, bias=False) for _ in range(EXPERTS)]
        layer.mlp.experts = nn.ModuleList(one)
    can = capabilities(model, "list")
    assert (can.weights, can.expert_bytes, can.expert_share) == (
        wanted.weights,
        wanted.expert_bytes,
        wanted.expert_share,
    )


def test_a_model_that_multiplies_each_token_with_all_experts_has_none_to_choose() -> None:
    sizes = {**_SIZES, "intermediate_size": INNER, "intermediate_size_mlp": 48, "num_local_experts": EXPERTS}
    model = made(lambda: Llama4TextConfig(**sizes, head_dim=8))
    can = capabilities(model, "llama4")
    assert (can.weights, can.expert_bytes, can.expert_share) == (weights_of(model), 0, 1.0)


def test_a_model_without_experts_is_multiplied_whole() -> None:
    model = tiny("llama")
    can = capabilities(model, "dense")
    assert (can.weights, can.weight_bytes) == (weights_of(model), 4 * weights_of(model))
    assert (can.expert_bytes, can.expert_share) == (0, 1.0)
