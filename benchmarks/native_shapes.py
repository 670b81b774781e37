"""GGUF files with random weights at the shapes of published models: as large and as fast, and no download.

Types of tensors are those of llama.cpp's Q4_K_M: Q6_K for the output layer and, in some layers, for values and the
second matrix of the feed-forward, Q4_K for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

Q4, Q6 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
_SCALES = {Q4: (0, 2, 7.5), Q6: (208, None, 0.0)}
"""Where a block has its scale and that of its minima, and the second over the first that centres the weights."""
_RANDOM_BLOCKS = 1 << 18
"""Of each type, which are written again and again: random numbers take longer than the disk."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of a model.

    Attributes:
        tied: its output layer is its embeddings.
        normed: queries and keys have norms.
        key_states, value_states: heads of Qwen 3.5's recurrent layers, which are three of four; 0: all layers attend.
        experts, experts_used: of a layer, and of those a token's; ``feed_forward`` is an expert's then. 0: it has none.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int
    context: int
    rope_base: float
    tied: bool
    normed: bool
    head: int = 128
    key_states: int = 0
    value_states: int = 0
    experts: int = 0
    experts_used: int = 0

    def attends(self, layer: int) -> bool:
        return not self.key_states or layer % _INTERVAL == _INTERVAL - 1

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer, of 16 bits."""
        return 2 * 2 * self.key_heads * self.head

    @property
    def file_bytes(self) -> int:
        """Of its weights."""
        sized = (
            (rows, _row_bytes(kind, columns) if kind else 4 * columns) for _, rows, columns, kind in _tensors(self)
        )
        return sum(rows * size for rows, size in sized)

    def attention_alone(self, layers: int) -> Shape:
        """A model whose passes over long contexts are little else than the same attention."""
        dense = self.architecture.removesuffix("moe")
        return replace(
            self, architecture=dense, layers=layers, feed_forward=256, vocabulary=20480, tied=True, experts=0
        )


_INTERVAL, _STATE, _TAPS = 4, 128, 4
"""One of so many layers of Qwen 3.5 attends; dimensions of its recurrent heads; inputs of a convolution."""
_QWEN35_4B = Shape(
    architecture="qwen35",
    hidden=2560,
    layers=32,
    heads=16,
    key_heads=4,
    feed_forward=9216,
    vocabulary=248320,
    context=262144,
    rope_base=1e7,
    tied=True,
    normed=True,
    head=256,
    key_states=16,
    value_states=32,
)
SHAPES: Mapping[str, Shape] = {
    "qwen3-4b": Shape(
        architecture="qwen3",
        hidden=2560,
        layers=36,
        heads=32,
        key_heads=8,
        feed_forward=9728,
        vocabulary=151936,
        context=40960,
        rope_base=1e6,
        tied=True,
        normed=True,
    ),
    "qwen3-30b-a3b-sixth": Shape(  # eight of its layers, and as much of its vocabulary
        architecture="qwen3moe",
        hidden=2048,
        layers=8,
        heads=32,
        key_heads=4,
        feed_forward=768,
        vocabulary=151936 // 6,
        context=40960,
        rope_base=1e6,
        tied=False,
        normed=True,
        experts=128,
        experts_used=8,
    ),
    "qwen3.5-0.8b": replace(
        _QWEN35_4B, hidden=1024, layers=24, heads=8, key_heads=2, feed_forward=3584, value_states=16
    ),
    "qwen3.5-4b": _QWEN35_4B,
    "qwen3.5-9b": replace(_QWEN35_4B, hidden=4096, feed_forward=12288, tied=False),
    "llama-8b": Shape(
        architecture="llama",
        hidden=4096,
        layers=32,
        heads=32,
        key_heads=8,
        feed_forward=14336,
        vocabulary=128256,
        context=131072,
        rope_base=5e5,
        tied=False,
        normed=False,
    ),
}


def write(path: Path, shape: Shape, report: Callable[[int], None] = lambda layers: None) -> Path:
    """Write a model, layer by layer.

    Args:
        report: called with how many layers have been written.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_numbers(writer, shape)
    _add_vocabulary(writer, shape.vocabulary)
    tensors = list(_tensors(shape))
    for name, rows, columns, kind in tensors:
        if kind is None:
            size: tuple[int, ...] = (columns,) if rows == 1 else (rows, columns)
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * rows * columns)
        else:
            row = _row_bytes(kind, columns)
            size = (shape.experts, rows // shape.experts, row) if name.endswith(_OF_EXPERTS) else (rows, row)
            writer.add_tensor_info(name, size, np.dtype(np.uint8), rows * row, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks = {kind: _blocks(kind, shape.hidden) for kind in _SCALES}
    for name, rows, columns, kind in tensors:
        if name.endswith(_ROUTER):
            random = np.random.default_rng([*name.encode()]).standard_normal(rows * columns, np.float32)
            writer.write_tensor_data(random * np.float32(columns**-0.5))
        elif kind is None:
            writer.write_tensor_data(np.full(rows * columns, -1 if name.endswith("ssm_a") else 1, np.float32))
        else:
            writer.write_tensor_data(np.resize(blocks[kind], rows * _row_bytes(kind, columns)))
        if name.endswith(_LAST):
            report(1 + int(name.split(".")[1]))
    writer.close()
    return path


_OF_EXPERTS, _ROUTER = "_exps.weight", "ffn_gate_inp.weight"
_LAST = ("ffn_down.weight", "ffn_down_exps.weight")
"""Of a layer's tensors."""
_Tensor = tuple[str, int, int, GGMLQuantizationType | None]
"""Name, rows, columns and type; None: a vector of float32."""


def _row_bytes(kind: GGMLQuantizationType, columns: int) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return columns // block * size


def _tensors(shape: Shape) -> Iterator[_Tensor]:
    hidden = shape.hidden
    yield "token_embd.weight", shape.vocabulary, hidden, Q6 if shape.tied else Q4
    if not shape.tied:
        yield "output.weight", shape.vocabulary, hidden, Q6
    yield "output_norm.weight", 1, hidden, None
    for layer in range(shape.layers):
        eighth, block = shape.layers // 8, f"blk.{layer}."
        more = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
        precise = Q6 if more else Q4
        yield f"{block}attn_norm.weight", 1, hidden, None
        yield from _attention(shape, block, precise) if shape.attends(layer) else _delta_net(shape, block)
        norm = "post_attention_norm" if shape.key_states else "ffn_norm"
        yield f"{block}{norm}.weight", 1, hidden, None
        yield from _feed_forward(shape, block, precise)


def _feed_forward(shape: Shape, block: str, precise: GGMLQuantizationType) -> Iterator[_Tensor]:
    """Of all experts, where there are some."""
    hidden, wide, networks = shape.hidden, shape.feed_forward, shape.experts or 1
    end = _OF_EXPERTS if shape.experts else ".weight"
    if shape.experts:
        yield f"{block}{_ROUTER}", shape.experts, hidden, None
    yield f"{block}ffn_gate{end}", networks * wide, hidden, Q4
    yield f"{block}ffn_up{end}", networks * wide, hidden, Q4
    yield f"{block}ffn_down{end}", networks * hidden, wide, precise


def _attention(shape: Shape, block: str, precise: GGMLQuantizationType) -> Iterator[_Tensor]:
    keys, queries, hidden = shape.key_heads * shape.head, shape.heads * shape.head, shape.hidden
    yield f"{block}attn_q.weight", queries * (2 if shape.key_states else 1), hidden, Q4
    yield f"{block}attn_k.weight", keys, hidden, Q4
    yield f"{block}attn_v.weight", keys, hidden, precise
    if shape.normed:
        yield f"{block}attn_q_norm.weight", 1, shape.head, None
        yield f"{block}attn_k_norm.weight", 1, shape.head, None
    yield f"{block}attn_output.weight", hidden, queries, Q4


def _delta_net(shape: Shape, block: str) -> Iterator[_Tensor]:
    keys, values, hidden = shape.key_states * _STATE, shape.value_states * _STATE, shape.hidden
    yield f"{block}attn_qkv.weight", 2 * keys + values, hidden, Q4
    yield f"{block}attn_gate.weight", values, hidden, Q4
    yield f"{block}ssm_alpha.weight", shape.value_states, hidden, Q4
    yield f"{block}ssm_beta.weight", shape.value_states, hidden, Q4
    yield f"{block}ssm_conv1d.weight", 2 * keys + values, _TAPS, None
    yield f"{block}ssm_dt.bias", 1, shape.value_states, None
    yield f"{block}ssm_a", 1, shape.value_states, None
    yield f"{block}ssm_norm.weight", 1, _STATE, None
    yield f"{block}ssm_out.weight", hidden, values, Q4


def _blocks(kind: GGMLQuantizationType, columns: int) -> NDArray[np.uint8]:
    """Random blocks of weights whose products with ``columns`` numbers are about as large as these."""
    packed = np.random.default_rng(kind).integers(0, 256, (_RANDOM_BLOCKS, GGML_QUANT_SIZES[kind][1]), np.uint8)
    scale, minimum, ratio = _SCALES[kind]

    def scaled(by: float) -> NDArray[np.uint8]:
        for at, number in ((scale, by), (minimum, by * ratio)):
            if at is not None:
                packed[:, at : at + 2] = np.array([number], np.float16).view(np.uint8)
        return packed

    return scaled(columns**-0.5 / float(gguf.dequantize(scaled(1.0)[:100], kind).std()))


def _add_numbers(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random {shape.architecture}")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.feed_forward)
    if shape.key_states:
        writer.add_rope_dimension_count(shape.head // 4)
        writer.add_rope_dimension_sections([shape.head // 8 // 3 + i for i in (1, 1, 0)] + [0])
        writer.add_full_attention_interval(_INTERVAL)
        writer.add_ssm_conv_kernel(_TAPS)
        writer.add_ssm_state_size(_STATE)
        writer.add_ssm_group_count(shape.key_states)
        writer.add_ssm_time_step_rank(shape.value_states)
        writer.add_ssm_inner_size(shape.value_states * _STATE)
    else:
        writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)


def _add_vocabulary(writer: gguf.GGUFWriter, count: int) -> None:
    """Byte-level BPE: special tokens, the bytes, then pairs of bytes and triples by merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [f"{a} {b}" for a in alphabet for b in alphabet]
    merges += [f"{a}{b} {c}" for a in alphabet[33:67] for b in alphabet for c in alphabet]
    merges = merges[: count - len(_SPECIAL) - len(alphabet)]
    tokens = [*_SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(_SPECIAL) + [TokenType.NORMAL] * (count - len(_SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
