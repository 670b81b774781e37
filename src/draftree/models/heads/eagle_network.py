"""The network of EAGLE heads, published or trained here: EAGLE-3 and 3.1, EAGLE-1, EAGLE-2 and HASS.

EAGLE-3 (Li et al., 2025): a state s is fc of the target's hidden states of a few layers side by side; the first layer's
queries, keys and values read [input_layernorm(e); hidden_norm(s)] for the token embedding e, and its residual is
s. What the last layer gives is the next state; logits = lm_head(norm(state)). EAGLE-1 (Li et al., 2024): s is the final
hidden state, the first layer reads fc [e; s] without a norm, what it gives is the next state, and logits are the
target's output layer's of it. EAGLE-2 and HASS differ from EAGLE-1 in drafting and in training alone. draftree's own
heads are EAGLE-1 with a norm before attention, and weigh e by ``embedding_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...errors import ConfigError
from ..base import FeatureSpec
from ..protocols import TrainableModel

ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose rotations do not depend on the length of a text."""
LayerId = Annotated[int, Field(ge=0)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """What the ``config.json`` of a head says; the names are those of transformers and of the formats.

    Attributes:
        hidden_size: H of the head's states.
        vocab_size: V of the target.
        rope_theta, rope_scaling, rope_parameters: of transformers' configs, of which files hold one or the other.
        attention_bias: queries, keys, values and the output of attention have biases.
        target_hidden_size: size of the target's hidden states; None: H.
        draft_vocab_size: size of the head's vocabulary; None: V.
        norm_before_residual: the first layer's residual is the normed state.
        norm_before_fc: one norm of all hidden states side by side comes before ``fc``.
        fc_norm: a norm of each of them does (EAGLE-3.1).
        norm_output: the next state is after the last norm (EAGLE-3.1).
        logit_scale: logits are multiplied by it.
        embedding_scale: embeddings are multiplied by it before ``fc`` of EAGLE-1, so that they weigh as much as states.
        use_aux_hidden_state: it reads hidden states of layers; else the final one.
        eagle_aux_hidden_state_layer_ids: layers that it reads, as the file counts them; None: ``default_layers``.

    Raises:
        ConfigError: heads cannot share key heads so, the size of a head is odd, there is no such activation or kind of
            rotary positions, or both kinds of norms come before ``fc``.
    """

    hidden_size: PositiveInt
    vocab_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    num_hidden_layers: PositiveInt = 1
    hidden_act: str = "silu"
    rms_norm_eps: PositiveNumber = 1e-6
    max_position_embeddings: PositiveInt = 2048
    rope_theta: PositiveNumber | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    target_hidden_size: PositiveInt | None = None
    draft_vocab_size: PositiveInt | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: PositiveNumber = 1.0
    embedding_scale: PositiveNumber = 1.0
    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: tuple[LayerId, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.kv_heads or self.head_size % 2:
            raise ConfigError(
                f"{self.num_attention_heads} heads of {self.head_size} share {self.kv_heads} key heads: use a divisor "
                "and an even size"
            )
        if self.hidden_act not in ACT2FN:
            raise ConfigError(f"hidden_act is {self.hidden_act!r}: use one of transformers, such as silu")
        rope = self.rope_scaling or self.rope_parameters or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPES:
            raise ConfigError(f"its rotary positions are {kind!r}: draftree knows {', '.join(ROPES)}")
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError("it rotates a part of each head (partial_rotary_factor): draftree rotates all")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm are both set: hidden states would be normed twice: use one")

    @classmethod
    def like(cls, target: TrainableModel, **fields: Any) -> EagleConfig:
        """A config with the sizes of one of the target's own layers, where its config names them."""
        config = target.model.config.get_text_config(decoder=True)
        hidden = target.hidden_size
        heads = int(getattr(config, "num_attention_heads", 0) or max(1, hidden // 64))
        dim = int(getattr(config, "head_dim", None) or hidden // heads)
        return cls(
            hidden_size=hidden,
            vocab_size=target.capabilities.vocab_size,
            intermediate_size=int(getattr(config, "intermediate_size", 0) or 3 * hidden),
            num_attention_heads=heads,
            num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=dim + dim % 2,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=target.capabilities.max_length,
            **fields,
        )

    @property
    def kv_heads(self) -> int:
        """Key heads of a layer."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """D of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def target_size(self) -> int:
        """H of the target's hidden states."""
        return self.target_hidden_size or self.hidden_size

    def rotary(self) -> nn.Module:
        """Rotary positions by transformers' own class."""
        rope = dict(self.rope_scaling or self.rope_parameters or {})
        if self.rope_theta is not None:
            rope.setdefault("rope_theta", self.rope_theta)
        size = self.head_size * self.num_attention_heads
        config = LlamaConfig(
            hidden_size=size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_size,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=rope,
        )
        return LlamaRotaryEmbedding(config)


def default_layers(layers: int) -> tuple[int, ...]:
    """Hidden states that a head reads whose file names none, of a target with so many layers."""
    return 2, layers // 2, layers - 3


class HeadWeights:
    """The tensors of a checkpoint, by names of the format; each is taken once.

    Attributes:
        missing: names that were taken and are not there.
        wrong: what is wrong with the shapes of others.
        left: names that nobody has taken.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.left, self.missing, self.wrong = set(tensors), list[str](), list[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return tuple(self._tensors[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape; where it is not there, or of another, one without values."""
        self.left.discard(name)
        found = self._tensors.get(name)
        if found is None:
            self.missing.append(name)
        elif tuple(found.shape) != shape:
            self.wrong.append(f"{name} is {list(found.shape)}, not {list(shape)}")
        else:
            return found
        return torch.empty(shape, device="meta")

    def linear(self, names: Sequence[str], inputs: int, outputs: Sequence[int], *, bias: bool = False) -> nn.Linear:
        """A linear layer of several in one; it has a bias where ``bias``, or where the first one has."""
        weight = _joined([self.take(f"{name}.weight", n, inputs) for name, n in zip(names, outputs, strict=True)])
        made = nn.Linear(inputs, sum(outputs), bias=False, device="meta")
        made.weight = nn.Parameter(weight, requires_grad=False)
        if bias or f"{names[0]}.bias" in self:
            parts = [self.take(f"{name}.bias", n) for name, n in zip(names, outputs, strict=True)]
            made.bias = nn.Parameter(_joined(parts), requires_grad=False)
        return made

    def norm(self, name: str, size: int, eps: float) -> nn.RMSNorm:
        """An RMS norm."""
        made = nn.RMSNorm(size, eps=eps, device="meta")
        made.weight = nn.Parameter(self.take(f"{name}.weight", size), requires_grad=False)
        return made


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """[n, ...] of parts; without values where one of them has none."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.to("meta") for part in parts] if any(part.is_meta for part in parts) else list(parts))


class EagleLayer(nn.Module):
    """A decoder layer around its attention: RMS norms, rotary grouped-query attention, gated feed-forward."""

    def __init__(
        self,
        config: EagleConfig,
        weights: HeadWeights,
        name: str,
        *,
        fused: bool = False,
        normed_inputs: bool = True,
        residual_normed: bool = False,
    ) -> None:
        """
        Args:
            name: of the layer's tensors.
            fused: it reads [e; s], both normed apart, and its residual is s.
            normed_inputs: its input is normed before attention.
            residual_normed: where it is fused, its residual is the normed s.
        """
        super().__init__()
        size, heads, kv, width = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_size
        attention, bias, eps = f"{name}.self_attn", config.attention_bias, config.rms_norm_eps
        self._heads, self._kv_heads, self._width = heads, kv, width
        self._residual_normed = residual_normed
        self.input_layernorm = weights.norm(f"{name}.input_layernorm", size, eps) if normed_inputs else None
        self.hidden_norm = weights.norm(f"{name}.hidden_norm", size, eps) if fused else None
        projections = [f"{attention}.{part}_proj" for part in "qkv"]
        outputs = [heads * width, kv * width, kv * width]
        self.qkv = weights.linear(projections, 2 * size if fused else size, outputs, bias=bias)
        has_norms = f"{attention}.q_norm.weight" in weights
        self.q_norm = weights.norm(f"{attention}.q_norm", width, eps) if has_norms else None
        self.k_norm = weights.norm(f"{attention}.k_norm", width, eps) if has_norms else None
        self.o = weights.linear([f"{attention}.o_proj"], heads * width, [size], bias=bias)
        self.post_attention_layernorm = weights.norm(f"{name}.post_attention_layernorm", size, eps)
        self.gate_up = weights.linear(
            [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], size, [config.intermediate_size] * 2
        )
        self.down = weights.linear([f"{name}.mlp.down_proj"], config.intermediate_size, [size])
        self._activation = ACT2FN[config.hidden_act]

    def attend_with(self, inputs: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [B, n, I] inputs, turned to their positions ([B or 1, n, 1, 2, D], ``turns``).

        Returns:
            queries [B, n, heads, D], keys and values [B, n, kv_heads, D].
        """
        if self.hidden_norm is not None and self.input_layernorm is not None:
            embeddings, states = inputs.chunk(2, dim=-1)
            inputs = torch.cat([normed(self.input_layernorm, embeddings), normed(self.hidden_norm, states)], dim=-1)
        elif self.input_layernorm is not None:
            inputs = normed(self.input_layernorm, inputs)
        found = self.qkv.forward(inputs).unflatten(-1, (-1, self._width))
        queries, keys, values = found.split([self._heads, self._kv_heads, self._kv_heads], dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
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
        predicts_features: its states are these hidden states, or predict them (EAGLE-1).
        embed_tokens: its own embeddings; None: it reads the target's.
        lm_head: its own output layer, over its vocabulary; None: the target's.

    Args:
        config: of its file.
        weights: of its file; tensors of it are taken.
        features: which hidden states of the target it reads, as many as ``fc`` takes.
        fuses_states: EAGLE-3; else EAGLE-1.
    """

    def __init__(
        self,
        config: EagleConfig,
        weights: HeadWeights,
        features: FeatureSpec,
        *,
        fuses_states: bool,
    ) -> None:
        super().__init__()
        self.config, self.features, self.predicts_features = config, features, not fuses_states
        size, eps, width = config.hidden_size, config.rms_norm_eps, len(features.layers) * config.target_size
        self._fuses = fuses_states
        inputs = width if fuses_states else 2 * size
        has_fc = "fc.weight" in weights or config.use_aux_hidden_state
        self.fc = weights.linear(["fc"], inputs, [size]) if has_fc else None
        if self.fc is None and width != size:
            weights.wrong.append(f"hidden states are of size {width}, not {size}, and there is no fc.weight")
        self.input_norm = weights.norm("input_norm", width, eps) if config.norm_before_fc else None
        each = [f"fc_norm.{i}" for i in range(len(features.layers) * config.fc_norm)]
        self.fc_norm = nn.ModuleList(weights.norm(name, config.target_size, eps) for name in each)
        self.layers = nn.ModuleList(
            EagleLayer(
                config,
                weights,
                f"layers.{i}",
                fused=fuses_states and i == 0,
                normed_inputs=fuses_states or i > 0 or f"layers.{i}.input_layernorm.weight" in weights,
                residual_normed=config.norm_before_residual,
            )
            for i in range(config.num_hidden_layers)
        )
        self.norm = weights.norm("norm", size, eps) if fuses_states else None
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        if "embed_tokens.weight" in weights:
            self.embed_tokens = nn.Embedding(config.vocab_size, size, device="meta")
            own = weights.take("embed_tokens.weight", config.vocab_size, size)
            self.embed_tokens.weight = nn.Parameter(own, requires_grad=False)
        if fuses_states:
            self.lm_head = weights.linear(["lm_head"], size, [config.draft_vocab_size or config.vocab_size])
        self._rotary = (config.rotary(),)  # no module of this one: its frequencies stay float32

    @property
    def blocks(self) -> Sequence[EagleLayer]:
        """Its layers."""
        return tuple(self.layers)  # type: ignore[arg-type]

    @property
    def slot(self) -> tuple[int, int, int]:
        """Layers, key heads and the size of a head: what a token takes in the cache."""
        return len(self.layers), self.config.kv_heads, self.config.head_size

    @property
    def sizes(self) -> tuple[int, int]:
        """H of states, and F of the target's hidden states."""
        return self.config.hidden_size, len(self.features.layers) * self.config.target_size

    def fused(self, features: Tensor) -> Tensor:
        """[..., F] hidden states of the target -> [..., H] states."""
        if not self._fuses:
            return features
        if self.input_norm is not None:
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
        if self._fuses or self.fc is None:
            return both
        return self.fc.forward(both).to(embeddings.dtype)  # as precise under autocast as it came

    def predicted(self, outputs: Tensor) -> Tensor:
        """[..., H] outputs of the last layer -> [..., H] states."""
        return normed(self.norm, outputs) if self.norm is not None and self.config.norm_output else outputs

    def readout(self, states: Tensor) -> Tensor:
        """[..., H] states -> [..., H], what the output layer reads."""
        if self.norm is not None and not self.config.norm_output:
            states = normed(self.norm, states)
        return states if self.config.logit_scale == 1 else states * self.config.logit_scale

    def turns(self, positions: Tensor) -> Tensor:
        """[...] positions -> [..., 1, 2, D] cos and sin."""
        like = torch.zeros(1, device=positions.device)
        cos, sin = self._rotary[0].forward(like, position_ids=positions.reshape(1, -1))
        return torch.stack([cos[0], sin[0]], dim=-2).view(*positions.shape, 1, 2, cos.shape[-1])


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """``norm`` of [..., H]; on a CPU PyTorch's own takes ten times as long as this."""
    if x.device.type != "cpu":
        return norm(x)  # type: ignore[no-any-return]
    wide = x.float()
    wide = wide * (wide * wide).mean(-1, keepdim=True).add(norm.eps or 0.0).rsqrt()
    return wide.to(x.dtype) * norm.weight
