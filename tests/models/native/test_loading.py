"""How large files are loaded: memory, weights that are no numbers, files that change, Ctrl-C, what does not fit."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, TokenType

from benchmarks.native_shapes import SHAPES
from benchmarks.native_shapes import write as write_shape
from draftree import progress
from draftree.errors import ModelFileError, RunError
from draftree.models import memory
from draftree.models.gguf.gguf_checks import check
from draftree.models.gguf.gguf_file import read
from draftree.models.llama.library import Weights, open_library
from draftree.models.native import native_model
from draftree.models.native.architecture import describe
from draftree.models.native.binding import LoadedModel
from draftree.models.native.header_reader import FORMATS
from draftree.models.native.native_model import NativeModel
from draftree.progress import StoppableProgress
from tests import tiny_gguf

ROOT = Path(__file__).parents[3]
WORDS = tiny_gguf.Vocabulary("none", tuple(f"{i}" for i in range(40)), (TokenType.NORMAL,) * 40)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "model.gguf", weights="Q4_0", context=64)


SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "F16": (0,),
    "BF16": (0,),
    "F32": (0,),
}
"""Where a block has its scales and minima, in bytes."""


@pytest.mark.parametrize("kind", sorted(FORMATS), ids=lambda kind: GGMLQuantizationType(kind).name)
def test_weights_that_are_no_numbers_are_refused_by_c_and_named(kind: int, tmp_path: Path) -> None:
    """C finds them as it packs: nothing else reads the weights of a file that is loaded."""
    name = GGMLQuantizationType(kind).name
    path = tiny_gguf.write(tmp_path / "m.gguf", layers=1, hidden=256, heads=8, vocabulary=WORDS, weights=name)
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]
    special = {"BF16": [0x7F80, 0xFFC0], "F32": [0x7F800000, 0xFFC00000]}.get(name, [0x7C00, 0xFE00])
    description = describe(read(path))
    LoadedModel(description, 2)
    tensors = [each for each in check(path).tensors if len(each.shape) > 1][:: 3 if len(SCALES[name]) > 1 else 2]
    for tensor in tensors:
        last = tensor.begin + tensor.size - size
        for at, bits in ((last + scale, bits) for scale in SCALES[name] for bits in special):
            with _overwritten(path, at, bits.to_bytes(4 if name == "F32" else 2, "little")):
                with pytest.raises(ModelFileError, match="NaN"):
                    LoadedModel(description, 2)
                with pytest.raises(ModelFileError, match=f"{tensor.name} .*NaN"):
                    NativeModel(path)
    LoadedModel(description, 2)


def test_vectors_that_are_no_numbers_are_refused_and_named(path: Path) -> None:
    for tensor in (each for each in check(path).tensors if len(each.shape) == 1):
        with (
            _overwritten(path, tensor.begin, np.float32(np.nan).tobytes()),
            pytest.raises(ModelFileError, match=f"{tensor.name} .*NaN"),
        ):
            NativeModel(path)
    NativeModel(path)


@contextmanager
def _overwritten(path: Path, at: int, data: bytes) -> Iterator[None]:
    """A file with other bytes at a place for as long as this takes."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        before = file.read(len(data))
        file.seek(at)
        file.write(data)
        yield
        file.seek(at)
        file.write(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_is_cut_while_it_is_read_is_an_error(threads: int, path: Path) -> None:
    """It was mapped: the process ended with SIGBUS."""
    description = describe(check(path))
    begin = min(tensor.begin for tensor in check(path).tensors)

    def cut(done: float) -> None:
        os.truncate(path, begin)

    with pytest.raises(ModelFileError, match="be read"):
        LoadedModel(description, threads, progress=cut)


def test_a_model_whose_file_is_cut_while_it_is_read_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = progress.loading_reporter

    @contextmanager
    def reporter(name: Path, size: int) -> Iterator[object]:
        with cut(name, size):
            yield lambda done: os.truncate(path, 40_000)

    monkeypatch.setattr(native_model, "loading_reporter", reporter)
    with pytest.raises(ModelFileError) as raised:
        NativeModel(path, threads=1)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_load_takes_little_more_memory_than_it_keeps(parts: int, tmp_path: Path) -> None:
    """At its peak it had the whole file mapped beside the packed weights: 1.9 times the file."""
    shape = replace(SHAPES["llama-8b"], hidden=1024, heads=8, key_heads=2, feed_forward=2048, layers=8, vocabulary=8192)
    whole = write_shape(tmp_path / "model.gguf", shape)
    path = whole if parts == 1 else tiny_gguf.split(whole, tmp_path)[0]
    command = [sys.executable, "-m", "benchmarks.native_large", "load", "native", str(path)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
    found = json.loads(done.stdout)
    assert 1 < found["kept"] / shape.file_bytes <= found["peak"] / shape.file_bytes < 1.4


def test_ctrl_c_that_comes_while_c_runs_stops_it() -> None:
    """It was raised as the callback began, before its ``try``: ctypes printed it, and the load went on."""
    interrupt = ctypes.CDLL(None)["raise"]
    stoppable = StoppableProgress(lambda done: None)
    assert list(map(stoppable.report, [0.0, 0.5])) == [True, True]
    stoppable.check()
    assert list(map(stoppable.report, map(interrupt, [signal.SIGINT]))) == [False]  # no Python between the two
    with pytest.raises(KeyboardInterrupt):
        stoppable.check()


def test_the_first_error_of_progress_is_raised() -> None:
    def stop(done: float) -> None:
        raise ValueError(done)

    stoppable = StoppableProgress(stop)
    assert [*map(stoppable.report, [0.25, 0.5])] == [False, False]
    with pytest.raises(ValueError, match=r"0\.25"):
        stoppable.check()


@pytest.mark.parametrize("backend", ["native", "llama.cpp"])
def test_loads_of_large_files_show_how_far_they_are(backend: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And small ones nothing."""
    shown, named = list[int](), list[str]()

    @contextmanager
    def reporter(what: str, total: int) -> Iterator[object]:
        named.append(what)
        yield shown.append

    def load() -> None:
        if backend == "native":
            NativeModel(path, threads=1)
        else:
            Weights(open_library(), path)

    monkeypatch.setattr(progress, "progress_reporter", reporter)
    load()
    assert not named
    monkeypatch.setattr(progress, "_LARGE", path.stat().st_size // 2)
    load()
    assert named == ["Loading model.gguf"]
    assert len(set(shown)) > 5 and shown == sorted(shown) and 0 <= shown[0] and shown[-1] == 100


@pytest.mark.parametrize("at", ["check", "load"])
def test_a_load_of_llama_can_be_stopped(at: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def reporter(what: str, total: int) -> Iterator[object]:
        def stop(done: int) -> None:
            if at == "check" or done > 50:
                raise KeyboardInterrupt

        yield stop

    monkeypatch.setattr(progress, "progress_reporter", reporter)
    monkeypatch.setattr(progress, "_LARGE", 0)
    with pytest.raises(KeyboardInterrupt):
        Weights(open_library(), path)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(path: Path) -> None:
    """The size that is refused is the one that is taken: there is an eighth beside it, and not a byte less."""
    description, read_so_far = describe(check(path)), list[float]()
    size = LoadedModel(description, 1).weight_bytes
    enough = -(-size * 9 // 8)
    assert LoadedModel(description, 1, free=enough).weight_bytes == size
    with pytest.raises(RunError, match=f"{path} needs .*quantisation"):
        LoadedModel(description, 1, free=enough - 1, progress=read_so_far.append)
    assert not read_so_far
    for free in (0, 1):
        with pytest.raises(RunError):
            LoadedModel(description, 1, free=free)


@pytest.mark.parametrize("weights", ["F32", "Q4_0", "Q6_K", "Q8_0"])
def test_the_size_of_packed_weights_is_about_that_of_their_tensors(weights: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", layers=1, hidden=256, heads=8, weights=weights)
    header = check(path)
    assert 1 <= LoadedModel(describe(header), 1).weight_bytes / header.weight_bytes < 1.1


@pytest.mark.parametrize("backend", ["native", "llama.cpp"])
def test_a_model_that_does_not_fit_is_one_line_with_the_numbers(
    backend: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100_000
    monkeypatch.setattr(native_model, "free_memory", lambda: free)
    monkeypatch.setattr(memory, "free_memory", lambda: free)

    def load() -> None:
        if backend == "native":
            NativeModel(path)
        else:
            Weights(open_library(), path)

    with pytest.raises(RunError, match=r"model\.gguf needs 0\.000\d+ GB .*0\.0001 GB"):
        load()
    free = 10_000_000
    load()


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"a/b/memory.max": "5000\n"}, None),  # no figure of what is used
        ({"a/b/memory.max": "max\n", "a/b/memory.current": "4000\n"}, None),
        ({"a/b/memory.max": "5000\n", "a/b/memory.current": "4000\n", "a/b/memory.stat": "anon 4000\n"}, 1000),
        (
            {
                "a/b/memory.max": "5000\n",
                "a/b/memory.current": "4000\n",
                "a/b/memory.stat": "anon 1000\ninactive_file 2500\nactive_file 300\n",
            },
            3800,
        ),
        ({"a/memory.max": "3000\n", "a/memory.current": "3500\n", "a/memory.stat": ""}, 0),  # of the group above
    ],
)
def test_free_memory_is_what_control_groups_leave(files: dict[str, str], left: int | None, tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": "0::/a/b\n", **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = memory.free_memory(tmp_path)
    assert found == left if left is not None else found > 1 << 20
