"""Tiny random GGUF files that llama.cpp loads, written on the spot: no download, the same for the same seed.

Weights are drawn wide, so that logits are far from flat (``tests.tiny``). The vocabulary spells all bytes, so that
every text can be encoded; it has some merges, special tokens and a chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

CONTEXT = 2048
HEAD = 32
"""Width of a head: keys of type Q8_0 come in blocks of 32."""
WINDOW = 16
"""Tokens of the windows of "cohere2", "gemma3" and "gpt-oss"."""
EXPERTS = 4
"""Of "gpt-oss", two of which each token uses."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2
"""The id that ends an answer, ``<|im_end|>``."""

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_MERGES = ("Ġ t", "h e", "i n", "r e", "Ġ a", "e r", "Ġt he", "o n", "Ġ Ġ", "Ġ w", "l l", "o r", "a n", "in g", "Ð °")
_PIECES = (*"▁etaonsirhlé", "▁t", "he", "▁the", "▁a", "in", "an", "er", "▁▁")
_SHARE = 0.3
"""Standard deviation of weights."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a GGUF file.

    Attributes:
        model: "gpt2", byte-level BPE; "llama", SentencePiece with byte fallback; or "none": tokens have no texts.
        pre: how texts are split before merges.
        scores: of SentencePiece's tokens.
        flags: settings of the tokenizer by key, such as ``Keys.Tokenizer.ADD_BOS``; SentencePiece begins texts with a
            token by default. None: the file has none.
    """

    model: str
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    pre: str = "smollm"
    flags: Mapping[str, bool | None] = field(default_factory=dict)


def byte_level(shift: bool = False, extra: Sequence[str] = ()) -> Vocabulary:
    """Byte-level BPE: special tokens, the 256 bytes, merges.

    Args:
        shift: the last merge makes another token.
        extra: tokens at the end that the user has defined, found in texts as they are.
    """
    merges = (*_MERGES[:-1], "o u") if shift else _MERGES
    tokens = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges))
    types = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    return Vocabulary("gpt2", (*tokens, *extra), (*types, *[TokenType.USER_DEFINED] * len(extra)), merges)


def with_byte_fallback() -> Vocabulary:
    """SentencePiece: special tokens, 256 bytes, some pieces; what no piece spells is spelt in bytes."""
    tokens = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, *SPECIAL)
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * len(_PIECES) + [TokenType.CONTROL] * len(SPECIAL)
    scores = [0.0] * 259 + [-float(len(_PIECES) - i) for i in range(len(_PIECES))] + [0.0] * len(SPECIAL)
    return Vocabulary("llama", tokens, tuple(types), scores=tuple(scores))


def write(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = CONTEXT,
    vocabulary: Vocabulary | None = None,
    template: str | Sequence[Mapping[str, str]] | None = TEMPLATE,
    weights: str = "F32",
    seed: int = 0,
    architecture: str = "llama",
    lacking: Sequence[str] = (),
    order: Sequence[int] | None = None,
) -> Path:
    """Write a model whose answers end at ``<|im_end|>``.

    Args:
        hidden: heads * ``HEAD``.
        vocabulary: ``byte_level()`` by default.
        template: for conversations, or several by "name" and "template"; None: the file has none.
        weights: the tensors' type, by ggml's name ("Q4_K"); vectors are always F32.
        architecture: "llama"; "mamba" is recurrent, "lfm2" in every other layer; windows of ``WINDOW`` tokens are in
            the first three of four layers of "cohere2", the first five of six of "gemma3", every other of "gpt-oss";
            "t5" is an encoder-decoder, "t5encoder" an encoder; any other name gets the tensors of "llama".
        lacking: tensors that the file lacks, by their names.
        order: token i has the embedding and the output weights that token ``order[i]`` has without it.
    """
    words = vocabulary or byte_level()
    kv_heads = heads if architecture.startswith("t5") else kv_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv([kv_heads * (i % 2) for i in range(layers)] if architecture == "lfm2" else kv_heads)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_of_architecture(writer, architecture, hidden)
    add_vocabulary(writer, words, template)
    shapes: _Shapes = {"token_embd.weight": (len(words.tokens), hidden)}
    shapes |= _SHAPES.get(architecture, _llama_shapes)(layers, hidden, kv_heads * HEAD, len(words.tokens))
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=np.float32) * _SHARE
        if len(shape) == 1:  # norms: away from ones, so that each of them matters
            values = 1 + values / 3
        if name.endswith("ssm_a"):  # states decay
            values = -np.abs(values)
        if order is not None and name in ("token_embd.weight", "output.weight"):
            values = values[list(order)]
        if name not in lacking:
            _add_tensor(writer, name, values, "F32" if len(shape) == 1 or name.endswith(_FLOATS) else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def copy_settings(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """Write all keys of another file of the same architecture."""
    for key, each in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, each.contents(), each.types[0], each.types[-1] if len(each.types) > 1 else None)


def split(whole: Path, folder: Path) -> list[Path]:
    """The same model in two parts, the second of which has the tensors of layer 1."""
    reader = gguf.GGUFReader(whole)
    parts = [folder / f"tiny-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(parts):
        writer = gguf.GGUFWriter(path, "llama")
        if i == 0:
            copy_settings(reader, writer)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors:
            if tensor.name.startswith("blk.1.") == (i == 1):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


_FLOATS = ("shortconv.conv.weight", "ssm_conv1d.weight", "ssm_a", "attn_rel_b.weight", ".bias")
"""Tensors that stay F32: rows that are no multiple of a block, and biases."""


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: str) -> None:
    of = GGMLQuantizationType[kind]
    if of == GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    elif of == GGMLQuantizationType.F16:
        writer.add_tensor(name, values.astype(np.float16))
    elif of in _BLOCKS:
        writer.add_tensor(name, random_blocks(of, values), raw_dtype=of)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, of), raw_dtype=of)


_BLOCKS = {
    GGMLQuantizationType.Q2_K: (80, 82, 1.5),
    GGMLQuantizationType.Q3_K: (108, None, 0.0),
    GGMLQuantizationType.Q4_K: (0, 2, 7.5),
    GGMLQuantizationType.Q5_K: (0, 2, 15.5),
    GGMLQuantizationType.Q6_K: (208, None, 0.0),
    GGMLQuantizationType.IQ4_NL: (0, None, 0.0),
    GGMLQuantizationType.IQ4_XS: (0, None, 0.0),
    GGMLQuantizationType.IQ2_XXS: (0, None, 0.0),
    GGMLQuantizationType.IQ2_XS: (0, None, 0.0),
    GGMLQuantizationType.IQ2_S: (0, None, 0.0),
    GGMLQuantizationType.IQ3_XXS: (0, None, 0.0),
    GGMLQuantizationType.IQ3_S: (0, None, 0.0),
    GGMLQuantizationType.IQ1_S: (0, None, 0.0),
}
"""Types that the package ``gguf`` does not quantize to: where a block has its scale and that of its minima, and the
second over the first for which weights are about zero in the mean."""


def random_blocks(kind: GGMLQuantizationType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of random bytes for weights of the shape and the standard deviation of ``values``."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.view(np.uint8)[0, :8].tolist())
    packed = random.integers(0, 256, (values.shape[0] * values.shape[1] // block, size), dtype=np.uint8)
    scale, minimum, ratio = _BLOCKS[kind]

    def scaled(by: float) -> NDArray[np.uint8]:
        for at, number in ((scale, by), (minimum, by * ratio)):
            if at is not None:
                packed[:, at : at + 2] = np.array([number], np.float16).view(np.uint8)
        return packed.reshape(values.shape[0], -1)

    return scaled(float(values.std()) / float(gguf.dequantize(scaled(1.0), kind).std()))


def add_vocabulary(
    writer: gguf.GGUFWriter, words: Vocabulary, template: str | Sequence[Mapping[str, str]] | None
) -> None:
    """Write the keys of a tokenizer."""
    writer.add_vocab_size(len(words.tokens))
    writer.add_tokenizer_model(words.model)
    if words.model == "none":
        return
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.merges:
        writer.add_tokenizer_pre(words.pre)
        writer.add_token_merges(words.merges)
    if words.scores:
        writer.add_token_scores(words.scores)
        writer.add_unk_token_id(0)
    for key, value in {gguf.Keys.Tokenizer.ADD_BOS: bool(words.scores), **words.flags}.items():
        if value is not None:
            writer.add_bool(key, value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(words.tokens.index(SPECIAL[END]))
    if template is not None:
        writer.add_chat_template(template)


def _add_of_architecture(writer: gguf.GGUFWriter, architecture: str, hidden: int) -> None:
    if architecture == "cohere2":
        writer.add_sliding_window(WINDOW)
        writer.add_logit_scale(1.0)
        writer.add_layer_norm_eps(1e-5)
    if architecture in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(WINDOW)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
    if architecture == "gpt-oss":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(2 * hidden)
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(3)
    if architecture == "mamba":
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * hidden)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(hidden // 16)
    if architecture.startswith("t5"):
        writer.add_relative_attn_buckets_count(32)
        writer.add_decoder_start_token_id(0)


_Shapes = dict[str, tuple[int, ...]]


def _attention(prefix: str, hidden: int, keys: int) -> _Shapes:
    return {
        f"{prefix}_q.weight": (hidden, hidden),
        f"{prefix}_k.weight": (keys, hidden),
        f"{prefix}_v.weight": (keys, hidden),
    }


def _mlp(block: str, hidden: int) -> _Shapes:
    return {
        f"{block}.ffn_gate.weight": (2 * hidden, hidden),
        f"{block}.ffn_up.weight": (2 * hidden, hidden),
        f"{block}.ffn_down.weight": (hidden, 2 * hidden),
    }


def _llama_shapes(layers: int, hidden: int, keys: int, vocab: int) -> _Shapes:
    shapes: _Shapes = {"output_norm.weight": (hidden,), "output.weight": (vocab, hidden)}
    for block in (f"blk.{i}" for i in range(layers)):
        shapes |= {f"{block}.attn_norm.weight": (hidden,), f"{block}.ffn_norm.weight": (hidden,)}
        shapes |= _attention(f"{block}.attn", hidden, keys) | {f"{block}.attn_output.weight": (hidden, hidden)}
        shapes |= _mlp(block, hidden)
    return shapes


def _cohere2_shapes(layers: int, hidden: int, keys: int, vocab: int) -> _Shapes:
    """As llama's, without output weights and a norm in front of the MLP."""
    shapes = _llama_shapes(layers, hidden, keys, vocab)
    return {name: shape for name, shape in shapes.items() if "ffn_norm" not in name and name != "output.weight"}


def _gemma3_shapes(layers: int, hidden: int, keys: int, vocab: int) -> _Shapes:
    """As llama's, without output weights, with norms of heads and behind attention and MLP."""
    shapes = _llama_shapes(layers, hidden, keys, vocab)
    del shapes["output.weight"]
    for block in (f"blk.{i}" for i in range(layers)):
        shapes |= {f"{block}.attn_{name}_norm.weight": (HEAD,) for name in "qk"}
        shapes |= {f"{block}.post_{name}_norm.weight": (hidden,) for name in ("attention", "ffw")}
    return shapes


def _gpt_oss_shapes(layers: int, hidden: int, keys: int, vocab: int) -> _Shapes:
    """Biases everywhere, a sink for each head, experts."""
    shapes: _Shapes = {"output_norm.weight": (hidden,), "output.weight": (vocab, hidden)}
    for block in (f"blk.{i}" for i in range(layers)):
        matrices = _attention(f"{block}.attn", hidden, keys) | {
            f"{block}.attn_output.weight": (hidden, hidden),
            f"{block}.ffn_gate_inp.weight": (EXPERTS, hidden),
            f"{block}.ffn_gate_exps.weight": (EXPERTS, 2 * hidden, hidden),
            f"{block}.ffn_up_exps.weight": (EXPERTS, 2 * hidden, hidden),
            f"{block}.ffn_down_exps.weight": (EXPERTS, hidden, 2 * hidden),
        }
        shapes |= {f"{block}.attn_norm.weight": (hidden,), f"{block}.post_attention_norm.weight": (hidden,)}
        shapes |= matrices | {name.replace(".weight", ".bias"): shape[:-1] for name, shape in matrices.items()}
        shapes[f"{block}.attn_sinks.weight"] = (hidden // HEAD,)
    return shapes


def _lfm2_shapes(layers: int, hidden: int, keys: int, vocab: int) -> _Shapes:
    """Short convolutions and attention in turns."""
    shapes: _Shapes = {"token_embd_norm.weight": (hidden,)}
    for i, block in enumerate(f"blk.{i}" for i in range(layers)):
        shapes |= {f"{block}.attn_norm.weight": (hidden,), f"{block}.ffn_norm.weight": (hidden,)}
        if i % 2:
            shapes |= _attention(f"{block}.attn", hidden, keys) | {f"{block}.attn_output.weight": (hidden, hidden)}
            shapes |= {f"{block}.attn_{name}_norm.weight": (HEAD,) for name in "qk"}
        else:
            shapes[f"{block}.shortconv.conv.weight"] = (hidden, 3)
            shapes[f"{block}.shortconv.in_proj.weight"] = (3 * hidden, hidden)
            shapes[f"{block}.shortconv.out_proj.weight"] = (hidden, hidden)
        shapes |= _mlp(block, hidden)
    return shapes


def _mamba_shapes(layers: int, hidden: int, keys: int, vocab: int) -> _Shapes:
    inner, rank = 2 * hidden, hidden // 16
    shapes: _Shapes = {"output_norm.weight": (hidden,), "output.weight": (vocab, hidden)}
    for block in (f"blk.{i}" for i in range(layers)):
        shapes |= {
            f"{block}.attn_norm.weight": (hidden,),
            f"{block}.ssm_in.weight": (2 * inner, hidden),
            f"{block}.ssm_conv1d.weight": (inner, 4),
            f"{block}.ssm_conv1d.bias": (inner,),
            f"{block}.ssm_x.weight": (rank + 32, inner),
            f"{block}.ssm_dt.weight": (inner, rank),
            f"{block}.ssm_dt.bias": (inner,),
            f"{block}.ssm_a": (inner, 16),
            f"{block}.ssm_d": (inner,),
            f"{block}.ssm_out.weight": (hidden, inner),
        }
    return shapes


def _encoder_shapes(layers: int, hidden: int, keys: int, vocab: int) -> _Shapes:
    return _t5_half("enc", layers, hidden)


def _t5_shapes(layers: int, hidden: int, keys: int, vocab: int) -> _Shapes:
    shapes = _t5_half("enc", layers, hidden) | _t5_half("dec", layers, hidden)
    for block in (f"dec.blk.{i}" for i in range(layers)):
        shapes[f"{block}.cross_attn_norm.weight"] = (hidden,)
        shapes |= _attention(f"{block}.cross_attn", hidden, hidden)
        shapes[f"{block}.cross_attn_o.weight"] = (hidden, hidden)
    return shapes


def _t5_half(half: str, layers: int, hidden: int) -> _Shapes:
    shapes: _Shapes = {f"{half}.output_norm.weight": (hidden,)}
    for block in (f"{half}.blk.{i}" for i in range(layers)):
        shapes |= {f"{block}.attn_norm.weight": (hidden,), f"{block}.ffn_norm.weight": (hidden,)}
        shapes |= _attention(f"{block}.attn", hidden, hidden) | {f"{block}.attn_o.weight": (hidden, hidden)}
        shapes |= _mlp(block, hidden)
        shapes[f"{block}.attn_rel_b.weight"] = (32, hidden // HEAD)
    return shapes


_SHAPES = {
    "cohere2": _cohere2_shapes,
    "gemma3": _gemma3_shapes,
    "gpt-oss": _gpt_oss_shapes,
    "lfm2": _lfm2_shapes,
    "mamba": _mamba_shapes,
    "t5": _t5_shapes,
    "t5encoder": _encoder_shapes,
}
