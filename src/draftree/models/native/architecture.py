"""What the native engine computes for a GGUF file, as data: numbers, rope frequencies and where the tensors lie.

An architecture is a row of ``FAMILIES``. What a file holds beside it, a tensor or a number that nothing here reads, is
an error: it might change what the model computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType as Format
from gguf.constants import Keys
from numpy.typing import NDArray

from ...errors import NotNativeError
from ..gguf.gguf_file import GGUFHeader
from ..gguf.metadata import damaged

FORMATS = frozenset(
    Format[name].value
    for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()
)
"""ggml's numbers of the tensor types that are read (``native/formats.h``)."""
WINDOW_PATTERN = "{arch}.attention.sliding_window_pattern"
_READ = {
    *(Keys.LLM.CONTEXT_LENGTH, Keys.LLM.EMBEDDING_LENGTH, Keys.LLM.BLOCK_COUNT, Keys.LLM.FEED_FORWARD_LENGTH),
    *(Keys.Attention.HEAD_COUNT, Keys.Attention.HEAD_COUNT_KV, Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH),
    *(Keys.Attention.LAYERNORM_RMS_EPS, Keys.Attention.SCALE, Keys.Attention.SLIDING_WINDOW, WINDOW_PATTERN),
    *(Keys.Rope.DIMENSION_COUNT, Keys.Rope.FREQ_BASE, Keys.Rope.FREQ_BASE_SWA, Keys.Rope.SCALING_TYPE),
    *(Keys.Rope.SCALING_FACTOR, Keys.Rope.SCALING_ATTN_FACTOR, Keys.Rope.SCALING_ORIG_CTX_LEN),
    *(Keys.Rope.SCALING_YARN_BETA_FAST, Keys.Rope.SCALING_YARN_BETA_SLOW),
    *(Keys.LLM.VOCAB_SIZE, Keys.Rope.SCALING_FINETUNED),  # these two change nothing
}
_LARGEST = 2**31 - 1
"""Of the numbers that C takes."""
_LEAST_REAL, _MOST_REAL = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def unsupported(header: GGUFHeader, what: str) -> NotNativeError:
    return NotNativeError(f"the native engine does not know {what} of {header.path.name}")


class Place(NamedTuple):
    """Where rows of a tensor lie; a vector is one row."""

    offset: int
    format: int
    rows: int
    columns: int


ABSENT = Place(0, -1, 0, 0)


class HeaderReader:
    """Numbers and tensors of a header, and which of them have been read.

    Raises:
        NotNativeError: it has a number under a key that nothing reads.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._read: set[str] = set()
        self.files = tuple(dict.fromkeys(tensor.file for tensor in header.tensors))
        sizes = [file.stat().st_size for file in self.files]
        self._begins = dict(zip(self.files, accumulate(sizes, initial=0), strict=False))
        self.metadata = header.metadata
        read = {self.metadata.name(key) for key in _READ}
        for key in self.metadata.stored:
            if key.startswith(f"{header.architecture}.") and key not in read:
                raise unsupported(header, f"the setting {key}")

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number under a key, the same for all layers; not 0, unless that is the default."""
        found, name = self.metadata.numbers(key), self.metadata.name(key)
        if found is None:
            if default is None:
                raise damaged(self.header.path, f"it has no {name}")
            return default
        if len(set(found)) > 1:
            raise unsupported(self.header, f"{name} that differs by layer")
        if found[0] > _LARGEST or (not found[0] and default != 0):
            raise damaged(self.header.path, f"its {name} is {found[0]}")
        return found[0]

    def real(self, key: str, default: float | None = None) -> float:
        """The number under a key: positive, and one that float32 holds in full."""
        found, name = self.metadata.real(key), self.metadata.name(key)
        if found is None:
            if default is None:
                raise damaged(self.header.path, f"it has no {name}")
            return default
        if not _LEAST_REAL <= found <= _MOST_REAL:
            raise damaged(self.header.path, f"its {name} is {found}")
        return found

    def has(self, name: str) -> bool:
        return name in self._tensors

    def place(self, name: str) -> Place:
        """Where a tensor lies, which counts as read then.

        Raises:
            ModelFileError: there is none.
            NotNativeError: it has an unknown type, or more than two dimensions.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise damaged(self.header.path, f"it has no tensor {name}")
        self._read.add(name)
        if tensor.kind not in FORMATS:
            named = {each.value: each.name for each in Format}
            raise unsupported(self.header, f"the format {named.get(tensor.kind, tensor.kind)} of tensor {name}")
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        if not 1 <= len(tensor.shape) <= 2 or not tensor.shape[0] or not rows:
            raise unsupported(self.header, f"the shape {tensor.shape} of tensor {name}")
        return Place(self._begins[tensor.file] + tensor.begin, tensor.kind, rows, tensor.shape[0])

    def vector(self, name: str) -> NDArray[np.float64]:
        """The numbers of a float32 tensor."""
        place, tensor = self.place(name), self._tensors[name]
        if place.format != Format.F32 or place.rows != 1:
            raise unsupported(self.header, f"a tensor {name} that is no vector of float32")
        found = np.fromfile(tensor.file, "<f4", place.columns, offset=tensor.begin).astype(np.float64)
        if not (np.isfinite(found) & (found > 0)).all():
            raise damaged(self.header.path, f"{name} holds numbers that are not positive")
        return found

    def part(self, name: str, first: int, rows: int) -> Place:
        """Some rows of a matrix."""
        whole, tensor = self.place(name), self._tensors[name]
        return Place(whole.offset + tensor.size // whole.rows * first, whole.format, rows, whole.columns)

    def unread(self) -> list[str]:
        """Tensors that nothing has read."""
        return [name for name in self._tensors if name not in self._read]


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
)
"""Of a decoder layer ("blk.0." and so on), in the order of the C interface (``native/draftree.h``)."""
MODEL_TENSORS = ("token_embd.weight", "output_norm.weight", "output.weight")
_BIASES = LAYER_TENSORS[4:7]
_MAY_BE_THERE = (*_BIASES, LAYER_TENSORS[16])
_HEAD_NORMS = LAYER_TENSORS[7:9]
_POST_NORMS = (LAYER_TENSORS[10], LAYER_TENSORS[15])
_EXTRA = {*_HEAD_NORMS, *_POST_NORMS}

_LARGEST_HEAD = 256
PLACE = np.dtype([("offset", "i8"), ("format", "i4"), ("rows", "i4"), ("columns", "i4")], align=True)
"""``TensorPlace`` of the C interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the layers of an architecture differ from Llama's.

    Attributes:
        halves: rope rotates dimensions i and i + d/2, not 2i and 2i + 1.
        tensors: that each layer has beside Llama's; attention may have biases in any family.
        gelu: the gate's activation is GELU (tanh), not SiLU.
        scaled: embeddings are multiplied by the square root of the hidden size.
        global_every: one of so many layers attends to all tokens, the last; 0: a window, if any, is every layer's.
        local_base: of the rope of layers with a window, whose frequencies are not scaled; 0: that of all.
        unrotated_every: one of so many layers has no rope, the last; 0: none.
    """

    halves: bool = True
    tensors: tuple[str, ...] = ()
    gelu: bool = False
    scaled: bool = False
    global_every: int = 0
    local_base: float = 0.0
    unrotated_every: int = 0


FAMILIES = {
    "llama": Family(halves=False),  # Mistral's too
    "qwen2": Family(tensors=_BIASES),
    "qwen3": Family(tensors=_HEAD_NORMS),
    "gemma3": Family(tensors=_HEAD_NORMS + _POST_NORMS, gelu=True, scaled=True, global_every=6, local_base=10000.0),
    "phi3": Family(),  # fused tensors, which any family may have
    "smollm3": Family(halves=False, unrotated_every=4),
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
    norm_epsilon: float
    embedding_scale: float
    attention_scale: float
    rope_magnitude: float


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


def describe(header: GGUFHeader) -> Description:
    """What the native engine computes for a file.

    Raises:
        NotNativeError: it has something that the engine cannot compute.
        ModelFileError: the file lacks something, or its numbers and tensors do not go together.
    """
    family = FAMILIES.get(header.architecture)
    if family is None:
        raise unsupported(header, f"architecture {header.architecture!r}")
    file = HeaderReader(header)
    hidden, layers = file.number(Keys.LLM.EMBEDDING_LENGTH), file.number(Keys.LLM.BLOCK_COUNT)
    heads = file.number(Keys.Attention.HEAD_COUNT)
    if not (head_size := file.number(Keys.Attention.KEY_LENGTH, hidden // heads)):
        raise damaged(header.path, f"it has {heads} heads for {hidden} numbers")
    if layers > len(header.tensors):
        raise damaged(header.path, f"it has {len(header.tensors)} tensors for {layers} layers")
    local = _local_layers(file, family, layers)
    rope_size = file.number(Keys.Rope.DIMENSION_COUNT, head_size)
    if rope_size % 2 or rope_size > head_size:
        raise damaged(header.path, f"rope turns {rope_size} of the {head_size} dimensions of a head")
    feed_forward = file.number(Keys.LLM.FEED_FORWARD_LENGTH)
    _check(file, head_size, hidden, feed_forward)
    ropes, layer_rope, magnitude = _ropes(file, family, rope_size, local)
    # Files of Gemma 3 27B do not tell their scale.
    width = hidden / heads if header.architecture == "gemma3" and layers == 62 else head_size
    numbers = Hyperparameters(
        vocabulary=file.place("token_embd.weight").rows,
        hidden=hidden,
        layers=layers,
        query_heads=heads,
        key_heads=file.number(Keys.Attention.HEAD_COUNT_KV, heads),
        head_size=head_size,
        feed_forward=feed_forward,
        context=file.number(Keys.LLM.CONTEXT_LENGTH),
        rope_size=rope_size,
        rope_halves=family.halves,
        rope_tables=len(ropes),
        activation=int(family.gelu),
        norm_epsilon=file.real(Keys.Attention.LAYERNORM_RMS_EPS),
        embedding_scale=math.sqrt(hidden) if family.scaled else 1.0,
        attention_scale=file.real(Keys.Attention.SCALE, 1 / math.sqrt(width)),
        rope_magnitude=magnitude,
    )
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
) -> tuple[NDArray[np.float64], NDArray[np.int32], float]:
    """[tables, size / 2] frequencies, [layers] which of them a layer has, and the magnitude of rotated vectors."""
    scaled, magnitude = scaled_frequencies(file, size)
    if family.unrotated_every:
        without = np.arange(len(local)) % family.unrotated_every == family.unrotated_every - 1
        return np.stack([scaled, np.zeros_like(scaled)]), without.astype(np.int32), magnitude
    if family.local_base and local.any():
        own = frequencies(file.real(Keys.Rope.FREQ_BASE_SWA, family.local_base), size)
        return np.stack([scaled, own]), local.astype(np.int32), magnitude
    return scaled[None], np.zeros(len(local), dtype=np.int32), magnitude


def _layer_tensors(file: HeaderReader, family: Family, numbers: Hyperparameters) -> NDArray[np.void]:
    """Places of the layers' tensors; C checks their shapes."""
    table = np.zeros((numbers.layers, len(LAYER_TENSORS)), PLACE)
    for layer in range(numbers.layers):
        block = f"blk.{layer}."
        places = _fused(file, block, numbers)
        for name in LAYER_TENSORS:
            if name not in places:
                there = file.has(block + name) if name in _MAY_BE_THERE else name not in _EXTRA
                places[name] = file.place(block + name) if there or name in family.tensors else ABSENT
        table[layer] = [places[name] for name in LAYER_TENSORS]
    return table


def _fused(file: HeaderReader, block: str, numbers: Hyperparameters) -> dict[str, Place]:
    """Tensors of a layer that lie in one with others: queries, keys and values; gate and up."""
    places: dict[str, Place] = {}
    queries, keys = numbers.query_heads * numbers.head_size, numbers.key_heads * numbers.head_size
    if file.has(whole := f"{block}attn_qkv.weight"):
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


def frequencies(base: float, size: int) -> NDArray[np.float64]:
    """[size / 2] base^(-2i / size)."""
    found: NDArray[np.float64] = base ** (-np.arange(0, size, 2) / size)
    return found


def scaled_frequencies(file: HeaderReader, size: int) -> tuple[NDArray[np.float64], float]:
    """Frequencies as a file scales them to long contexts, and the magnitude of rotated vectors.

    By a factor for each: Llama 3 (``rope_freqs``), LongRoPE (arXiv 2402.13753); by one for all, "linear"; YaRN (arXiv
    2309.00071, section 3.2): by one for those that turn seldom within the context that was trained on.
    """
    base = file.real(Keys.Rope.FREQ_BASE, 10000.0)
    if base <= 1:
        raise damaged(file.header.path, f"the base of its rope frequencies is {base}")
    plain, magnitude = frequencies(base, size), file.real(Keys.Rope.SCALING_ATTN_FACTOR, 1.0)
    trained = file.number(Keys.Rope.SCALING_ORIG_CTX_LEN, file.number(Keys.LLM.CONTEXT_LENGTH))
    if file.has("rope_factors_long.weight"):
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
        both = [file.vector(name) for name in names]  # both count as read
        long = file.number(Keys.LLM.CONTEXT_LENGTH) > trained
        divisors = both[long]
    else:
        divisors = file.vector("rope_freqs.weight") if file.has("rope_freqs.weight") else np.ones_like(plain)
    if len(divisors) != len(plain):
        raise damaged(file.header.path, f"it has {len(divisors)} factors for {len(plain)} rope frequencies")
    plain = plain / divisors
    factor = file.real(Keys.Rope.SCALING_FACTOR, 1.0)
    kind = file.metadata.text(Keys.Rope.SCALING_TYPE)
    if kind in ("none", "longrope") or factor == 1:
        return plain, magnitude
    if kind in (None, "linear"):
        return plain / factor, magnitude
    if kind != "yarn":
        raise unsupported(file.header, f"rope scaling {kind!r}")
    betas = (file.real(Keys.Rope.SCALING_YARN_BETA_FAST, 32.0), file.real(Keys.Rope.SCALING_YARN_BETA_SLOW, 1.0))
    return yarn(plain, base, trained, factor, *betas), magnitude * yarn_magnitude(factor)


def yarn(
    plain: NDArray[np.float64], base: float, trained: int, factor: float, fast: float = 32.0, slow: float = 1.0
) -> NDArray[np.float64]:
    """Frequencies of YaRN: of dimensions that turn ``fast`` times within ``trained`` tokens as they are, of those that
    turn ``slow`` times over ``factor``."""
    size = 2 * len(plain)
    # The dimension whose frequency turns b times within the trained context.
    first, last = (size * math.log(trained / (b * 2 * math.pi)) / (2 * math.log(base)) for b in (fast, slow))
    low, high = min(max(math.floor(first), 0), size), min(math.ceil(last), size - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp


def yarn_magnitude(factor: float) -> float:
    """What YaRN multiplies rotated vectors by."""
    return 1 + 0.1 * math.log(factor)
