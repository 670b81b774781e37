"""Tiny checkpoints of transformers with random weights, and the GGUF files that llama.cpp's own converter makes.

Each architecture has two references so, which know nothing of each other: transformers on the checkpoint, llama.cpp on
the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Ernie4_5Config,
    Exaone4Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from .tiny_gguf import byte_level

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGURATIONS: Mapping[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**_SIZES),
    "gpt-oss": lambda: GptOssConfig(**{**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Architecture of the GGUF file -> a tiny model's configuration."""

_DENSE: dict[str, Any] = {
    **_SIZES,
    "vocab_size": len(byte_level().tokens),
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
_FEW: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}
_WINDOW = 16
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000.0}
_TEMPERATURE: dict[str, Any] = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5, "beta_fast": 4.0}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.06,
    "logits_scaling": 0.5,
}
_HYBRID: dict[str, Any] = {
    "head_dim": 128,
    "rope_parameters": _PLAIN | {"mrope_section": [6, 5, 5], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 1,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
DENSE: Mapping[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_DENSE),
    "qwen2": lambda: Qwen2Config(**_DENSE),
    "qwen3": lambda: Qwen3Config(**_DENSE),
    "qwen3moe": lambda: Qwen3MoeConfig(
        **_DENSE | {"num_hidden_layers": 2},
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=256,
        norm_topk_prob=True,
    ),
    "gemma": lambda: GemmaConfig(**_DENSE | {"tie_word_embeddings": True}),
    "gemma3": lambda: Gemma3TextConfig(
        **_DENSE | {"tie_word_embeddings": True, "num_hidden_layers": 7},
        sliding_window=_WINDOW,
        query_pre_attn_scalar=64,
    ),
    "phi3": lambda: Phi3Config(**_DENSE, sliding_window=255, original_max_position_embeddings=256),
    "smollm3": lambda: SmolLM3Config(**_DENSE | {"num_hidden_layers": 4}),
    "qwen3vl": lambda: Qwen3VLConfig(
        text_config=_DENSE | {"rope_parameters": _PLAIN | {"mrope_section": [11, 11, 10]}}, vision_config=_VISION
    ),
    "mistral3": lambda: Ministral3Config(**_DENSE, rope_parameters=_YARN | _TEMPERATURE),
    "ernie4_5": lambda: Ernie4_5Config(**_DENSE),
    "seed_oss": lambda: SeedOssConfig(**_DENSE),
    "granite": lambda: GraniteConfig(**_DENSE | _GRANITE),
    "granite-4": lambda: GraniteMoeHybridConfig(
        **_DENSE | _GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256},
        layer_types=["attention"],
        position_embedding_type="rope",
    ),
    "olmo2": lambda: Olmo2Config(**_DENSE),
    "olmo2-windows": lambda: Olmo3Config(
        **_DENSE | _FEW,
        sliding_window=_WINDOW,
        rope_parameters={"sliding_attention": dict(_PLAIN), "full_attention": dict(_YARN)},
    ),
    "glm4": lambda: Glm4Config(**_DENSE),
    "qwen35": lambda: Qwen3_5TextConfig(
        **_DENSE | _HYBRID | {"num_hidden_layers": 4}, layer_types=[*["linear_attention"] * 3, "full_attention"]
    ),
    "qwen35-attention": lambda: Qwen3_5TextConfig(**_DENSE | _HYBRID, layer_types=["full_attention"]),
    "hunyuan-dense": lambda: HunYuanDenseV1Config(
        **_DENSE | {"max_position_embeddings": 32768},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "exaone4": lambda: Exaone4Config(**_DENSE, sliding_window=None, layer_types=["full_attention"]),
    "exaone4-windows": lambda: Exaone4Config(**_DENSE | _FEW, sliding_window=_WINDOW),
}
"""Of architectures that the native engine runs: wide enough for rows of Q4_K."""
_CONVERTER = Path(sys.prefix) / "converter"
"""Where ``make setup`` installs the converter, apart from everything else."""


def checkpoint(configuration: PretrainedConfig, folder: Path, spread_of_weights: float = 0.3) -> PreTrainedModel:
    """A model with random weights, saved in a folder; norms are away from ones, so that each of them matters."""
    torch.manual_seed(0)
    of_text = not hasattr(configuration, "vision_config")
    kind: Any = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
    model: PreTrainedModel = kind.from_config(configuration, attn_implementation="eager").float()
    adds_one = configuration.model_type in ("gemma", "gemma3_text", "qwen3_5_text")  # to the weights of norms
    with torch.no_grad():
        for name, values in model.named_parameters():
            spread, one = torch.randn_like(values), not adds_one or "linear_attn" in name
            values.copy_(one + spread / 10 if "norm" in name and values.dim() == 1 else spread * spread_of_weights)
    model.eval().save_pretrained(folder)
    if configuration.model_type == "qwen3_5_text":  # as it was published
        every = configuration.layer_types.index("full_attention") + 1
        published = json.loads((folder / "config.json").read_text()) | {"full_attention_interval": every}
        (folder / "config.json").write_text(json.dumps(published))
    if configuration.model_type == "granitemoehybrid":  # as it was published
        published = (folder / "config.json").read_text().replace('"full_attention"', '"attention"')
        (folder / "config.json").write_text(published)
    tokens = map(str, range(configuration.get_text_config().vocab_size))
    words = {"model": {"vocab": dict.fromkeys(tokens)}}
    (folder / "tokenizer.json").write_text(json.dumps(words | {"added_tokens": []}))  # the converter counts them
    return model


def converted(*folders: Path, kind: str = "ALL_F32") -> list[Path]:
    """The GGUF files of some checkpoints, by one process for all: it takes seconds to start."""
    script = Path(__file__).with_name("converter.py")
    environment = os.environ | {"PYTHONPATH": f"{_CONVERTER}:{script.parents[1]}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(script), kind, *map(str, folders)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603 - our own script
    assert ran.returncode == 0, ran.stderr
    return [folder.with_name(f"{folder.name}.gguf") for folder in folders]
