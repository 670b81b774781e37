"""A GGUF file: its header and its fingerprint.

The header alone is parsed, and texts of the vocabulary stay bytes: ``gguf.GGUFReader`` makes an array of each token,
which takes 7 s for 150,000 of them.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, Keys
from numpy.typing import NDArray

from ...artifacts import check_regular
from ...errors import ModelFileError, UnsupportedModelError
from .metadata import AGAIN, Metadata, Value, damaged

_VERSIONS = (2, 3)
_DIMENSIONS = 4
"""Most of a tensor."""
_RUNS, _RUN = 16, 256
"""Pieces of each tensor that go into the fingerprint, and their bytes: about a megabyte of a model of 30 layers."""
_NUMBERS = {int(kind): np.dtype(number).newbyteorder("<") for kind, number in GGUFReader.gguf_scalar_to_np.items()}
"""Types of metadata that are numbers."""


_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
"""Tensors of the embeddings and of the output layer; a model without the latter multiplies by the former."""


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

    @property
    def data(self) -> NDArray[np.uint8]:
        """[size] its bytes, mapped.

        Raises:
            ModelFileError: the file is no longer there, or shorter.
        """
        if not self.size:
            return np.zeros(0, np.uint8)
        try:
            return np.asarray(np.memmap(self.file, np.uint8, "r", self.begin, (self.size,)))
        except (OSError, ValueError) as error:
            raise damaged(self.file, f"tensor {self.name} cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file; for a model in several parts, with the tensors of all."""

    metadata: Metadata
    tensors: tuple[StoredTensor, ...]

    @property
    def path(self) -> Path:
        return self.metadata.path

    @property
    def architecture(self) -> str:
        return self.metadata.architecture

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """Where the file lists others beside it, all by name, and it as "default"; None: the file has none."""
        default = self.metadata.text(Keys.Tokenizer.CHAT_TEMPLATE)
        names = [name.decode(errors="replace") for name in self.metadata.texts(Keys.Tokenizer.CHAT_TEMPLATES)]
        named = {name: self.metadata.text(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name)) for name in names}
        others = {name: template for name, template in named.items() if template}
        return {**others, "default": default} if default and others else default

    @property
    def token_types(self) -> NDArray[Any] | None:
        """Of the vocabulary, one a token; None where the file has none."""
        return self.metadata.array(Keys.Tokenizer.TOKEN_TYPE, "int32", "uint32")

    @property
    def token_scores(self) -> NDArray[Any] | None:
        """Of the vocabulary, one a token; None where the file has none."""
        return self.metadata.array(Keys.Tokenizer.SCORES, "float32")

    @property
    def weight_bytes(self) -> int:
        """Of all tensors whose type is known."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def layers(self) -> int:
        """Decoder layers; 0 where the file does not tell."""
        return self.metadata.number(Keys.LLM.BLOCK_COUNT) or 0

    @property
    def draft_layer(self) -> Mapping[str, StoredTensor]:
        """The tensors of a layer behind the model's that predicts one token more, by their names in it; empty: none."""
        if self.metadata.number(Keys.LLM.NEXTN_PREDICT_LAYERS) != 1:
            return {}
        block = f"blk.{self.layers - 1}."
        return {each.name.removeprefix(block): each for each in self.tensors if each.name.startswith(block)}

    @property
    def widths(self) -> tuple[int, int]:
        """Of a head's keys and values; 0 where the file does not tell."""
        metadata = self.metadata
        heads = metadata.numbers(Keys.Attention.HEAD_COUNT) or ()
        head_width = (metadata.number(Keys.LLM.EMBEDDING_LENGTH) or 0) // max((*heads, 1))
        keys, values = (metadata.number(key) for key in (Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH))
        return keys or head_width, values or head_width

    @property
    def has_float_layers(self) -> bool:
        """Passes multiply by matrices of floats, of which quantized files may have some too: routers of experts."""
        matrices = [
            tensor
            for tensor in self.tensors
            if tensor.kind in _FLOATS and len(tensor.shape) > 1 and min(tensor.shape) > 1
        ]
        names = {tensor.name for tensor in matrices if tensor.name.endswith(".weight") and "conv" not in tensor.name}
        return bool(names - ({EMBEDDINGS} if any(tensor.name == OUTPUT for tensor in self.tensors) else set()))

    @property
    def is_latent(self) -> bool:
        """Its attention is over latent vectors, of which the values are a part (MLA, arXiv 2405.04434)."""
        return self.metadata.number(Keys.Attention.KEY_LENGTH_MLA) is not None


class _DamagedError(Exception):
    """The bytes are no header."""


def read(path: Path) -> GGUFHeader:
    """The header of one file.

    Raises:
        OSError: it cannot be read.
        ModelFileError: it is no GGUF file, or a damaged one.
        UnsupportedModelError: it is of a version that llama.cpp does not read.
    """
    with check_regular(path).open("rb") as file:
        start = file.read(8)
        if start[:4] != b"GGUF":
            raise ModelFileError(f"cannot read {path}: it does not start like a GGUF file: {AGAIN}")
        size = os.fstat(file.fileno()).st_size
        version = int.from_bytes(start[4:], "little")
        if len(start) == 8 and version not in _VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise UnsupportedModelError(f"{path} is a GGUF file of {what}, not of version 2 or 3: convert it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data)
            try:
                header = reader.header(path)
            except (_DamagedError, struct.error, OverflowError) as error:
                ends = f"it ends after {size} bytes, inside its header"
                reason = str(error) if isinstance(error, _DamagedError) else ends
                raise damaged(path, f"{reason}{reader.place}") from None
    if beyond := next((tensor for tensor in header.tensors if tensor.begin + tensor.size > size), None):
        needed = max(tensor.begin + tensor.size for tensor in header.tensors)
        raise ModelFileError(
            f"{path} is incomplete: it has {size} bytes of {needed}, and tensor {beyond.name} lies beyond: {AGAIN}"
        )
    return header


class _Reader:
    """Walks over a header; the end of the file inside it is a ``struct.error``, or an OverflowError far behind it.

    Attributes:
        place: behind what it has last read the name of, for people.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 8
        self.place = ""

    def header(self, path: Path) -> GGUFHeader:
        tensors, entries = self._take("QQ")
        stored: dict[str, Value] = {}
        for _ in range(entries):
            key = self._text()
            if key in stored:
                raise _DamagedError(f"{key} is there twice")
            self.place = f", at {key}"
            stored[key] = self._value(self._take("I")[0])
        places = [self._tensor() for _ in range(tensors)]
        self.place = ""
        metadata = Metadata(path, stored)
        align = metadata.number(Keys.General.ALIGNMENT)
        align = GGUF_DEFAULT_ALIGNMENT if align is None else align
        if align < 1 or align & (align - 1):
            raise _DamagedError(f"{Keys.General.ALIGNMENT} is {align}, not a power of 2")
        begin, end, stored_tensors = -(-self._at // align) * align, 0, list[StoredTensor]()
        for name, shape, kind, offset in places:
            if offset < end or (offset > end and (not stored_tensors or stored_tensors[-1].size)):
                raise _DamagedError(f"tensor {name} is at byte {offset} of the weights, where {end} is next")
            stored_tensors.append(StoredTensor(name, shape, kind, path, begin + offset, _bytes(shape, kind)))
            end = -(-(offset + stored_tensors[-1].size) // align) * align
        return GGUFHeader(metadata, tuple(stored_tensors))

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

    def _value(self, kind: int) -> Value:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._numbers(kind, 1).item()  # type: ignore[no-any-return]
        of, length = self._take("IQ")
        return self._texts(length) if of == GGUFValueType.STRING else self._numbers(of, length)

    def _texts(self, count: int) -> list[bytes]:
        size_of, at, data = struct.Struct("<Q").unpack_from, self._at, self._data
        texts: list[bytes] = []
        for _ in range(count):
            end = at + 8 + size_of(data, at)[0]
            texts.append(data[at + 8 : end])
            at = end
        self._at = at
        return texts

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        if (number := _NUMBERS.get(kind)) is None:
            raise _DamagedError(f"its header holds a value of unknown type {kind}")
        begin = self._skip(count * number.itemsize)
        return np.frombuffer(self._data[begin : self._at], number)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        self.place = f", at tensor {name}"
        (count,) = self._take("I")
        if not 1 <= count <= _DIMENSIONS:
            raise _DamagedError(f"it has {count} dimensions")
        shape = self._take("Q" * count)
        kind, offset = self._take("IQ")
        block, _ = _SIZES.get(kind, (1, 0))
        if 0 in shape or shape[0] % block:
            raise _DamagedError(f"its shape is {list(shape)}, in blocks of {block}")
        return name, shape, kind, offset


_SIZES: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def _bytes(shape: Sequence[int], kind: int) -> int:
    block, size = _SIZES.get(kind, (1, 0))
    return math.prod(shape) // block * size


def fingerprint(header: GGUFHeader) -> str:
    """16 hexadecimal digits of SHA-256 over the tensors' names, shapes and types and over evenly spaced pieces of each.

    Another quantization of the same weights has another one: it is another distribution.
    """
    digest = hashlib.sha256()
    for tensor in header.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.kind}\n".encode())
        pieces = [((tensor.size - _RUN) * i // (_RUNS - 1), _RUN) for i in range(_RUNS)]
        with tensor.file.open("rb", buffering=0) as file:
            for begin, size in pieces if tensor.size > _RUNS * _RUN else [(0, tensor.size)]:
                file.seek(tensor.begin + begin)
                digest.update(file.read(size))
    return digest.hexdigest()[:16]


def slot_bytes(header: GGUFHeader, keys: int, values: int) -> int:
    """Bytes that one token takes in the cache.

    Args:
        keys, values: ggml's numbers of their types.

    Raises:
        ModelFileError: the file does not say how large a layer's keys are.
    """
    layers = header.layers
    heads = header.metadata.numbers(Keys.Attention.HEAD_COUNT) or ()
    shared = header.metadata.numbers(Keys.Attention.HEAD_COUNT_KV) or heads
    widths = header.widths
    if not layers or not any(shared) or not all(widths) or len(shared) not in (1, layers):
        raise ModelFileError(f"{header.path} does not give its {header.architecture}.attention.head_count: {AGAIN}")
    stored = [(widths[0], keys)] if header.is_latent else [*zip(widths, (keys, values), strict=True)]
    total = sum(_bytes((n * width,), kind) for n in shared for width, kind in stored)
    return total * layers // len(shared)
