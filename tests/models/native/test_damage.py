"""Damaged files: an error, never a crash, nor a read or write outside of the engine's memory."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType

from tests import tiny_gguf
from tests.checkpoints import DENSE
from tests.draft_layers import predictor
from tests.models.native import sanitizer
from tests.models.native.conftest import STOCK, Dense, quantized
from tests.published import Recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The engine with another number of threads at each task, and the library to load before it."""
    files = ("[!p]*.c", "p[!o]*.c", "check/fickle_pool.c")
    return sanitizer.link(
        tmp_path_factory.mktemp("sanitized") / "libdraftree.so", "-shared", files=files
    ), sanitizer.runtime()


def run(runtime: str, module: str, *arguments: str) -> dict[str, int]:
    """What a module of this folder prints, over a sanitized library."""
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", f"tests.models.native.{module}", *arguments],
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
    found: dict[str, int] = ast.literal_eval(done.stdout)
    return found


def test_draft_heads_stay_inside_their_memory(sanitized: tuple[Path, str], tmp_path: Path) -> None:
    """Walks with rows of all lengths, and descriptions with a wrong number, of which some do no harm."""
    library, runtime = sanitized
    path = tiny_gguf.write(tmp_path / "m.gguf", layers=3, hidden=64, heads=2, kv_heads=1, weights="Q8_0")
    sizes = Recipe(vocab=274, target_size=64, size=64, width=16, wide=64, drafted=tuple(range(1, 150, 2)))
    folders = [
        sizes.save(tmp_path / "eagle3"),
        replace(sizes, kind="eagle", fc_bias=True).save(tmp_path / "eagle", "midlayer"),
    ]
    outcomes = run(runtime, "head_walk", str(path), str(library), *map(str, folders))
    assert outcomes.pop("walks") == 8
    assert sum(outcomes.values()) == 240 and outcomes["UnsupportedModelError"] > 60 < outcomes["ran"], outcomes


def test_a_draft_layer_stays_inside_its_memory(sanitized: tuple[Path, str], tmp_path: Path) -> None:
    library, runtime = sanitized
    _, path = predictor(tmp_path / "m", trained=False)
    outcomes = run(runtime, "head_walk", str(path), str(library), str(path))
    assert outcomes.pop("walks") == 4
    assert sum(outcomes.values()) == 120 and outcomes["UnsupportedModelError"] > 30 < outcomes["ran"], outcomes


@pytest.mark.parametrize(("weights", "first"), [("F16", 0), ("Q4_K", 300)])
def test_damaged_files_are_errors_with_any_number_of_threads(
    weights: str, first: int, sanitized: tuple[Path, str], tmp_path: Path
) -> None:
    """600 kinds of damage: half of them to each file, whose headers differ in the type of their matrices alone."""
    library, runtime = sanitized
    words = tiny_gguf.Vocabulary("none", tuple(f"{i}" for i in range(40)), (TokenType.NORMAL,) * 40)
    path = tiny_gguf.write(tmp_path / "m.gguf", layers=1, hidden=256, heads=8, vocabulary=words, weights=weights)
    outcomes = run(runtime, "damage", str(first), str(first + 300), str(library), str(path))
    assert sum(outcomes.values()) == 300
    assert outcomes["ran"] > 25 and outcomes["ModelFileError"] > 100, outcomes


def test_damaged_files_of_other_architectures_are_errors(
    sanitized: tuple[Path, str], dense: Mapping[str, Dense], tmp_path: Path
) -> None:
    """200 kinds of damage to each, to its numbers and weights; it has no tokens, which headers would mostly be of."""
    library, runtime = sanitized
    paths = [
        quantized(dense[name].path, Kind.Q4_K, tmp_path / f"{name}.gguf", lacking="tokenizer.")
        for name in DENSE
        if name not in STOCK
    ]
    outcomes = run(runtime, "damage", "600", "800", str(library), *map(str, paths))
    assert sum(outcomes.values()) == 200 * len(paths)
    assert outcomes["ran"] > 20 * len(paths) and outcomes["ModelFileError"] > 60 * len(paths), outcomes
