"""The embeddings and the output layer of a GGUF file by rows: what a draft head needs of a model that runs from one.

Quantized blocks run along a row, so that single rows are dequantized out of the mapped file, whose pages are those that
the engine has mapped: the float32 matrix (933 MB of a model of 1.5 billion weights) is never made.
"""

from __future__ import annotations

from functools import cached_property

import gguf
import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError, first_line
from .gguf_file import EMBEDDINGS, OUTPUT, GGUFHeader, StoredTensor

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]

_FIRST: Ids = np.zeros(1, np.int64)


class GGUFWeights:
    """Rows of the embeddings and of the output layer, float32 on the CPU; they are mapped at the first call.

    Args:
        header: of the file.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header

    def embeddings(self, ids: Ids) -> Rows:
        """[n, H] embeddings of tokens (``FeatureModel.embeddings``)."""
        return self._tensors[EMBEDDINGS].rows(ids)

    def output_rows(self, ids: Ids) -> Rows:
        """[n, H] weights of the output layer (``FeatureModel.output_rows``); the embeddings' where it has none."""
        return self._output.rows(ids)

    def output_blocks(self, ids: Ids) -> tuple[NDArray[np.uint8], gguf.GGMLQuantizationType]:
        """[n, bytes] rows of the output layer as the file has them, and their format."""
        return self._output.blocks(ids)

    @property
    def _output(self) -> PackedRows:
        return self._tensors.get(OUTPUT, self._tensors[EMBEDDINGS])

    @cached_property
    def _tensors(self) -> dict[str, PackedRows]:
        """The tensors of these names that are in the file; the embeddings always are.

        Raises:
            UnsupportedModelError: they cannot be read, or there are no embeddings.
        """
        found = {t.name: PackedRows(t) for t in self._header.tensors if t.name in (EMBEDDINGS, OUTPUT)}
        if EMBEDDINGS not in found:
            raise _unread(f"{self._header.path} has no tensor {EMBEDDINGS}")
        return found


class PackedRows:
    """A tensor as its file holds it; a vector is one row.

    Raises:
        UnsupportedModelError: it cannot be read, or nothing dequantizes its format.
    """

    def __init__(self, tensor: StoredTensor) -> None:
        count = tensor.shape[1] if len(tensor.shape) > 1 else 1
        try:
            mapped = np.memmap(tensor.file, np.uint8, "r", tensor.begin, (count, tensor.size // count))
            self._packed: NDArray[np.uint8] = np.asarray(mapped)
            self._kind = gguf.GGMLQuantizationType(tensor.kind)
            self.rows(_FIRST)
        except (OSError, ValueError, NotImplementedError) as error:
            raise _unread(f"{tensor.name} of {tensor.file}: {first_line(error)}") from None

    def blocks(self, ids: Ids) -> tuple[NDArray[np.uint8], gguf.GGMLQuantizationType]:
        """[n, bytes] rows as they are, and their format."""
        return self._packed[ids], self._kind

    def rows(self, ids: Ids) -> Rows:
        """[n, H] float32 rows."""
        return gguf.dequantize(self._packed[ids], self._kind)


def _unread(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"a draft head cannot read embeddings or output layer: {why}: use drafter 'lookup'")
