"""Heads as draftree writes them, in the format of speculators: ``config.json`` and ``model.safetensors``.

vLLM and SGLang read EAGLE-3 heads too. In these the target's embeddings are in the file, as in those of speculators,
whose release 0.9 leaves them random in a head without them. EAGLE-1 heads are of half precision; their format is
draftree's alone, as speculators knows neither their draft vocabulary nor the scale of their embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ...artifacts import make_folder, write_whole
from ..base import Capabilities
from ..huggingface.inspection import torch_dtype
from ..protocols import FeatureModel
from .eagle_network import EagleLayer, EagleNetwork
from .head_config import EagleConfig
from .head_folder import CONFIG
from .head_tensors import SAMPLE, WEIGHTS, sample

PROPOSED = 5
"""Tokens that servers draft at a time unless they are told another number: a chain, for want of trees."""


def save_head(folder: Path, network: EagleNetwork, vocabulary: Tensor, target: FeatureModel) -> None:
    """Write a head, EAGLE-3 in the target's dtype; the config comes last, and without it there is no head.

    Args:
        network: of one layer, without embeddings of its own.
        vocabulary: [D] int64 the target's ids of its tokens.

    Raises:
        RunError: it cannot be written.
    """
    make_folder(folder)
    ids, vocab, can, is_eagle1 = (
        vocabulary.cpu(),
        network.config.vocab_size,
        target.capabilities,
        network.predicts_features,
    )
    found = _tensors(network)
    if not is_eagle1:
        found["embed_tokens.weight"] = target.embeddings(torch.arange(vocab, device=can.device))
    dtype = torch.float16 if is_eagle1 else torch_dtype(can)
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in found.items()}
    if is_eagle1:
        weights[SAMPLE] = torch.from_numpy(sample(target))
    if not torch.equal(ids, torch.arange(vocab)):  # without maps they are all tokens
        marked = torch.zeros(vocab, dtype=torch.bool)
        marked[ids] = True
        weights |= {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    write_whole(folder / WEIGHTS, save(weights))
    document = _document(network, len(ids), can, dtype)
    write_whole(folder / CONFIG, json.dumps(document, indent=2, sort_keys=True) + "\n")


def _tensors(network: EagleNetwork) -> dict[str, Tensor]:
    """Its weights by the names of the format: what ``HeadWeights`` has joined is apart again."""
    found: dict[str, Tensor] = {}

    def put(module: nn.Module | None, *names: str, sizes: tuple[int, ...] = ()) -> None:
        """The parameters of a module, cut along their first dimension where it stands for several."""
        for kind, value in () if module is None else module.named_parameters():
            for name, part in zip(names, value.split(sizes) if sizes else (value,), strict=True):
                found[f"{name}.{kind}"] = part

    config, (layer,) = network.config, network.layers
    assert isinstance(layer, EagleLayer)  # noqa: S101 - it holds no others
    heads, kv, at = config.num_attention_heads * config.head_size, config.kv_heads * config.head_size, "layers.0"
    put(network.fc, "fc")
    put(network.input_norm, "input_norm")
    for i, norm in enumerate(network.fc_norm):
        put(norm, f"fc_norm.{i}")
    put(layer.input_layernorm, f"{at}.input_layernorm")
    put(layer.hidden_norm, f"{at}.hidden_norm")
    put(layer.qkv, *(f"{at}.self_attn.{part}_proj" for part in "qkv"), sizes=(heads, kv, kv))
    put(layer.o, f"{at}.self_attn.o_proj")
    put(layer.post_attention_layernorm, f"{at}.post_attention_layernorm")
    put(layer.gate_up, f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj", sizes=(config.intermediate_size,) * 2)
    put(layer.down, f"{at}.mlp.down_proj")
    put(network.norm, "norm")
    put(network.lm_head, "lm_head")
    return found


def _document(network: EagleNetwork, drafted: int, target: Capabilities, dtype: torch.dtype) -> dict[str, Any]:
    """What ``config.json`` holds."""
    config, place = network.config, Path(target.name)
    verifier = {
        "architectures": [target.architecture],
        "name_or_path": str(place.resolve()) if place.exists() else target.name,
    }
    document = {
        "draft_vocab_size": drafted,
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(config, target),
    }
    if network.predicts_features:
        document |= {
            "architectures": ["LlamaForCausalLMEagle"],
            "embedding_scale": config.embedding_scale,
            "speculators_config": {"verifier": verifier},
        }
    else:
        document |= {
            "architectures": ["Eagle3DraftModel"],
            "eagle_aux_hidden_state_layer_ids": [*network.features.layers],
            "embed_requires_grad": False,
            "fc_norm": config.fc_norm,
            "norm_before_fc": config.norm_before_fc,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": PROPOSED}],
                "verifier": verifier,
            },
            "speculators_model_type": "eagle3",
            "target_hidden_size": config.target_hidden_size,
        }
    return document if config.logit_scale == 1 else document | {"logit_scale": config.logit_scale}


def _layer_config(config: EagleConfig, target: Capabilities) -> dict[str, Any]:
    """The config of a Llama model with such layers; rotary positions as transformers 5 has them, and as 4 had them."""
    rope = config.rope
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "dtype": str(target.dtype).removeprefix("torch."),
        "head_dim": config.head_size,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
