"""The benchmark of large models: its files, going on where it was stopped, and what its tables are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from benchmarks import native_large
from benchmarks.native_large import DRAFTS, ENGINES, NEAR, Part, bound, parts_of, run
from benchmarks.native_shapes import SHAPES, write
from draftree.models.base import prefill_scored
from draftree.models.gguf.gguf_checks import check
from draftree.models.llama.library import Weights, open_library
from draftree.models.native.native_model import NativeModel

NAME, LAYERS = "llama-8b", 2
TINY = replace(SHAPES["qwen3-4b"], hidden=256, heads=2, key_heads=1, feed_forward=256, layers=8, vocabulary=512)


def test_a_shapes_file_is_of_its_size_and_both_engines_load_it(tmp_path: Path) -> None:
    written = list[int]()
    path = write(tmp_path / "tiny.gguf", TINY, written.append)
    tensors = check(path).tensors
    assert sum(tensor.size for tensor in tensors) == TINY.file_bytes
    assert written == list(range(1, 9))
    assert NativeModel(path).capabilities.vocab_size == Weights(open_library(), path).vocab_size == 512
    precise = {tensor.name for tensor in tensors if tensor.kind == GGMLQuantizationType.Q6_K}
    values = {f"blk.{layer}.{name}.weight" for layer in (0, 3, 6, 7) for name in ("attn_v", "ffn_down")}
    assert precise == values | {"token_embd.weight"}


def test_the_sizes_of_the_shapes_are_those_of_the_published_files() -> None:
    """Of Q4_K_M: 2.50 GB, 4.92 GB, and 18.6 GB of the mixture of experts; of Qwen 3.5 about as large ones."""
    sizes = {name: round(shape.file_bytes / 1e9, 1) for name, shape in SHAPES.items()}
    assert sizes == {
        "qwen3-4b": 2.5,
        "qwen3-30b-a3b-sixth": 3.1,
        "llama-8b": 4.9,
        "qwen3.5-0.8b": 0.5,
        "qwen3.5-4b": 2.6,
        "qwen3.5-9b": 5.5,
    }


def test_a_shape_with_experts_is_loaded_and_chooses_among_them(tmp_path: Path) -> None:
    tiny = replace(SHAPES["qwen3-30b-a3b-sixth"], hidden=256, heads=2, key_heads=1, feed_forward=256, vocabulary=512)
    model = NativeModel(path := write(tmp_path / "tiny.gguf", tiny))
    assert sum(tensor.size for tensor in check(path).tensors) == tiny.file_bytes
    assert Weights(open_library(), path).vocab_size == 512
    assert np.ptp(prefill_scored(model, [1, 2, 3])[1].logits([0])) > 0
    assert model.capabilities.expert_share == 8 / 128


def test_attention_of_a_shape_with_experts_is_measured_without_them(tmp_path: Path) -> None:
    can = NativeModel(write(tmp_path / "alone.gguf", SHAPES["qwen3-30b-a3b-sixth"].attention_alone(2))).capabilities
    assert (can.architecture, can.expert_bytes) == ("qwen3", 0)


def test_a_hybrid_shape_is_loaded_and_decodes(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden": 256,
        "heads": 2,
        "key_heads": 1,
        "feed_forward": 256,
        "layers": 4,
        "vocabulary": 20480,
    }
    tiny = replace(SHAPES["qwen3.5-4b"], **sizes, key_states=2, value_states=4)
    model = NativeModel(path := write(tmp_path / "tiny.gguf", tiny))
    assert np.isfinite(prefill_scored(model, [1, 2, 3])[1].logits([0])).all()
    assert model.capabilities.slot_bytes == tiny.key_bytes  # one layer attends
    assert not any(part.attention for part in parts_of("qwen3.5-4b"))
    measured = {engine: list(native_large.passes(engine, path, 16, 1)) for engine in ENGINES}
    assert measured == {"native": [*DRAFTS], "llama.cpp": ["1", "2", "4", "8", "16"]}


class Measured:
    """Stands for the processes: seconds grow by 1 ms for each 1,000 tokens of context and layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native_large, "measure", self.measure)
        monkeypatch.setattr(native_large, "write", lambda path, shape: path.touch() or path)
        monkeypatch.setattr(native_large, "bandwidth", lambda: 1e10)
        monkeypatch.setattr(native_large, "multiply_adds", lambda: 1e11)

    def measure(self, part: Part, path: Path, count: int) -> dict[str, float]:
        assert path.exists() and path.name == (f"{LAYERS}.gguf" if part.attention else "whole.gguf")
        if not part.context:
            return {"seconds": 1.0, "busy": 2.0, "peak": 5e9, "kept": 5e9}
        layers = LAYERS if part.attention else 32
        return {draft: 0.01 + 1e-6 * layers * (part.context - NEAR) for draft in DRAFTS}


def lines(out: Path | None) -> Sequence[str]:
    return run([NAME], LAYERS, 1, out)


def test_attention_is_scaled_from_some_layers_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch)
    (whole,) = (line for line in lines(None) if "context 4096 (attention of 2 layers for 32)" in line)
    ms = 10 + 32 * (4096 - NEAR) / 1000
    assert whole.split("|")[2].split(",")[0].strip() == f"{ms:.1f}"


def test_the_bound_is_the_larger_of_reading_and_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch)
    read, multiplied = 32 * 16384 * 4 * 8 * 128 / 1e10, 32 * 16 * 32 * 128 * 16384 * 2 / 1e11
    for nodes, expected, reason in ((1, read, "reading"), (16, multiplied, "arithmetic")):
        seconds, found = bound(SHAPES[NAME], 16384, nodes)
        assert seconds == pytest.approx(expected) and found == reason
