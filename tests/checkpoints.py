"""Tiny checkpoints of transformers with random weights, and the GGUF files that llama.cpp's own converter makes.

Each architecture has two references so, which know nothing of each other: transformers on the checkpoint, llama.cpp on
the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

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
_CONVERTER = Path(sys.prefix) / "converter"
"""Where ``make setup`` installs the converter, apart from everything else."""


def checkpoint(configuration: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """A model with random weights, saved in a folder; norms are away from ones, so that each of them matters."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(configuration)
    with torch.no_grad():
        for name, values in model.named_parameters():
            spread = torch.randn_like(values)
            values.copy_(1 + spread / 10 if "norm" in name and values.dim() == 1 else spread * 0.3)
    model.eval().save_pretrained(folder)
    return model


def converted(*folders: Path, kind: str = "ALL_F32") -> list[Path]:
    """The GGUF files of some checkpoints, by one process for all: it takes seconds to start."""
    script = Path(__file__).with_name("converter.py")
    environment = os.environ | {"PYTHONPATH": str(_CONVERTER), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(script), kind, *map(str, folders)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603 - our own script
    assert ran.returncode == 0, ran.stderr
    return [folder.with_name(f"{folder.name}.gguf") for folder in folders]
