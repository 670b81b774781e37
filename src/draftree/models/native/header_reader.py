"""What a GGUF header holds for the native engine, number by number and tensor by tensor, and what nothing has read."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType as Format
from gguf.constants import Keys
from numpy.typing import NDArray

from ...errors import ModelFileError, NotNativeError
from ..gguf.gguf_file import GGUFHeader

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


def unsupported(header: GGUFHeader, what: str) -> NotNativeError:
    return NotNativeError(f"the native engine does not know {what} of {header.path.name}")


def damaged(header: GGUFHeader, what: str) -> ModelFileError:
    return ModelFileError(f"{header.path} is damaged: {what}: download it again")


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
        NotNativeError: it has several parts, or a number under a key that nothing reads.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._read: set[str] = set()
        if any(tensor.file != header.path for tensor in header.tensors):
            raise unsupported(header, "models in several files")
        arch = header.architecture
        read = {key.format(arch=arch) for key in _READ}
        for key in header.metadata:
            if key.startswith(f"{arch}.") and key not in read:
                raise unsupported(header, f"the setting {key}")

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number under a key, the same for all layers; not 0, unless that is the default."""
        found, name = self.header.numbers(key), key.format(arch=self.header.architecture)
        if found is None:
            if default is None:
                raise damaged(self.header, f"it has no {name}")
            return default
        if len(set(found)) > 1:
            raise unsupported(self.header, f"{name} that differs by layer")
        if found[0] > _LARGEST or (not found[0] and default != 0):
            raise damaged(self.header, f"its {name} is {found[0]}")
        return found[0]

    def real(self, key: str, default: float | None = None) -> float:
        """The number under a key: finite, and positive."""
        key = key.format(arch=self.header.architecture)
        found = self.header.metadata.get(key, default)
        if not isinstance(found, int | float) or not 0 < found < math.inf:
            raise damaged(self.header, f"its {key} is {found!r}" if found is not None else f"it has no {key}")
        return float(found)

    def text(self, key: str, default: str) -> str:
        return str(self.header.metadata.get(key.format(arch=self.header.architecture), default))

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
            raise damaged(self.header, f"it has no tensor {name}")
        self._read.add(name)
        if tensor.kind not in FORMATS:
            named = {each.value: each.name for each in Format}
            raise unsupported(self.header, f"the format {named.get(tensor.kind, tensor.kind)} of tensor {name}")
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        if not 1 <= len(tensor.shape) <= 2 or not tensor.shape[0] or not rows:
            raise unsupported(self.header, f"the shape {tensor.shape} of tensor {name}")
        return Place(tensor.begin, tensor.kind, rows, tensor.shape[0])

    def vector(self, name: str) -> NDArray[np.float64]:
        """The numbers of a float32 tensor."""
        place, tensor = self.place(name), self._tensors[name]
        if place.format != Format.F32 or place.rows != 1:
            raise unsupported(self.header, f"a tensor {name} that is no vector of float32")
        found = np.fromfile(tensor.file, "<f4", place.columns, offset=tensor.begin).astype(np.float64)
        if not (np.isfinite(found) & (found > 0)).all():
            raise damaged(self.header, f"{name} holds numbers that are not positive")
        return found

    def part(self, name: str, first: int, rows: int) -> Place:
        """Some rows of a matrix."""
        whole, tensor = self.place(name), self._tensors[name]
        return Place(whole.offset + tensor.size // whole.rows * first, whole.format, rows, whole.columns)

    def unread(self) -> list[str]:
        """Tensors that nothing has read."""
        return [name for name in self._tensors if name not in self._read]
