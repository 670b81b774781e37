"""Checkpoints of the architectures that the native engine runs, and their GGUF files: made once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from draftree.models.gguf.gguf_checks import check
from draftree.models.llama.library import open_library
from tests.checkpoints import DENSE, checkpoint, converted

_SPREAD = 0.06
"""Standard deviation of weights: attention is far from even, and logits are of order 1."""

STOCK = ("llama", "qwen2", "qwen3", "gemma3", "phi3", "smollm3")
"""What other tests run all of a pass with (``stock.CONFIGS``)."""


class Dense(NamedTuple):
    """A checkpoint, and the GGUF file that llama.cpp's converter makes of it."""

    model: PreTrainedModel
    path: Path


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Dense]:
    """By the names of ``DENSE``; folders have numbers, because llama.cpp gives files of some names other tokens."""
    root = tmp_path_factory.mktemp("dense")
    folders = [root / f"{number}" for number in range(len(DENSE))]
    models = [checkpoint(DENSE[name](), folder, _SPREAD) for name, folder in zip(DENSE, folders, strict=True)]
    return dict(zip(DENSE, map(Dense, models, converted(*folders)), strict=True))


def quantized(path: Path, kind: Kind, target: Path, lacking: str = "GGUF.") -> Path:
    """The file with matrices of another type, by llama.cpp's own quantization; those of few columns and routers
    stay as they are.

    Args:
        lacking: keys that it loses, by how they begin.
    """
    open_library()
    (found,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/xllamacpp" in line}
    quantize = ctypes.CDLL(found).ggml_quantize_chunk
    quantize.argtypes = [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, check(path).architecture)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", lacking)):
            kinds = field.types
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        values = np.ascontiguousarray(tensor.data)
        if values.ndim == 1 or values.shape[-1] % block or "ffn_gate_inp" in tensor.name:
            writer.add_tensor(tensor.name, values)
        else:
            *rows, columns = values.shape
            packed = np.empty((*rows, columns // block * size), np.uint8)
            quantize(kind, values.ctypes.data, packed.ctypes.data, 0, math.prod(rows), columns, None)
            writer.add_tensor(tensor.name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
