"""The format of draft heads: a head's config, and its tensors by name, as arrays. No torch."""

from __future__ import annotations

import hashlib
import math
import pickle
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt
from safetensors import SafetensorError, deserialize, safe_open

from ...artifacts import check_regular, read_bytes
from ...errors import ConfigError, needs_extra
from ..base import FeatureSpec
from ..protocols import FeatureModel
from ..rope import frequencies, yarn, yarn_magnitude

Array = NDArray[Any]

_ROPE_NUMBERS = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("rope_theta", "factor"),
}
"""Kinds of rotary positions whose rotations do not depend on the length of a text, and what each needs."""
_ROPE_MAY_HAVE = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")
_THETA = 10000.0
"""Base of rotary positions where a config names none, as transformers has it."""
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
    fc_norm: Annotated[bool, Field(validation_alias=AliasChoices("fc_norm", "use_aux_norm"))] = False
    norm_output: bool = False
    logit_scale: PositiveNumber = 1.0
    embedding_scale: PositiveNumber = 1.0
    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: tuple[NonNegativeInt, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.kv_heads or self.head_size % 2:
            raise ConfigError(
                f"{self.num_attention_heads} heads of {self.head_size} share {self.kv_heads} key heads: use a divisor "
                "and an even size"
            )
        rope = self.rope
        if (kind := rope["rope_type"]) not in _ROPE_NUMBERS:
            raise ConfigError(f"its rotary positions are {kind!r}: draftree knows {', '.join(_ROPE_NUMBERS)}")
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


def rope_of(config: EagleConfig) -> tuple[NDArray[np.float64], float]:
    """[D / 2] frequencies of rotary positions, and the magnitude of rotated vectors, as transformers computes them."""
    rope = config.rope
    plain = frequencies(float(rope["rope_theta"]), config.head_size)
    factor, kind = float(rope.get("factor") or 1.0), rope["rope_type"]
    trained = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = trained * plain / (2 * math.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)  # 1: as it is, 0: slowed down
        return share * plain + (1 - share) * plain / factor, 1.0
    if kind == "yarn":
        betas = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
        magnitude = float(rope.get("attention_factor") or yarn_magnitude(factor))
        return yarn(plain, float(rope["rope_theta"]), trained, factor, *betas), magnitude
    return plain, 1.0


def _is_positive(value: object) -> bool:
    """It is a positive number, or nothing."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf)


def default_layers(layers: int) -> tuple[int, ...]:
    """Hidden states that a head reads whose file names none, of a target with so many layers."""
    return 2, layers // 2, layers - 3


_LAYER = {
    "input_layernorm": ("input_layernorm",),
    "hidden_norm": ("hidden_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o": ("self_attn.o_proj",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""A module of a decoder layer, and the names of the format for what it has one behind the other."""


def modules(layers: int, features: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The modules of a network in their order, with the names of the format for the parts of each."""
    for name in ("fc", "input_norm", *(f"fc_norm.{i}" for i in range(features))):
        yield name, (name,)
    for i in range(layers):
        for module, parts in _LAYER.items():
            yield f"layers.{i}.{module}", tuple(f"layers.{i}.{part}" for part in parts)
    for name in ("norm", "embed_tokens", "lm_head"):
        yield name, (name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadArrays:
    """A head.

    Attributes:
        config: of its folder.
        features: which hidden states of the target it reads.
        ids: [D] the target's ids of its vocabulary.
        fuses_states: EAGLE-3; else EAGLE-1 (``eagle_network``).
        tensors: by the names of the format (``tensor_shapes``).
    """

    config: EagleConfig
    features: FeatureSpec
    ids: NDArray[np.int64]
    fuses_states: bool
    tensors: Mapping[str, Array]

    @property
    def parameters(self) -> dict[str, Array]:
        """The parameters of its network in their order, by name."""
        joined = dict[str, Array]()
        for module, parts in modules(self.config.num_hidden_layers, len(self.features.layers)):
            for kind in ("weight", "bias"):
                tensors = [self.tensors[name] for part in parts if (name := f"{part}.{kind}") in self.tensors]
                if tensors:
                    joined[f"{module}.{kind}"] = np.concatenate(tensors) if len(tensors) > 1 else tensors[0]
        return joined

    @property
    def fingerprint(self) -> str:
        """The same as of its network (``huggingface.inspection``)."""
        weights = self.parameters.values()
        return digest_of((weight.shape, np.signbit(weight.reshape(-1)[spaced(weight.size)])) for weight in weights)


def tensor_shapes(
    config: EagleConfig, names: Container[str], features: FeatureSpec, tokens: int, *, fuses_states: bool
) -> dict[str, tuple[int, ...]]:
    """The tensors that a head must have, and of those that it may have the ones that are there; with their shapes.

    Args:
        names: of the tensors of its folder.
        features, tokens, fuses_states: as of ``HeadArrays``.
    """
    size, wide, width = config.hidden_size, config.intermediate_size, config.head_size
    heads, kv, read = config.num_attention_heads * width, config.kv_heads * width, len(features.layers)
    must, may = dict[str, tuple[int, ...]](), {"fc.bias": (size,), "embed_tokens.weight": (config.vocab_size, size)}
    if "fc.weight" in names or config.use_aux_hidden_state or read * config.target_size != size:
        must["fc.weight"] = size, read * config.target_size if fuses_states else 2 * size
    if config.norm_before_fc:
        must["input_norm.weight"] = (read * config.target_size,)
    must |= {f"fc_norm.{i}.weight": (config.target_size,) for i in range(read * config.fc_norm)}
    for number in range(config.num_hidden_layers):
        at, joins = f"layers.{number}", fuses_states and number == 0
        parts = {"q": heads, "k": kv, "v": kv}
        must |= {f"{at}.self_attn.{part}_proj.weight": (n, 2 * size if joins else size) for part, n in parts.items()}
        must |= {
            f"{at}.self_attn.o_proj.weight": (size, heads),
            f"{at}.mlp.gate_proj.weight": (wide, size),
            f"{at}.mlp.up_proj.weight": (wide, size),
            f"{at}.mlp.down_proj.weight": (size, wide),
            f"{at}.post_attention_layernorm.weight": (size,),
        }
        if config.attention_bias or f"{at}.self_attn.q_proj.bias" in names:
            must |= {f"{at}.self_attn.{part}_proj.bias": (n,) for part, n in parts.items()}
        (must if config.attention_bias else may)[f"{at}.self_attn.o_proj.bias"] = (size,)
        (must if fuses_states or number else may)[f"{at}.input_layernorm.weight"] = (size,)
        if joins:
            must[f"{at}.hidden_norm.weight"] = (size,)
        if f"{at}.self_attn.q_norm.weight" in names:
            must |= {f"{at}.self_attn.{part}_norm.weight": (width,) for part in "qk"}
    if fuses_states:
        must |= {"norm.weight": (size,), "lm_head.weight": (tokens, size)}
    return must | {name: shape for name, shape in may.items() if name in names}


CONFIG, WEIGHTS = "config.json", "model.safetensors"
SAMPLE = "target_sample"
PACKED = ".q4_1"
"""Ends the name of a matrix that is kept as [rows, bytes] of Q4_1 blocks, 5 bits a weight: draftree's own EAGLE-1 heads
may be so."""
UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, EOFError),
    *(SafetensorError, pickle.UnpicklingError),
)
"""What readers of damaged files raise."""
_SAMPLED = (64, 32)
"""Rows and columns of the embeddings that are kept to know the target by."""
_SIGNS = 4096
"""Weights of a tensor whose signs are compared: about a million of a model of 30 layers, some milliseconds."""
_SAME = 0.9
"""Correlation of two samples of one model: quantised and fine-tuned copies pass, other models have about 0."""


def read_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of a folder, by the names of speculators; pickles are read only where there are no safetensors.

    Raises:
        ValueError: there are none, or a pickle holds other things, or a number is not finite.
        MissingPackageError: there are pickles alone, and torch is missing.
        Exception: as ``UNREADABLE``.
    """
    safe = sorted(folder.glob("*.safetensors"))
    pickled = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.bin"))
    if not safe and not pickled:
        raise ValueError("it has no weights (*.safetensors or pytorch_model.bin)")
    tensors: dict[str, Array] = {}
    for path in safe:
        content = read_bytes(path, check_regular(path).stat().st_size)
        for name, stored in deserialize(content):  # type: ignore[no-untyped-call]
            values = _array(stored)
            tensors[name] = gguf.dequantize(values, gguf.GGMLQuantizationType.Q4_1) if name.endswith(PACKED) else values
    for path in () if safe else pickled:
        tensors |= _unpickled(path)
    tensors = {_new_name(name): tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise ValueError(f"its {name} is not all finite numbers")
    return tensors


_SIZES = (*(("I", n) for n in (1, 2, 4, 8)), *(("F", n) for n in (2, 4, 8)))
_TYPES = {"BF16": "<u2", "BOOL": "?", "U8": "u1"} | {f"{kind}{8 * n}": f"<{kind.lower()}{n}" for kind, n in _SIZES}
"""Types of safetensors, by NumPy's names; the bits of a BF16 are the upper half of a float32's."""


def _array(stored: Mapping[str, Any]) -> Array:
    """A tensor of a file; float32 where its numbers are bfloat16."""
    if (kind := stored["dtype"]) not in _TYPES:
        raise ValueError(f"it holds numbers of type {kind}")
    values = np.frombuffer(bytearray(stored["data"]), _TYPES[kind]).reshape(stored["shape"])
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32) if kind == "BF16" else values


def _unpickled(path: Path) -> dict[str, Array]:
    """The tensors of a pickle that holds nothing else."""
    with needs_extra("torch", f"the pickle {path}"):
        import torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds of pickles, which end as errors or do not
        read = torch.load(check_regular(path), map_location="cpu", weights_only=True)
    if not isinstance(read, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in read.values()):
        raise ValueError(f"{path.name} is not a table of tensors")
    return {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in read.items()}


def _new_name(name: str) -> str:
    """The name of a tensor as speculators has it."""
    name = name.removeprefix("model.").removesuffix(PACKED)
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    return "d2t" if name == "draft_id_to_target_id" else name.replace("fc_norms.", "fc_norm.")


def vocabulary_in(tensors: Mapping[str, Array], config: EagleConfig) -> tuple[NDArray[np.int64], EagleConfig]:
    """[D] the target's ids of the head's tokens, by d2t or else by t2d, and the config with D.

    Raises:
        ValueError: there are none, some are beyond the target's, or one is there twice.
    """
    size = config.draft_vocab_size or config.vocab_size
    if (distances := tensors.get("d2t")) is not None:
        if distances.dtype.kind == "f" or distances.ndim != 1:
            raise ValueError(f"d2t is {list(distances.shape)} of {distances.dtype}, not a whole number for each token")
        ids = np.arange(len(distances)) + distances.astype(np.int64)
    elif "t2d" in tensors:
        ids = np.flatnonzero(tensors["t2d"])
    elif size == config.vocab_size:
        return np.arange(size), config
    else:
        raise ValueError(f"it drafts {size} of {config.vocab_size} tokens and lacks d2t, which are which")
    if config.draft_vocab_size is not None and len(ids) != size:
        raise ValueError(f"it drafts {size} tokens, and d2t or t2d has {len(ids)}")
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise ValueError(f"d2t leads to token {int(ids.max()) if len(ids) else 0}, beyond {config.vocab_size} tokens")
    if len(np.unique(ids)) != len(ids):
        raise ValueError("d2t leads to a token twice")
    return ids, replace(config, draft_vocab_size=len(ids))


def sample(target: FeatureModel) -> NDArray[np.float32]:
    """[64, 32] float32, or less of a smaller model: evenly spaced rows of the embeddings."""
    vocab = target.capabilities.vocab_size
    count = min(_SAMPLED[0], vocab)
    rows = target.embedding_rows(np.arange(count) * (vocab - 1) // max(1, count - 1))
    return np.ascontiguousarray(rows[:, : _SAMPLED[1]])


def is_same(known: Array, given: Array) -> bool:
    """Are these samples of one model?"""
    return given.shape == known.shape and bool(np.corrcoef(given.ravel(), known.ravel())[0, 1] >= _SAME)


def read_sample(folder: Path) -> Array | None:
    """The sample of the target that is kept with a head.

    Raises:
        ValueError, or another of ``UNREADABLE``: it is no table of finite numbers.
    """
    if not (path := folder / WEIGHTS).exists():
        return None
    with safe_open(check_regular(path), framework="np") as file:
        if SAMPLE not in file.keys():  # noqa: SIM118 - it is no dict
            return None
        known: Array = file.get_tensor(SAMPLE)
    if known.dtype.kind != "f" or not np.isfinite(known).all():
        raise ValueError(f"its {SAMPLE} is not all finite numbers")
    return known


def spaced(count: int) -> slice:
    """Which of so many weights have signs that count: evenly spaced ones, 4096 or half as many, or all of a few."""
    return slice(None, None, -(-count // _SIGNS) or 1)


def digest_of(signs: Iterable[tuple[tuple[int, ...], NDArray[np.bool_]]]) -> str:
    """16 hexadecimal digits of SHA-256 over the shapes of weights and the signs of their ``spaced`` entries."""
    digest, tensors = hashlib.sha256(), list(signs)
    digest.update("".join(str(shape) for shape, _ in tensors).encode())
    digest.update(np.packbits(np.concatenate([np.zeros(0, np.bool_), *(bits for _, bits in tensors)])).tobytes())
    return digest.hexdigest()[:16]
