"""What do CUDA graphs gain on a GPU, and draft trees over them?

    python -m benchmarks.gpu [passes] [answers] [ties] [bench] [rows] [--target smollm2] [--drafter head]
                             [--dtype float16] [--context 512] [--prompts 26] [--compile]

All parts by default. ``passes``: milliseconds of a pass over n tokens by the eager and the graph runner (medians, the
device waited for), with ``--compile`` also of the stock forward by ``torch.compile``, in the graph runner's shapes.
``answers``: how many greedy answers differ between the runners. ``ties``: of the places of greedy answers, those where
the two highest logits are closer than logits of passes over 1 and over ``--width`` tokens, by ``--runner``, and those
where their choice differs: what lossless decoding can change in 16 bits. ``bench``: ``draftree bench`` on Spec-Bench:
AR decoding by graphs, ``auto`` over it, and transformers' own generate. ``rows``: tokens a second and time between
tokens of 1 to 32 rows together, of AR decoding, ``auto``, trees and a chain (``benchmarks.serving``). ``--device cpu``
tries it without a GPU, where nothing is captured.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.models.base import LanguageModel, Nodes, prefill
from draftree.models.huggingface.hf_loading import load_stock
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.runner import RUNNERS
from draftree.models.loading import ModelOptions, load
from draftree.models.model_files import DEFAULT_MODEL
from draftree.text.encoding import encode, user

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
    if model.capabilities.device.startswith("cuda"):
        torch.cuda.synchronize(model.capabilities.device)


def differing(models: Sequence[LanguageModel], texts: Sequence[str], tokens: int) -> tuple[int, int]:
    """Of the greedy answers of two models those that differ, and how many there are."""
    params = SamplingParams(max_tokens=tokens)
    answers = [
        [Engine(m).generate([encode(m.tokenizer, user(text))], params)[0].token_ids for text in texts] for m in models
    ]
    return sum(a != b for a, b in zip(*answers, strict=True)), len(texts)


@dataclass(frozen=True)
class Ties:
    """How passes over one token and over several differ, along greedy answers.

    Attributes:
        places: tokens of the answers.
        ties: where the two highest logits are closer than the logits of the two passes.
        choices: where the highest is another.
        difference: largest one between the logits of a place.
    """

    places: int
    ties: int
    choices: int
    difference: float


def near_ties(model: LanguageModel, texts: Sequence[str], tokens: int, width: int) -> Ties:
    """Feed greedy answers one token at a time, and ``width`` at a time, to one model."""
    engine, places, ties, choices, largest = Engine(model), 0, 0, 0, 0.0
    for text in texts:
        prompt = encode(model.tokenizer, user(text))
        answer = engine.generate([prompt], SamplingParams(max_tokens=tokens))[0].token_ids
        one, several = (_logits(model, prompt, answer, step) for step in (1, width))
        difference = (one - several).abs().amax(-1)
        best = one.topk(2).values
        places += len(answer)
        ties += int((best[:, 0] - best[:, 1] < difference).sum())
        choices += int((one.argmax(-1) != several.argmax(-1)).sum())
        largest = max(largest, float(difference.max()))
    return Ties(places, ties, choices, largest)


def _logits(model: LanguageModel, prompt: list[int], answer: list[int], step: int) -> Tensor:
    """[n, V] float32 logits after each token of an answer, ``step`` of them a pass."""
    row, found = prefill(model, prompt), []
    for first in range(0, len(answer), step):
        new = answer[first : first + step]
        found.append(torch.from_numpy(model.extend([row], [Nodes.chain(new)]).logits(range(len(new)))))
        model.commit(row, range(len(new)))
    model.close(row)
    return torch.cat(found)


def compiled(name: str, dtype: str, device: str) -> LanguageModel:
    """A model whose stock forward is compiled for each of the graph runner's shapes."""
    stock, tokenizer = load_stock(name, dtype=dtype, device=device)
    model = HFModel(stock, tokenizer, runner="graph", self_test=False)
    torch._dynamo.config.cache_size_limit = 64  # shapes
    stock.compile(dynamic=False)
    return model


PARTS = ("passes", "answers", "ties", "bench", "rows")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="head")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--runner", choices=RUNNERS, default="graph")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args(argv)
    parts = args.parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is no part: choose from {', '.join(PARTS)}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("error: there is no CUDA device here: run it on a machine that has one, or try it with --device cpu")
    where = {"backend": "transformers", "device": args.device, "dtype": args.dtype}
    _in_this_process(args, parts, where)
    options = [word for name, value in where.items() for word in (f"--{name}", value)] + ["--runner", "graph"]
    if "bench" in parts:
        _call(
            "draftree",
            *("bench", "--suite", "spec-bench", "--limit", str(args.prompts), "--turns", "1"),
            *("--max-tokens", str(args.tokens), "--methods", "auto,opt-tree:nodes=16,chain:depth=4,peer:hf-generate"),
            *("--drafters", args.drafter, "--target", args.target, *options),
        )
    for rows in ROWS if "rows" in parts else ():
        _call(
            "benchmarks.serving",
            *("throughput", "--requests", str(rows), "--tokens", str(args.tokens), "--target", args.target),
            *("--drafter", args.drafter, "--methods", "auto,opt-tree,static,chain", *options),
        )


def _in_this_process(args: argparse.Namespace, parts: Sequence[str], where: dict[str, str]) -> None:
    """Passes, answers and near-ties."""
    if not {"passes", "answers", "ties"} & set(parts):
        return
    names = RUNNERS if {"passes", "answers"} & set(parts) else (args.runner,)
    models = {name: load(args.target, **cast(ModelOptions, {**where, "runner": name})) for name in names}
    if "passes" in parts:
        timed = models | ({"compile": compiled(args.target, args.dtype, args.device)} if args.compile else {})
        print(f"ms of a pass behind {args.context} tokens, over n = {', '.join(map(str, SIZES))}")
        for name, model in timed.items():
            times = pass_times(model, args.context, SIZES, args.repeats)
            print(f"{name:7} {' '.join(f'{t:7.2f}' for t in times)}   {model.passes}", flush=True)  # type: ignore[attr-defined]
    texts = questions(args.prompts)
    if "answers" in parts:
        different, of = differing(list(models.values()), texts, args.tokens)
        print(f"{different} of {of} greedy answers differ between the runners", flush=True)
    if "ties" in parts:
        found = near_ties(models[args.runner], texts, args.tokens, args.width)
        print(
            f"{args.dtype}, {args.runner} passes over 1 and {args.width} tokens: "
            f"{found.ties} near-ties in {found.places} places, {found.choices} other choices; "
            f"logits differ by up to {found.difference:.3g}",
            flush=True,
        )


def _call(module: str, *arguments: str) -> None:
    if code := subprocess.run([sys.executable, "-m", module, *arguments]).returncode:  # noqa: S603
        sys.exit(code)


if __name__ == "__main__":
    main()
