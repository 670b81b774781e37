"""The network of EAGLE heads, published or trained here: EAGLE-3 and 3.1, EAGLE-1, EAGLE-2 and HASS.

EAGLE-3 (Li et al., 2025): a state s is fc of the target's hidden states of a few layers side by side; the first layer's
queries, keys and values read [input_layernorm(e); hidden_norm(s)] for the token embedding e, and its residual is
s. What the last layer gives is the next state; logits = lm_head(norm(state)). EAGLE-1 (Li et al., 2024): s is the final
hidden state, the first layer reads fc [e; s] without a norm, what it gives is the next state, and logits are the
target's output layer's of it. EAGLE-2 and HASS differ from EAGLE-1 in drafting and in training alone. draftree's own
heads are EAGLE-1 with a norm before attention, and weigh e by ``embedding_scale``.

Heads are written in the format of speculators, which vLLM and SGLang read of EAGLE-3: the target's embeddings are in
the file, as release 0.9 of speculators leaves them random in a head without them. EAGLE-1 heads are of half precision;
their format is draftree's alone, as speculators knows neither their draft vocabulary nor the scale of their embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from ...artifacts import make_folder, write_together
from ..base import Capabilities
from ..huggingface.attention import attend_as_one
from ..huggingface.cache import TreeCache, packed, padded
from ..huggingface.inspection import torch_dtype
from ..huggingface.pass_inputs import Longs, on_device
from ..huggingface.runner import DevicePass, EagerRunner, PassOutput
from ..huggingface.torch_scores import ranked
from ..protocols import FeatureModel
from .head_format import (
    CONFIG,
    PACKED,
    SAMPLE,
    WEIGHTS,
    Array,
    EagleConfig,
    HeadArrays,
    modules,
    rope_of,
    sample,
    tensor_shapes,
)

Weights = Mapping[str, Array]
"""Of a network, by the names of its parameters."""


def _linear(weights: Weights, name: str) -> nn.Linear:
    rows, columns = weights[f"{name}.weight"].shape
    return nn.Linear(columns, rows, bias=f"{name}.bias" in weights, device="meta")


def _norm(weights: Weights, name: str, eps: float) -> nn.RMSNorm | None:
    """None: the head has no such norm."""
    weight = weights.get(f"{name}.weight")
    return None if weight is None else nn.RMSNorm(len(weight), eps=eps, device="meta")


class EagleLayer(nn.Module):
    """A decoder layer around its attention: RMS norms, rotary grouped-query attention, gated feed-forward."""

    def __init__(self, config: EagleConfig, weights: Weights, at: str) -> None:
        super().__init__()
        if config.hidden_act not in ACT2FN:
            raise ValueError(f"its hidden_act is {config.hidden_act!r}: use one of transformers, such as silu")
        self._heads, self._kv_heads, self._width = config.num_attention_heads, config.kv_heads, config.head_size
        self._residual_normed, eps = config.norm_before_residual, config.rms_norm_eps
        self.input_layernorm = _norm(weights, f"{at}.input_layernorm", eps)
        self.hidden_norm = _norm(weights, f"{at}.hidden_norm", eps)
        self.qkv = _linear(weights, f"{at}.qkv")
        self.q_norm, self.k_norm = _norm(weights, f"{at}.q_norm", eps), _norm(weights, f"{at}.k_norm", eps)
        self.o = _linear(weights, f"{at}.o")
        self.post_attention_layernorm = _norm(weights, f"{at}.post_attention_layernorm", eps)
        self.gate_up, self.down = _linear(weights, f"{at}.gate_up"), _linear(weights, f"{at}.down")
        self._activation = ACT2FN[config.hidden_act]

    def attend_with(self, inputs: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [B, n, I] inputs, turned to their positions ([B or 1, n, 1, 2, D], ``turns``).

        Returns:
            queries [B, n, heads, D], keys and values [B, n, kv_heads, D].
        """
        if self.hidden_norm is not None:
            embeddings, states = inputs.chunk(2, dim=-1)
            inputs = torch.cat([normed(self.input_layernorm, embeddings), normed(self.hidden_norm, states)], dim=-1)
        else:
            inputs = normed(self.input_layernorm, inputs)
        projected = self.qkv.forward(inputs).unflatten(-1, (-1, self._width))
        queries, keys, values = projected.split([self._heads, self._kv_heads, self._kv_heads], dim=-2)
        queries, keys = normed(self.q_norm, queries), normed(self.k_norm, keys)
        cos, sin = turns.to(values.dtype).unbind(-2)
        return _turned(queries, cos, sin), _turned(keys, cos, sin), values

    def finish(self, inputs: Tensor, attended: Tensor) -> Tensor:
        """[..., I] inputs, [..., heads x D] found by attention -> [..., H] outputs."""
        residual = inputs
        if self.hidden_norm is not None:
            residual = inputs.chunk(2, dim=-1)[1]
            residual = normed(self.hidden_norm, residual) if self._residual_normed else residual
        middle = residual + self.o.forward(attended)
        gate, up = self.gate_up.forward(normed(self.post_attention_layernorm, middle)).chunk(2, dim=-1)
        out: Tensor = middle + self.down.forward(self._activation(gate) * up)
        return out


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, n, heads, D] turned by [B or 1, n, 1, D]: halves of a head are pairs, as in transformers."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class EagleNetwork(nn.Module):
    """A head: token embeddings and states of the tokens before, to states (``DraftHead``).

    Attributes:
        features: which hidden states of the target it reads.
        sizes: H of states, and F of the target's hidden states.
        blocks: its layers.
        predicts_features: its states are these hidden states, or predict them (EAGLE-1).
        embed_tokens: its own embeddings; None: it reads the target's.
        lm_head: its own output layer, over its vocabulary; None: the target's.

    Args:
        arrays: its weights.
    """

    def __init__(self, arrays: HeadArrays) -> None:
        super().__init__()
        config, eps, weights = arrays.config, arrays.config.rms_norm_eps, arrays.parameters
        self.sizes = config.hidden_size, len(arrays.features.layers) * config.target_size
        self.config, self.features, self.predicts_features = config, arrays.features, not arrays.fuses_states
        self.fc = _linear(weights, "fc") if "fc.weight" in weights else None
        self.input_norm = _norm(weights, "input_norm", eps)
        norms = (_norm(weights, f"fc_norm.{i}", eps) for i in range(len(arrays.features.layers)))
        self.fc_norm = nn.ModuleList(norm for norm in norms if norm is not None)
        self.blocks = tuple(EagleLayer(config, weights, f"layers.{i}") for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(self.blocks)
        self.norm = _norm(weights, "norm", eps)
        table = weights.get("embed_tokens.weight")
        self.embed_tokens = None if table is None else nn.Embedding(table.shape[0], table.shape[1], device="meta")
        self.lm_head = _linear(weights, "lm_head") if "lm_head.weight" in weights else None
        self.load_state_dict({name: torch.as_tensor(weight) for name, weight in weights.items()}, assign=True)
        self.requires_grad_(False)
        frequencies, self._magnitude = rope_of(config)
        self._frequencies = (torch.from_numpy(frequencies),)  # no buffer of this one: they stay float64

    def fused(self, features: Tensor) -> Tensor:
        """[..., F] hidden states of the target -> [..., H] states."""
        if self.predicts_features:
            return features
        features = normed(self.input_norm, features)
        if self.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            norms: Any = self.fc_norm
            features = torch.cat([normed(norm, part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
        return features if self.fc is None else self.fc.forward(features)

    def read(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """[..., E] token embeddings and [..., H] states of the tokens before -> [..., I] input of the first layer."""
        if self.config.embedding_scale != 1:
            embeddings = embeddings * self.config.embedding_scale
        both = torch.cat([embeddings, states], dim=-1)
        if not self.predicts_features or self.fc is None:
            return both
        return self.fc.forward(both).to(embeddings.dtype)  # as precise under autocast as it came

    def predicted(self, outputs: Tensor) -> Tensor:
        """[..., H] outputs of the last layer -> [..., H] states."""
        return normed(self.norm, outputs) if self.config.norm_output else outputs

    def readout(self, states: Tensor) -> Tensor:
        """[..., H] states -> [..., H], what the output layer reads."""
        if not self.config.norm_output:
            states = normed(self.norm, states)
        return states if self.config.logit_scale == 1 else states * self.config.logit_scale

    def turns(self, positions: Tensor) -> Tensor:
        """[...] positions -> [..., 1, 2, D] cos and sin."""
        angles = positions[..., None, None] * self._frequencies[0].to(positions.device).repeat(2)
        return (torch.stack([angles.cos(), angles.sin()], dim=-2) * self._magnitude).float()


def normed(norm: nn.RMSNorm | None, x: Tensor) -> Tensor:
    """``norm`` of [..., H], if there is one; on a CPU PyTorch's own takes ten times as long as this."""
    if norm is None:
        return x
    if x.device.type != "cpu":
        return norm(x)  # type: ignore[no-any-return]
    wide = x.float()
    wide = wide * (wide * wide).mean(-1, keepdim=True).add(norm.eps or 0.0).rsqrt()
    return wide.to(x.dtype) * norm.weight


class HeadPasses(EagerRunner):
    """Makes the passes of one head: of each token the state that it predicts, and logits.

    Args:
        network: the head's network.
        output: its output layer, or the target's for the vocabulary.
        vocabulary: [D] int64 tokens of ``output``.
        target: whose embeddings it reads where it has none of its own, and whose output layer further tokens have.
        best: how many of the most probable tokens are found with the logits; 0: none.
    """

    def __init__(
        self, network: EagleNetwork, output: nn.Linear, vocabulary: Longs, target: FeatureModel, best: int
    ) -> None:
        self._network, self._output, self._target, self.best = network, output, target, best
        self.device = output.weight.device
        (self._vocabulary,) = on_device(self.device, vocabulary)
        self._turns: Tensor | None = None

    def make(self, step: DevicePass, cache: TreeCache) -> PassOutput:
        network, at = self._network, cache.placement
        if self._turns is None or self._turns.shape[0] < at.slots:
            self._turns = network.turns(torch.arange(at.slots, device=self.device))
        tokens, mask, embed = step.inputs.tokens, step.inputs.mask(), network.embed_tokens
        embedded = self._target.embeddings(tokens) if embed is None else embed.forward(tokens)
        turns = self._turns[step.inputs.positions[None]]
        states = network.read(embedded[None], step.states[None])  # type: ignore[index]
        for number, block in enumerate(network.blocks):
            queries, keys, values = block.attend_with(states, turns)
            every = cache.update(keys.transpose(1, 2), values.transpose(1, 2), number)
            lines = padded(queries.transpose(1, 2), at.count, at.sources)
            attended = packed(attend_as_one(lines, *every, mask, None), at.index)
            states = block.finish(states, attended.flatten(2))
        inputs, predicted = step.inputs, network.predicted(states)[0]
        wanted, rows = (each.index_select(0, inputs.wanted) for each in (predicted, inputs.rows))
        return replace(self.scored(wanted, inputs.further, inputs.places, rows), states=predicted)

    def scored(self, states: Tensor, further: Tensor, places: Tensor, rows: Tensor) -> PassOutput:
        """Logits after [W, H] states, each over its row's draft vocabulary.

        Args:
            further, places: [U] and [B, X] (``Further``).
            rows: [W] the row of each state among the B.
        """
        states, ids = self._network.readout(states), self._vocabulary.expand(len(states), -1)
        logits = self._output.forward(states)
        if len(further):
            weight, bias = self._target.output_rows(further)
            further_logits = linear(states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype))
            columns = places.index_select(0, rows)
            clamped = columns.clamp(min=0)
            further_logits = further_logits.gather(1, clamped).masked_fill(columns < 0, float("-inf"))
            logits, ids = torch.cat([logits, further_logits], dim=-1), torch.cat([ids, further[clamped]], dim=-1)
        if not self.best:
            return PassOutput(None, logits, ids)
        places, figures = ranked(logits.float(), self.best)
        return PassOutput(None, logits, ids, torch.cat([ids.gather(1, places), figures], dim=1))


PROPOSED = 5
"""Tokens that servers draft at a time unless they are told another number: a chain, for want of trees."""


def save_head(
    folder: Path, network: EagleNetwork, vocabulary: Tensor, target: FeatureModel, *, packed: bool = False
) -> None:
    """Write a head, EAGLE-3 in the target's dtype; one that is there is replaced as a whole.

    Args:
        network: of one layer, without embeddings of its own.
        vocabulary: [D] int64 the target's ids of its tokens.
        packed: keep matrices in Q4_1 (``PACKED``): of EAGLE-1 alone, for other servers do not read that.

    Raises:
        RunError: it cannot be written.
    """
    make_folder(folder)
    ids, vocab, can = vocabulary.cpu(), network.config.vocab_size, target.capabilities
    is_eagle1 = network.predicts_features
    tensors = _tensors(network)
    if not is_eagle1:
        tensors["embed_tokens.weight"] = target.embeddings(torch.arange(vocab, device=can.device))
    dtype = torch.float16 if is_eagle1 else torch_dtype(can)
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in tensors.items()}
    if packed:
        weights = dict(map(_packed, weights.items()))
    if is_eagle1:
        weights[SAMPLE] = torch.from_numpy(sample(target))
    if not torch.equal(ids, torch.arange(vocab)):  # without maps they are all tokens
        marked = torch.zeros(vocab, dtype=torch.bool)
        marked[ids] = True
        weights |= {"d2t": ids - torch.arange(len(ids)), "t2d": marked}
    document = json.dumps(_document(network, len(ids), can, dtype), indent=2, sort_keys=True) + "\n"
    write_together({folder / WEIGHTS: save(weights), folder / CONFIG: document})


def _packed(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """A weight under its name, a matrix as Q4_1 blocks."""
    name, values = named
    if values.ndim != 2 or values.shape[1] % 32:
        return named
    return name + PACKED, torch.from_numpy(gguf.quantize(values.float().numpy(), gguf.GGMLQuantizationType.Q4_1))


def _tensors(network: EagleNetwork) -> dict[str, Tensor]:
    """Its weights by the names of the format: what modules have in one is apart again."""
    tensors, parameters, config = dict[str, Tensor](), dict(network.named_parameters()), network.config
    shapes = tensor_shapes(config, parameters, network.features, 0, fuses_states=not network.predicts_features)
    for module, parts in modules(config.num_hidden_layers, len(network.features.layers)):
        for kind in ("weight", "bias"):
            if (value := parameters.get(f"{module}.{kind}")) is not None:
                sizes = [shapes[f"{part}.weight"][0] for part in parts] if len(parts) > 1 else len(value)
                tensors |= {f"{part}.{kind}": rows for part, rows in zip(parts, value.split(sizes), strict=True)}
    return tensors


def _document(network: EagleNetwork, drafted: int, target: Capabilities, dtype: torch.dtype) -> dict[str, Any]:
    """What ``config.json`` holds."""
    config, place = network.config, Path(target.name)
    verifier = {
        "architectures": [target.architecture],
        "name_or_path": str(place.resolve()) if place.exists() else target.name,
    }
    document = {
        "architectures": ["LlamaForCausalLMEagle" if network.predicts_features else "Eagle3DraftModel"],
        "draft_vocab_size": drafted,
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {"verifier": verifier},
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(config, target),
        **{name: getattr(config, name) for name in (_OF_EAGLE if network.predicts_features else _OF_EAGLE3)},
    }
    if not network.predicts_features:
        document |= {
            "eagle_aux_hidden_state_layer_ids": [*network.features.layers],
            "embed_requires_grad": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": PROPOSED}],
                "verifier": verifier,
            },
            "speculators_model_type": "eagle3",
        }
    return document if config.logit_scale == 1 else document | {"logit_scale": config.logit_scale}


_OF_EAGLE = ("embedding_scale",)
_OF_EAGLE3 = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "target_hidden_size")
_OF_LAYERS = (
    *("attention_bias", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size"),
)
"""Fields of a config that files have under the same names: of heads, and of their layers."""


def _layer_config(config: EagleConfig, target: Capabilities) -> dict[str, Any]:
    """The config of a Llama model with such layers; rotary positions as transformers 5 has them, and as 4 had them."""
    rope = config.rope
    return {name: getattr(config, name) for name in _OF_LAYERS} | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": str(target.dtype).removeprefix("torch."),
        "head_dim": config.head_size,
        "mlp_bias": False,
        "model_type": "llama",
        "num_key_value_heads": config.kv_heads,
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
    }
