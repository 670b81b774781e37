"""Large models on the native engine and on llama.cpp: loading, memory, passes, and attention over long contexts.

``python -m benchmarks.native --shape`` runs it over files with random weights (``benchmarks.native_shapes``), which are
removed again. Each figure comes from a process of its own, one after another, and is a line of ``--out`` with the
ending .jsonl: the same command goes on where it was stopped. Loading is measured in memory that a process has just used
and freed, since the first use of a virtual machine's memory takes as long as its host needs. Of llama.cpp it is its own
``llama_model_load_from_file``, of the native engine all of ``NativeModel``.

To read a long prompt with all layers takes many minutes. So attention is measured on a model of ``--layers`` layers
with a small feed-forward: a layer's is the time of a pass behind a context less that of the same pass behind 100
tokens, over the layers. A pass of the whole model behind a long context is its pass behind 100 tokens and this for each
of its layers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftree.models.base import LanguageModel
from draftree.models.cpu_threads import default_threads
from draftree.models.llama.library import open_library
from draftree.models.loading import load_llama
from draftree.models.memory import free_memory
from draftree.models.native.native_model import NativeModel
from draftree.progress import progress_reporter

from .commands import command_parser, one_line_errors
from .native_passes import chains, pass_seconds, timed
from .native_shapes import SHAPES, Shape, write

NEAR, FAR = 100, (4096, 16384)
ENGINES = ("native", "llama.cpp")
DRAFTS: Mapping[str, Sequence[int]] = {
    **{str(size): parents for size, parents in chains((1, 2, 4, 8, 16)).items()},
    "tree of 16": [-1, *((node - 1) // 2 for node in range(1, 16))],
}
"""Parents of the nodes of a pass, by its name: chains, and a tree in which each node has two children."""


class Part(NamedTuple):
    """What one process measures.

    Attributes:
        context: tokens; 0: it is the load.
        attention: of the model for attention.
    """

    shape: str
    engine: str
    what: str
    context: int = 0
    attention: bool = False


def parts_of(shape: str) -> Iterator[Part]:
    for engine in ENGINES:
        yield from (Part(shape, engine, f"load, {pages}") for pages in ("cold", "warm"))
        yield Part(shape, engine, "passes", NEAR)
        if not SHAPES[shape].key_states:  # of whose layers few attend
            yield from (Part(shape, engine, "attention", context, True) for context in (NEAR, *FAR))


def load(engine: str, path: Path) -> dict[str, float]:
    """Seconds of a load, seconds of all processors, and bytes of memory: at the peak, and kept (no file has them)."""
    library = open_library()
    before = _memory()
    began, busy = time.perf_counter(), time.process_time()
    if engine == "native":
        loaded: object = NativeModel(path)
    else:
        loaded = library.model_load_from_file(os.fsencode(path), library.model_default_params())
    seconds, busy, after = time.perf_counter() - began, time.process_time() - busy, _memory()
    if not loaded:
        raise SystemExit(f"llama.cpp cannot load {path}: {library.complaint()}")
    return {
        "seconds": seconds,
        "busy": busy,
        "peak": after["VmHWM"] - before["VmRSS"],
        "kept": after["RssAnon"] - before["RssAnon"],
    }


def _memory() -> dict[str, int]:
    """Bytes of this process, by the names of /proc/self/status."""
    found = re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {name: 1024 * int(amount) for name, amount in found}


def passes(engine: str, path: Path, context: int, count: int) -> dict[str, float]:
    """Least seconds of passes by what they are over; llama.cpp makes none over trees of recurrent models."""
    model: LanguageModel = NativeModel(path) if engine == "native" else load_llama(str(path))
    drafts = {draft: parents for draft, parents in DRAFTS.items() if draft.isdigit() or not model.capabilities.no_trees}
    found = pass_seconds(model, context, drafts, count)
    return {draft: min(seconds) for draft, seconds in found.items()}


def measure(part: Part, path: Path, count: int) -> dict[str, float]:
    """What a part's process finds."""
    if not part.context:
        _use_memory(path.stat().st_size)
        _set_pages(path, cold=part.what.endswith("cold"))
        given = ["load", part.engine, str(path)]
    else:
        given = ["passes", part.engine, str(path), str(part.context), str(count)]
    command = [sys.executable, "-m", "benchmarks.native_large", *given]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ourselves
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _use_memory(size: int) -> None:
    """Let a process use and free what a load of so many bytes may take: pages of the file, and weights."""
    count = min(22 * size // 10, 8 * free_memory() // 10)
    subprocess.run([sys.executable, "-c", f"import numpy; numpy.ones({count}, 'u1')"], check=True)  # noqa: S603


def _set_pages(path: Path, *, cold: bool) -> None:
    """Have all of a file in the page cache, or nothing of it."""
    with path.open("rb", buffering=0) as file:
        if cold:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            piece = bytearray(1 << 20)
            while file.readinto(piece):
                pass


@cache
def bandwidth() -> float:
    """Bytes a second that all threads together read."""
    threads = default_threads()
    arrays = [np.ones(1 << 26, np.float32) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = min(timed(lambda: list(pool.map(np.max, arrays))) for _ in range(8))
    return sum(array.nbytes for array in arrays) / seconds


@cache
def multiply_adds() -> float:
    """Multiply-adds a second of float32 in a product of matrices by NumPy."""
    size = 2048
    matrix = np.ones((size, size), np.float32)
    return size**3 / min(timed(lambda: matrix @ matrix) for _ in range(8))


def bound(shape: Shape, context: int, nodes: int) -> tuple[float, str]:
    """Least seconds of the attention of all layers, and what they are for: to read keys and values once, or to
    multiply each node's queries with all keys, and its weights with all values."""
    read = shape.layers * context * shape.key_bytes / bandwidth()
    multiply = shape.layers * nodes * shape.heads * shape.head * context * 2 / multiply_adds()
    return max((read, "reading"), (multiply, "arithmetic"))


Found = dict[Part, dict[str, float]]


def run(names: Sequence[str], layers: int, count: int, out: Path | None) -> list[str]:
    """Measure what is not in ``out`` yet; the lines of the tables."""
    kept = out.with_suffix(".jsonl") if out else None
    found, parts = _read(kept, layers), [part for name in names for part in parts_of(name)]
    with progress_reporter("measuring", len(parts), len(found.keys() & parts)) as report:
        for name in names:
            left = [part for part in parts_of(name) if part not in found]
            with tempfile.TemporaryDirectory(dir=out.parent if out else None) as folder:
                for part in left:
                    path = _file(Path(folder), SHAPES[name], layers if part.attention else 0)
                    found[part] = measure(part, path, count)
                    if kept:
                        with kept.open("a") as file:
                            file.write(json.dumps({"part": part, "layers": layers, "found": found[part]}) + "\n")
                    report(len(found.keys() & parts))
    return [line for name in names for line in table(name, found, layers)]


def _read(kept: Path | None, layers: int) -> Found:
    if kept is None or not kept.exists():
        return {}
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    return {Part(*line["part"]): line["found"] for line in lines if line["layers"] == layers}


def _file(folder: Path, shape: Shape, layers: int) -> Path:
    """The file of a shape, or of its attention alone in so many layers."""
    path = folder / f"{layers or 'whole'}.gguf"
    if not path.exists():
        write(path, shape.attention_alone(layers) if layers else shape)
    return path


def table(name: str, found: Found, layers: int) -> Iterator[str]:
    """The lines of one shape's tables."""
    shape, size = SHAPES[name], SHAPES[name].file_bytes
    yield f"\n| {name}, {size / 1e9:.2f} GB | {' | '.join(ENGINES)} |\n|---|---|---|"
    for pages in ("cold", "warm"):
        loads = (found[Part(name, engine, f"load, {pages}")] for engine in ENGINES)
        seconds = (f"{each['seconds']:.1f} ({each['busy']:.1f}) s" for each in loads)
        yield f"| load, {pages} pages (processor time) | {' | '.join(seconds)} |"
    for what, key in (("memory at the peak of the load", "peak"), ("memory that is no file's, kept", "kept")):
        amounts = (found[Part(name, engine, "load, warm")][key] for engine in ENGINES)
        yield f"| {what}, over the file | {' | '.join(f'{each / size:.2f}' for each in amounts)} |"
    for context in (NEAR,) if shape.key_states else (NEAR, *FAR):
        row = (_shown(_pass_seconds(name, engine, context, found, layers)) for engine in ENGINES)
        scaled = "" if context == NEAR else f" (attention of {layers} layers for {shape.layers})"
        yield f"| ms of a pass over {', '.join(DRAFTS)}; context {context}{scaled} | {' | '.join(row)} |"
    if shape.key_states:
        return
    rates = f"{bandwidth() / 1e9:.0f} GB/s, {multiply_adds() / 1e9:.0f} GMAC/s"
    yield f"\n| {name}, attention of all layers | {' | '.join(ENGINES)} | bound ({rates}) |\n|---|---|---|---|"
    for context in FAR:
        for draft, parents in DRAFTS.items():
            least, reason = bound(shape, context, len(parents))
            spent = (_attention(name, engine, context, found, layers)[draft] for engine in ENGINES)
            row = (f"{1e3 * each:.1f} ms ({each / least:.1f} times)" for each in spent)
            yield f"| {draft}, context {context} | {' | '.join(row)} | {1e3 * least:.1f} ms ({reason}) |"


def _attention(name: str, engine: str, context: int, found: Found, layers: int) -> dict[str, float]:
    """Seconds of the attention of all layers to what lies before the last 100 tokens of a context."""
    near, far = (found[Part(name, engine, "attention", at, True)] for at in (NEAR, context))
    return {size: (far[size] - near[size]) / layers * SHAPES[name].layers for size in near}


def _pass_seconds(name: str, engine: str, context: int, found: Found, layers: int) -> dict[str, float]:
    near = found[Part(name, engine, "passes", NEAR)]
    if context == NEAR:
        return near
    further = _attention(name, engine, context, found, layers)
    return {size: seconds + further[size] for size, seconds in near.items()}


def _shown(seconds: dict[str, float]) -> str:
    return ", ".join(f"{1e3 * each:.1f}" for each in seconds.values())


@one_line_errors()
def main() -> None:
    """One part, in a process of its own: its figures as JSON."""
    parser = command_parser("benchmarks.native_large", __doc__)
    parser.add_argument("what", choices=("load", "passes"))
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("file", type=Path)
    parser.add_argument("context", type=int, nargs="?", default=NEAR)
    parser.add_argument("passes", type=int, nargs="?", default=1)
    args = parser.parse_args()
    if args.what == "load":
        found = load(args.engine, args.file)
    else:
        found = passes(args.engine, args.file, args.context, args.passes)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
