"""What is read of a GGUF file beside llama.cpp: whether it holds a model that can be run, and its fingerprint.

The header alone is parsed, and of the vocabulary only the lengths: ``gguf.GGUFReader`` makes an array of each token,
which takes 7 s for 150,000 of them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, Keys

from ...errors import DraftreeError, ModelFileError, UnsupportedModelError
from .library import Library

Value = int | float | bool | str | tuple[int | float | bool, ...]

_VERSIONS = (2, 3)
_LONGEST = 1024
"""Entries of an array of metadata that is read: one number a layer. Longer ones are the vocabulary's."""
_RUNS, _RUN = 16, 256
"""Pieces of each tensor that go into the fingerprint, and their bytes: about a megabyte of a model of 30 layers."""
_NO_MODELS = {"adapter": "a LoRA adapter", "imatrix": "an importance matrix", "mmproj": "a multi-modal projector"}
_CODES = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        kind: ggml's number of its type.
        begin: in bytes, in ``file``.
        size: in bytes; 0: of a type that the package ``gguf`` does not know.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    file: Path
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file; for a model in several parts, with the tensors of all.

    Attributes:
        metadata: numbers, texts and short arrays, by key.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: tuple[StoredTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get(Keys.General.ARCHITECTURE, ""))

    @property
    def chat_template(self) -> str | None:
        found = self.metadata.get(Keys.Tokenizer.CHAT_TEMPLATE)
        return found if isinstance(found, str) else None

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """The whole numbers, or the one, under a key in which "{arch}" stands for the architecture; None: no such key.

        Raises:
            ModelFileError: there is something else.
        """
        found = self.metadata.get(key.format(arch=self.architecture))
        if found is None:
            return None
        values = found if isinstance(found, tuple) else (found,)
        whole = tuple(value for value in values if isinstance(value, int) and value >= 0)
        if not whole or len(whole) != len(values):
            name = key.format(arch=self.architecture)
            raise ModelFileError(f"{self.path}: {name} is {found!r}, which is no number of something: {_AGAIN}")
        return whole

    @property
    def layers(self) -> int:
        """Decoder layers; 0 where the file does not tell."""
        return (self.numbers(Keys.LLM.BLOCK_COUNT) or (0,))[0]

    @property
    def widths(self) -> tuple[int, int]:
        """Of a head's keys and values; 0 where the file does not tell."""
        heads = self.numbers(Keys.Attention.HEAD_COUNT) or ()
        own = (self.numbers(Keys.LLM.EMBEDDING_LENGTH) or (0,))[0] // max((*heads, 1))
        keys, values = (Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH)
        return (self.numbers(keys) or (own,))[0], (self.numbers(values) or (own,))[0]

    @property
    def formats(self) -> frozenset[str]:
        """Of the weights, as "Q4_K"; vectors and what is float32 are left out."""
        kinds = {GGMLQuantizationType(t.kind).name for t in self.tensors if t.size and len(t.shape) > 1}
        return frozenset(kinds - {"F32"} or kinds)


def check(path: Path) -> GGUFHeader:
    """The header of a file that holds all of a language model, as far as it can be seen without loading it.

    Raises:
        ModelFileError: it is no GGUF file of a language model, or damaged, or a part of it is missing.
        UnsupportedModelError: it is of a version that llama.cpp does not read.
    """
    try:
        header = _read(path)
        first, *others = _parts(header)
        read = [header, *map(_read, others)]
    except OSError as error:
        raise _unreadable(path, error) from None
    kind = str(header.metadata.get(Keys.General.TYPE, ""))
    if what := _NO_MODELS.get("mmproj" if header.architecture == "clip" else kind):
        raise ModelFileError(f"{path} is no language model but {what}: give the .gguf file of the model itself")
    if not header.architecture or not header.tensors:
        lacking = "weights" if header.architecture else Keys.General.ARCHITECTURE
        raise ModelFileError(
            f"{path} is no language model: it has no {lacking}: give the .gguf file of the model itself"
        )
    return GGUFHeader(path, header.metadata, tuple(tensor for part in read for tensor in part.tensors))


_AGAIN = "download it again"


def _unreadable(path: Path, error: OSError) -> ModelFileError:
    return ModelFileError(
        f"cannot read {error.filename or path}: {error.strerror or error}: give a file that can be read"
    )


def _parts(header: GGUFHeader) -> list[Path]:
    """All files of a model: the parts of a split one are numbered from 1 by their names, and from 0 inside."""
    path = header.path
    ((count,), (part,)) = (header.numbers(key) or (0,) for key in (Keys.Split.LLM_KV_SPLIT_COUNT, "split.no"))
    if count < 2:
        return [path]
    numbered = re.fullmatch(r"(.*)-\d{5}-of-\d{5}\.gguf", path.name)
    if numbered is None:
        raise ModelFileError(f"{path} is part {part + 1} of {count} but not named so: name it as it was published")
    parts = [path.with_name(f"{numbered[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    if part != 0:
        raise ModelFileError(f"{path} is part {part + 1} of {count} of a model: give the first, {parts[0].name}")
    return parts


class _Damaged(Exception):
    """The bytes are no header."""


def _read(path: Path) -> GGUFHeader:
    """The header of one file.

    Raises:
        OSError: it cannot be read.
        ModelFileError: it is no GGUF file, or a damaged one.
        UnsupportedModelError: it is of a version that llama.cpp does not read.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != b"GGUF":
            raise ModelFileError(f"cannot read {path}: it does not start like a GGUF file: {_AGAIN}")
        size = os.fstat(file.fileno()).st_size
        version = int.from_bytes(start[4:], "little")
        if len(start) == 8 and version not in _VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise UnsupportedModelError(f"{path} is a GGUF file of {what}, not of version 2 or 3: convert it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Reader(data).header(path)
            except (_Damaged, struct.error, OverflowError) as error:
                reason = str(error) if isinstance(error, _Damaged) else f"it ends after {size} bytes, inside its header"
                raise ModelFileError(f"{path} is damaged: {reason}: {_AGAIN}") from None
    needed = max((tensor.begin + tensor.size for tensor in header.tensors), default=0)
    if size < needed:
        raise ModelFileError(f"{path} is incomplete: it has {size} bytes of {needed}: {_AGAIN}")
    return header


class _Reader:
    """Walks over a header; the end of the file inside it is a ``struct.error``, or an OverflowError far behind it."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 8

    def header(self, path: Path) -> GGUFHeader:
        tensors, entries = self._take("QQ")
        metadata: dict[str, Value] = {}
        for _ in range(entries):
            key = self._text()
            value = self._value(self._take("I")[0])
            if value is not None:
                metadata[key] = value
        places = [self._tensor() for _ in range(tensors)]
        align = metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(align, int) or align < 1:
            raise _Damaged(f"{Keys.General.ALIGNMENT} is {align!r}")
        begin = -(-self._at // align) * align
        stored = (
            StoredTensor(name, shape, kind, path, begin + offset, _bytes(shape, kind))
            for name, shape, kind, offset in places
        )
        return GGUFHeader(path, metadata, tuple(stored))

    def _take(self, codes: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{codes}", self._data, self._at)
        self._at += struct.calcsize(f"<{codes}")
        return values

    def _text(self) -> str:
        (length,) = self._take("Q")
        return self._data[self._skip(length) : self._at].decode(errors="replace")

    def _skip(self, size: int) -> int:
        """Where the next ``size`` bytes begin; the position is behind them."""
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise struct.error
        return begin

    def _value(self, kind: int) -> Value | None:
        """The next value; None: an array that is not read."""
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind == GGUFValueType.ARRAY:
            of, length = self._take("I")[0], self._take("Q")[0]
            return self._array(of, length)
        return self._take(self._code(kind))[0]

    def _array(self, of: int, length: int) -> Value | None:
        if of == GGUFValueType.STRING:
            size_of, at, data = struct.Struct("<Q").unpack_from, self._at, self._data
            for _ in range(length):
                at += 8 + size_of(data, at)[0]
            self._at = at
            return None
        if of == GGUFValueType.ARRAY:
            raise _Damaged("it holds arrays of arrays")
        code = self._code(of)
        if length <= _LONGEST:
            return self._take(code * length)
        self._skip(length * struct.calcsize(f"<{code}"))
        return None

    def _code(self, kind: int) -> str:
        try:
            return _CODES[GGUFValueType(kind)]
        except (ValueError, KeyError):
            raise _Damaged(f"its header holds a value of unknown type {kind}") from None

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        shape = self._take("Q" * min(self._take("I")[0], _LONGEST))
        kind, offset = self._take("IQ")
        return name, shape, kind, offset


_SIZES: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def _bytes(shape: Sequence[int], kind: int) -> int:
    block, size = _SIZES.get(kind, (1, 0))
    count = 1
    for length in shape:
        count *= length
    return count // block * size


def fingerprint(header: GGUFHeader) -> str:
    """16 hexadecimal digits of SHA-256 over the tensors' names, shapes and types and over evenly spaced pieces of each.

    Another quantization of the same weights has another one: it is another distribution.

    Raises:
        ModelFileError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with ExitStack() as stack:
            paths = {tensor.file for tensor in header.tensors}
            files = {path: stack.enter_context(path.open("rb", buffering=0)) for path in paths}
            for tensor in header.tensors:
                digest.update(f"{tensor.name} {tensor.shape} {tensor.kind}\n".encode())
                for begin, size in _pieces(tensor.size):
                    files[tensor.file].seek(tensor.begin + begin)
                    digest.update(files[tensor.file].read(size))
    except OSError as error:
        raise _unreadable(header.path, error) from None
    return digest.hexdigest()[:16]


def _pieces(size: int) -> list[tuple[int, int]]:
    """Where pieces of a tensor of ``size`` bytes begin, and their sizes, from its first byte to its last."""
    if size <= _RUNS * _RUN:
        return [(0, size)]
    return [((size - _RUN) * i // (_RUNS - 1), _RUN) for i in range(_RUNS)]


def slot_bytes(header: GGUFHeader, keys: int, values: int) -> int:
    """Bytes that one token takes in the cache.

    Args:
        keys, values: ggml's numbers of their types.

    Raises:
        ModelFileError: the file does not say how large a layer's keys are.
    """
    layers = header.layers
    heads = header.numbers(Keys.Attention.HEAD_COUNT) or ()
    shared = header.numbers(Keys.Attention.HEAD_COUNT_KV) or heads
    widths = header.widths
    if not layers or not shared or not all(widths) or len(shared) not in (1, layers):
        raise ModelFileError(f"{header.path} does not give its {header.architecture}.attention.head_count: {_AGAIN}")
    total = sum(_bytes((n * w,), kind) for n in shared for w, kind in zip(widths, (keys, values), strict=True))
    return total * layers // len(shared)


def unloadable(library: Library, path: Path) -> DraftreeError:
    """The error of a model that llama.cpp has just failed to load, with the reason out of its complaints."""
    why = "error loading model: "
    reasons = [line.split(why)[-1] for line in library.complaints if why in line]
    reason = reasons[-1] if reasons else library.complaint() or "it gives no reason"
    library.complaints = []
    if "unknown model architecture" in reason:
        return UnsupportedModelError(f"{path}: {reason} to {library.name}: {_OTHER_BACKEND}")
    return ModelFileError(f"llama.cpp cannot load {path}: {reason}: {_AGAIN}, or use backend 'transformers'")


_OTHER_BACKEND = "use backend 'transformers', if transformers knows it"


def refuse(library: Library, model: int, header: GGUFHeader) -> None:
    """Reject a loaded model whose cache cannot hold trees.

    Args:
        model: the pointer to it.

    Raises:
        UnsupportedModelError: it cannot be given draft trees.
    """
    own = "use llama.cpp itself for it"
    why = None
    if library.model_has_encoder(model):
        why = "it is an encoder-decoder model: load a decoder-only one"
    elif (
        not library.model_has_decoder(model) or header.metadata.get(f"{header.architecture}.attention.causal") is False
    ):
        why = "it is an encoder, which generates no text: load a decoder-only one"
    elif library.model_is_hybrid(model) or library.model_is_recurrent(model):
        why = f"it keeps a recurrent state that cannot branch: {own}"
    elif window := library.model_n_swa(model):
        why = f"its cache forgets what lies beyond a window of {window} tokens: use backend 'transformers', or {own}"
    if why:
        raise UnsupportedModelError(f"{header.path} ({header.architecture}) cannot verify draft trees: {why}")
