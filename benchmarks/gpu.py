"""What do CUDA graphs gain on a GPU, and draft trees over them?

    python -m benchmarks.gpu [--target smollm2] [--drafter head] [--dtype float16] [--context 512] [--prompts 26]

First the milliseconds of a pass over n tokens by the eager and the graph runner (medians, the device waited for), and
how many greedy choices of 26 prompts differ between them. Then ``draftree bench`` on Spec-Bench: AR decoding by graphs,
``auto`` over it, and transformers' own generate; its column of equal ids is what half precision changes. Then tokens a
second of 1 to 32 rows together, of ``auto``, a fixed tree and a chain over AR decoding (``benchmarks.serving``).
``--device cpu`` tries it without a GPU, where nothing is captured.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.models.abilities import tokenizer_of
from draftree.models.base import LanguageModel, Nodes, prefill
from draftree.models.loading import DEFAULT_MODEL, load
from draftree.models.runner import RUNNERS
from draftree.text import encode, user

from .serving import questions

SIZES = (1, 2, 4, 8, 16, 32, 64)
ROWS = (1, 4, 8, 16, 32)
WARM = 3
"""Passes before those that count: one before the capture, the capture, and one replay."""


def pass_times(model: LanguageModel, context: int, sizes: Sequence[int], repeats: int) -> list[float]:
    """Median milliseconds of a pass over n tokens behind so many, for each n."""
    row = prefill(model, [7] * context)
    medians = []
    for size in sizes:
        seconds = []
        for _ in range(WARM + repeats):
            _wait(model)
            began = time.perf_counter()
            model.extend([row], [Nodes.chain([11] * size)])
            _wait(model)
            seconds.append(time.perf_counter() - began)
            model.commit(row, [])
        medians.append(1e3 * statistics.median(seconds[WARM:]))
    model.close(row)
    return medians


def _wait(model: LanguageModel) -> None:
    if model.capabilities.device.type == "cuda":
        torch.cuda.synchronize(model.capabilities.device)


def differing(models: Sequence[LanguageModel], texts: Sequence[str], tokens: int) -> tuple[int, int]:
    """Of the greedy answers of two models those that differ, and how many there are."""
    params = SamplingParams(max_tokens=tokens)
    answers = [
        [Engine(m).generate([encode(tokenizer_of(m), user(text))], params)[0].token_ids for text in texts]
        for m in models
    ]
    return sum(a != b for a, b in zip(*answers, strict=True)), len(texts)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="head")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("error: there is no CUDA device here: run it on a machine that has one, or try it with --device cpu")
    where = {"backend": "transformers", "device": args.device, "dtype": args.dtype}
    models = {name: load(args.target, **where, runner=name) for name in RUNNERS}
    print(f"ms of a pass behind {args.context} tokens, over n = {', '.join(map(str, SIZES))}")
    for name, model in models.items():
        times = pass_times(model, args.context, SIZES, args.repeats)
        print(f"{name:6} {' '.join(f'{t:7.2f}' for t in times)}   {model.passes}", flush=True)  # type: ignore[attr-defined]
    different, of = differing(list(models.values()), questions(args.prompts), args.tokens)
    print(f"{different} of {of} greedy answers differ between the runners", flush=True)
    del models
    options = [word for name, value in where.items() for word in (f"--{name}", value)] + ["--runner", "graph"]
    _call(
        "draftree",
        *("bench", "--suite", "spec-bench", "--limit", str(args.prompts), "--turns", "1"),
        *("--max-tokens", str(args.tokens), "--methods", "auto,opt-tree:nodes=16,chain:depth=4,peer:hf-generate"),
        *("--drafters", args.drafter, "--target", args.target, *options),
    )
    for rows in ROWS:
        _call(
            "benchmarks.serving",
            *("throughput", "--requests", str(rows), "--tokens", str(args.tokens), "--target", args.target),
            *("--drafter", args.drafter, "--methods", "auto,opt-tree,chain", *options),
        )


def _call(module: str, *arguments: str) -> None:
    if code := subprocess.run([sys.executable, "-m", module, *arguments]).returncode:  # noqa: S603
        sys.exit(code)


if __name__ == "__main__":
    main()
