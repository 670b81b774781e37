"""Damaged files: an error, never a crash, nor a read or write outside of the engine's memory."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import TokenType

from native import build
from tests import tiny_gguf

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sanitized() -> tuple[Path, str]:
    """The library that ends the process at undefined behaviour, and the runtime that must be loaded before it."""
    compiler = build.find_compiler()
    command = [] if compiler is None or compiler.zig else [*compiler.command, "-print-file-name=libasan.so"]
    runtime = command and subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603
    if not runtime or not Path(runtime).is_absolute():
        pytest.skip("no C compiler with AddressSanitizer")
    return build.build(build.OBJECTS / "sanitized", extra=(*build.SANITIZE, "-Werror")), runtime


@pytest.mark.parametrize("weights", ["F16", "Q4_K"])
def test_damaged_files_are_errors(weights: str, sanitized: tuple[Path, str], tmp_path: Path) -> None:
    library, runtime = sanitized
    words = tiny_gguf.Vocabulary("none", tuple(f"{i}" for i in range(40)), (TokenType.NORMAL,) * 40)
    path = tiny_gguf.write(tmp_path / "m.gguf", layers=1, hidden=256, heads=8, vocabulary=words, weights=weights)
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "tests.models.native.damage", str(path), "600", str(library)],
        cwd=ROOT,
        env={
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = ast.literal_eval(done.stdout)
    assert sum(outcomes.values()) == 600
    assert outcomes["ran"] > 50 and outcomes["ModelFileError"] > 200, outcomes
