"""Damaged files: an error, never a crash, nor a read or write outside of the engine's memory."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import TokenType

from tests import tiny_gguf
from tests.models.native import sanitizer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The engine with another number of threads at each task, and the library to load before it."""
    files = ("[!p]*.c", "pass.c", "platform.c", "check/fickle_pool.c")
    return sanitizer.link(
        tmp_path_factory.mktemp("sanitized") / "libdraftree.so", "-shared", files=files
    ), sanitizer.runtime()


@pytest.mark.parametrize("weights", ["F16", "Q4_K"])
def test_damaged_files_are_errors_with_any_number_of_threads(
    weights: str, sanitized: tuple[Path, str], tmp_path: Path
) -> None:
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
