"""What a GGUF file must hold before an engine gets it: where some of it is otherwise, llama.cpp ends the process.

Nothing here knows an architecture: whether numbers and shapes of tensors go together is the engine's to find out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, Keys
from gguf.constants import GGMLQuantizationType as Format
from numpy.typing import NDArray

from ...errors import ModelFileError
from ..base import Capabilities
from .gguf_file import EMBEDDINGS, OUTPUT, GGUFHeader, StoredTensor, fingerprint, read
from .metadata import damaged

_NO_MODELS = {"adapter": "a LoRA adapter", "imatrix": "an importance matrix", "mmproj": "a multi-modal projector"}
_MOST = {Keys.LLM.CONTEXT_LENGTH: 2**31 - 1, Keys.LLM.EMBEDDING_LENGTH: 2**31 - 1, Keys.LLM.BLOCK_COUNT: 512}
"""Numbers that every model has, and their largest values: llama.cpp counts in 32 bits, and has room for 512 layers."""
_NO_WEIGHTS = {Format.I8, Format.I16, Format.I32, Format.I64, Format.F64, Format.Q8_1, Format.Q8_K}
"""Types that llama.cpp computes no layer with: the last two are of activations."""
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
"""That llama.cpp knows."""
_LONGEST_WINDOW = 2**30
_KEY_LENGTHS = (Keys.Attention.KEY_LENGTH, Keys.Attention.KEY_LENGTH_SWA)
_VALUE_LENGTHS = (Keys.Attention.VALUE_LENGTH, Keys.Attention.VALUE_LENGTH_SWA)
_WINDOW_PATTERN, _TURNED = Keys.Attention.SLIDING_WINDOW_PATTERN, Keys.Rope.DIMENSION_COUNT
_INTERVAL = Keys.LLM.FULL_ATTENTION_INTERVAL
_GATINGS = 4
"""The largest number of a function of routers that llama.cpp knows."""
_EXPERTS = (
    Keys.LLM.EXPERT_COUNT,
    Keys.LLM.EXPERT_USED_COUNT,
    Keys.LLM.EXPERT_GROUP_COUNT,
    Keys.LLM.EXPERT_GROUP_USED_COUNT,
)
_MOST_EXPERTS = 512
_OF_EXPERTS = "_exps.weight"
"""Ends of the names of tensors with a matrix for each expert."""
_EPSILONS = (Keys.Attention.LAYERNORM_RMS_EPS, Keys.Attention.LAYERNORM_EPS, Keys.Attention.GROUPNORM_EPS)
_SCALES: Mapping[int, tuple[int, ...]] = {
    **dict.fromkeys((Format.Q4_0, Format.Q5_0, Format.Q8_0, Format.IQ4_NL, Format.IQ4_XS), (0,)),
    **dict.fromkeys((Format.IQ2_XXS, Format.IQ2_XS, Format.IQ2_S, Format.IQ3_XXS, Format.IQ3_S), (0,)),
    **dict.fromkeys((Format.IQ1_S, Format.Q1_0), (0,)),
    **dict.fromkeys((Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K), (0, 2)),
    Format.Q2_K: (80, 82),
    Format.Q3_K: (108,),
    Format.Q6_K: (208,),
    Format.TQ1_0: (52,),
    Format.TQ2_0: (64,),
}
"""Where a block has its scales and minima, each a float16: in bytes from its start."""
_IQ1_M_SCALE = (48, 56)
"""Where a block of IQ1_M has its scale: the four bits of each digit are the highest ones of a 16-bit number."""
_NO_EXPONENT = 0xFF
"""The byte in front of a block of MXFP4 that is no power of two (OCP Microscaling formats 1.0, E8M0)."""
_INFINITE = {Format.F16: 0x7C00, Format.BF16: 0x7F80}
"""Bits of infinity in 16 bits; those of NaN are above, apart from the sign."""
_PIECE = 1 << 16
"""Numbers that are looked at together: as many as processors keep in their caches."""


def check(path: Path) -> GGUFHeader:
    """The header of a file that holds all of a language model, whose weights are numbers (``check_weights``)."""
    header = check_header(path)
    check_weights(header)
    return header


def check_header(path: Path) -> GGUFHeader:
    """The header of a file that holds all of a language model, as far as it can be seen without its weights.

    Raises:
        ModelFileError: it is no GGUF file of a language model, or damaged, or a part of it is missing.
        UnsupportedModelError: it is of a version that llama.cpp does not read.
    """
    try:
        header = read(path)
        parts = _other_parts(header)
        tensors = [tensor for part in chain((header,), map(read, parts)) for tensor in part.tensors]
    except OSError as error:
        raise ModelFileError(
            f"cannot read {error.filename or path}: {error.strerror or error}: give a file that can be read"
        ) from None
    kind = header.metadata.text(Keys.General.TYPE) or ""
    if what := _NO_MODELS.get("mmproj" if header.architecture == "clip" else kind):
        raise ModelFileError(f"{path} is no language model but {what}: give the .gguf file of the model itself")
    if not header.architecture or not tensors:
        lacking = "weights" if header.architecture else Keys.General.ARCHITECTURE
        raise ModelFileError(
            f"{path} is no language model: it has no {lacking}: give the .gguf file of the model itself"
        )
    whole = GGUFHeader(header.metadata, tuple(tensors))
    if flaw := next(chain(*(flaws(whole) for flaws in _FLAWS)), None):
        raise damaged(path, flaw)
    return whole


def check_weights(header: GGUFHeader, progress: Callable[[float], None] = lambda done: None) -> None:
    """Read all weights.

    Args:
        progress: called with 0 to 1.

    Raises:
        ModelFileError: a tensor has some that are NaN or infinite.
    """
    done, size = 0, header.weight_bytes
    for tensor in header.tensors:
        if tensor.size and not _finite(tensor):
            raise damaged(header.path, f"tensor {tensor.name} has weights that are NaN or infinite")
        done += tensor.size
        progress(done / max(1, size))


def _other_parts(header: GGUFHeader) -> Iterator[Path]:
    """The other files of a model: the parts of a split one are numbered from 1 by their names, and from 0 inside."""
    path, metadata = header.path, header.metadata
    count, part = (metadata.number(key) or 0 for key in (Keys.Split.LLM_KV_SPLIT_COUNT, Keys.Split.LLM_KV_SPLIT_NO))
    if count < 2:
        return iter(())
    numbered = re.fullmatch(r"(.*)-[0-9]{5}-of-([0-9]{5})\.gguf", path.name, re.DOTALL)
    if numbered is None or int(numbered[2]) != count:
        raise ModelFileError(f"{path} is part {part + 1} of {count} but not named so: name it as it was published")
    names = (f"{numbered[1]}-{i + 1:05}-of-{count:05}.gguf" for i in range(count))
    first = next(names)
    if part != 0:
        raise ModelFileError(f"{path} is part {part + 1} of {count} of a model: give the first, {first}")
    return map(path.with_name, names)


def _flaws_of_numbers(header: GGUFHeader) -> Iterator[str]:
    """What is wrong with a model's numbers, by its name; the first counts, and so it is below."""
    metadata, layers = header.metadata, header.layers
    yield from (f"{key} is {wrong}" for key, wrong in metadata.infinite() if key != Keys.Tokenizer.SCORES)
    for key in _EPSILONS:
        epsilon = metadata.real(key)
        if epsilon is not None and not 0 <= epsilon < 1:
            yield f"{metadata.name(key)} is {epsilon}, not a number from 0 to 1"
    scaling = metadata.text(Keys.Rope.SCALING_TYPE)
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        yield f"{metadata.name(Keys.Rope.SCALING_TYPE)} is {scaling!r}, none of {', '.join(_ROPE_SCALINGS)}"
    for key, most in _MOST.items():
        name, value = metadata.name(key), metadata.number(key)
        if value is None:
            yield f"it has no {name}"
        elif not 1 <= value <= most:
            yield f"{name} is {value}, not a number from 1 to {most}"
    if max(ahead := metadata.numbers(Keys.LLM.NEXTN_PREDICT_LAYERS) or (0,)) >= layers:
        yield f"{metadata.name(Keys.LLM.NEXTN_PREDICT_LAYERS)} is {max(ahead)}, of {layers} layers"
    for tensor in header.tensors:
        block = re.match(r"blk\.([0-9]{1,9})\.", tensor.name)
        if block and int(block[1]) >= layers:
            yield f"{metadata.name(Keys.LLM.BLOCK_COUNT)} is {layers}, with {tensor.name}"


def _flaws_of_attention(header: GGUFHeader) -> Iterator[str]:
    """Numbers of heads, and of layers that have keys and values of their own."""
    metadata, width = header.metadata, header.metadata.number(Keys.LLM.EMBEDDING_LENGTH) or 0
    heads = metadata.numbers(Keys.Attention.HEAD_COUNT) or (0,)
    if max(heads) > width:
        yield f"{metadata.name(Keys.Attention.HEAD_COUNT)} is {max(heads)}, for {width} numbers"
    window = max(metadata.numbers(Keys.Attention.SLIDING_WINDOW) or (0,))
    if window > _LONGEST_WINDOW:
        yield f"{metadata.name(Keys.Attention.SLIDING_WINDOW)} is {window}, not a number up to {_LONGEST_WINDOW}"
    yield from _flaws_of_latents(header) if header.is_latent else _flaws_of_heads(header)
    keys, _ = header.widths
    for key, size in ((_TURNED, keys), (Keys.Rope.DIMENSION_COUNT_SWA, metadata.number(_KEY_LENGTHS[1]) or keys)):
        turned = metadata.numbers(key) or metadata.numbers(_TURNED)
        if any(heads) and turned and (max(turned) % 2 or not 0 < max(turned) <= size):
            yield f"{metadata.name(key)} is {max(turned)}, for heads of {size} numbers"
    shared, windows = metadata.number(Keys.Attention.SHARED_KV_LAYERS) or 0, metadata.numbers(_WINDOW_PATTERN) or ()
    before = header.layers - shared
    if shared and (before < 2 or (len(windows) > 1 and windows[before - 2 : before] != (1, 0))):
        yield f"{metadata.name(Keys.Attention.SHARED_KV_LAYERS)} is {shared}, of {header.layers} layers"


def _flaws_of_heads(header: GGUFHeader) -> Iterator[str]:
    """Lengths of heads that their matrices do not have; a layer without values of its own has its keys for values."""
    metadata, tensors = header.metadata, {tensor.name: tensor for tensor in header.tensors if len(tensor.shape) == 2}
    heads = metadata.numbers(Keys.Attention.HEAD_COUNT_KV) or metadata.numbers(Keys.Attention.HEAD_COUNT) or (0,)
    stated, local = ([metadata.number(key) for key in keys] for keys in zip(_KEY_LENGTHS, _VALUE_LENGTHS, strict=True))
    names, shared = [*map(metadata.name, (_KEY_LENGTHS[0], _VALUE_LENGTHS[0]))], header.widths[1]
    for layer in range(header.layers):
        count = heads[min(layer, len(heads) - 1)]
        keys, values = (tensors.get(f"blk.{layer}.attn_{part}.weight") for part in "kv")
        for i, tensor in enumerate((keys, values or keys)):
            length = shared if i == 1 and values is None and stated[i] is None else stated[i]
            if not tensor or not count or length is None:
                continue
            if tensor.shape[1] not in (count * length, count * (local[i] or length)):
                yield f"{names[i]} is {length}, with {tensor.shape[1]} rows of {tensor.name}"


def _flaws_of_latents(header: GGUFHeader) -> Iterator[str]:
    """Lengths that the matrices of latent attention do not have, whose latent vectors are one head's keys."""
    metadata, turned = header.metadata, header.metadata.number(_TURNED)
    heads = metadata.numbers(Keys.Attention.HEAD_COUNT_KV) or (0,)
    if set(heads) != {1}:
        yield f"{metadata.name(Keys.Attention.HEAD_COUNT_KV)} is {max(heads)}, not 1"
    if turned is None:
        yield f"it has no {metadata.name(_TURNED)}"
        return
    wanted = (
        ("attn_kv_a_mqa", Keys.Attention.KEY_LENGTH, 1, 0),
        ("attn_v_b", Keys.Attention.VALUE_LENGTH, 0, 0),
        ("attn_k_b", Keys.Attention.KEY_LENGTH_MLA, 0, turned),
        ("attn_v_b", Keys.Attention.VALUE_LENGTH_MLA, 1, 0),
    )
    for tensor in header.tensors:
        for part, key, dimension, more in wanted:
            if tensor.name.endswith(f".{part}.weight") and len(tensor.shape) > dimension:
                length = tensor.shape[dimension] + more
                if metadata.number(key) != length:
                    yield f"{metadata.name(key)} is {metadata.number(key)}, not {length} as {tensor.name} has it"


def _flaws_of_states(header: GGUFHeader) -> Iterator[str]:
    """Numbers of layers that keep a state."""
    metadata, inner = header.metadata, header.metadata.number(Keys.SSM.INNER_SIZE)
    for tensor in header.tensors if inner is not None else ():
        if re.fullmatch(r"blk\.[0-9]+\.ssm_out\.weight", tensor.name) and tensor.shape[0] != inner:
            yield f"{metadata.name(Keys.SSM.INNER_SIZE)} is {inner}, with {tensor.shape[0]} columns of {tensor.name}"
    if metadata.number(_INTERVAL) == 0:
        yield f"{metadata.name(_INTERVAL)} is 0, not a number of layers"


def _flaws_of_experts(header: GGUFHeader) -> Iterator[str]:
    """For each token some of the experts are used, or those of some groups."""
    metadata = header.metadata
    count, used, groups, used_groups = (max(metadata.numbers(key) or (0,)) for key in _EXPERTS)
    if count > _MOST_EXPERTS:
        yield f"{metadata.name(Keys.LLM.EXPERT_COUNT)} is {count}, not a number up to {_MOST_EXPERTS}"
    if (gating := max(metadata.numbers(Keys.LLM.EXPERT_GATING_FUNC) or (0,))) > _GATINGS:
        yield f"{metadata.name(Keys.LLM.EXPERT_GATING_FUNC)} is {gating}, not a number up to {_GATINGS}"
    if not min(1, count) <= used <= count:
        yield f"{metadata.name(Keys.LLM.EXPERT_USED_COUNT)} is {used}, of {count} experts"
    if groups >= max(1, count) or (groups > 1 and count % groups):
        yield f"{metadata.name(Keys.LLM.EXPERT_GROUP_COUNT)} is {groups}, of {count} experts"
    if groups > 1 and not 0 < used_groups < groups:
        yield f"{metadata.name(Keys.LLM.EXPERT_GROUP_USED_COUNT)} is {used_groups}, of {groups} groups"


def _flaws_of_vocabulary(header: GGUFHeader) -> Iterator[str]:
    tokens = header.metadata.texts(Keys.Tokenizer.LIST)
    header.metadata.texts(Keys.Tokenizer.MERGES)
    numbers = {Keys.Tokenizer.SCORES: header.token_scores, Keys.Tokenizer.TOKEN_TYPE: header.token_types}
    for key, entries in numbers.items():
        if entries is not None and len(entries) != len(tokens):
            yield f"{key} has {len(entries)} entries for {len(tokens)} tokens"
    spelt = [token.partition(b"\0")[0] for token in tokens]  # as far as llama.cpp reads them
    first = dict(zip(reversed(spelt), range(len(spelt) - 1, -1, -1), strict=True))
    for token, text in enumerate(spelt):
        if text and first[text] != token:
            shown = text.decode(errors="replace")
            yield f"{Keys.Tokenizer.LIST} has {shown!r} twice, as token {first[text]} and as token {token}"


def _flaws_of_tensors(header: GGUFHeader) -> Iterator[str]:
    names = set[str]()
    for tensor in header.tensors:
        name, kind = tensor.name, tensor.kind
        if name in names:
            yield f"tensor {name} is there twice"
        names.add(name)
        if not tensor.size:  # a type that only newer engines know
            continue
        vector = len(tensor.shape) == 1 or name.endswith("_norm.weight") or not name.endswith(".weight")
        if kind in _NO_WEIGHTS or (vector and kind != Format.F32):
            wanted = "F32" if vector else "a type of weights"
            yield f"tensor {name} is of type {Format(kind).name}, not {wanted}"


def _finite(tensor: StoredTensor) -> bool:
    """All weights of a tensor are numbers, or all scales of its blocks.

    Passes do not show it: llama.cpp rounds activations that are NaN to numbers.
    """
    data = tensor.data
    if tensor.kind == Format.F32:
        return all(np.isfinite(part).all() for part in _pieces(data.view(np.float32)))
    infinite, columns = _INFINITE.get(Format(tensor.kind)), [data.view(np.uint16)]
    if infinite is None:
        blocks = data.reshape(-1, GGML_QUANT_SIZES[Format(tensor.kind)][1])
        if tensor.kind == Format.MXFP4:
            return all((part != _NO_EXPONENT).all() for part in _pieces(blocks[:, 0]))
        infinite = _INFINITE[Format.F16]
        columns = [blocks[:, at : at + 2].view(np.uint16)[:, 0] for at in _SCALES.get(tensor.kind, ())]
        if tensor.kind == Format.IQ1_M:
            begin, end = _IQ1_M_SCALE
            digits = blocks[:, begin:end].view(np.uint16) >> np.uint16(12)
            columns = [digits @ np.array([1, 16, 256, 4096], np.uint16)]
    return all((part & 0x7FFF).max() < infinite for column in columns for part in _pieces(column))


def _pieces(values: NDArray[np.generic]) -> Iterable[NDArray[Any]]:
    return (values[begin : begin + _PIECE] for begin in range(0, len(values), _PIECE))


_FLAWS = (
    _flaws_of_numbers,
    _flaws_of_attention,
    _flaws_of_states,
    _flaws_of_experts,
    _flaws_of_vocabulary,
    _flaws_of_tensors,
)


def capabilities(header: GGUFHeader, name: str, threads: int, **given: Any) -> Capabilities:
    """Of a model in a file, on a CPU.

    Args:
        given: what its engine knows.
    """
    tensors, draft_layer = header.tensors, header.draft_layer.values()
    untied = any(tensor.name == OUTPUT for tensor in tensors)  # a pass looks its embeddings up
    multiplied = [t for t in tensors if not (untied and t.name == EMBEDDINGS) and t not in draft_layer]
    kinds = {Format(tensor.kind).name for tensor in tensors if tensor.size and len(tensor.shape) > 1}
    count, used = (max(header.metadata.numbers(key) or (0,)) for key in _EXPERTS[:2])
    share = used / count if used else 1.0
    weights, size = _amounts(tensor for tensor in multiplied if not tensor.name.endswith(_OF_EXPERTS))
    of_experts = _amounts(tensor for tensor in multiplied if tensor.name.endswith(_OF_EXPERTS))
    expert_weights, expert_bytes = (round(share * amount) for amount in of_experts)
    return Capabilities(
        name=name,
        architecture=header.architecture,
        parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        max_length_reason="its context",
        dtype="float32",
        device="cpu",
        threads=threads,
        weights=weights + expert_weights,
        weight_bytes=size + expert_bytes,
        expert_bytes=expert_bytes,
        expert_share=share,
        weight_format="+".join(sorted(kinds - {"F32"} or kinds)),
        fingerprint=fingerprint(header),
        **given,
    )


def _amounts(tensors: Iterable[StoredTensor]) -> tuple[int, int]:
    """Numbers and bytes."""
    listed = list(tensors)
    return sum(math.prod(tensor.shape) for tensor in listed), sum(tensor.size for tensor in listed)
