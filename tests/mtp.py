"""Tiny random models with multi-token prediction (MTP) layers in their checkpoints; transformers' own computation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from .tiny import MAX_LENGTH, VOCAB, tiny_tokenizer

LAYERS = 2
"""Decoder layers of the target."""
_HIDDEN, _STD = 32, 0.3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": _HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_HEADS: dict[str, Any] = {"head_dim": 8}
_BUILDERS: dict[str, Callable[[int], PreTrainedModel]] = {
    "deepseek_v3": lambda layers: DeepseekV3ForCausalLM(
        DeepseekV3Config(**_SIZES, **_LATENT, num_hidden_layers=layers, num_key_value_heads=4, n_group=2, topk_group=1)
    ),
    "glm4_moe": lambda layers: Glm4MoeForCausalLM(
        Glm4MoeConfig(**_SIZES, num_hidden_layers=layers, num_key_value_heads=2, **_HEADS)
    ),
}
KINDS = tuple(_BUILDERS)
_OF_MTP = [rf"model\.layers\.{LAYERS + k}\." for k in range(3)]


def save_mtp(folder: Path, kind: str, layers: int = 1, lacking: Sequence[str] = ()) -> Path:
    """Save a model with MTP layers, as its publishers lay them out: behind the decoder layers.

    Args:
        layers: MTP layers that its config names.
        lacking: ends of names of tensors that are left out.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = _BUILDERS[kind](LAYERS + layers)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=_STD)
            else:
                weight.add_(torch.randn_like(weight), alpha=_STD / 3)
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for k in range(LAYERS, LAYERS + layers):
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                tensors[f"model.layers.{k}.{norm}.weight"] = 1 + torch.randn(_HIDDEN) / 10
            tensors[f"model.layers.{k}.eh_proj.weight"] = torch.randn(_HIDDEN, 2 * _HIDDEN) * _STD
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(tuple(lacking))}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def known(patch: pytest.MonkeyPatch) -> None:
    """Let transformers look for MTP layers behind so few decoder layers: it knows them by those of real checkpoints."""
    for stock in (DeepseekV3ForCausalLM, Glm4MoeForCausalLM):
        patch.setattr(stock, "_keys_to_ignore_on_load_unexpected", _OF_MTP)


def read(folder: Path, **options: Any) -> PreTrainedModel:
    """The target of a folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()  # type: ignore[no-any-return]


class Oracle:
    """The same target and its MTP layers in transformers alone: chains, read anew for every token."""

    def __init__(self, folder: Path) -> None:
        self.model = read(folder)
        self._layers: Any = MtpModel.from_pretrained(self.model).eval()

    @torch.no_grad()
    def drafted(self, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """[1 + D, V] logits after a text, the last token of which the target has not read, and after each draft."""
        ids = torch.tensor([[*text, *drafts]])
        final = self.model.base_model(input_ids=ids[:, : len(text) - 1], use_cache=False)[0]
        count, found = len(self._layers.layers), []
        states, own = [final], final
        for step in range(1 + len(drafts)):
            layer = min(step, count - 1)
            end = len(text) + step
            if step >= count:  # the last layer again: it reads what it has given after its own drafts
                states[layer] = torch.cat([states[layer], own[:, -1:]], dim=1)
            fed = states[layer]
            tokens = ids[:, end - fed.shape[1] : end]
            places = torch.arange(end - fed.shape[1], end)[None]
            cache = MtpCache(config=self.model.config.get_mtp_config())
            own = self._layers.forward_layer(layer, fed, places, cache, input_ids=tokens)
            found.append(self._layers._project_to_logits(own[:, -1:])[0])
            if layer + 1 < count:
                states.append(own)
        return torch.cat(found)
