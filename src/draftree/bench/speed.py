"""Is plain decoding as fast as transformers' generate, and how much faster are draft trees?

    python -m draftree.bench.speed [--categories summarization,rag] [--per-category 8] [--max-tokens 128] [--method ...]

All contestants decode each prompt in turn on the same weights and threads, in an order that rotates from prompt to
prompt, so that a drifting machine hits all alike. Times include the prefill where nothing else is said. Ratios are
paired by prompt: geometric mean with a 95% bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.progress import track

from ..config import SamplingParams
from ..draft.base import NoDrafter
from ..draft.load import load_drafter
from ..draft.methods import DEFAULT_METHOD, DEFAULT_NODES, find_policy
from ..engine import Engine
from ..models.hf import HFModel
from ..models.load import DEFAULT_MODEL, load
from ..text import encode, user
from .suites import spec_bench


class Run(NamedTuple):
    """One decoding: seconds include the prefill; ``decode`` leaves it out; NaN where it is not known."""

    tokens: int
    seconds: float
    decode: float = math.nan
    mal: float = math.nan


Contestant = Callable[[list[int]], Run]


def bootstrap(ratios: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Geometric mean and its 95% interval over prompts."""
    logs = [math.log(r) for r in ratios]
    dice = random.Random(0)  # noqa: S311 - resampling, not secrets
    means = sorted(sum(dice.choices(logs, k=len(logs))) / len(logs) for _ in range(draws))
    return tuple(math.exp(x) for x in (sum(logs) / len(logs), means[draws // 40], means[-draws // 40]))  # type: ignore[return-value]


def _ours(engine: Engine, max_tokens: int) -> Contestant:
    def decode(prompt: list[int]) -> Run:
        began = time.perf_counter()
        stats = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0].stats
        seconds = time.perf_counter() - began
        return Run(stats.tokens, seconds, seconds - stats.seconds.prefill, stats.mal)

    return decode


def _transformers(target: HFModel, max_tokens: int, **options: int) -> Contestant:
    def decode(prompt: list[int]) -> Run:
        ids = torch.tensor([prompt])
        generate: Callable[..., torch.Tensor] = target.model.generate
        target.model.set_attn_implementation("sdpa")
        began = time.perf_counter()
        out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, **options)
        seconds = time.perf_counter() - began
        target.model.set_attn_implementation(target.capabilities.attention)
        return Run(out.shape[1] - len(prompt), seconds)

    return decode


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.speed", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--method", default=DEFAULT_METHOD)
    parser.add_argument("--nodes", type=int, default=DEFAULT_NODES)
    parser.add_argument("--categories", default="summarization,rag")
    parser.add_argument("--per-category", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    target = load(args.target)
    items = spec_bench(args.per_category, set(args.categories.split(",")))
    trees = Engine(target, load_drafter(args.drafter, target, find_policy(args.method)), nodes=args.nodes)
    contestants: dict[str, Contestant] = {
        "plain": _ours(Engine(target, NoDrafter()), args.max_tokens),
        f"{args.drafter}, {args.method}, {args.nodes} nodes": _ours(trees, args.max_tokens),
        "transformers generate": _transformers(target, args.max_tokens),
        "transformers prompt lookup": _transformers(target, args.max_tokens, prompt_lookup_num_tokens=10),
    }
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    order = list(contestants)
    warm = encode(target.tokenizer, user("Hello"))
    for decode in contestants.values():
        decode(warm)
    for item in track(items, "decoding"):
        prompt = encode(target.tokenizer, user(item.prompt))
        for name in order:
            runs[name].append(contestants[name](prompt))
        order.append(order.pop(0))
    print(f"{len(items)} prompts of {args.categories}, up to {args.max_tokens} tokens, {target.capabilities.name}")
    print(f"{'':40} tokens/s    MAL   over plain          over plain, no prefill   over transformers generate")
    for name, own in runs.items():
        columns = [
            _ratio(own, runs["plain"], lambda r: r.tokens / r.seconds),
            _ratio(own, runs["plain"], lambda r: r.tokens / r.decode),
            _ratio(own, runs["transformers generate"], lambda r: r.tokens / r.seconds),
        ]
        rate = sum(r.tokens for r in own) / sum(r.seconds for r in own)
        print(f"{name:40} {rate:8.1f} {sum(r.mal for r in own) / len(own):6.2f}   {'   '.join(columns)}")


def _ratio(own: list[Run], base: list[Run], rate: Callable[[Run], float]) -> str:
    mean, low, high = bootstrap([rate(a) / rate(b) for a, b in zip(own, base, strict=True)])
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
