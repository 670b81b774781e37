"""Reading the header of a GGUF file as the native engine's description needs it: what nothing reads is an error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
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
    *(Keys.Rope.SCALING_YARN_BETA_FAST, Keys.Rope.SCALING_YARN_BETA_SLOW, Keys.Rope.SCALING_YARN_ATTN_FACTOR),
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

    Args:
        header: of the file.
        settings: keys that its architecture reads beside those that all do.

    Raises:
        NotNativeError: it has a number under a key that nothing reads.
    """

    def __init__(self, header: GGUFHeader, settings: Iterable[str]) -> None:
        self.header = header
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._read: set[str] = set()
        self.files = tuple(dict.fromkeys(tensor.file for tensor in header.tensors))
        sizes = [file.stat().st_size for file in self.files]
        self._begins = dict(zip(self.files, accumulate(sizes, initial=0), strict=False))
        self.metadata = header.metadata
        read = {self.metadata.name(key) for key in (*_READ, *settings)}
        for key in self.metadata.stored:
            if key.startswith(f"{header.architecture}.") and key not in read:
                raise unsupported(header, f"the setting {key}")

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number under a key, the same for all layers; not 0, unless that is the default."""
        values, name = self.metadata.numbers(key), self.metadata.name(key)
        if values is None:
            if default is None:
                raise damaged(self.header.path, f"it has no {name}")
            return default
        if len(set(values)) > 1:
            raise unsupported(self.header, f"{name} that differs by layer")
        if values[0] > _LARGEST or (not values[0] and default != 0):
            raise damaged(self.header.path, f"its {name} is {values[0]}")
        return values[0]

    def real(self, key: str, default: float | None = None) -> float:
        """The number under a key: one that float32 holds in full, and positive, or 0 where that is the default."""
        value, name = self.metadata.real(key), self.metadata.name(key)
        if value is None:
            if default is None:
                raise damaged(self.header.path, f"it has no {name}")
            return default
        if not _LEAST_REAL <= value <= _MOST_REAL and not value == default == 0:
            raise damaged(self.header.path, f"its {name} is {value}")
        return value

    def has(self, name: str) -> bool:
        return name in self._tensors

    def place(self, name: str, matrices: int = 0) -> Place:
        """Where a tensor lies, which counts as read then.

        Args:
            matrices: so many of the same shape are in it, and their rows are those of one; 0: it has two dimensions
                at most.

        Raises:
            ModelFileError: there is none, or it has another number of matrices.
            NotNativeError: it has an unknown type, or another number of dimensions.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise damaged(self.header.path, f"it has no tensor {name}")
        self._read.add(name)
        if tensor.kind not in FORMATS:
            named = {each.value: each.name for each in Format}
            raise unsupported(self.header, f"the format {named.get(tensor.kind, tensor.kind)} of tensor {name}")
        rows, dimensions = math.prod(tensor.shape[1:]), (3,) if matrices else (1, 2)
        if len(tensor.shape) not in dimensions or not all(0 < size <= _LARGEST for size in (rows, tensor.shape[0])):
            raise unsupported(self.header, f"the shape {tensor.shape} of tensor {name}")
        if matrices and tensor.shape[-1] != matrices:
            raise damaged(self.header.path, f"tensor {name} has {tensor.shape[-1]} matrices, not {matrices}")
        return Place(self._begins[tensor.file] + tensor.begin, tensor.kind, rows, tensor.shape[0])

    def leave(self, prefix: str) -> None:
        """Leave the tensors of a draft head to it: those whose names begin so."""
        self._read.update(name for name in self._tensors if name.startswith(prefix))

    def vector(self, name: str) -> NDArray[np.float64]:
        """The numbers of a float32 tensor."""
        place, tensor = self.place(name), self._tensors[name]
        if place.format != Format.F32 or place.rows != 1:
            raise unsupported(self.header, f"a tensor {name} that is no vector of float32")
        numbers = np.fromfile(tensor.file, "<f4", place.columns, offset=tensor.begin).astype(np.float64)
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise damaged(self.header.path, f"{name} holds numbers that are not positive")
        return numbers

    def part(self, name: str, first: int, rows: int) -> Place:
        """Some rows of a matrix."""
        whole, tensor = self.place(name), self._tensors[name]
        return Place(whole.offset + tensor.size // whole.rows * first, whole.format, rows, whole.columns)

    def unread(self) -> list[str]:
        """Tensors that nothing has read."""
        return [name for name in self._tensors if name not in self._read]
