"""The first hour with a GPU: what do CUDA graphs and draft trees gain there?

    python -m benchmarks.gpu OUT [PART ...] [--dry-run] [--target smollm2] [--drafter head] [--suite spec-bench]

Makes the parts that OUT does not hold yet, the most valuable ones first, each in a process that is ended after
``--limit`` seconds. OUT/parts has what each printed, OUT/report.md all of it, written after each part: a run that was
cut off goes on where it was, and tries again what failed. ``--dry-run`` makes all on the CPU in tiny sizes.

``tests``: those marked gpu. ``passes``: milliseconds of a pass over n tokens by both runners in float32 (medians, the
device waited for), and what share of the device's memory bandwidth reads the weights. ``kernels``: what a pass
launches, and what takes longest. ``methods``: ``draftree bench`` of ``auto`` and four methods over AR decoding by
graphs, and of transformers' generate, in ``--dtype``. ``1b``, ``8b``, ``135m``: passes of such shapes with random
weights made on the device. ``exactness``: greedy answers that differ between the eager and the graph runner, in
float32; then, in ``--dtype``, the places of greedy answers where the two highest logits are closer than the logits of
passes over 1 and over 16 tokens, and those where the choice differs: what lossless decoding can change in 16 bits.
``attention``: one layer's over a tree, by PyTorch's SDPA and as passes make it, as graphs where there are any.
``compile``: passes of the stock forward with parts of it fused by ``torch.compile``. ``batches``: tokens a second of 1,
8 and 32 requests (``benchmarks.serving``). ``native``: the native engine on its CPUs (``benchmarks.native``).
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from draftree.artifacts import make_folder, write_whole
from draftree.models.model_files import DEFAULT_MODEL

from .commands import command_parser, one_line_errors
from .gpu_parts import SHAPES, TINY, Options, attention, compiled, exactness, kernels, passes, shape

BATCHES = (1, 8, 32)

MEASURED: dict[str, Callable[[Options], Iterator[str]]] = {
    "exactness": exactness,
    "passes": passes,
    **{name: shape(config) for name, config in SHAPES.items()},
    "attention": attention,
    "kernels": kernels,
    "compile": compiled,
}
"""Parts that are made here; others are commands."""
PARTS = tuple("tests methods passes kernels batches exactness 8b native attention compile 1b 135m".split())
"""The most valuable ones first."""


def commands(part: str, options: Options) -> list[list[str]]:
    """What Python is to run for a part that is not made here."""
    where = ["--device", options.device, "--runner", "graph", "--target", options.target, "--drafters", options.drafter]
    if part == "tests":
        return [["-m", "pytest", "-q", "-rs", "-m", "gpu", "tests/test_gpu.py"]]
    if part == "native":
        return [["-m", "benchmarks.native", "--models", options.target, "--passes", str(options.repeats)]]
    if part == "methods":
        methods = "auto,opt-tree:nodes=4,eagle2:nodes=16,dynamic-width:nodes=16,chain:depth=4,peer:hf-generate"
        of_suite = ["--suite", options.suite, "--limit", str(options.prompts), "--max-tokens", str(options.tokens)]
        backend = ["--backend", "transformers", "--dtype", options.dtype, "--turns", "1", "--methods", methods]
        return [["-m", "draftree", "bench", *of_suite, *backend, *where]]
    where[-2:] = ["--drafter", options.drafter]
    throughput = ["-m", "benchmarks.serving", "throughput", "--backend", "transformers", "--suite", options.suite]
    chosen = ["--tokens", str(options.tokens), "--methods", "auto,opt-tree,static,chain", "--dtype", options.dtype]
    return [[*throughput, *chosen, *where, "--requests", str(requests)] for requests in BATCHES]


def facts(device: str) -> str:
    """The machine, in a line."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "CPU"
    commit = ""
    with suppress(OSError):
        found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)  # noqa: S607
        commit = found.stdout.strip()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}; {versions}; commit {commit or 'unknown'}; {time.strftime('%Y-%m-%d')}"


def make(part: str, out: Path, words: Sequence[str], options: Options, limit: float) -> bool:
    """Make a part in processes of its own; what it prints is shown and kept. Whether it was done in time."""
    done, began = out / "parts" / f"{part}.txt", time.monotonic()
    lines, why = list[str](), ""
    orders = [["-m", "benchmarks.gpu", *words, "--only", part]] if part in MEASURED else commands(part, options)
    for order in orders:
        if part == "methods":
            order = [*order, "--out", str(out / "bench")]
        with subprocess.Popen(  # noqa: S603
            [sys.executable, *order], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                text, _ = process.communicate(timeout=max(1.0, limit - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
                text, why = process.communicate()[0], f"ended after {limit:.0f} seconds"
        print(text, end="", flush=True)
        lines.append(text)
        if why or process.returncode:
            why = why or f"exit status {process.returncode}"
            break
    took = f"{time.monotonic() - began:.0f} s"
    kept = done.with_suffix(".failed" if why else ".txt")
    done.with_suffix(".failed").unlink(missing_ok=True)
    write_whole(kept, "".join(lines) + (f"FAILED: {why}\n" if why else f"({took})\n"))
    return not why


def report(out: Path, device: str) -> None:
    """Write what all parts have printed into one file."""
    sections = [f"# {facts(device)}\n"]
    for part in PARTS:
        for kept in (out / "parts" / f"{part}.txt", out / "parts" / f"{part}.failed"):
            if kept.exists():
                sections.append(f"\n## {part}\n\n```\n{kept.read_text()}```\n")
    write_whole(out / "report.md", "".join(sections))


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and keep."""
    parser = command_parser("benchmarks.gpu", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="head")
    parser.add_argument("--suite", default="spec-bench", help="prompts, as draftree bench takes them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of weights, float32 or bfloat16")
    parser.add_argument("--limit", type=float, default=300.0, help="most seconds of a part")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", choices=MEASURED, help=argparse.SUPPRESS)
    words = list(argv if argv is not None else sys.argv[1:])
    args = parser.parse_intermixed_args(words)
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is no part: choose from {', '.join(PARTS)}")
    options = Options(args.target, args.drafter, args.suite, args.device, args.dtype)
    if args.dry_run:
        options = replace(options, device="cpu", context=20, repeats=1, prompts=2, tokens=4)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("error: there is no CUDA device here: run it on a machine that has one, or try it with --dry-run")
    if args.only:
        run = shape(TINY) if args.dry_run and args.only in SHAPES else MEASURED[args.only]
        for line in run(options):
            print(line, flush=True)
        return
    make_folder(args.out / "parts")
    failed = []
    for part in args.parts or PARTS:
        if (args.out / "parts" / f"{part}.txt").exists():
            continue
        print(f"{part}:", flush=True)
        if not make(part, args.out, words, options, args.limit):
            failed.append(part)
        report(args.out, options.device)
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed: {args.out / 'report.md'} says why; the same call tries again")


if __name__ == "__main__":
    main()
