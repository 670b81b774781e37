"""Memory that runs out: each call of C to the allocator fails once, and nothing else than an error comes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests import tiny_gguf
from tests.checkpoints import converted
from tests.families import FAMILIES, made
from tests.models.native import sanitizer
from tests.models.native.test_damage import run
from tests.published import Recipe

WRAPPED = ("malloc", "calloc", "realloc", "free", "mmap", "munmap", "pthread_create")
MAY_FAIL = {"load", "load_head", *(f"{of}.{name}" for of in ("model", "head") for name in ("open", "fork", "extend"))}


def test_a_call_without_memory_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    """With a malloc that failed in a thread, top-k and top-p were left out: another token, and no error.

    A pass that failed late left scores of zeros behind.
    """
    wrapped = [f"-Wl,--wrap={name}" for name in WRAPPED]
    files = ("*.c", "check/failing_memory.c")
    library = sanitizer.link(tmp_path / "libdraftree.so", "-shared", *wrapped, files=files)
    path = tiny_gguf.write(tmp_path / "m.gguf", layers=3, hidden=64, heads=2, kv_heads=1, weights="Q8_0")
    sizes = Recipe(vocab=274, target_size=64, size=64, width=16, wide=64, drafted=tuple(range(1, 150, 2)))
    heads = [
        replace(sizes, embeddings=True).save(tmp_path / "eagle3"),
        replace(sizes, kind="eagle", fc_bias=True).save(tmp_path / "eagle", "midlayer"),
    ]
    failed = run(sanitizer.runtime(), "out_of_memory", str(path), str(library), *map(str, heads))
    assert failed.keys() == {*MAY_FAIL, "head.learn"}
    for name in ("qwen35", "qwen3moe"):
        made(FAMILIES[name], tmp_path / name)
        failed = run(sanitizer.runtime(), "out_of_memory", str(*converted(tmp_path / name)), str(library))
        assert failed.keys() == {name for name in MAY_FAIL if "head" not in name}
