"""Draft models and heads score layers in C as in Python, inside their memory, and without memory they raise errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny_gguf
from tests.models.native import sanitizer
from tests.models.native.test_damage import run
from tests.models.native.test_memory import WRAPPED
from tests.published import Recipe


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wrapped = [f"-Wl,--wrap={name}" for name in WRAPPED]
    files = ("*.c", "check/failing_memory.c", "check/drafting.c")
    return sanitizer.link(tmp_path_factory.mktemp("library") / "libdraftree.so", "-shared", *wrapped, files=files)


def test_layers_are_scored_as_in_python(tmp_path: Path, library: Path) -> None:
    """To the bit, whatever requests have in common: masks, warping, noise, a vocabulary of another size."""
    path = tiny_gguf.write(tmp_path / "m.gguf", layers=3, hidden=64, heads=2, kv_heads=1, weights="Q8_0")
    sizes = Recipe(vocab=274, target_size=64, size=64, width=16, wide=64, drafted=tuple(range(1, 150, 2)))
    heads = [
        sizes.save(tmp_path / "eagle3"),
        replace(sizes, kind="eagle", fc_bias=True).save(tmp_path / "eagle", "midlayer"),
    ]
    found = run(sanitizer.runtime(), "draft_walk", str(path), str(library), *map(str, heads))
    assert found["cases"] == 30 and found["few"] < found["scored"]
    assert min(found[name] for name in ("scored", "few", "constrained", "kept")) > 300
    assert found["score"] > 30, "there was always memory"


def test_trees_grow_inside_their_memory_and_without_it_there_is_an_error(library: Path) -> None:
    """What failed is called again, with memory: the trees are those of a walk in which nothing failed."""
    failed = run(sanitizer.runtime(), "growth_walk", str(library))
    assert failed.keys() == {"open", "index", "room", "text", "draft"}


def test_drafts_are_translated_inside_their_memory_and_without_it_there_is_an_error(
    library: Path, tmp_path: Path
) -> None:
    """What failed is called again, with memory: the trees are those of a walk in which nothing failed."""
    found = run(sanitizer.runtime(), "translation_walk", str(library), str(tmp_path))
    assert found["nodes"] > 100
    assert found["draft"] > 20, "there was always memory"
