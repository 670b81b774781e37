"""Tiny checkpoints of the architectures that llama.cpp runs, with random weights, and their GGUF files.

Those that the native engine runs are in ``checkpoints``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from gguf import GGMLQuantizationType as Format
from safetensors.torch import load_file, save_file
from transformers import (
    ApertusConfig,
    Cohere2Config,
    Ernie4_5_MoeConfig,
    FalconH1Config,
    Gemma4TextConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    HunYuanMoEV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from .checkpoints import checkpoint
from .tiny_gguf import byte_level, copy_settings

WINDOW = 8
"""Tokens of the windows."""
CONTEXT = 1024

_NONE: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_BODY: dict[str, Any] = {
    **_NONE,
    "vocab_size": len(byte_level().tokens),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
_TWO: dict[str, Any] = {**_BODY, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {**_TWO, "head_dim": 32}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED: dict[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 64}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SECTIONS: dict[str, Any] = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN: dict[str, Any] = {**_HEADS, **_DELTA, "rope_parameters": _ROPE | _SECTIONS}
_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA: dict[str, Any] = {
    **_HEADS,
    **_WINDOWS,
    "rope_parameters": {
        "sliding_attention": _ROPE,
        "full_attention": {"rope_type": "proportional", "rope_theta": 100000.0, "partial_rotary_factor": 0.25},
    },
    "final_logit_softcapping": 30.0,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
}
_GEMMA_KEYS: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
_MAMBA: dict[str, Any] = {
    "mamba_chunk_size": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
}
_GRANITE: dict[str, Any] = {
    **_TWO,
    **_MAMBA,
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 128,
    "embedding_multiplier": 2.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_NEMOTRON: dict[str, Any] = {
    **_BODY,
    "head_dim": 32,
    "ssm_state_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "chunk_size": 8,
}
_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_HUNYUAN: dict[str, Any] = {"moe_intermediate_size": [64, 64], "num_shared_expert": [1, 1]}
_LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_FACTORS: dict[str, Any] = {"short_factor": [1.0] * 16, "long_factor": [1 + i / 4 for i in range(16)]}
_FALCON: dict[str, Any] = {
    **_MAMBA,
    "mamba_d_ssm": 128,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.5, 0.9, 1.1, 0.7, 1.3],
    "mlp_multipliers": [0.8, 1.2],
    "lm_head_multiplier": 1.5,
    "embedding_multiplier": 2.0,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


class Family(NamedTuple):
    """A tiny model.

    Attributes:
        published: keys of its ``config.json`` as publishers write it, where transformers saves it otherwise; None:
            without this key.
    """

    configuration: Callable[[], PretrainedConfig]
    published: Mapping[str, Any] = {}


def _gpt_oss(**rope: Any) -> GptOssConfig:
    sizes: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": rope,
    }
    return GptOssConfig(**_HEADS | sizes)


def long_rope(trained: int) -> Phi3Config:
    """A model with LongRoPE's factors for texts of more than ``trained`` tokens."""
    rope = {**_LONG, **_FACTORS, "original_max_position_embeddings": trained}
    sizes: dict[str, Any] = _TWO | {
        "max_position_embeddings": 8 * CONTEXT,
        "sliding_window": None,
        "rope_parameters": rope,
    }
    return Phi3Config(**sizes, original_max_position_embeddings=trained)


_INTERVAL: dict[str, Any] = {"full_attention_interval": 2}
_GLOBAL_HEADS: dict[str, Any] = {"global_head_dim": 64, "num_global_key_value_heads": 2}
FAMILIES: Mapping[str, Family] = {
    "qwen35": Family(lambda: Qwen3_5TextConfig(**_QWEN), _INTERVAL),
    "qwen35+mtp": Family(lambda: Qwen3_5TextConfig(**_QWEN), {**_INTERVAL, "mtp_num_hidden_layers": 1}),
    "qwen35moe": Family(lambda: Qwen3_5MoeTextConfig(**_QWEN, **_SHARED), _INTERVAL),
    "qwen35moe+mtp": Family(
        lambda: Qwen3_5MoeTextConfig(**_QWEN, **_SHARED), {**_INTERVAL, "mtp_num_hidden_layers": 1}
    ),
    "qwen3next": Family(lambda: Qwen3NextConfig(**_HEADS, **_DELTA, **_SHARED), _INTERVAL),
    "gemma4": Family(lambda: Gemma4TextConfig(**_GEMMA, **_GEMMA_KEYS), _GLOBAL_HEADS),
    "gemma4+experts": Family(
        lambda: Gemma4TextConfig(
            **_GEMMA, **_GEMMA_KEYS, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64
        ),
        _GLOBAL_HEADS,
    ),
    "gemma4+layer-embeddings": Family(
        lambda: Gemma4TextConfig(
            **_GEMMA
            | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
            | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
            | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": _BODY["vocab_size"]}
        ),
        {"global_head_dim": 64},
    ),
    "gpt-oss": Family(lambda: _gpt_oss(**_ROPE)),
    "gpt-oss+yarn": Family(lambda: _gpt_oss(**_ROPE | _YARN, original_max_position_embeddings=256)),
    "qwen3moe": Family(lambda: Qwen3MoeConfig(**_HEADS, **_EXPERTS, norm_topk_prob=True)),
    "deepseek2": Family(
        lambda: Glm4MoeLiteConfig(**_TWO | _LATENT), {"first_k_dense_replace": 1, "scoring_func": "sigmoid"}
    ),
    "granitehybrid": Family(
        lambda: GraniteMoeHybridConfig(**_GRANITE, num_local_experts=0, num_experts_per_tok=0),
        {"layer_types": _GRANITE["layer_types"]},
    ),
    "granitehybrid+experts": Family(
        lambda: GraniteMoeHybridConfig(**_GRANITE, num_local_experts=4, num_experts_per_tok=2),
        {"layer_types": _GRANITE["layer_types"]},
    ),
    "lfm2": Family(
        lambda: Lfm2Config(**_TWO, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
        {"block_ff_dim": 128},
    ),
    "lfm2moe": Family(
        lambda: Lfm2MoeConfig(
            **_BODY, **_EXPERTS, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1
        )
    ),
    "nemotron_h": Family(
        lambda: NemotronHConfig(**_NEMOTRON, layers_block_type=["mamba", "mlp", "attention", "mlp"]),
        dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_group", "layers_block_type"))
        | {"num_hidden_layers": 4, "hybrid_override_pattern": "M-*-"},
    ),
    "nemotron_h_moe": Family(
        lambda: NemotronHConfig(
            **_NEMOTRON,
            layers_block_type=["mamba", "moe", "attention", "moe"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            moe_shared_expert_intermediate_size=64,
            routed_scaling_factor=2.5,
        ),
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
    ),
    "cohere2": Family(
        lambda: Cohere2Config(**_BODY, num_hidden_layers=4, sliding_window=WINDOW, logit_scale=0.5), {"rotary_pct": 1.0}
    ),
    "ernie4_5-moe": Family(
        lambda: Ernie4_5_MoeConfig(
            **_TWO | {"num_key_value_heads": 2},
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=64,
            moe_num_shared_experts=1,
        )
    ),
    "hunyuan-moe": Family(
        lambda: HunYuanMoEV1Config(**_HEADS | {"num_experts": 4, "moe_topk": 2} | _HUNYUAN),
        {"moe_topk": [2, 2]},
    ),
    "apertus": Family(lambda: ApertusConfig(**_TWO, rope_parameters=_ROPE)),
    "falcon-h1": Family(lambda: FalconH1Config(**_HEADS, **_FALCON)),
    "phi3+long": Family(lambda: long_rope(trained=WINDOW)),
}
"""Architecture of the GGUF file, and behind a "+" what its model has beside others -> the tiny model."""


def made(family: Family, folder: Path) -> PreTrainedModel:
    """A checkpoint with random weights in a folder, as it would be published; biases of routers are random, too."""
    model = checkpoint(family.configuration(), folder)
    with torch.no_grad():
        for name, values in model.named_buffers():
            if name.endswith(("bias", "layer_scalar")):
                values.add_(torch.randn_like(values) * 0.3)
    model.save_pretrained(folder)
    configuration = json.loads((folder / "config.json").read_text()) | family.published
    kept = {key: value for key, value in configuration.items() if value is not None or key not in family.published}
    (folder / "config.json").write_text(json.dumps(kept))
    if "mtp_num_hidden_layers" in family.published:
        _add_draft_layer(folder / "model.safetensors", hidden=model.config.hidden_size)
    return model


def _add_draft_layer(weights: Path, hidden: int) -> None:
    """Add a layer that predicts the token after the next one, as Qwen 3.5 has it; transformers leaves it out."""
    tensors = load_file(weights)
    attention = {name: values for name, values in tensors.items() if name.startswith("model.layers.1.")}
    own = {name.replace("model.layers.1", "mtp.layers.0"): values.clone() for name, values in attention.items()}
    own["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * 0.3
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        own[f"mtp.{norm}.weight"] = torch.randn(hidden) / 10
    save_file(tensors | own, weights, {"format": "pt"})


def repacked(path: Path, part: str, kind: Format) -> Path:
    """The file with the tensors whose names contain ``part`` in another format."""
    reader, written = gguf.GGUFReader(path), path.with_name(f"{kind.name}.gguf")
    writer = gguf.GGUFWriter(written, str(reader.fields["general.architecture"].contents()))
    copy_settings(reader, writer)
    for tensor in reader.tensors:
        of = kind if part in tensor.name else tensor.tensor_type
        data = tensor.data
        if part in tensor.name:
            data = gguf.quants.quantize(gguf.dequantize(data, tensor.tensor_type), of)
        writer.add_tensor(tensor.name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written
