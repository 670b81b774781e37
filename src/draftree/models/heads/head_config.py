"""A draft head's config, and its weights by what they do, as arrays: what the native engine packs. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from ...errors import ConfigError
from ..base import FeatureSpec
from ..protocols import FeatureModel

Array = NDArray[Any]

_ROPE_NUMBERS = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("rope_theta", "factor"),
}
"""Kinds of rotary positions whose rotations do not depend on the length of a text, and what each needs."""
_ROPE_MAY_HAVE = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")
ROPES = tuple(_ROPE_NUMBERS)
_THETA = 10000.0
"""Base of rotary positions where a config names none, as transformers has it."""
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
        ConfigError: heads cannot share key heads so, the size of a head is odd, there is no such kind of rotary
            positions, or both kinds of norms come before ``fc``.
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
        rope = self.rope
        if (kind := rope["rope_type"]) not in ROPES:
            raise ConfigError(f"its rotary positions are {kind!r}: draftree knows {', '.join(ROPES)}")
        for name in _ROPE_NUMBERS[kind] + _ROPE_MAY_HAVE:
            value = rope.get(name)
            if (value is None and name in _ROPE_NUMBERS[kind]) or not _is_positive(value):
                raise ConfigError(f"{name} of its rotary positions is {value!r}: use a positive number")
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError("it rotates a part of each head (partial_rotary_factor): draftree rotates all")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm are both set: hidden states would be normed twice: use one")

    @classmethod
    def like(cls, target: FeatureModel, feed_forward: int | None = None, **fields: Any) -> EagleConfig:
        """A config with the sizes of one of the target's own layers.

        Args:
            feed_forward: width of the MLP; None: the target's.
        """
        sizes = target.layer_sizes
        return cls(
            hidden_size=target.hidden_size,
            vocab_size=target.capabilities.vocab_size,
            intermediate_size=feed_forward or sizes.feed_forward,
            num_attention_heads=sizes.query_heads,
            num_key_value_heads=sizes.key_heads,
            head_dim=sizes.head_size + sizes.head_size % 2,
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

    @property
    def rope(self) -> dict[str, Any]:
        """Parameters of its rotary positions, as transformers 5 has them."""
        rope: dict[str, Any] = dict(self.rope_scaling or self.rope_parameters or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope.setdefault("rope_theta", self.rope_theta or _THETA)
        return rope


def _is_positive(value: object) -> bool:
    """It is a positive number, or nothing."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf)


def default_layers(layers: int) -> tuple[int, ...]:
    """Hidden states that a head reads whose file names none, of a target with so many layers."""
    return 2, layers // 2, layers - 3


class HeadWeights:
    """The tensors of a checkpoint, by names of the format; each is taken once.

    Args:
        tensors: of NumPy or of torch.

    Attributes:
        missing: names that were taken and are not there.
        wrong: what is wrong with the shapes of others.
        left: names that nobody has taken.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = dict(tensors)
        self.left, self.missing, self.wrong = set(tensors), list[str](), list[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Any:
        """A tensor of this shape; None where it is not there, or of another."""
        self.left.discard(name)
        found = self._tensors.get(name)
        if found is None:
            self.missing.append(name)
        elif tuple(found.shape) != shape:
            self.wrong.append(f"{name} is {list(found.shape)}, not {list(shape)}")
            found = None
        return found


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
