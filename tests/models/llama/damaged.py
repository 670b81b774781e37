"""Damaged variants of a small GGUF file, and what the command line makes of each.

As a program it makes a request to every so many of them, each in a process of its own, and prints what became of it as
a line of JSON: where llama.cpp aborts, the exit code is that of a signal. Files that are named run on llama.cpp alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType

import draftree.cli.generate  # what a command loads, once for all the processes that are forked
import draftree.models.llama.llama_model
import draftree.models.native.native_model  # noqa: F401
from draftree.cli.main import run
from draftree.models.llama.library import open_library
from draftree.models.loading import AUTO

from ...tiny_gguf import with_byte_fallback, write

TOKENS = 3
"""Of each answer."""
_LINE = f"generate cat --raw --json --ignore-eos --drafter none --max-tokens {TOKENS}".split()
_MEMORY = 8 << 30
"""Bytes of addresses that a variant may take."""
_ABORTED = re.compile(r"block_count|epsilon|a token twice|of type 26")
"""Variants on which llama.cpp aborts: none of them is left out."""
_NONE = re.compile("(?!)")
_HIDDEN = "failed to load model"
_FLIPS = 120
"""Bits of the header that are flipped, each in a variant of its own."""

Change = Callable[[gguf.GGUFReader], Any]
"""Damages the copy of a file that a reader has mapped."""


def overwritten(key: str, value: Any) -> Change:
    """Overwrite a number."""

    def change(reader: gguf.GGUFReader) -> None:
        reader.fields[key].parts[-1][0] = value

    return change


def with_item(key: str, index: int, value: Any) -> Change:
    """Overwrite an entry of an array, as far as it is as long."""

    def change(reader: gguf.GGUFReader) -> None:
        field = reader.fields[key]
        part = field.parts[field.data[index]]
        part[:] = (
            value if not isinstance(value, bytes) else np.frombuffer(value[: len(part)].ljust(len(part)), np.uint8)
        )

    return change


def of_length(key: str, length: int) -> Change:
    """Of an array, or of a text."""

    def change(reader: gguf.GGUFReader) -> None:
        field = reader.fields[key]
        field.parts[-2 if field.types == [GGUFValueType.STRING] else 4][0] = length

    return change


def of_kind(key: str, kind: int) -> Change:
    def change(reader: gguf.GGUFReader) -> None:
        reader.fields[key].parts[2][0] = kind

    return change


def renamed(key: str) -> Change:
    def change(reader: gguf.GGUFReader) -> None:
        reader.fields[key].parts[1][-1] = ord("~")

    return change


def with_tensor(name: str, part: int, value: Any, index: int = 0) -> Change:
    """Overwrite a tensor's name (1), number of dimensions (2), dimensions (3), type (4) or offset (5)."""

    def change(reader: gguf.GGUFReader) -> None:
        own = next(t for t in reader.tensors if t.name == name)
        own.field.parts[part][index] = value

    return change


def _weights(name: str, value: float) -> Change:
    """Overwrite the first weight, or the first scale of a quantized row."""

    def change(reader: gguf.GGUFReader) -> None:
        own = next(t for t in reader.tensors if t.name == name)
        data = own.data.reshape(-1)
        if own.tensor_type == gguf.GGMLQuantizationType.F32:
            data[len(data) // 2] = value
        else:
            data[:2] = np.array([value], np.float16).view(np.uint8)

    return change


def _header(at: int, value: bytes) -> Change:
    def change(reader: gguf.GGUFReader) -> None:
        reader.data[at : at + len(value)] = np.frombuffer(value, np.uint8)

    return change


def changes(reader: gguf.GGUFReader) -> Iterator[tuple[str, Change]]:
    """Names of variants, and what makes them."""
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        yield f"no {key}", renamed(key)
        for kind in (GGUFValueType.UINT8, GGUFValueType.FLOAT32, GGUFValueType.STRING, GGUFValueType.ARRAY, 99):
            if kind != field.types[0]:
                yield f"{key} of type {kind}", of_kind(key, int(kind))
        of = field.types[-1]
        if field.types[0] == GGUFValueType.ARRAY:
            for length in (0, 1, len(field.data) - 1, 2**31, 2**60):
                yield f"{key} of {length}", of_length(key, length)
        elif of == GGUFValueType.STRING:
            yield f"{key} of 2^62 bytes", of_length(key, 2**62)
            yield f"{key} of other characters", with_item(key, 0, b"\xff~\x00\x01" * 9)
        elif of == GGUFValueType.FLOAT32:
            for number in (0.0, -1.0, -1e-6, math.nan, math.inf, 1e30):
                yield f"{key} {number}", overwritten(key, number)
        elif of != GGUFValueType.BOOL:
            for whole in (0, 1, 3, 33, 2**20, 2**31 - 1, 2**31, 2**32 - 1):
                yield f"{key} {whole}", overwritten(key, whole)
    tokens = reader.fields["tokenizer.ggml.tokens"]
    same = bytes(tokens.parts[tokens.data[30]])
    single = [i for i, part in enumerate(tokens.data) if len(tokens.parts[part]) == len(same)]
    yield "a token twice", with_item("tokenizer.ggml.tokens", single[-1], same)
    yield "a token that is no text", with_item("tokenizer.ggml.tokens", single[-1], b"\xff\xfe\xfd")
    yield "a token of zeros", with_item("tokenizer.ggml.tokens", single[-1], b"\0\0\0")
    for number in (-1, 0, 99, 2**31 - 1):
        yield f"a token of type {number}", with_item("tokenizer.ggml.token_type", 40, number)
    if "tokenizer.ggml.scores" in reader.fields:
        for score in (math.nan, math.inf, -math.inf):
            yield f"a score of {score}", with_item("tokenizer.ggml.scores", 260, score)
    if "tokenizer.ggml.merges" in reader.fields:
        yield "a merge of one part", with_item("tokenizer.ggml.merges", 3, b"____________")
        yield "a merge of unknown parts", with_item("tokenizer.ggml.merges", 3, b"\xff \xff\xff")
    for tensor in reader.tensors:
        name, others = tensor.name, [t for t in reader.tensors if t.name != tensor.name]
        yield f"no {name}", with_tensor(name, 1, ord("~"))
        for count in (0, 1, 2, 5, 2**32 - 1):
            if count != len(tensor.shape):
                yield f"{name} of {count} dimensions", with_tensor(name, 2, count)
        for length in (0, 1, 32, int(tensor.shape[0]) + 32, 2**40, 2**64 - 1):
            yield f"{name} of first dimension {length}", with_tensor(name, 3, length)
        if len(tensor.shape) > 1:
            for length in (0, 1, int(tensor.shape[1]) + 1, 2**63):
                yield f"{name} of second dimension {length}", with_tensor(name, 3, length, 1)
        for kind in (0, 1, 2, 8, 12, 26, 30, 31, 99, 2**32 - 1):
            if kind != tensor.tensor_type:
                yield f"{name} of type {kind}", with_tensor(name, 4, kind)
        for offset in (1, 32, 2**40, 2**64 - 32, int(others[0].field.parts[5][0])):
            if offset != int(tensor.field.parts[5][0]):
                yield f"{name} at {offset}", with_tensor(name, 5, offset)
        for weight in (math.nan, math.inf, -math.inf):
            yield f"{name} with {weight}", _weights(name, weight)
    for at, what in ((4, "version"), (8, "count of tensors"), (16, "count of keys")):
        for number in (0, 1, 5, 2**16, 2**31):
            yield f"{what} {number}", _header(at, number.to_bytes(4, "little"))
    drawn, end = random.Random(2), int(reader.data_offset)
    for _ in range(_FLIPS):
        at, bit = drawn.randrange(24, end), drawn.randrange(8)
        yield f"bit {bit} of byte {at}", _header(at, bytes([int(reader.data[at]) ^ 1 << bit]))


def written(folder: Path) -> list[Path]:
    """Files of both kinds of vocabularies."""
    sizes: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 1}
    byte_fallback = write(folder / "spm.gguf", **sizes, vocabulary=with_byte_fallback())
    return [write(folder / "bpe.gguf", **sizes, weights="Q8_0"), byte_fallback]


def variants(paths: Iterable[Path], each: int, always: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of one of so many variants of each file, and of those whose name matches ``always``."""
    for path in paths:
        kind, reader = path.stem, gguf.GGUFReader(path, "c")
        whole = reader.data.copy()
        for i, (name, change) in enumerate(changes(gguf.GGUFReader(path))):
            if i % each == 0 or always.search(name):
                change(reader)
                yield f"{kind}: {name}", reader.data.tobytes()
                reader.data[:] = whole


def outcome(path: Path, backend: str) -> dict[str, Any]:
    """Exit code, output and complaint of a request to the model of a file, in a process of its own that may end."""
    reads, writes = os.pipe()
    if child := os.fork():
        os.close(writes)
        with open(reads) as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return json.loads(said) if status == 0 else {"code": status, "out": "", "err": said}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout, sys.stderr = out, err = io.StringIO(), io.StringIO()
    code = run([*_LINE, "--backend", backend, "--target", str(path)])
    with open(writes, "w") as pipe:
        json.dump({"code": code, "out": out.getvalue(), "err": err.getvalue()}, pipe)
    os._exit(0)


def is_fine(outcome: Mapping[str, Any]) -> bool:
    """It was refused in one line that names what is wrong, or it decoded."""
    if outcome["code"] == 0:
        return bool(json.loads(outcome["out"])["stats"]["tokens"] == TOKENS)
    lines = outcome["err"].strip().splitlines()
    return (
        outcome["code"] == 2 and outcome["out"] == "" and lines != [] and _HIDDEN not in lines[-1] and len(lines) == 1
    )


def main(folder: Path, each: int, paths: Sequence[Path]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    path = folder / "damaged.gguf"
    open_library()
    with contextlib.redirect_stderr(io.StringIO()):
        run([*_LINE, "--target", str(path)])  # makes, once for all, what the first command of a process makes
    chosen = variants(paths, each, _NONE) if paths else variants(written(folder), each, _ABORTED)
    for name, content in chosen:
        path.write_bytes(content)
        for backend in (AUTO, "llama.cpp")[bool(paths) :]:
            sys.stdout.write(json.dumps({"name": f"{name}, {backend}"} | outcome(path, backend)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [*map(Path, sys.argv[3:])])
