"""Damaged GGUF files: each is one line that names what is wrong, or it loads and decodes. llama.cpp aborts on some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Format

from draftree.errors import ModelFileError
from draftree.models.gguf.gguf_checks import check

from ... import tiny_gguf
from ...tiny_gguf import write
from .damaged import Change, is_fine, of_kind, of_length, overwritten, renamed, with_item, with_tensor

_EACH = 16
"""One of so many variants is tried, by the backend that is chosen for it and by llama.cpp."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each variant: its name, exit code, output and complaint."""
    command = [sys.executable, "-m", "tests.models.llama.damaged", str(tmp_path_factory.mktemp("files")), str(_EACH)]
    settings = os.environ | {"GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_at_least_150_variants_are_tried(outcomes: Sequence[dict[str, Any]]) -> None:
    assert len({each["name"] for each in outcomes}) == len(outcomes) >= 2 * 150


def test_each_is_refused_in_one_line_or_decodes(outcomes: Sequence[dict[str, Any]]) -> None:
    assert [each for each in outcomes if not is_fine(each)] == []
    assert {each["code"] for each in outcomes} == {0, 2}


_NORM, _GATE = "blk.0.attn_norm.weight", "blk.0.ffn_gate.weight"
_EPSILON = "llama.attention.layer_norm_rms_epsilon"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (overwritten("llama.block_count", 0), "llama.block_count is 0"),
        (overwritten("llama.block_count", 2**20), "llama.block_count is 1048576"),
        (overwritten("llama.context_length", 2**32 - 1), "llama.context_length is 4294967295"),
        (overwritten("llama.embedding_length", 0), "llama.embedding_length is 0"),
        (renamed("llama.embedding_length"), "llama.embedding_length"),
        (overwritten(_EPSILON, -1e-6), f"{_EPSILON} is -9.99"),
        (overwritten(_EPSILON, np.nan), f"{_EPSILON} is nan"),
        (overwritten(_EPSILON, np.inf), f"{_EPSILON} is inf"),
        (
            overwritten("llama.attention.head_count", 2**32 - 1),
            "llama.attention.head_count is 4294967295, .*64",
        ),
        (overwritten("llama.rope.dimension_count", 0), "llama.rope.dimension_count is 0, .*32"),
        (overwritten("llama.rope.dimension_count", 31), "llama.rope.dimension_count is 31, .*32"),
        (overwritten("llama.rope.dimension_count", 34), "llama.rope.dimension_count is 34, .*32"),
        (of_kind("tokenizer.ggml.merges", 99), "99, .*tokenizer.ggml.merges"),
        (of_length("tokenizer.chat_template", 2**62), "header, .*tokenizer.chat_template"),
        (with_item("tokenizer.ggml.tokens", 40, b"!"), "tokenizer.ggml.tokens has '!' twice"),
        (with_tensor(_NORM, 4, 26), f"{_NORM} .*I32, not F32"),
        (with_tensor(_NORM, 3, 0), f"at tensor {_NORM}"),
        (with_tensor(_GATE, 2, 9), f"9 dimensions, .*{_GATE}"),
        (with_tensor(_GATE, 3, 33), rf"\[33, 128\], .*32, .*{_GATE}"),
        (with_tensor(_GATE, 3, 2**40), "blk.0.ffn_up.weight .*byte"),
        (with_tensor(_GATE, 4, 26), f"{_GATE} .*I32|blk.0.ffn_up.weight .*byte"),
        (with_tensor(_GATE, 5, 32), f"{_GATE} .*byte 32"),
        (with_tensor("blk.0.attn_q.weight", 1, ord("k"), 11), "blk.0.attn_k.weight .*twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Change, named: str) -> None:
    path = write(tmp_path / "tiny.gguf", weights="Q8_0", layers=1, hidden=64, heads=2, kv_heads=1)
    change(reader := gguf.GGUFReader(path, "r+"))
    reader.data.flush()
    with pytest.raises(ModelFileError, match=named):
        check(path)


@pytest.mark.parametrize("weights", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_weight_that_is_no_number_is_found_in_any_tensor(tmp_path: Path, weights: str, value: float) -> None:
    """A NaN in one matrix reached no logits: llama.cpp rounds activations to blocks of integers in between."""
    path = write(tmp_path / "tiny.gguf", weights=weights, layers=1)
    check(path)
    for tensor in gguf.GGUFReader(path).tensors:
        reader = gguf.GGUFReader(path, "r+")
        _, block = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        at = tensor.data_offset + tensor.n_bytes // block // 2 * block
        number = np.array([value], np.float32)
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            number = (number.view(np.uint32) >> 16).astype(np.uint16)
        elif tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            number = number.astype(np.float16)
        before = reader.data[at : at + number.nbytes].copy()
        reader.data[at : at + number.nbytes] = number.view(np.uint8)
        reader.data.flush()
        with pytest.raises(ModelFileError, match=f"{tensor.name} .*NaN"):
            check(path)
        reader.data[at : at + number.nbytes] = before
        reader.data.flush()
    check(path)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Format.Q4_K, [0, 0x3C, 0, 0x3C], [0, 0x3C, 0, 0x7C]),
        (Format.MXFP4, [0xFE], [0xFF]),
        (Format.Q1_0, [0xFF, 0x7B], [0, 0x7C]),
        (Format.IQ3_S, [0xFF, 0x7B], [0, 0x7C]),
        (Format.IQ1_M, [0, 0xF0, 0, 0xF0, 0, 0xB0, 0, 0x70], [0, 0, 0, 0, 0, 0xC0, 0, 0x70]),
    ],
)
def test_scales_that_are_no_numbers_are_found_in_tensors_of_experts(
    tmp_path: Path, kind: Format, good: Sequence[int], bad: Sequence[int]
) -> None:
    """Three dimensions, and each format's own place for its scales."""
    begin = {Format.IQ1_M: 48}.get(kind, 0)
    block, size = gguf.GGML_QUANT_SIZES[kind]

    def checked(scale: Sequence[int]) -> None:
        packed = np.zeros((2, 3, 256 // block, size), np.uint8)
        packed[1, 2, 0, begin : begin + len(scale)] = scale
        writer = gguf.GGUFWriter(tmp_path / "experts.gguf", "llama")
        writer.add_context_length(8)
        writer.add_embedding_length(256)
        writer.add_block_count(1)
        writer.add_array("tokenizer.ggml.tokens", ["a"])
        writer.add_tensor("blk.0.ffn_up_exps.weight", packed.reshape(2, 3, -1), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert check(tmp_path / "experts.gguf").tensors[0].shape == (256, 3, 2)

    checked(good)
    with pytest.raises(ModelFileError, match="blk.0.ffn_up_exps.weight .*NaN"):
        checked(bad)


@pytest.mark.parametrize("kind", [Format.Q8_1, Format.Q8_K])
def test_formats_of_activations_are_no_weights(tmp_path: Path, kind: Format) -> None:
    """llama.cpp calls a function that it does not have for them."""
    path = write(tmp_path / "tiny.gguf", weights="Q8_0", layers=1, hidden=256, heads=8)
    with_tensor("blk.0.attn_output.weight", 4, kind)(reader := gguf.GGUFReader(path, "r+"))
    reader.data.flush()
    with pytest.raises(ModelFileError, match=f"type {kind.name}|at byte"):
        check(path)


@pytest.mark.parametrize(
    ("architecture", "kind", "named"),
    [("gpt-oss", "F16", "_exps.bias"), ("gpt-oss", "Q8_0", "_exps.bias"), ("mamba", "F16", "ssm_a")],
)
def test_matrices_that_are_no_weights_are_floats(
    tmp_path: Path, architecture: str, kind: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp ends the process on others, in the first pass."""
    monkeypatch.setattr(tiny_gguf, "_FLOATS", ())
    path = tmp_path / "tiny.gguf"
    write(path, architecture=architecture, weights=kind, layers=1, hidden=64, heads=2, kv_heads=1)
    with pytest.raises(ModelFileError, match=rf"{named} .*{kind}, not F32"):
        check(path)
