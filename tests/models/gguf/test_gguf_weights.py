"""Rows of a GGUF file's embeddings and output layer are those of the whole matrix, and heads draft with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from draftree.models.gguf.gguf_file import EMBEDDINGS, OUTPUT, PackedRows, packed_rows, read

VOCAB, HIDDEN = 40, 512
IDS = torch.tensor([39, 0, 7, 7, 20])
EVERY = torch.arange(VOCAB)
_IDS = IDS.numpy()
KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
FINITE = 0x7C
"""Bytes below it make no half-precision scale infinite."""


def packed(kind: Kind, seed: int = 0) -> NDArray[np.uint8]:
    """[V, bytes of a row] of random weights in this format; of those that the package cannot write, random bytes."""
    rng = np.random.default_rng(seed)
    try:
        weights = gguf.quantize(rng.standard_normal((VOCAB, HIDDEN), np.float32), kind)
    except NotImplementedError:
        _, size = gguf.quant_shape_to_byte_shape([VOCAB, HIDDEN], kind)
        return rng.integers(0, FINITE, (VOCAB, size), np.uint8)
    return weights.view(np.uint8)


def write(path: Path, tensors: Mapping[str, tuple[NDArray[Any], Kind]], alignment: int | None = None) -> Path:
    """A file with these tensors among others."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_token_list([f"token {i}" for i in range(VOCAB)])
    writer.add_tensor("first.weight", np.ones((3, 5), np.float32))
    for name, (weights, kind) in tensors.items():
        writer.add_tensor(name, weights, raw_dtype=kind)
        writer.add_tensor(f"beside.{name}", np.ones((1, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights_of(path: Path) -> dict[str, PackedRows]:
    return packed_rows(read(path))


def whole(weights: NDArray[np.uint8], kind: Kind) -> NDArray[np.float32]:
    return gguf.dequantize(weights, kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_are_those_of_the_whole_matrix(kind: Kind, tmp_path: Path) -> None:
    weights = packed(kind)
    read = weights_of(write(tmp_path / "tied.gguf", {"token_embd.weight": (weights, kind)}))
    wanted = whole(weights, kind)
    assert wanted.shape == (VOCAB, HIDDEN)
    for ids in (_IDS, EVERY.numpy(), _IDS[:1]):
        assert read[EMBEDDINGS].rows(ids).dtype == np.float32
        assert np.array_equal(read[EMBEDDINGS].rows(ids), wanted[ids])
        assert np.array_equal(read[OUTPUT].rows(ids), wanted[ids])  # tied: the output layer has the embeddings' weights


@pytest.mark.parametrize("alignment", [None, 256])
def test_an_output_layer_of_its_own_has_rows_of_its_own(alignment: int | None, tmp_path: Path) -> None:
    own = packed(Kind.Q6_K, 1)
    tensors: dict[str, tuple[NDArray[Any], Kind]] = {
        "output.weight": (own, Kind.Q6_K),
        "token_embd.weight": (packed(Kind.Q4_K), Kind.Q4_K),
    }
    read = weights_of(write(tmp_path / "untied.gguf", tensors, alignment))
    assert np.array_equal(read[EMBEDDINGS].rows(_IDS), whole(packed(Kind.Q4_K), Kind.Q4_K)[_IDS])
    assert np.array_equal(read[OUTPUT].rows(_IDS), whole(own, Kind.Q6_K)[_IDS])
