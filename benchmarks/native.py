"""What passes of the native engine cost and how good they are, beside llama.cpp's library in the same run.

    python -m benchmarks.native [--models smollm2,FILE.gguf] [--tiers TIER,...] [--passes 25] [--out FILE.md]
    python -m benchmarks.native --quality FILE.txt [--models ...]
    python -m benchmarks.native --shape qwen3-4b,llama-8b [--layers 2] [--passes 25] [--out FILE.md]

For each model and instruction set: AR decoding and the reading of a prompt, both engines in turn; passes over n tokens;
eight requests together; passes beside a process that keeps one CPU busy; what a step of AR decoding costs beside its
pass. Run it alone on a machine. Times are medians, those of passes over n tokens minima.

``--quality``: KL divergence of the next token's distribution from that of the same weights in float32 by transformers,
over the first tokens of a text, and how often the most probable token is the same: the native engine's and llama.cpp's.

``--shape``: loading, memory and passes of large models with random weights (``benchmarks.native_shapes``).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import draftree
from draftree.models.base import LanguageModel, Nodes
from draftree.models.cost_profile import processor
from draftree.models.loading import load_llama
from draftree.models.model_files import DEFAULT_MODEL, gguf_path
from draftree.models.native.binding import tiers
from draftree.models.native.native_model import NativeModel
from draftree.request import Stats

from . import native_large
from .commands import command_parser, one_line_errors
from .native_passes import chains, pass_seconds, text, timed
from .native_shapes import SHAPES

SIZES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (100, 900)
PROMPT = 1000
TOGETHER = 8
BUSY_PASSES = 500
ANSWER = 64
PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List the steps to bake bread, and say why each of them matters.",
    "What is the difference between a process and a thread?",
)


class Line(NamedTuple):
    """A row of the table."""

    figure: str
    value: str


def reading_seconds(model: LanguageModel, length: int) -> float:
    """Seconds of reading a prompt, as the engine does: the scores of its last token alone."""
    row = model.open()
    seconds = timed(lambda: model.extend([row], [Nodes.chain(text(length), 1)]).argmax([0]))
    model.close(row)
    return seconds


def rows_seconds(model: LanguageModel, rows: int, passes: int) -> float:
    """Median seconds of a pass over one token of each of so many rows, behind contexts of 100 tokens."""
    opened, found = [model.open() for _ in range(rows)], list[float]()
    for row in opened:
        model.extend([row], [Nodes.chain(text(100), 0)])
        model.commit(row, range(100))
    for _ in range(passes):
        each = [Nodes.chain([7]) for _ in opened]
        found.append(timed(lambda: model.extend(opened, each).argmax(range(rows))))  # noqa: B023
        for row in opened:
            model.commit(row, [])
    for row in opened:
        model.close(row)
    return statistics.median(found)


def _spin(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """One process that keeps one of this process's CPUs busy."""
    cpu = max(os.sched_getaffinity(0))
    process = multiprocessing.get_context("spawn").Process(target=_spin, args=(cpu,), daemon=True)
    process.start()
    time.sleep(1)
    try:
        yield
    finally:
        process.kill()
        process.join()


def decode(model: LanguageModel, prompt: str) -> Stats:
    """Of an answer by AR decoding to a prompt that is read whole."""
    engine = draftree.Engine(model, scheduling=draftree.SchedulerParams(prefixes=0))
    (result,) = engine.generate([draftree.user(prompt)], draftree.SamplingParams(max_tokens=ANSWER))
    return result.stats


def step_seconds(stats: Stats) -> float:
    """Of one token, the prompt's reading left out."""
    return (stats.seconds.total - stats.seconds.prefill) / stats.steps


def decoding(models: Sequence[LanguageModel], rounds: int) -> list[list[float]]:
    """Seconds a token of AR decoding, by model; models take turns at each prompt."""
    found = [list[float]() for _ in models]
    for prompt in PROMPTS * rounds:
        for model, seconds in zip(models, found, strict=True):
            seconds.append(step_seconds(decode(model, prompt)))
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How many times as fast, paired."""
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(each):.2f} times [{min(each):.2f}, {max(each):.2f}]"


def measure(name: str, tier: str, passes: int) -> Iterator[Line]:
    """The table of one model with one instruction set."""
    began = time.perf_counter()
    ours = NativeModel(gguf(name), tier=tier)
    yield Line("load", f"{time.perf_counter() - began:.2f} s")
    theirs = load_llama(name)
    own, others = decoding([ours, theirs], 2)
    yield Line(
        "AR decoding over llama.cpp",
        f"{ratios(own, others)}; {1 / statistics.median(own):.0f} and {1 / statistics.median(others):.0f} tokens/s",
    )
    first = dict[int, float]()
    for context in CONTEXTS:
        seconds = pass_seconds(ours, context, chains(SIZES), passes)
        first[context] = min(seconds[1])
        shown = (f"{n}: {1e3 * min(s):.2f} ({min(s) / min(seconds[1]):.2f})" for n, s in seconds.items())
        yield Line(f"ms of a pass over n tokens (over n = 1), context {context}", ", ".join(shown))
    yield Line("context 900 over context 100, n = 1", f"{first[900] / first[100]:.2f}")
    reading = [[reading_seconds(model, PROMPT) for model in (ours, theirs)] for _ in range(3)]
    own, others = ([pair[i] for pair in reading] for i in range(2))
    yield Line(
        f"prompt of {PROMPT} tokens over llama.cpp",
        f"{ratios(own, others)}; {statistics.median(own):.2f} and {statistics.median(others):.2f} s",
    )
    alone, together = rows_seconds(ours, 1, passes), rows_seconds(ours, TOGETHER, passes)
    yield Line(f"{TOGETHER} requests over one, tokens/s", f"{TOGETHER * alone / together:.2f} times")
    with busy_neighbour():
        busy = sorted(pass_seconds(ours, 100, chains([1]), BUSY_PASSES)[1])
    yield Line(
        "pass beside a busy process over a pass alone",
        f"{statistics.median(busy) / first[100]:.2f} (99th percentile {busy[len(busy) * 99 // 100] / first[100]:.1f})",
    )
    yield Line("everything but the pass in a step of AR decoding", f"{1e3 * overhead(ours):.3f} ms")


def overhead(model: NativeModel) -> float:
    """Median seconds of a token of AR decoding outside the pass."""
    found = list[float]()
    for prompt in PROMPTS * 3:
        before = model.pass_seconds
        stats = decode(model, prompt)
        found.append(step_seconds(stats) - (model.pass_seconds - before) / stats.steps)
    return statistics.median(found)


def gguf(name: str) -> Path:
    """The GGUF file of a name."""
    path = gguf_path(name)
    if path is None:
        raise SystemExit(f"{name} is no GGUF file")
    return path


QUALITY_TOKENS = 1000


def distributions(model: LanguageModel, ids: Sequence[int]) -> NDArray[np.float64]:
    """[n, V] log-probabilities of the token behind each of ``ids``."""
    row, found = model.open(), list[NDArray[np.float64]]()
    for at in range(0, len(ids), 50):
        piece = ids[at : at + 50]
        logits = model.extend([row], [Nodes.chain(piece)]).logits(range(len(piece))).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        found.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        model.commit(row, range(len(piece)))
    model.close(row)
    return np.concatenate(found)


def quality(name: str, words: str) -> Iterator[Line]:
    """How far both engines are from float32."""
    ours = NativeModel(gguf(name))
    if ours.tokenizer is None:
        raise SystemExit(f"{name} has no tokenizer")
    ids = ours.tokenizer.encode(words)[:QUALITY_TOKENS]
    exact = distributions(draftree.load(name, backend="transformers"), ids)
    for label, model in (("native", ours), ("llama.cpp", load_llama(name))):
        found = distributions(model, ids)
        divergence = (np.exp(exact) * (exact - found)).sum(-1).mean()
        same = (exact.argmax(-1) == found.argmax(-1)).mean()
        yield Line(f"{label}, {len(ids)} tokens", f"KL {divergence:.5f}, most probable token the same {same:.1%}")


@one_line_errors()
def main() -> None:
    parser = command_parser("benchmarks.native", __doc__)
    parser.add_argument("--models", default=DEFAULT_MODEL)
    parser.add_argument("--tiers", default=tiers()[-1], help=f"of {', '.join(tiers())}")
    parser.add_argument("--passes", type=int, default=25)
    parser.add_argument("--quality", type=Path, metavar="FILE")
    parser.add_argument("--shape", help=f"of {', '.join(SHAPES)}: measure these with random weights")
    parser.add_argument("--layers", type=int, default=2, help="of the model that attention is measured on")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = list[str]()

    def show(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    show(f"{processor()}, {len(os.sched_getaffinity(0))} CPUs")
    if args.shape:
        if unknown := [name for name in args.shape.split(",") if name not in SHAPES]:
            parser.error(f"no shape {unknown[0]}: choose from {', '.join(SHAPES)}")
        for row in native_large.run(args.shape.split(","), args.layers, args.passes, args.out):
            show(row)
    for name in () if args.shape else args.models.split(","):
        for tier in [""] if args.quality else args.tiers.split(","):
            show(f"\n| {Path(name).name} {tier} | |\n|---|---|")
            for line in quality(name, args.quality.read_text()) if args.quality else measure(name, tier, args.passes):
                show(f"| {line.figure} | {line.value} |")
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
