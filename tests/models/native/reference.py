"""What the native engine computes, in float64 NumPy: the whole forward pass of a described GGUF file.

Weights are dequantized by the package ``gguf``. It follows the description (``draftree.models.native.architecture``)
and nothing of the C sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from draftree.models.native.architecture import LAYER_TENSORS, MODEL_TENSORS, Description, NormOf

Array = NDArray[np.float64]
_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


@dataclass(frozen=True)
class Weights:
    """[rows, columns], or [columns] of a vector."""

    values: Array
    quantized: bool


class Reference:
    """A model whose passes are exact.

    Args:
        path: of the file.
        description: of it.
        rounded: as the engine does, activations that quantized weights multiply are int8 in groups of 32, and keys and
            values float16.
    """

    def __init__(self, path: Path, description: Description, *, rounded: bool = False) -> None:
        self.numbers, self._description, self._rounded = description.hyperparameters, description, rounded
        self._data = np.memmap(path, np.uint8, "r")
        self.layers = [self._read(LAYER_TENSORS, places) for places in description.layer_tensors]
        self.tensors = self._read(MODEL_TENSORS, description.model_tensors)

    def _read(self, names: tuple[str, ...], places: NDArray[np.void]) -> dict[str, Weights]:
        return {name: self._weights(place) for name, place in zip(names, places, strict=True) if place["format"] >= 0}

    def _weights(self, place: np.void) -> Weights:
        kind = GGMLQuantizationType(place["format"])
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows, width, begin = int(place["rows"]), int(place["columns"]) // block * size, int(place["offset"])
        packed = self._data[begin : begin + rows * width].reshape(rows, width)
        found: Array = gguf.dequantize(packed, kind).astype(np.float64)
        return Weights(found[0] if rows == 1 else found, kind not in _FLOATS)

    def logits(self, tokens: list[int]) -> Array:
        """[n, V] after each token of a text."""
        normed = self._norm(self.hidden(tokens)[-1], self.tensors["output_norm.weight"])
        return self._multiply(normed * self.numbers.logit_scale, self.tensors["output.weight"])

    def hidden(self, tokens: list[int]) -> list[Array]:
        """[n, hidden] what each layer reads, and what the last one gives."""
        states = [self.tensors["token_embd.weight"].values[tokens] * self.numbers.embedding_scale]
        for index, weights in enumerate(self.layers):
            block = self._delta_net if "ssm_a" in weights else self._attention
            x = states[-1] + block(states[-1], index, weights) * self.numbers.residual_scale
            states.append(x + self._feed_forward(x, weights) * self.numbers.residual_scale)
        return states

    def _multiply(self, x: Array, weights: Weights) -> Array:
        """[n, rows] of [n, columns]."""
        if self._rounded and weights.quantized:
            groups = x.reshape(len(x), -1, 32)
            largest = np.abs(groups).max(-1, keepdims=True)
            x = (np.rint(groups * 127 / np.maximum(largest, 1e-30)) * largest / 127).reshape(x.shape)
        found: Array = x @ weights.values.T
        return found

    def _norm(self, x: Array, weights: Weights | None) -> Array:
        if weights is None:
            return x
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.numbers.norm_epsilon))
        found: Array = x / scale * weights.values
        return found

    def _attention(self, x: Array, index: int, weights: dict[str, Weights]) -> Array:
        numbers, n = self.numbers, len(x)
        x = self._norm(x, weights.get("attn_norm.weight"))

        gates = np.ones(1)

        def project(name: str, heads: int) -> Array:
            nonlocal gates
            y = self._multiply(x, weights[f"attn_{name}.weight"])
            if name == "q" and numbers.gated_attention:
                queries_gates = y.reshape(n, heads, 2, -1)
                y, gates = queries_gates[:, :, 0].reshape(n, -1), 1 / (1 + np.exp(-queries_gates[:, :, 1]))
            if f"attn_{name}.bias" in weights:
                y = y + weights[f"attn_{name}.bias"].values
            norm, norm_of = weights.get(f"attn_{name}_norm.weight"), numbers.query_key_norm
            y = self._norm(y, norm if norm_of == NormOf.ALL_HEADS else None).reshape(n, heads, numbers.head_size)
            y = self._norm(y, norm if norm_of == NormOf.HEADS else None)
            y = y if name == "v" else self._rotate(y, index)
            return self._norm(y, norm if norm_of == NormOf.ROTATED_HEADS else None)

        queries, keys = project("q", numbers.query_heads), project("k", numbers.key_heads)
        values = project("v", numbers.key_heads)
        if numbers.temperature_length:
            steps = np.arange(n)[:, None, None] // numbers.temperature_length
            queries = queries * (1 + numbers.temperature_growth * np.log(1 + steps))
        if self._rounded:
            keys, values = keys.astype(np.float16).astype(np.float64), values.astype(np.float16).astype(np.float64)
        shared = numbers.query_heads // numbers.key_heads
        keys, values = keys.repeat(shared, axis=1), values.repeat(shared, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) * numbers.attention_scale
        distance = np.arange(n)[:, None] - np.arange(n)
        window = int(self._description.layer_window[index]) or n
        scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
        mass = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", mass / mass.sum(-1, keepdims=True), values) * gates
        y = self._multiply(mixed.reshape(n, -1), weights["attn_output.weight"])
        return self._norm(y, weights.get("post_attention_norm.weight"))

    def _delta_net(self, x: Array, index: int, weights: dict[str, Weights]) -> Array:
        """A gated delta net (arXiv 2412.06464), token by token."""
        numbers, n = self.numbers, len(x)
        key_heads, size = numbers.delta_key_heads, numbers.delta_key_size
        heads, values = numbers.delta_value_heads, numbers.delta_value_size
        x = self._norm(x, weights["attn_norm.weight"])
        z, time, rate = (
            self._multiply(x, weights[f"{name}.weight"]) for name in ("attn_gate", "ssm_alpha", "ssm_beta")
        )
        mixed = np.pad(self._multiply(x, weights["attn_qkv.weight"]), ((3, 0), (0, 0)))
        taps = weights["ssm_conv1d.weight"].values
        mixed = _silu(np.einsum("tnc,ct->nc", np.stack([mixed[tap : tap + n] for tap in range(4)]), taps))
        q, k, v = np.split(mixed, [key_heads * size, 2 * key_heads * size], axis=-1)
        q, k = (y.reshape(n, key_heads, size) for y in (q, k))
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        q, k = np.tile(q / math.sqrt(size), (1, heads // key_heads, 1)), np.tile(k, (1, heads // key_heads, 1))
        decay = np.exp(weights["ssm_a"].values * np.log1p(np.exp(time + weights["ssm_dt.bias"].values)))
        v, rate, state = v.reshape(n, heads, values), 1 / (1 + np.exp(-rate)), np.zeros((heads, size, values))
        found = np.zeros((n, heads, values))
        for i in range(n):
            state *= decay[i][:, None, None]
            change = rate[i][:, None] * (v[i] - np.einsum("hk,hkv->hv", k[i], state))
            state += k[i][:, :, None] * change[:, None]
            found[i] = np.einsum("hk,hkv->hv", q[i], state)
        normed = self._norm(found, weights["ssm_norm.weight"]).reshape(n, -1)
        return self._multiply(normed * _silu(z), weights["ssm_out.weight"])

    def _rotate(self, x: Array, layer: int) -> Array:
        """Rope on [n, heads, head_size]."""
        frequencies = self._description.rope_frequencies[self._description.layer_rope[layer]]
        half, turned = len(frequencies), x.copy()
        first = slice(0, half) if self.numbers.rope_halves else slice(0, 2 * half, 2)
        second = slice(half, 2 * half) if self.numbers.rope_halves else slice(1, 2 * half, 2)
        angles = (np.arange(len(x))[:, None] * frequencies)[:, None]
        magnitudes = self.numbers.rope_magnitude, self.numbers.second_magnitude
        magnitude = magnitudes[self._description.layer_rope[layer]]
        cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., first] * sin + x[..., second] * cos
        return turned

    def _feed_forward(self, x: Array, weights: dict[str, Weights]) -> Array:
        x = self._norm(x, weights.get("ffn_norm.weight"))
        networks = [weights[f"ffn_{name}.weight"] for name in ("gate", "up", "down")]
        router = weights.get("ffn_gate_inp.weight")
        y = self._experts(x, router, networks) if router else self._network(x, *networks)
        return self._norm(y, weights.get("post_ffw_norm.weight"))

    def _network(self, x: Array, gate: Weights, up: Weights, down: Weights) -> Array:
        activation = _ACTIVATIONS[self.numbers.activation]
        return self._multiply(activation(self._multiply(x, gate)) * self._multiply(x, up), down)

    def _experts(self, x: Array, router: Weights, networks: Sequence[Weights]) -> Array:
        """A token's experts are the most probable ones; their probabilities are divided by their sum."""
        probabilities = np.exp(self._multiply(x, router))
        probabilities /= probabilities.sum(-1, keepdims=True)
        least = np.sort(probabilities)[:, -self.numbers.experts_used, None]
        probabilities = np.where(probabilities >= least, probabilities, 0)
        probabilities /= probabilities.sum(-1, keepdims=True)
        parts = zip(*(np.split(each.values, self.numbers.experts) for each in networks), strict=True)
        y = np.zeros_like(x)
        for expert, matrices in enumerate(parts):
            of = [Weights(values, each.quantized) for values, each in zip(matrices, networks, strict=True)]
            y += self._network(x, *of) * probabilities[:, expert, None]
        return y


def _silu(x: Array) -> Array:
    found: Array = x / (1 + np.exp(-x))
    return found


def _gelu_tanh(x: Array) -> Array:
    found: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return found


_ACTIVATIONS: list[Callable[[Array], Array]] = [_silu, _gelu_tanh]
