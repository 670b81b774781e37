"""What a small file may make of work: no more than grows with its bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Kind

from draftree.errors import InputError, ModelFileError, NotNativeError
from draftree.models.gguf.gguf_checks import check
from draftree.models.gguf.metadata import Metadata, Value
from draftree.models.native.architecture import describe
from draftree.models.native.vocabulary import read_vocabulary

from ...tiny_gguf import byte_level, with_byte_fallback, write
from .retyped import Rewriter, number


def tiny(path: Path, layers: int = 1) -> Path:
    return write(path, layers=layers, hidden=64, heads=2, kv_heads=1)


@pytest.mark.parametrize("count", [2, 3, 99_999, 100_000, 30_000_000, 2**40, 2**64 - 1])
def test_parts_are_named_one_after_another(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``split.count`` 2^40 in a file of 130 KB was a list of as many names."""
    path, named, original = tmp_path / f"tiny-00001-of-{min(count, 99_999):05}.gguf", list[str](), Path.with_name

    def with_name(self: Path, name: str) -> Path:
        named.append(name)
        assert len(named) < 10
        return original(self, name)

    Rewriter(tiny(tmp_path / "tiny.gguf")).copy(path, "split.count", number(Kind.UINT64, count))
    monkeypatch.setattr(Path, "with_name", with_name)
    with pytest.raises(ModelFileError, match=str(count) if count > 99_999 else f"tiny-00002-of-{count:05}"):
        check(path)


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
def test_a_token_of_200_000_characters_is_not_cut_at_each_of_them(kind: str, tmp_path: Path) -> None:
    """Its merges were looked for at each place, by two copies of it: minutes for a file of 200 KB."""
    words = with_byte_fallback() if kind == "pieces" else byte_level()
    at = words.tokens.index("in")
    long = replace(words, tokens=(*words.tokens[:at], "▁t" * 100_000, *words.tokens[at + 1 :]))
    path = write(tmp_path / "tiny.gguf", layers=1, hidden=64, heads=2, kv_heads=1, vocabulary=long)
    with pytest.raises(NotNativeError, match="200000 characters"):
        read_vocabulary(check(path))


def test_each_byte_is_one_tensors(tmp_path: Path) -> None:
    """Behind a tensor of an unknown type the next could begin anywhere: a thousand could share the same weights, all of
    which were read for each of them."""
    path = tiny(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(path, "r+")
    reader.tensors[3].field.parts[4][0] = 99
    reader.tensors[4].field.parts[5][0] = 0
    reader.data.flush()
    with pytest.raises(ModelFileError, match=f"{reader.tensors[4].name} .*byte 0"):
        check(path)


@pytest.mark.parametrize("keys", [("attention.key_length", "rope.dimension_count"), ("context_length",)])
def test_a_number_makes_no_array_before_it_is_checked(keys: Sequence[str], tmp_path: Path) -> None:
    """Heads of 2^31 - 2 dimensions made 8 GB of rope frequencies, and were refused then."""
    path = tiny(tmp_path / "tiny.gguf")
    for key in keys:
        Rewriter(path).copy(path, f"llama.{key}", number(Kind.UINT32, 2**31 - 2))
    tracemalloc.start()
    try:
        with suppress(InputError):
            describe(check(path))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_number_of_many_digits_in_a_tensors_name_is_no_layer(tmp_path: Path) -> None:
    """Python refuses to read more than 4300 digits: it was a traceback."""
    writer = gguf.GGUFWriter(path := tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(8)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_tensor(f"blk.{'9' * 5000}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(check(path).tensors) == 1


def test_metadata_is_looked_up_as_often_for_many_tensors_as_for_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of layers was looked up for each tensor, and made a tuple of all entries where it was an array."""
    looked_up, original = list[str](), Metadata._find

    def find(self: Metadata, key: str) -> Value | None:
        looked_up.append(key)
        return original(self, key)

    monkeypatch.setattr(Metadata, "_find", find)
    counts = list[int]()
    for layers in (1, 12):
        path = tiny(tmp_path / "tiny.gguf", layers)
        looked_up.clear()
        check(path)
        counts.append(len(looked_up))
    assert counts[0] == counts[1] > 0
