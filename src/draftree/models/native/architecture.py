"""What the native engine computes for a GGUF file, as data: numbers, rope frequencies and where the tensors lie.

An architecture is a row of ``FAMILIES``. What a file holds beside it, a tensor or a number that nothing here reads, is
an error: it might change what the model computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from gguf.constants import Keys
from numpy.typing import NDArray

from ..gguf.gguf_file import GGUFHeader
from ..gguf.metadata import damaged
from ..rope import frequencies
from .delta_nets import RECORDED_END, TAPS, delta_net, is_recurrent
from .header_reader import ABSENT, WINDOW_PATTERN, HeaderReader, Place, unsupported
from .rope_scaling import scaled_frequencies

LAYER_TENSORS = (
    "attn_norm.weight",
    *("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    *("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    *("attn_q_norm.weight", "attn_k_norm.weight"),
    "attn_output.weight",
    "post_attention_norm.weight",
    "ffn_norm.weight",
    *("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
    "post_ffw_norm.weight",
    "attn_output.bias",
    *("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_conv1d.weight"),
    *("ssm_dt.bias", "ssm_a", "ssm_norm.weight", "ssm_out.weight"),
    "ffn_gate_inp.weight",
)
"""Of a decoder layer ("blk.0." and so on), in the order of the C interface (``native/draftree.h``)."""
MODEL_TENSORS = ("token_embd.weight", "output_norm.weight", "output.weight")
_BIASES, _OUTPUT_BIAS = LAYER_TENSORS[4:7], LAYER_TENSORS[16:17]
_HEAD_NORMS = LAYER_TENSORS[7:9]
_PRE_NORMS, _POST_NORMS = (LAYER_TENSORS[0], LAYER_TENSORS[11]), (LAYER_TENSORS[10], LAYER_TENSORS[15])
_ATTENTION = (*LAYER_TENSORS[1:4], *_HEAD_NORMS, LAYER_TENSORS[9])
"""Of layers of Qwen 3.5 that attend; recurrent ones have a gated delta net in their place."""
_DELTA_NET, _ROUTER = LAYER_TENSORS[17:26], LAYER_TENSORS[26:]
_EXPERTS = {name: name.replace(".weight", "_exps.weight") for name in LAYER_TENSORS[12:15]}
"""Names of the feed-forward network's tensors where there are several networks in each."""
_EXTRA = {*_BIASES, *_OUTPUT_BIAS, *_HEAD_NORMS, *_POST_NORMS, *_DELTA_NET, *_ROUTER}
"""That Llama's layers lack."""

_LARGEST_HEAD = 256
PLACE = np.dtype([("offset", "i8"), ("format", "i4"), ("rows", "i4"), ("columns", "i4")], align=True)
"""``TensorPlace`` of the C interface."""


class NormOf(IntEnum):
    """What norms of queries and keys are over, by its number in the C interface."""

    HEADS, ROTATED_HEADS, ALL_HEADS = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the layers of an architecture differ from Llama's.

    Attributes:
        settings: keys that its files may have beside those of all.
        halves: rope rotates dimensions i and i + d/2, not 2i and 2i + 1.
        tensors, lacks: tensors that each layer has beside Llama's, and those of Llama's that it lacks.
        optional: tensors that a layer may have.
        feed_forward_norm: the name of the norm of what the feed-forward block reads.
        norm_of: what the norms of queries and keys are over.
        experts: a router chooses some of many feed-forward networks for each token.
        gated: what a head attends to is multiplied by a gate, which the projection of queries gives behind each.
        gelu: the gate's activation is GELU (tanh), not SiLU.
        scaled: embeddings are multiplied by the square root of the hidden size.
        global_every: one of so many layers attends to all tokens, the last; 0: a window, if any, is every layer's.
        local_base: of the rope of layers with a window, whose frequencies are not scaled; 0: the base of the others;
            None: they have the rope of the others.
        unrotated_every: one of so many layers has no rope, the last; 0: none.
        rotates_windows: in a model with windows, layers without one have no rope.
    """

    settings: tuple[str, ...] = ()
    halves: bool = True
    tensors: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    optional: tuple[str, ...] = _BIASES + _OUTPUT_BIAS
    feed_forward_norm: str = _PRE_NORMS[1]
    norm_of: NormOf = NormOf.HEADS
    experts: bool = False
    gated: bool = False
    gelu: bool = False
    scaled: bool = False
    global_every: int = 0
    local_base: float | None = None
    unrotated_every: int = 0
    rotates_windows: bool = False


_OF_HYBRIDS = (
    *(Keys.SSM.CONV_KERNEL, Keys.SSM.INNER_SIZE, Keys.SSM.STATE_SIZE, Keys.SSM.TIME_STEP_RANK, Keys.SSM.GROUP_COUNT),
    *(Keys.LLM.EXPERT_COUNT, Keys.LLM.EXPERT_USED_COUNT, Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH),
)
"""Numbers of Granite 4, which change nothing in a model without the tensors of states and experts."""
_OF_DELTA_NETS = (
    *(Keys.SSM.CONV_KERNEL, Keys.SSM.INNER_SIZE, Keys.SSM.STATE_SIZE, Keys.SSM.TIME_STEP_RANK, Keys.SSM.GROUP_COUNT),
    *(Keys.LLM.FULL_ATTENTION_INTERVAL, Keys.LLM.NEXTN_PREDICT_LAYERS, Keys.Rope.DIMENSION_SECTIONS),
)
_OF_EXPERTS = (Keys.LLM.EXPERT_COUNT, Keys.LLM.EXPERT_USED_COUNT, Keys.LLM.EXPERT_FEED_FORWARD_LENGTH)
FAMILIES = {
    "llama": Family(halves=False),  # Mistral's too
    "qwen2": Family(tensors=_BIASES),
    "qwen3": Family(tensors=_HEAD_NORMS),
    "gemma": Family(gelu=True, scaled=True),
    "gemma3": Family(
        tensors=_HEAD_NORMS + _POST_NORMS,
        optional=_BIASES,
        gelu=True,
        scaled=True,
        global_every=6,
        local_base=10000.0,
    ),
    "phi3": Family(),  # fused tensors, which any family may have
    "smollm3": Family(halves=False, unrotated_every=4),
    "qwen3moe": Family(settings=_OF_EXPERTS, tensors=_HEAD_NORMS + _ROUTER, experts=True),
    "qwen3vl": Family(settings=(Keys.Rope.DIMENSION_SECTIONS, Keys.LLM.NUM_DEEPSTACK_LAYERS), tensors=_HEAD_NORMS),
    "mistral3": Family(settings=(Keys.Attention.TEMPERATURE_SCALE, Keys.Rope.SCALING_YARN_LOG_MUL), halves=False),
    "ernie4_5": Family(halves=False),
    "seed_oss": Family(feed_forward_norm=_POST_NORMS[0]),
    "qwen35": Family(
        settings=_OF_DELTA_NETS, tensors=_HEAD_NORMS, optional=(), feed_forward_norm=_POST_NORMS[0], gated=True
    ),
    "granite": Family(
        settings=(Keys.LLM.EMBEDDING_SCALE, Keys.LLM.RESIDUAL_SCALE, Keys.LLM.LOGIT_SCALE, *_OF_HYBRIDS),
        halves=False,
        optional=_BIASES,
    ),
    "olmo2": Family(
        tensors=_HEAD_NORMS + _POST_NORMS,
        lacks=_PRE_NORMS,
        optional=(),
        norm_of=NormOf.ALL_HEADS,
        global_every=4,
        local_base=0.0,
    ),
    "glm4": Family(halves=False, tensors=_POST_NORMS, optional=_BIASES),
    "hunyuan-dense": Family(tensors=_HEAD_NORMS, norm_of=NormOf.ROTATED_HEADS),
    "exaone4": Family(
        tensors=_HEAD_NORMS + _POST_NORMS, lacks=_PRE_NORMS, optional=(), global_every=4, rotates_windows=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """The numbers of a model, by the names and in the order of ``Architecture`` of the C interface."""

    vocabulary: int
    hidden: int
    layers: int
    query_heads: int
    key_heads: int
    head_size: int
    feed_forward: int
    context: int
    rope_size: int
    rope_halves: bool
    rope_tables: int
    activation: int
    query_key_norm: int = NormOf.HEADS.value
    temperature_length: int = 0
    gated_attention: bool = False
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_size: int = 0
    delta_value_size: int = 0
    experts: int = 0
    experts_used: int = 0
    norm_epsilon: float
    embedding_scale: float
    attention_scale: float
    rope_magnitude: float
    second_magnitude: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    temperature_growth: float = 0.0


@dataclass(frozen=True, slots=True)
class Description:
    """A model, as the native engine loads it.

    Attributes:
        files: that the model lies in, in order; offsets count through all of them (``draftree_load``).
        rope_frequencies: [tables, rope_size / 2] float64, radians a position.
        layer_rope: [layers] int32, the row of ``rope_frequencies``.
        layer_window: [layers] int32, how many last tokens a layer attends to; 0: all.
        layer_tensors: [layers, len(LAYER_TENSORS)] of ``PLACE``; format -1: the model has none.
        model_tensors: [len(MODEL_TENSORS)] of ``PLACE``.
    """

    files: tuple[Path, ...]
    hyperparameters: Hyperparameters
    rope_frequencies: NDArray[np.float64]
    layer_rope: NDArray[np.int32]
    layer_window: NDArray[np.int32]
    layer_tensors: NDArray[np.void]
    model_tensors: NDArray[np.void]

    @property
    def attending(self) -> int:
        """How many layers keep keys and values; the others are recurrent."""
        return int((self.layer_tensors["format"][:, LAYER_TENSORS.index("attn_q.weight")] >= 0).sum())

    def _of_recurrent_layers(self, numbers: int) -> int:
        return (self.hyperparameters.layers - self.attending) * numbers * np.dtype(np.float32).itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a state of all recurrent layers (``native/states.h``)."""
        numbers = self.hyperparameters
        values = numbers.delta_value_heads * numbers.delta_value_size
        channels = 2 * numbers.delta_key_heads * numbers.delta_key_size + values
        return self._of_recurrent_layers(numbers.delta_key_size * values + (TAPS - 1) * channels)

    @property
    def record_bytes(self) -> int:
        """Bytes of what they keep of a token until it is replayed."""
        numbers = self.hyperparameters
        values = numbers.delta_value_heads * (numbers.delta_value_size + 2)
        return self._of_recurrent_layers(2 * numbers.delta_key_heads * numbers.delta_key_size + values)

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes at most beside its tokens: its state, two behind earlier tokens, one while a pass
        reads a text, and records: of the end of what was read last, which are replayed, and of the end of what is read
        now. Trees of more than 64 nodes take more records."""
        records = 2 * RECORDED_END
        return 4 * self.state_bytes + (records + records // 4 + 4) * self.record_bytes  # as C makes room for them


def describe(header: GGUFHeader) -> Description:
    """What the native engine computes for a file.

    Raises:
        NotNativeError: it has something that the engine cannot compute.
        ModelFileError: the file lacks something, or its numbers and tensors do not go together.
    """
    family = FAMILIES.get(header.architecture)
    if family is None:
        raise unsupported(header, f"architecture {header.architecture!r}")
    if header.architecture == "granite" and not header.metadata.flag(Keys.Rope.SCALING_FINETUNED, True):
        raise unsupported(header, "layers without rope")
    file = HeaderReader(header, family.settings)
    if not family.experts and file.number(Keys.LLM.EXPERT_COUNT, 0):
        raise unsupported(header, "experts")
    hidden, layers = file.number(Keys.LLM.EMBEDDING_LENGTH), _decoder_layers(file)
    heads = file.number(Keys.Attention.HEAD_COUNT)
    if not (head_size := file.number(Keys.Attention.KEY_LENGTH, hidden // heads)):
        raise damaged(header.path, f"it has {heads} heads for {hidden} numbers")
    if layers > len(header.tensors):
        raise damaged(header.path, f"it has {len(header.tensors)} tensors for {layers} layers")
    local = _local_layers(file, family, layers)
    rope_size = file.number(Keys.Rope.DIMENSION_COUNT, head_size)
    if rope_size % 2 or rope_size > head_size:
        raise damaged(header.path, f"rope turns {rope_size} of the {head_size} dimensions of a head")
    _check(file, head_size, hidden, _feed_forward(file, family))
    ropes, layer_rope, magnitudes = _ropes(file, family, rope_size, local)
    numbers = _hyperparameters(file, family, head_size, rope_size, len(ropes), magnitudes)
    window = file.number(Keys.Attention.SLIDING_WINDOW, 0)
    window = window if window < numbers.context else 0
    return Description(
        files=file.files,
        hyperparameters=numbers,
        rope_frequencies=ropes,
        layer_rope=layer_rope,
        layer_window=np.where(local, window, 0).astype(np.int32),
        layer_tensors=_layer_tensors(file, family, numbers),
        model_tensors=_model_tensors(file),
    )


def _hyperparameters(
    file: HeaderReader,
    family: Family,
    head_size: int,
    rope_size: int,
    rope_tables: int,
    magnitudes: tuple[float, float],
) -> Hyperparameters:
    hidden, layers, heads = (
        file.number(Keys.LLM.EMBEDDING_LENGTH),
        _decoder_layers(file),
        file.number(Keys.Attention.HEAD_COUNT),
    )
    context, growth = file.number(Keys.LLM.CONTEXT_LENGTH), file.real(Keys.Attention.TEMPERATURE_SCALE, 0.0)
    # Files of Gemma 3 27B do not tell their scale.
    width = hidden / heads if file.header.architecture == "gemma3" and layers == 62 else head_size
    return Hyperparameters(
        vocabulary=file.place("token_embd.weight").rows,
        hidden=hidden,
        layers=layers,
        query_heads=heads,
        key_heads=file.number(Keys.Attention.HEAD_COUNT_KV, heads),
        head_size=head_size,
        feed_forward=_feed_forward(file, family),
        context=context,
        rope_size=rope_size,
        rope_halves=family.halves,
        rope_tables=rope_tables,
        activation=int(family.gelu),
        query_key_norm=family.norm_of.value,
        temperature_length=file.number(Keys.Rope.SCALING_ORIG_CTX_LEN, context) if growth else 0,
        gated_attention=family.gated,
        **delta_net(file, layers),
        experts=file.number(Keys.LLM.EXPERT_COUNT) if family.experts else 0,
        experts_used=file.number(Keys.LLM.EXPERT_USED_COUNT) if family.experts else 0,
        norm_epsilon=file.real(Keys.Attention.LAYERNORM_RMS_EPS),
        embedding_scale=file.real(Keys.LLM.EMBEDDING_SCALE, math.sqrt(hidden) if family.scaled else 1.0),
        attention_scale=file.real(Keys.Attention.SCALE, 1 / math.sqrt(width)),
        rope_magnitude=magnitudes[0],
        second_magnitude=magnitudes[1],
        residual_scale=file.real(Keys.LLM.RESIDUAL_SCALE, 1.0),
        logit_scale=1 / file.real(Keys.LLM.LOGIT_SCALE, 1.0),
        temperature_growth=growth,
    )


def _decoder_layers(file: HeaderReader) -> int:
    """How many layers the model has: the last blocks of a file may be a draft head's (``nextn_predict_layers``)."""
    blocks, drafting = file.number(Keys.LLM.BLOCK_COUNT), file.number(Keys.LLM.NEXTN_PREDICT_LAYERS, 0)
    if drafting >= blocks:
        raise damaged(file.header.path, f"{drafting} of its {blocks} layers are a draft head's")
    return blocks - drafting


def _feed_forward(file: HeaderReader, family: Family) -> int:
    return file.number(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH if family.experts else Keys.LLM.FEED_FORWARD_LENGTH)


def _check(file: HeaderReader, size: int, hidden: int, feed_forward: int) -> None:
    """Raise NotNativeError for sizes that the engine's kernels do not compute; C checks the others."""
    if size % 16 or not 0 < size <= _LARGEST_HEAD or file.number(Keys.Attention.VALUE_LENGTH, size) != size:
        raise unsupported(file.header, f"heads of {size} dimensions")
    if hidden % 32 or feed_forward % 32:
        raise unsupported(file.header, f"layers of {hidden} and {feed_forward} numbers")


def _local_layers(file: HeaderReader, family: Family, layers: int) -> NDArray[np.bool_]:
    """[layers] which layers have a window."""
    if not file.number(Keys.Attention.SLIDING_WINDOW, 0):
        return np.zeros(layers, dtype=np.bool_)
    pattern = file.metadata.numbers(WINDOW_PATTERN)
    if pattern is not None and len(pattern) > 1:
        if len(pattern) != layers:
            raise damaged(file.header.path, f"its pattern of windows has {len(pattern)} entries for {layers} layers")
        return np.array(pattern, dtype=np.bool_)
    every = file.number(WINDOW_PATTERN, family.global_every)
    return np.arange(layers) % every < every - 1 if every else np.ones(layers, dtype=np.bool_)


def _ropes(
    file: HeaderReader, family: Family, size: int, local: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.int32], tuple[float, float]]:
    """[tables, size / 2] frequencies, [layers] which of them a layer has, and the magnitudes of what each rotates."""
    scaled, magnitude = scaled_frequencies(file, size)
    if every := family.unrotated_every:
        second, layers = np.zeros_like(scaled), np.arange(len(local)) % every == every - 1
    elif family.rotates_windows and local.any():
        second, layers = np.zeros_like(scaled), ~local
    elif family.local_base is not None and local.any():
        base = file.real(Keys.Rope.FREQ_BASE_SWA, family.local_base or file.real(Keys.Rope.FREQ_BASE, 10000.0))
        second, layers = frequencies(base, size), local
    else:
        return scaled[None], np.zeros(len(local), dtype=np.int32), (magnitude, magnitude)
    return np.stack([scaled, second]), layers.astype(np.int32), (magnitude, 1.0)


def _layer_tensors(file: HeaderReader, family: Family, numbers: Hyperparameters) -> NDArray[np.void]:
    """Places of the layers' tensors; C checks their shapes."""
    table = np.zeros((numbers.layers, len(LAYER_TENSORS)), PLACE)
    for layer in range(numbers.layers):
        block = f"blk.{layer}."
        recurrent = is_recurrent(file, layer)
        places = dict.fromkeys(_ATTENTION if recurrent else (), ABSENT) | _fused(file, block, numbers, recurrent)
        if family.experts:
            places |= {name: file.place(block + whole, numbers.experts) for name, whole in _EXPERTS.items()}
        for name in LAYER_TENSORS:
            if name not in places:
                key = block + (family.feed_forward_norm if name == _PRE_NORMS[1] else name)
                required = name in family.tensors or (name not in _EXTRA and name not in family.lacks)
                required |= recurrent and name in _DELTA_NET
                places[name] = file.place(key) if required or (name in family.optional and file.has(key)) else ABSENT
        table[layer] = [places[name] for name in LAYER_TENSORS]
    for number in range(numbers.layers, file.number(Keys.LLM.BLOCK_COUNT)):
        file.leave(f"blk.{number}.")
    return table


def _fused(file: HeaderReader, block: str, numbers: Hyperparameters, recurrent: bool) -> dict[str, Place]:
    """Tensors of a layer that lie in one with others: queries, keys and values; gate and up."""
    places: dict[str, Place] = {}
    queries = numbers.query_heads * numbers.head_size * (1 + numbers.gated_attention)
    keys = numbers.key_heads * numbers.head_size
    if not recurrent and file.has(whole := f"{block}attn_qkv.weight"):
        if (rows := file.place(whole).rows) != queries + 2 * keys:
            raise damaged(file.header.path, f"{whole} has {rows} rows, not {queries + 2 * keys}")
        places["attn_q.weight"] = file.part(whole, 0, queries)
        places["attn_k.weight"] = file.part(whole, queries, keys)
        places["attn_v.weight"] = file.part(whole, queries + keys, keys)
    up, wide = f"{block}ffn_up.weight", numbers.feed_forward
    if not file.has(f"{block}ffn_gate.weight") and file.has(up) and file.place(up).rows == 2 * wide:
        places["ffn_gate.weight"], places["ffn_up.weight"] = file.part(up, 0, wide), file.part(up, wide, wide)
    return places


def _model_tensors(file: HeaderReader) -> NDArray[np.void]:
    """Places of the model's own tensors; all others have been read by now.

    Raises:
        NotNativeError: there is a tensor that nothing reads.
    """
    tied = "output.weight" if file.has("output.weight") else "token_embd.weight"
    places = [file.place(name) for name in (*MODEL_TENSORS[:2], tied)]
    if unread := file.unread():
        raise unsupported(file.header, f"the tensor {unread[0]}")
    return np.array(places, PLACE)
