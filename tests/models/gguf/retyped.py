"""Copies of a GGUF file in which one key has a value of another type, and what a backend makes of each.

python -m tests.models.gguf.retyped BACKEND FILE...

prints what each copy has before it is loaded, and how that ended: where llama.cpp ends the process, the last line is
of the culprit. Keys that a file before had are tried again where they are of the tokenizer.
"""

from __future__ import annotations

import math
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

import gguf
from gguf import GGUFValueType as Kind

from draftree.errors import InputError
from draftree.models.base import Nodes
from draftree.models.gguf.gguf_file import read
from draftree.models.gguf.metadata import Metadata, Value
from draftree.models.loading import BACKENDS

_ALIGNMENT = 32
_NUMBERS = {
    Kind.UINT8: ("B", (0, 1, 255)),
    Kind.INT8: ("b", (-1, 1)),
    Kind.UINT16: ("H", (2**16 - 1,)),
    Kind.INT16: ("h", (-(2**15),)),
    Kind.UINT32: ("I", (0, 1, 2**31 - 2, 2**31, 2**32 - 1)),
    Kind.INT32: ("i", (-1, 1)),
    Kind.UINT64: ("Q", (1, 2**63, 2**64 - 1)),
    Kind.INT64: ("q", (-1, -(2**63))),
    Kind.FLOAT32: ("f", (0.0, -1.0, 0.5, 1e-45, 3e38, math.nan, math.inf, -math.inf)),
    Kind.FLOAT64: ("d", (0.0, 1e-320, 1e-40, 1 + 1e-15, 1e40, 1e308, math.nan, -math.inf)),
    Kind.BOOL: ("?", (False, True)),
}
_TEXTS = (b"", b"x", b"none", b"yarn", b"\x1b[31m", b"\xff\xfe")


def _string(string: bytes) -> bytes:
    return struct.pack("<Q", len(string)) + string


def text(string: bytes) -> bytes:
    """The bytes of a value."""
    return struct.pack("<I", Kind.STRING) + _string(string)


def number(kind: Kind, value: float) -> bytes:
    """The bytes of a value."""
    return struct.pack(f"<I{_NUMBERS[kind][0]}", kind, value)


def values() -> Iterator[tuple[str, bytes]]:
    """Names of values, and their bytes: scalars of each type, and arrays of each, empty and not."""
    for kind, (code, numbers) in _NUMBERS.items():
        for value in numbers:
            yield f"{kind.name} {value}", number(kind, value)
        pair = struct.pack(f"<{code}", value) * 2
        yield f"[{kind.name} {value}] * 2", struct.pack("<IIQ", Kind.ARRAY, kind, 2) + pair
        yield f"[] of {kind.name}", struct.pack("<IIQ", Kind.ARRAY, kind, 0)
    for string in _TEXTS:
        yield f"text {string!r}", text(string)
    yield "two texts", struct.pack("<IIQ", Kind.ARRAY, Kind.STRING, 2) + _string(b"a") + _string(b"b")
    yield "no text", struct.pack("<IIQ", Kind.ARRAY, Kind.STRING, 0)
    yield "no array", struct.pack("<IIQ", Kind.ARRAY, Kind.ARRAY, 0)
    yield "an array of one", struct.pack("<IIQIQB", Kind.ARRAY, Kind.ARRAY, 1, Kind.UINT8, 1, 1)


class Rewriter:
    """Writes copies of a file with another value under a key, which it may lack."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._data, fields = path.read_bytes(), list(reader.fields.values())[3:]  # behind version and counts
        starts = [int(each.offset) for each in fields] + [int(reader.tensors[0].field.offset)]
        self._places = {each.name: place for each, place in zip(fields, pairwise(starts), strict=True)}
        self._absent = (starts[-1], starts[-1])
        last = reader.tensors[-1].field
        self._end, self._weights = int(last.offset + sum(p.nbytes for p in last.parts)), int(reader.data_offset)

    def copy(self, path: Path, key: str, value: bytes) -> None:
        begin, end = self._places.get(key, self._absent)
        count = struct.pack("<Q", len(self._places) + (begin == end))
        header = self._data[:16] + count + self._data[24:begin] + _string(key.encode()) + value
        header += self._data[end : self._end]
        path.write_bytes(header + bytes(-len(header) % _ALIGNMENT) + self._data[self._weights :])


def load(path: Path, backend: str) -> None:
    """Load a model, and let it read and write a text."""
    model = BACKENDS[backend].load(str(path), threads=1)
    if model.tokenizer is not None:
        str(model.tokenizer.decode(model.tokenizer.encode("the cat")))
    row = model.open()
    model.extend([row], [Nodes.chain([3])]).argmax([0])
    model.close(row)


def asked(path: Path) -> list[str]:
    """Keys of a file, and those that are looked up while it is loaded by either backend."""
    keys, found = dict.fromkeys(read(path).metadata.stored), Metadata._find

    def find(metadata: Metadata, key: str) -> Value | None:
        keys[metadata.name(key)] = None
        return found(metadata, key)

    Metadata._find = find  # type: ignore[method-assign, assignment]
    load(path, "native")
    load(path, "llama.cpp")
    Metadata._find = found  # type: ignore[method-assign]
    return list(keys)


def outcome(path: Path, backend: str) -> str:
    """How loading ends: "loaded", "refused" with one line, or the error."""
    try:
        load(path, backend)
    except InputError as error:
        return "refused" if "\n" not in str(error) else repr(error)
    except Exception as error:  # noqa: BLE001 - of any type
        return repr(error)
    return "loaded"


def main(backend: str, paths: Sequence[Path]) -> None:
    warnings.simplefilter("error")
    tried = set[str]()
    for path in paths:
        rewriter, copy = Rewriter(path), path.with_name("copy.gguf")
        keys = [key for key in asked(path) if key not in tried or key.startswith("tokenizer.")]
        tried.update(keys)
        for number, key in enumerate(keys):  # each value with a third of the keys
            for name, value in islice(values(), number % 3, None, 3):
                sys.stdout.write(f"{path.name}: {key} = {name}\n")
                sys.stdout.flush()
                rewriter.copy(copy, key, value)
                sys.stdout.write(f"{outcome(copy, backend)}\n")


if __name__ == "__main__":
    main(sys.argv[1], [Path(name) for name in sys.argv[2:]])
