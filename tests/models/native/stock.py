"""Tiny random models of transformers, and their GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
THETA = 500.0


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": THETA, **more}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_LOCAL = {"rope_type": "default", "rope_theta": 100.0}
_FACTORS = [1.0 + i / 4 for i in range(8)]
_LONG = {"short_factor": [1.0] * 8, "long_factor": _FACTORS, "original_max_position_embeddings": 64}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, **_rope("default")),
    "llama-tied": lambda: LlamaConfig(**SIZES, **_rope("default"), tie_word_embeddings=True),
    "llama-one-key-head": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, head_dim=32),
    "llama3": lambda: LlamaConfig(**SIZES, **_LLAMA3),
    "llama-linear": lambda: LlamaConfig(**SIZES, **_rope("linear", factor=4.0)),
    "llama-yarn": lambda: LlamaConfig(**SIZES, **_YARN),
    "mistral": lambda: MistralConfig(**SIZES, **_rope("default"), sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES, **_rope("default")),
    "qwen2-yarn": lambda: Qwen2Config(**SIZES, **_YARN),
    "qwen3": lambda: Qwen3Config(**SIZES, **_rope("default"), head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        rope_parameters={
            "sliding_attention": _LOCAL,
            "full_attention": {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0},
        },
    ),
    "phi3": lambda: Phi3Config(**SIZES, **_rope("default", partial_rotary_factor=1.0), sliding_window=8),
    "phi3-partial": lambda: Phi3Config(**SIZES, **_rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": lambda: Phi3Config(
        **SIZES, **_rope("longrope", partial_rotary_factor=1.0, **_LONG), original_max_position_embeddings=64
    ),
    "smollm3": lambda: SmolLM3Config(**SIZES, **_rope("default")),
}


def stock_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of ``CONFIGS`` in float32, drawn wide, with norms that differ from ones and biases from zeros."""
    torch.manual_seed(seed)
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").float().eval()
    )
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(
                    (0.0 if label.endswith("bias") or "Gemma3" in type(model).__name__ else 1.0)
                    + 0.3 * torch.randn_like(weight)
                )
            else:
                weight.copy_(0.25 * torch.randn_like(weight))
    return model


_NAMES = {"mistral": "llama", "gemma3_text": "gemma3"}


def write_gguf(model: PreTrainedModel, path: Path) -> Path:
    """Write a model's numbers and float32 weights."""
    config: Any = model.config
    architecture = _NAMES.get(config.model_type, config.model_type)
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    _add_rope(writer, config, architecture, head)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for label, weight in model.state_dict().items():
        if label == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values: NDArray[np.float32] = weight.numpy()
        if architecture in ("llama", "smollm3") and label.endswith(("q_proj.weight", "k_proj.weight")):
            values = _paired(values, heads if "q_proj" in label else keys)
        if architecture == "gemma3" and "norm" in label:
            values = values + 1
        name = names.get_name(label, try_suffixes=(".weight", ".bias"))
        assert name is not None, label
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _paired(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of queries or keys in the order in which rope turns dimensions 2i and 2i + 1."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_rope(writer: gguf.GGUFWriter, config: Any, architecture: str, head: int) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head))
    if kind == "longrope":
        trained, most = rope["original_max_position_embeddings"], config.max_position_embeddings
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(most / trained) / np.log(trained))))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _llama3_factors(rope: dict[str, float], head: int) -> NDArray[np.float32]:
    """What llama.cpp's converter divides rope frequencies by."""
    low, high, trained = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    waves = 2 * np.pi * THETA ** (np.arange(0, head, 2) / head)
    smooth = (trained / waves - low) / (high - low)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(waves > trained / low, rope["factor"], np.where(waves < trained / high, 1.0, factors))
    return factors.astype(np.float32)
