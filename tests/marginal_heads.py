"""Medusa, DFlash and P-EAGLE heads with random weights, in folders; and what they compute, by the book.

The references are written from the papers and the README files of the formats, in plain tensors, without a cache. They
share no code with draftree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from draftree.models.base import FeatureSpec, prefill
from draftree.models.huggingface.features import feature_row
from draftree.models.huggingface.hf_model import HFModel

from .published import ROPES, Config, Recipe, layer_of, rms, through

SIZE, VOCAB = 32, 61


def _matrices(seed: int) -> Callable[..., Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=rng) * 0.2


def weights_of(target: HFModel) -> tuple[Tensor, Tensor]:
    """[V, H] embeddings and output layer of a target."""
    matrices = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    embeddings, output = (m.detach() for m in matrices if isinstance(m, Tensor))
    return embeddings, output


def features_of(target: HFModel, prompt: Sequence[int], wanted: FeatureSpec) -> Tensor:
    """[n - 1, F] hidden states of a target at all tokens of a text but the last."""
    target.track_features(wanted)
    row = prefill(target, list(prompt))
    found = feature_row(row).waiting_features(wanted)[:-1].clone()
    target.close(row)
    return found


@dataclass(frozen=True, kw_only=True)
class MedusaRecipe:
    """Medusa heads with random weights.

    Attributes:
        style: of names: "authors" or "vllm".
        drafted: the tokens of ``token_map``; None: all.
        is_shared: one output layer serves all heads.
    """

    style: str = "authors"
    heads: int = 3
    layers: int = 1
    drafted: tuple[int, ...] | None = None
    is_shared: bool = False

    @property
    def outputs(self) -> int:
        return 1 if self.is_shared else self.heads

    def tensors(self) -> dict[str, Tensor]:
        """Its weights."""
        matrix, authors = _matrices(1), self.style == "authors"
        found: dict[str, Tensor] = {}
        for i in range(self.heads):
            for j in range(self.layers):
                name = f"{i}.{j}.linear" if authors else f"blocks.{i}.layers.{j}"
                found |= {f"{name}.weight": matrix(SIZE, SIZE), f"{name}.bias": matrix(SIZE)}
        for i in range(self.outputs):
            found[f"{i}.{self.layers}.weight" if authors else f"lm_heads.{i}.weight"] = matrix(VOCAB, SIZE)
        if self.drafted is not None:
            found["token_map"] = torch.tensor(self.drafted)
        return found

    def save(self, folder: Path, *, pickled: bool = False) -> Path:
        """Write it."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.style == "authors":
            config: Config = {"medusa_num_heads": self.heads, "medusa_num_layers": self.layers}
            config["base_model_name_or_path"] = "org/tiny"
        else:
            config = {"architectures": ["MedusaModel"], "num_heads": self.heads, "num_hidden_layers": self.layers}
            config |= {"hidden_size": SIZE, "vocab_size": VOCAB, "original_lm_head": self.is_shared}
            if self.drafted is not None:
                config["truncated_vocab_size"] = len(self.drafted)
        (folder / "config.json").write_text(json.dumps(config))
        if pickled:
            torch.save(self.tensors(), folder / "medusa_lm_head.pt")
        else:
            name = "medusa_lm_head" if self.style == "authors" else "model"
            save_file(self.tensors(), folder / f"{name}.safetensors")
        return folder

    def reference(self, state: Tensor) -> Tensor:
        """[K, D] logits of the [H] final hidden state at a token."""
        weights, authors, found = self.tensors(), self.style == "authors", []
        for i in range(self.heads):
            x = state
            for j in range(self.layers):
                name = f"{i}.{j}.linear" if authors else f"blocks.{i}.layers.{j}"
                x = x + silu(weights[f"{name}.weight"] @ x + weights[f"{name}.bias"])
            last = min(i, self.outputs - 1)
            logits = weights[f"{last}.{self.layers}.weight" if authors else f"lm_heads.{last}.weight"] @ x
            found.append(logits if self.drafted is None else logits[list(self.drafted)])
        return torch.stack(found)


@dataclass(frozen=True, kw_only=True)
class DFlashRecipe:
    """A DFlash head with random weights.

    Attributes:
        block: S.
        ids: the layers of the target that it reads, as the file has them.
        extra: further fields of its config.
    """

    block: int = 5
    layers: int = 2
    ids: tuple[int, ...] = (0, 1)
    mask: int = 60
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> Config:
        """``config.json``."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block,
            "dflash_config": {"target_layer_ids": list(self.ids), "mask_token_id": self.mask},
            "num_target_layers": 2,
            "hidden_size": SIZE,
            "vocab_size": VOCAB,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_hidden_layers": self.layers,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128,
            "attention_bias": False,
            **ROPES["default"],
            **dict(self.extra),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Its weights."""
        matrix = _matrices(2)

        def norm(size: int) -> Tensor:
            return 1 + matrix(size)

        found = {"fc.weight": matrix(SIZE, len(self.ids) * SIZE), "hidden_norm.weight": norm(SIZE)}
        for i in range(self.layers):
            at = f"layers.{i}"
            for name, rows in (("q", 32), ("k", 16), ("v", 16)):
                found[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows, SIZE)
            found[f"{at}.self_attn.o_proj.weight"] = matrix(SIZE, 32)
            found |= {f"{at}.self_attn.{name}_norm.weight": norm(8) for name in "qk"}
            found |= {f"{at}.mlp.{name}_proj.weight": matrix(48, SIZE) for name in ("gate", "up")}
            found[f"{at}.mlp.down_proj.weight"] = matrix(SIZE, 48)
            found |= {f"{at}.{name}_layernorm.weight": norm(SIZE) for name in ("input", "post_attention")}
        return found | {"norm.weight": norm(SIZE)}

    def save(self, folder: Path) -> Path:
        """Write it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors(), folder / "model.safetensors")
        return folder

    def reference(self, embeddings: Tensor, output: Tensor, features: Tensor, root: int) -> Tensor:
        """[S - 1, V] logits of a block behind [n, F] hidden states of a text, without a cache."""
        weights, config = self.tensors(), self.config
        context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
        scale = config.get("input_embedding_scale", 1.0)
        states = embeddings[[root] + [self.mask] * (self.block - 1)] * scale
        for i in range(self.layers):
            states = self._layer(weights, i, context, states)
        logits: Tensor = rms(states, weights["norm.weight"])[1:] @ output.T * config.get("output_multiplier", 1.0)
        cap = config.get("final_logit_softcapping")
        return (logits / cap).tanh() * cap if cap else logits

    def _layer(self, weights: Mapping[str, Tensor], number: int, context: Tensor, states: Tensor) -> Tensor:
        config, at = self.config, f"layers.{number}"
        normed = rms(states, weights[f"{at}.input_layernorm.weight"])
        both = torch.cat([context, normed])
        kinds = config.get("layer_types") or ["full_attention"] * self.layers
        is_causal = config.get("is_causal")
        is_causal = kinds[number] == "sliding_attention" if is_causal is None else is_causal
        place = torch.arange(len(both))
        seen = torch.ones(len(both), len(both), dtype=torch.bool)
        if is_causal:
            seen &= place <= place[:, None]
        if kinds[number] == "sliding_attention" and config.get("use_sliding_window"):
            seen &= (place - place[:, None]).abs() < config["sliding_window"]
        residual = torch.cat([torch.zeros_like(context), states])
        return layer_of(weights, at, config, both, residual, seen)[len(context) :]


@dataclass(frozen=True, kw_only=True)
class ParallelRecipe(Recipe):
    """A P-EAGLE head with random weights.

    Attributes:
        depth: tokens that it proposes.
        mask: the mask token.
    """

    depth: int = 4
    mask: int = 7

    def tensors(self) -> dict[str, Tensor]:
        """Its weights."""
        masked = _matrices(3)(1, 1, self.states * self.target_size)
        return super().tensors() | {"mask_hidden": masked}

    def save(self, folder: Path, style: str = "speculators", *, pickled: bool = False) -> Path:
        """Write it as speculators does."""
        super().save(folder, style, pickled=pickled)
        document = json.loads((folder / "config.json").read_text())
        document |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
        document["mask_token_id"] = self.mask
        methods = [{"proposal_type": "greedy", "speculative_tokens": self.depth}]
        document["speculators_config"] |= {"algorithm": "peagle", "proposal_methods": methods}
        (folder / "config.json").write_text(json.dumps(document))
        return folder

    def reference(self, embeddings: Tensor, tokens: Sequence[int], features: Tensor) -> Tensor:
        """[depth, D] logits after ``tokens``, of [n, F] hidden states at those before them: masks stand behind."""
        weights, masks = self.tensors(), self.depth - 1
        features = torch.cat([features, weights["mask_hidden"][0].expand(masks, -1)])
        states = features @ weights["fc.weight"].T
        embedded = weights.get("embed_tokens.weight", embeddings)[[*tokens, *[self.mask] * masks]]
        last = through(self, weights, embedded, states)[-self.depth :]
        return rms(last, weights["norm.weight"]) @ weights["lm_head.weight"].T


KINDS: dict[str, MedusaRecipe | DFlashRecipe | ParallelRecipe] = {
    "medusa": MedusaRecipe(style="vllm", drafted=tuple(range(0, VOCAB, 2))),
    "dflash": DFlashRecipe(),
    "p-eagle": ParallelRecipe(),
}
"""A head of every kind, for decoding."""
