"""Decoder layers with merged projections and fewer small operations, made of a stock layer's own weights.

A layer of the Llama kind (RMSNorm, rotary grouped-query attention, gated feed-forward) makes some sixty small
operations, which on a CPU cost as much as the products of a small model. ``merge_layers`` gives each such layer of a
model a forward of half as many. Whether a layer is of this kind is found out by trying: it must have the parts, and the
same output. Any other layer stays as it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
TOLERANCE = 1e-4
"""Largest difference from the stock layer, in standard deviations of its output; rounding makes 1e-6."""

NOT_ALIKE = (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError)
"""What trying a layer of another kind ends with."""


Attention = Callable[..., tuple[Tensor, Any]]


class Rotation:
    """cos and sin of a pass, as its layers need them: worked out for the first and kept for the others."""

    def __init__(self) -> None:
        self._source: tuple[Tensor, Tensor] | None = None
        self._turn: tuple[Tensor, Tensor] | None = None

    def __call__(self, source: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos, sin [B, n, d] -> [B, n, 1, d] factors c and s of rotated x: x c + roll(x, d / 2) s."""
        if self._turn is None or self._source is not source:
            cos, sin = (part.unsqueeze(2) for part in source)
            half = sin.shape[-1] // 2
            self._source, self._turn = source, (cos, torch.cat((-sin[..., :half], sin[..., half:]), -1))
        return self._turn


class Norm(nn.Module):
    """RMSNorm, x w / sqrt(mean x^2 + e), as x (w sqrt(d)) / sqrt(sum x^2 + d e): a sum takes less than a mean."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        width = stock.weight.shape[0]
        self._weight = stock.weight.detach() * math.sqrt(width)
        self._least = torch.tensor([width * stock.variance_epsilon], dtype=self._weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return (x * (x * x).sum(-1, keepdim=True).add_(self._least).rsqrt_()).mul_(self._weight)


class Concatenated(nn.Module):
    """Linear layers that read the same input as one layer, with the outputs of all."""

    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            self.add_module(str(i), part)
        if len({part.bias is None for part in parts}) > 1:
            raise TypeError("some parts have a bias and some have none")
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)
        self._parts = parts

    @property
    def weight(self) -> Tensor:
        """[out, in], put together anew."""
        return torch.cat([part.weight for part in self._parts])

    @property
    def bias(self) -> Tensor | None:
        """[out], or None where no part has one."""
        return None if self._parts[0].bias is None else torch.cat([part.bias for part in self._parts])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)


class Merged(nn.Module):
    """The arithmetic of a decoder layer of the Llama kind, of a stock layer's parts; TorchScript can take it as a part.

    Works in place, so it is not differentiable.

    Attributes:
        qkv, o, gate_up, down: its projections; query, key and value in one, gate and up in one.
        scaling: of attention scores.
        width: of its input and output.

    Raises:
        any of NOT_ALIKE: the layer is of another kind.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        attention, feed_forward = stock.self_attn, stock.mlp
        for module, parts in ((stock, _LAYER), (attention, _ATTENTION), (feed_forward, _FEED_FORWARD)):
            if set(dict(module.named_children())) != parts:
                raise TypeError(f"{type(module).__name__} has other parts")
        self.qkv: nn.Module = Concatenated(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o: nn.Module = attention.o_proj
        self.gate_up: nn.Module = Concatenated(feed_forward.gate_proj, feed_forward.up_proj)
        self.down: nn.Module = feed_forward.down_proj
        self.activation: nn.Module = feed_forward.act_fn
        self._before, self._between = Norm(stock.input_layernorm), Norm(stock.post_attention_layernorm)
        self.is_causal, self.num_key_value_groups = True, int(attention.num_key_value_groups)
        self.scaling, self._head_dim = float(attention.scaling), int(attention.head_dim)
        self._kv_heads: int = attention.k_proj.out_features // self._head_dim
        self._heads = self._kv_heads * self.num_key_value_groups
        self.width = int(attention.o_proj.out_features)

    def before(self, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before attention.

        Args:
            states: [B, n, width].
            cos, sin: of a ``Rotation``.

        Returns:
            [B, heads, n, head_dim] query; key and value with heads of their own.
        """
        rows, n, _ = states.shape
        qkv = self.qkv.forward(self._before.forward(states)).view(rows, n, -1, self._head_dim)
        straight, value = qkv.split_with_sizes((self._heads + self._kv_heads, self._kv_heads), 2)
        turned = torch.addcmul(straight * cos, straight.roll(self._head_dim // 2, -1), sin).transpose(1, 2)
        query, key = turned.split_with_sizes((self._heads, self._kv_heads), 1)
        return query, key, value.transpose(1, 2)

    def after(self, states: Tensor, seen: Tensor) -> Tensor:
        """The layer's output [B, n, width], of its input and what attention gave [B, n, heads, head_dim]."""
        hidden = self.o.forward(seen.flatten(2)).add_(states)
        gate, up = self.gate_up.forward(self._between.forward(hidden)).chunk(2, -1)
        out: Tensor = self.down.forward(self.activation.forward(gate).mul_(up)).add_(hidden)
        return out

    def empty(self) -> Tensor:
        """[1, heads, 0, head_dim], like its keys and values."""
        return torch.empty(1, self._kv_heads, 0, self._head_dim)


class Forward:
    """A stock layer's ``forward`` by way of its ``Merged``, with any attention.

    Attributes:
        merged: the arithmetic.
        number: of the layer.
    """

    def __init__(self, merged: Merged, attention: Any, rotation: Rotation) -> None:
        self.merged, self._rotation = merged, rotation
        self._config, self.number = attention.config, int(attention.layer_idx)
        self._eager: Attention = sys.modules[type(attention).__module__].eager_attention_forward

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """What the stock layer computes."""
        turn = self._rotation(position_embeddings)
        return self.run(hidden_states, turn, attention_mask, past_key_values, self.attention, kwargs)

    @property
    def implementation(self) -> str:
        """Name of the attention in use."""
        return self._config._attn_implementation  # type: ignore[no-any-return]

    @property
    def attention(self) -> Attention:
        """Its function."""
        found: Attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, self._eager)
        return found

    def run(
        self,
        states: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
        attend: Attention,
        options: Mapping[str, Any],
    ) -> Tensor:
        """A call with what all layers of a pass share worked out.

        Args:
            states: [B, n, width].
            turn: of a ``Rotation``.
            mask: [B, 1, n, S], added to attention scores.
            cache: takes the layer's keys and values.
            attend: the attention function.
            options: for it.
        """
        merged = self.merged
        query, key, value = merged.before(states, *turn)
        if cache is not None:
            key, value = cache.update(key, value, self.number)
        seen, _ = attend(merged, query, key, value, mask, dropout=0.0, scaling=merged.scaling, **options)
        return merged.after(states, seen)


def merge_layers(model: PreTrainedModel) -> int:
    """Give the layers of the Llama kind of a float32 model merged projections; how many there are.

    A layer keeps its place and its class. No weights are copied: that is for who replaces the projections.
    """
    base: Any = model.base_model
    layers, rotation, merged = getattr(base, "layers", ()), Rotation(), 0
    for layer in layers:
        try:
            made = Forward(Merged(layer), layer.self_attn, rotation)
            alike = _difference(layer, made, base.rotary_emb) <= TOLERANCE
        except NOT_ALIKE:
            continue
        if alike:
            for name in _LAYER:
                delattr(layer, name)
            layer.merged = made.merged
            vars(layer)["forward"] = made
            merged += 1
    return merged


@torch.inference_mode()
def _difference(stock: nn.Module, merged: Forward, rotary: Any) -> float:
    """Largest difference of their outputs on noise under a mask with holes, in standard deviations."""
    noise = torch.Generator().manual_seed(0)
    n, width = 5, merged.merged.width
    hidden = torch.randn((2, n, width), generator=noise)
    hole = torch.rand((2, 1, n, n), generator=noise) < 0.4
    mask = torch.zeros((2, 1, n, n)).masked_fill_(
        hole & ~torch.eye(n, dtype=torch.bool), torch.finfo(torch.float32).min
    )
    turn = rotary(hidden, position_ids=torch.arange(n).expand(2, -1) * 7)
    want, got = (layer(hidden.clone(), attention_mask=mask, position_embeddings=turn) for layer in (stock, merged))
    return float((want - got).abs().max() / want.std())
