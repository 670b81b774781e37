"""Metadata of every other type than a key has: a file loads and decodes, or is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from gguf import GGUFValueType as Kind

from ...tiny_gguf import byte_level, with_byte_fallback, write
from .retyped import Rewriter, number, text


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of byte-level BPE; of SentencePiece; of a rope that YaRN scales."""
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / f"{name}.gguf" for name in ("bpe", "pieces", "yarn")]
    for path, words in zip(paths, (byte_level(), with_byte_fallback(), byte_level()), strict=True):
        write(path, layers=1, hidden=64, heads=2, kv_heads=1, vocabulary=words)
    scaling = {
        "type": text(b"yarn"),
        "factor": number(Kind.FLOAT32, 2),
        "original_context_length": number(Kind.UINT32, 512),
    }
    for key, value in scaling.items():
        Rewriter(paths[2]).copy(paths[2], f"llama.rope.scaling.{key}", value)
    return paths


@pytest.mark.parametrize("backend", ["native", "llama.cpp"])
def test_a_value_of_another_type_is_refused_in_one_line_or_decodes(backend: str, files: list[Path]) -> None:
    """An array as ``add_bos_token`` or ``rope.scaling.type``, and ``yarn_beta_fast`` 1e-320 were tracebacks; of some
    values llama.cpp ends the process."""
    command = [sys.executable, "-m", "tests.models.gguf.retyped", backend, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    outcomes = dict(zip(lines[::2], lines[1::2], strict=True))
    assert {copy: became for copy, became in outcomes.items() if became not in ("loaded", "refused")} == {}
    assert min(Counter(outcomes.values()).values()) > 100
