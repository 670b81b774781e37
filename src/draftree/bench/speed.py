"""Is plain decoding as fast as transformers' generate, and how much faster are draft trees?

    python -m draftree.bench.speed [--categories summarization,rag] [--per-category 8] [--max-tokens 128] [--method ...]

All contestants decode each prompt in turn on the same weights and threads, in an order that rotates from prompt to
prompt, so that a drifting machine hits all alike. Times include the prefill. Ratios are paired by prompt: geometric
mean with a 95% bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable

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

Contestant = Callable[[list[int]], tuple[int, float]]
"""Prompt -> (generated tokens, mean acceptance length)."""


def bootstrap(ratios: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Geometric mean and its 95% interval over prompts."""
    logs = [math.log(r) for r in ratios]
    dice = random.Random(0)  # noqa: S311 - resampling, not secrets
    means = sorted(sum(dice.choices(logs, k=len(logs))) / len(logs) for _ in range(draws))
    return tuple(math.exp(x) for x in (sum(logs) / len(logs), means[draws // 40], means[-draws // 40]))  # type: ignore[return-value]


def _ours(engine: Engine, max_tokens: int) -> Contestant:
    def decode(prompt: list[int]) -> tuple[int, float]:
        stats = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))[0].stats
        return stats.tokens, stats.mal

    return decode


def _transformers(target: HFModel, max_tokens: int, **options: int) -> Contestant:
    def decode(prompt: list[int]) -> tuple[int, float]:
        ids = torch.tensor([prompt])
        generate: Callable[..., torch.Tensor] = target.model.generate
        target.model.set_attn_implementation("sdpa")
        out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, **options)
        target.model.set_attn_implementation(target.capabilities.attention)
        return out.shape[1] - len(prompt), math.nan

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
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    tokens: dict[str, list[int]] = {name: [] for name in contestants}
    mals: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    warm = encode(target.tokenizer, user("Hello"))
    for decode in contestants.values():
        decode(warm)
    for item in track(items, "decoding"):
        prompt = encode(target.tokenizer, user(item.prompt))
        for name in order:
            began = time.perf_counter()
            count, mal = contestants[name](prompt)
            seconds[name].append(time.perf_counter() - began)
            tokens[name].append(count)
            mals[name].append(mal)
        order.append(order.pop(0))
    print(f"{len(items)} prompts of {args.categories}, up to {args.max_tokens} tokens, {target.capabilities.name}")
    print(f"{'':40} tokens/s    MAL  speed-up over plain   over transformers generate")
    for name in contestants:
        rates = {n: [t / s for t, s in zip(tokens[n], seconds[n], strict=True)] for n in contestants}
        columns = []
        for base in ("plain", "transformers generate"):
            mean, low, high = bootstrap([a / b for a, b in zip(rates[name], rates[base], strict=True)])
            columns.append(f"{mean:6.2f} [{low:.2f}, {high:.2f}]")
        rate = sum(tokens[name]) / sum(seconds[name])
        print(f"{name:40} {rate:8.1f} {sum(mals[name]) / len(items):6.2f} {'   '.join(columns)}")


if __name__ == "__main__":
    main()
