"""The weights of a head by what they do, as arrays: what a head is described by, and what the native engine packs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..base import FeatureSpec
from .head_config import EagleConfig, HeadWeights
from .head_tensors import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArrays:
    """A decoder layer of a head; None: it has no such tensor.

    Attributes:
        qkv, qkv_biases: of queries, keys and values.
        input_norm: of its input, or of the embedding where it reads a state beside that.
    """

    qkv: tuple[Array, Array, Array]
    qkv_biases: tuple[Array, Array, Array] | None
    output: Array
    output_bias: Array | None
    gate: Array
    up: Array
    down: Array
    input_norm: Array | None
    state_norm: Array | None
    query_norm: Array | None
    key_norm: Array | None
    feed_forward_norm: Array

    @property
    def weights(self) -> Iterator[Array | None]:
        """All of them in the order of a network's parameters, some of which are several in one."""
        yield from (self.input_norm, self.state_norm, np.concatenate(self.qkv))
        yield None if self.qkv_biases is None else np.concatenate(self.qkv_biases)
        yield from (self.query_norm, self.key_norm, self.output, self.output_bias, self.feed_forward_norm)
        yield from (np.concatenate([self.gate, self.up]), self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadArrays:
    """A head; None: it has no such tensor.

    Attributes:
        config: of its folder.
        features: which hidden states of the target it reads.
        ids: [D] the target's ids of its vocabulary.
        fuses_states: EAGLE-3; else EAGLE-1 (``eagle_network``).
        fc, fc_bias: makes a state of hidden states, or what the first layer reads of embedding and state.
        feature_norms: of all hidden states side by side, or of each.
        norm: before the output layer.
        output: None: the target's output layer.
        embeddings: None: the target's.
    """

    config: EagleConfig
    features: FeatureSpec
    ids: NDArray[np.int64]
    fuses_states: bool
    fc: Array | None
    fc_bias: Array | None
    feature_norms: tuple[Array, ...]
    layers: tuple[LayerArrays, ...]
    norm: Array | None
    embeddings: Array | None
    output: Array | None

    @property
    def weights(self) -> Iterator[Array]:
        """All of them, as the parameters of a network."""
        layers = (weight for layer in self.layers for weight in layer.weights)
        all_of_them = (self.fc, self.fc_bias, *self.feature_norms, *layers, self.norm, self.embeddings, self.output)
        return (weight for weight in all_of_them if weight is not None)


def taken(
    config: EagleConfig, weights: HeadWeights, features: FeatureSpec, ids: NDArray[np.int64], *, fuses_states: bool
) -> HeadArrays:
    """A head of the tensors of its folder; the result holds None where they are missing or wrong (``HeadWeights``)."""
    size, width, take = config.hidden_size, len(features.layers) * config.target_size, weights.take

    def where(name: str, *shape: int) -> Array | None:
        return take(name, *shape) if name in weights else None

    has_fc = "fc.weight" in weights or config.use_aux_hidden_state
    norms = ["input_norm"] * config.norm_before_fc
    norms += [f"fc_norm.{i}" for i in range(len(features.layers) * config.fc_norm)]
    if not has_fc and width != size:
        weights.wrong.append(f"hidden states are of size {width}, not {size}, and there is no fc.weight")
    return HeadArrays(
        config=config,
        features=features,
        ids=ids,
        fuses_states=fuses_states,
        fc=take("fc.weight", size, width if fuses_states else 2 * size) if has_fc else None,
        fc_bias=where("fc.bias", size),
        feature_norms=tuple(
            take(f"{name}.weight", width if config.norm_before_fc else config.target_size) for name in norms
        ),
        layers=tuple(_layer(config, weights, number, fuses_states) for number in range(config.num_hidden_layers)),
        norm=take("norm.weight", size) if fuses_states else None,
        embeddings=where("embed_tokens.weight", config.vocab_size, size),
        output=take("lm_head.weight", len(ids), size) if fuses_states else None,
    )


def _layer(config: EagleConfig, weights: HeadWeights, number: int, fuses_states: bool) -> LayerArrays:
    size, wide, take, at = config.hidden_size, config.intermediate_size, weights.take, f"layers.{number}"
    heads, kv, width = config.num_attention_heads, config.kv_heads, config.head_size
    joins = fuses_states and number == 0
    sizes = {"q": heads * width, "k": kv * width, "v": kv * width}

    def has(name: str) -> bool:
        return f"{at}.{name}" in weights

    has_biases = config.attention_bias or has("self_attn.q_proj.bias")
    has_norms = has("self_attn.q_norm.weight")
    is_normed = fuses_states or number > 0 or has("input_layernorm.weight")
    biases = [take(f"{at}.self_attn.{part}_proj.bias", n) for part, n in sizes.items()] if has_biases else None
    q, k, v = (take(f"{at}.self_attn.{p}_proj.weight", n, 2 * size if joins else size) for p, n in sizes.items())
    return LayerArrays(
        qkv=(q, k, v),
        qkv_biases=None if biases is None else (biases[0], biases[1], biases[2]),
        output=take(f"{at}.self_attn.o_proj.weight", size, heads * width),
        output_bias=take(f"{at}.self_attn.o_proj.bias", size)
        if config.attention_bias or has("self_attn.o_proj.bias")
        else None,
        gate=take(f"{at}.mlp.gate_proj.weight", wide, size),
        up=take(f"{at}.mlp.up_proj.weight", wide, size),
        down=take(f"{at}.mlp.down_proj.weight", size, wide),
        input_norm=take(f"{at}.input_layernorm.weight", size) if is_normed else None,
        state_norm=take(f"{at}.hidden_norm.weight", size) if joins else None,
        query_norm=take(f"{at}.self_attn.q_norm.weight", width) if has_norms else None,
        key_norm=take(f"{at}.self_attn.k_norm.weight", width) if has_norms else None,
        feed_forward_norm=take(f"{at}.post_attention_layernorm.weight", size),
    )
