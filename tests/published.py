"""Published draft heads of tiny targets, with random weights, in folders; and what they compute, by the book.

The reference is written from the description of the formats (Li et al., *EAGLE* and *EAGLE-3*; README files of the
formats), in plain tensors without a cache: a whole sequence again for every token. It shares no code with draftree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftree.models.base import LanguageModel
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.heads.head_folder import load_head

Config = dict[str, Any]

ROPES: dict[str, Config] = {
    "default": {"rope_theta": 5000.0},
    "llama3": {
        "rope_theta": 700.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "yarn": {
        "rope_theta": 900.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
}
FLAGS: dict[str, Config] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "biases": {"attention_bias": True},
    "two layers": {"num_hidden_layers": 2},
    "scaled": {"logit_scale": 0.25},
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A head with random weights.

    Attributes:
        kind: "eagle3" or "eagle".
        vocab, target_size: of the target.
        size: H of the head.
        drafted: the target's ids of its vocabulary; None: all, and no map.
        ids: of the layers that it reads, as the file has them; None: it has none.
        states: hidden states that it reads.
        rope, flags: of its config; with "float16_cache" the reference rounds keys and values.
        embeddings: it has its own.
        fc_bias: ``fc`` has a bias.
        input_norm: of EAGLE-1: the first layer norms its input.
        qk_norm: queries and keys are normed, as in Qwen3.
        width, wide: of its heads, and of its feed-forward block.
        seed: of its weights.
    """

    kind: str = "eagle3"
    vocab: int = 61
    target_size: int = 32
    size: int = 32
    drafted: tuple[int, ...] | None = tuple(range(0, 61, 2))
    ids: tuple[int, ...] | None = (0, 1, 2)
    states: int = 3
    rope: Config = field(default_factory=lambda: ROPES["default"])
    flags: Config = field(default_factory=dict)
    embeddings: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    input_norm: bool = False
    width: int = 8
    wide: int = 48
    seed: int = 0

    @property
    def config(self) -> Config:
        """Sizes and flags, by the names of ``config.json``."""
        layers = {
            "hidden_size": self.size,
            "vocab_size": self.vocab,
            "intermediate_size": self.wide,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.width,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128,
        }
        return {**layers, **self.rope, **self.flags}

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by the names of speculators."""
        config, size, width = self.config, self.size, self.width
        rng = torch.Generator().manual_seed(self.seed)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng) * 0.15

        def norm(length: int) -> Tensor:
            return 1 + torch.randn(length, generator=rng) * 0.2

        eagle3, wide = self.kind == "eagle3", self.states * self.target_size
        found = {"fc.weight": matrix(size, wide if eagle3 else 2 * size)}
        if self.fc_bias:
            found["fc.bias"] = matrix(size)
        if config.get("norm_before_fc"):
            found["input_norm.weight"] = norm(wide)
        if config.get("fc_norm"):
            found |= {f"fc_norm.{i}.weight": norm(self.target_size) for i in range(self.states)}
        for i in range(config["num_hidden_layers"]):
            at, inputs = f"layers.{i}", 2 * size if eagle3 and i == 0 else size
            for part, heads in (("q", 4), ("k", 2), ("v", 2)):
                found[f"{at}.self_attn.{part}_proj.weight"] = matrix(heads * width, inputs)
            found[f"{at}.self_attn.o_proj.weight"] = matrix(size, 4 * width)
            if config.get("attention_bias"):
                for part, length in (("q", 4 * width), ("k", 2 * width), ("v", 2 * width), ("o", size)):
                    found[f"{at}.self_attn.{part}_proj.bias"] = matrix(length)
            if self.qk_norm:
                found |= {f"{at}.self_attn.{part}_norm.weight": norm(width) for part in "qk"}
            for part in ("gate", "up"):
                found[f"{at}.mlp.{part}_proj.weight"] = matrix(self.wide, size)
            found[f"{at}.mlp.down_proj.weight"] = matrix(size, self.wide)
            found[f"{at}.post_attention_layernorm.weight"] = norm(size)
            if eagle3 or i or self.input_norm:
                found[f"{at}.input_layernorm.weight"] = norm(size)
            if eagle3 and i == 0:
                found[f"{at}.hidden_norm.weight"] = norm(size)
        if eagle3:
            found["norm.weight"] = norm(size)
            found["lm_head.weight"] = matrix(self.vocab if self.drafted is None else len(self.drafted), size)
        if self.embeddings or size != self.target_size:
            found["embed_tokens.weight"] = matrix(self.vocab, size)
        return found

    def maps(self) -> dict[str, Tensor]:
        """``d2t`` and ``t2d``."""
        if self.drafted is None:
            return {}
        ids = torch.tensor(self.drafted)
        marked = torch.zeros(self.vocab, dtype=torch.bool)
        marked[ids] = True
        return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}

    def save(self, folder: Path, style: str = "speculators", *, pickled: bool = False) -> Path:
        """Write it as speculators does, or as SafeAILab and SpecForge do ("midlayer")."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors, config = self.tensors() | self.maps(), self.config
        size = {} if self.size == self.target_size else {"target_hidden_size": self.target_size}
        drafted = {} if self.drafted is None else {"draft_vocab_size": len(self.drafted)}
        if style == "speculators":
            document: Config = {
                "speculators_model_type": "eagle3",
                "architectures": ["Eagle3DraftModel"],
                "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/tiny"}},
                "transformer_layer_config": {key: config[key] for key in config if key not in _FLAGS},
                "eagle_aux_hidden_state_layer_ids": None if self.ids is None else list(self.ids),
                **{key: config[key] for key in config if key in _FLAGS},
                **size,
                **drafted,
            }
        elif self.kind == "eagle":
            document = {"architectures": ["LlamaForCausalLM" if self.drafted is None else "LlamaForCausalLMEagle"]}
            document |= {**config, **drafted}
        else:
            own = {} if self.ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.ids)}}
            document = {"architectures": ["LlamaForCausalLMEagle3"], **config, **size, **drafted, **own}
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        (folder / "config.json").write_text(json.dumps(document))
        if pickled:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")
        return folder


_FLAGS = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "logit_scale"}
"""What speculators writes beside the layers' config."""

KINDS = {
    "eagle3": Recipe(),
    "eagle3 of all tokens": Recipe(drafted=None, ids=(1, 2, 0), flags={"norm_output": True, "fc_norm": True}),
    "eagle3 of two layers": Recipe(size=48, fc_bias=True, flags={"num_hidden_layers": 2, "norm_before_residual": True}),
    "eagle": Recipe(kind="eagle", drafted=None, fc_bias=True),
    "draftree's own": Recipe(
        kind="eagle", fc_bias=True, input_norm=True, drafted=tuple(range(61)), flags={"embedding_scale": 1.7}
    ),
}
"""Heads of every kind, for decoding."""


def frequencies(config: Config, width: int = 8) -> tuple[Tensor, float]:
    """[D / 2] frequencies of rotary positions, and what cos and sin are multiplied by."""
    base, rope = config["rope_theta"], config.get("rope_scaling") or {"rope_type": "default"}
    plain = base ** -(torch.arange(0, width, 2).double() / width)
    if rope["rope_type"] == "default":
        return plain, 1.0
    factor, old = rope["factor"], rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        turns = old * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)  # 1: left as it is, 0: slowed down
        return share * plain + (1 - share) * plain / factor, 1.0

    def dimension(turns: float) -> float:  # which one turns so often over the old length
        return width * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), width - 1)
    slowed = ((torch.arange(width // 2).double() - first) / max(last - first, 0.001)).clamp(0, 1)
    return slowed * plain / factor + (1 - slowed) * plain, 0.1 * math.log(factor) + 1


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """[n, H] normed."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _rotate(x: Tensor, config: Config) -> Tensor:
    """[n, heads, D] by positions 0 to n - 1: (x_j, x_{j + D/2}) turns as one complex number."""
    frequency, scale = frequencies(config, x.shape[-1])
    angles = torch.arange(len(x)).double()[:, None] * frequency
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.full_like(angles, scale), angles)[:, None]
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def layer_of(
    weights: Mapping[str, Tensor],
    at: str,
    config: Config,
    inputs: Tensor,
    residual: Tensor,
    seen: Tensor | None = None,
) -> Tensor:
    """[n, H] after a decoder layer, of what its attention reads and its residual.

    Args:
        seen: [n, n] bool, what each position attends to; None: what is not behind it.
    """
    if seen is None:
        seen = torch.ones(len(inputs), len(inputs), dtype=torch.bool).tril()

    def project(part: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{at}.self_attn.{part}_proj.bias", torch.zeros(()))
        return x @ weights[f"{at}.self_attn.{part}_proj.weight"].T + bias

    parts = {part: project(part, inputs).view(len(inputs), -1, config["head_dim"]) for part in "qkv"}
    for part in "qk":
        if (norm := weights.get(f"{at}.self_attn.{part}_norm.weight")) is not None:
            parts[part] = rms(parts[part], norm)
        parts[part] = _rotate(parts[part], config)
    if config.get("float16_cache"):
        parts |= {part: parts[part].half().float() for part in "kv"}
    found = []
    for head in range(4):
        scores = parts["q"][:, head] @ parts["k"][:, head // 2].T / config["head_dim"] ** 0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        found.append(scores.softmax(-1) @ parts["v"][:, head // 2])
    middle = residual + project("o", torch.cat(found, -1))
    x = rms(middle, weights[f"{at}.post_attention_layernorm.weight"])
    gate, up, down = (weights[f"{at}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return middle + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def through(recipe: Recipe, weights: Mapping[str, Tensor], embedded: Tensor, states: Tensor) -> Tensor:
    """[n, H] outputs of the last layer for a text."""
    config = recipe.config
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}"
        if i == 0 and recipe.kind == "eagle3":
            normed = rms(states, weights[f"{at}.hidden_norm.weight"])
            inputs = torch.cat([rms(embedded, weights[f"{at}.input_layernorm.weight"]), normed], -1)
            residual = normed if config.get("norm_before_residual") else states
        elif i == 0:
            both = torch.cat([embedded * config.get("embedding_scale", 1.0), states], -1)
            residual = inputs = both @ weights["fc.weight"].T + weights.get("fc.bias", 0)
            if recipe.input_norm:
                inputs = rms(inputs, weights[f"{at}.input_layernorm.weight"])
        else:
            residual, inputs = states, rms(states, weights[f"{at}.input_layernorm.weight"])
        states = layer_of(weights, at, config, inputs, residual)
    return states


@torch.inference_mode()
def reference(
    recipe: Recipe, embeddings: Tensor, output: Tensor, tokens: Sequence[int], features: Tensor, further: Sequence[int]
) -> Tensor:
    """[1 + m, D] logits after ``tokens``, and after each of m further tokens that are drafted.

    Args:
        embeddings, output: [V, H] of the target.
        tokens: n of a text.
        features: [n, F] hidden states of the target at the tokens before them.
        further: m.
    """
    weights, config = recipe.tensors(), recipe.config
    embeddings = weights.get("embed_tokens.weight", embeddings)
    if recipe.kind == "eagle3":
        if config.get("norm_before_fc"):
            features = rms(features, weights["input_norm.weight"])
        if config.get("fc_norm"):
            parts = features.chunk(recipe.states, -1)
            features = torch.cat([rms(part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        states = features @ weights["fc.weight"].T + weights.get("fc.bias", 0)
    else:
        states = features
    text, found, last = list(tokens), [], states[:0]
    for token in (None, *further):
        if token is not None:
            text.append(token)
            states = torch.cat([states, last])
        last = through(recipe, weights, embeddings[torch.tensor(text)], states)[-1:]
        if recipe.kind != "eagle3":
            found.append(last @ output.T)
            continue
        normed = rms(last, weights["norm.weight"])
        found.append(normed @ weights["lm_head.weight"].T * config.get("logit_scale", 1.0))
        last = normed if config.get("norm_output") else last
    return torch.cat(found)


def saved(recipe: Recipe, folder: Path) -> Path:
    """A head in a folder, in the style in which its kind is published most."""
    return recipe.save(folder, "speculators" if recipe.kind == "eagle3" else "midlayer")


def eagle_head(folder: Path, target: LanguageModel) -> HeadModel:
    """A head of the EAGLE family that was saved."""
    head = load_head(folder, target)
    assert isinstance(head, HeadModel)
    return head
