"""Llama models in fewer operations, and as one TorchScript call.

A decoder layer of the Llama kind (RMSNorm, rotary grouped-query attention, gated feed-forward) makes some sixty small
operations, which on a CPU cost as much as the products of a small model. ``merge_layers`` gives each such layer a
forward of half as many, made of its own weights. A model of nothing but such layers gets a ``Decoder``, which leaves
transformers' forward out. Whether a layer or a model is of this kind is found out by trying: it must have the parts,
and the same output. Any other stays as it is.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit.frontend import FrontendError
from torch.nn.functional import embedding
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..base import FINAL, difference
from ..huggingface.attention import EAGER, attend, by_rows
from ..huggingface.cache import TreeCache, packed, padded, write
from ..huggingface.probe import side_by_side
from ..huggingface.runner import Pass, StockRunner

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_TOLERANCE = 1e-4
"""Largest difference from the stock output, in its standard deviations; rounding makes 1e-6."""
NOT_ALIKE = (AttributeError, TypeError, ValueError, RuntimeError, LookupError, FrontendError, AssertionError, OSError)
"""What ends the trial of a layer of another kind, or of one that TorchScript does not take (OSError: no source)."""


def rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [B, n, d] -> [B, n, 1, d] factors c and s of rotated x: x c + roll(x, d / 2) s."""
    first, second = sin.unsqueeze(2).chunk(2, -1)
    return cos.unsqueeze(2), torch.cat((-first, second), -1)


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
        any of ``NOT_ALIKE``: the layer is of another kind.
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
            cos, sin: factors of a ``rotation``.

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
    """A stock layer's ``forward`` by way of its ``Merged``, with any attention."""

    def __init__(self, merged: Merged, attention: Any) -> None:
        self.merged = merged
        self._config, self._number = attention.config, int(attention.layer_idx)
        self._eager = by_rows(sys.modules[type(attention).__module__].eager_attention_forward)

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
        merged = self.merged
        query, key, value = merged.before(hidden_states, *rotation(*position_embeddings))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self._number)
        used = self._config._attn_implementation
        attention = self._eager if used == EAGER else ALL_ATTENTION_FUNCTIONS.get_interface(used, self._eager)
        seen, _ = attention(merged, query, key, value, attention_mask, dropout=0.0, scaling=merged.scaling, **kwargs)
        return merged.after(hidden_states, seen)


def merge_layers(model: PreTrainedModel) -> int:
    """Give the layers of the Llama kind of a float32 model merged projections; how many there are.

    A layer keeps its place and its class. No weights are copied: that is for who replaces the projections.
    """
    base: Any = model.base_model
    merged = 0
    for layer in getattr(base, "layers", ()):
        try:
            made = Forward(Merged(layer), layer.self_attn)
            alike = _difference_on_noise(layer, made, base.rotary_emb) <= _TOLERANCE
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
def _difference_on_noise(stock: nn.Module, merged: Forward, rotary: Any) -> float:
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
    return difference(got.numpy(), want.numpy())


def scripted(module: nn.Module) -> nn.Module:
    """``module`` in TorchScript, on the same tensors.

    Raises:
        any of ``NOT_ALIKE``: TorchScript does not take it.
    """
    with _quiet():
        made: nn.Module = torch.jit.script(module)
    return made


def all_scripted(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules of one structure in TorchScript; the first alone is compiled, which takes 30 milliseconds.

    Raises:
        any of ``NOT_ALIKE``: TorchScript does not take them, or they differ in more than what they hold.
    """
    like = scripted(modules[0])
    return [like, *(_refilled(like, module) for module in modules[1:])]


def _refilled(like: nn.Module, module: nn.Module) -> nn.Module:
    """A copy of a scripted module that holds what ``module`` does."""
    made = copy(like)
    own = vars(module).keys() - vars(nn.Module()).keys()
    for name in own:
        if hasattr(like, name):
            setattr(made, name, getattr(module, name))
    for name, part in module.named_children():
        setattr(made, name, part if isinstance(part, torch.jit.ScriptModule) else _refilled(getattr(like, name), part))
    return made


@contextmanager
def one_plan() -> Iterator[None]:
    """What is called for the first time in here keeps one plan for tensors of all shapes.

    Otherwise its second call compiles another for the shapes of the first, and calls with other shapes do so again.
    """
    with _quiet():
        before = torch.jit.set_fusion_strategy([])
        try:
            yield
        finally:
            torch.jit.set_fusion_strategy(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """No word of TorchScript's end in a future PyTorch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield


class Decoder:
    """A causal model of merged layers, on its own parts.

    Raises:
        any of ``NOT_ALIKE``: the model has other parts, or TorchScript does not take them.
    """

    splits = True

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        layers: list[Merged] = [layer.merged for layer in base.layers]
        self._embeddings: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        self._norm, self._rotary = Norm(base.norm), base.rotary_emb
        self._output: nn.Module = model.get_output_embeddings()
        self._like = layers[0].empty()
        self._layers = scripted(_Layers(all_scripted(layers))).forward

    def forward(self, step: Pass, cache: TreeCache) -> tuple[Tensor | None, Tensor]:
        """One pass (``Runner.forward``)."""
        states = embedding(step.tokens[None], self._embeddings)
        cos, sin = rotation(*self._rotary.forward(states, step.positions[None]))
        at = cache.placement
        place = at.first, at.count, at.start, at.end, at.index, at.sources, at.apart
        before = sorted(layer for layer in {*step.features.layers} if layer != FINAL)
        states, read = self._layers(states, cos, sin, step.mask, step.apart, *cache.storage(self._like), *place, before)
        states = self._norm.forward(states)[0]
        last = step.last or 1  # there is no kernel for none
        logits = self._output.forward(states[step.wanted] if step.last is None else states[len(states) - last :])
        found = dict(zip(before, read, strict=True)) | {FINAL: states[None]}
        return side_by_side(found, step.features), logits[:0] if step.last == 0 else logits


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)

    def forward(
        self,
        states: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        own_mask: Tensor | None,
        keys: list[Tensor],
        values: list[Tensor],
        first: int,
        count: int,
        start: int,
        end: int,
        index: Tensor | None,
        sources: Tensor | None,
        apart: tuple[int, int, int] | None,
        wanted: list[int],
    ) -> tuple[Tensor, list[Tensor]]:
        found_before: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if i in wanted:
                found_before.append(states)
            query, key, value = layer.before(states, cos, sin)
            key, value = write(keys[i], values[i], key, value, first, count, start, end, index)
            found = packed(attend(padded(query, count, sources), key, value, mask, layer.scaling), index, sources)
            if apart is not None:
                line, begin, n = apart
                row = key.narrow(0, line, 1), value.narrow(0, line, 1)
                own = attend(query.narrow(2, begin, n), row[0], row[1], own_mask, layer.scaling)
                found.narrow(1, begin, n).copy_(own)
            states = layer.after(states, found)
        if len(self.layers) in wanted:
            found_before.append(states)
        return states, found_before


@torch.inference_mode()
def direct(model: PreTrainedModel, *, trusted: bool = False) -> Decoder | None:
    """A decoder for ``model`` if all of its layers are merged and nothing else is done in a pass of it.

    Tried on a prompt, and on tokens behind two, as many and not as many. Outputs are compared unless ``trusted``: the
    model is one that has passed with its weights rounded, and rounding differs too much from pass to pass. The trial
    also gives its TorchScript the one plan, without which its second pass takes half a second.
    """
    config = model.config.get_text_config(decoder=True)
    ids = torch.tensor([11, 7, 5, 3, 2, 2, 3, 5, 7, 11]) % config.vocab_size
    caches = [TreeCache(config.num_hidden_layers) for _ in range(2)]
    every, n = slice(0, None), 5
    try:
        decoder, stock = Decoder(model), StockRunner(model)
        with one_plan():
            for starts, counts in (((0,), (n,)), ((0, 0), (n, n)), ((n, n - 2), (n, n)), ((n, n - 2), (n, 1))):
                for cache in caches:
                    cache.place(0, starts, counts, ids.device)
                total, at = sum(counts), caches[0].placement
                positions = torch.cat([torch.arange(m) + start for start, m in zip(starts, counts, strict=True)])
                mask = None if len(starts) == 1 else torch.zeros((len(starts), 1, n, at.end))
                step = Pass(ids[:total], positions, every, mask)
                got = decoder.forward(step, caches[0])[1]
                if trusted:
                    continue
                want = stock.forward(step, caches[1])[1]
                if want.shape != got.shape or not difference(got.numpy(), want.numpy()) <= _TOLERANCE:
                    return None
    except NOT_ALIKE:
        return None
    return decoder
