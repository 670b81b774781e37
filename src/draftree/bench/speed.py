"""Is plain decoding as fast as transformers' generate, and how much faster are draft trees?

    python -m draftree.bench.speed [--categories summarization,rag] [--per-category 8] [--max-tokens 128] [--method ...]

All contestants decode each prompt in turn on the same threads, transformers in float32 with its own layers, in an order
that rotates from prompt to prompt, so that a drifting machine hits all alike. Times include the prefill where nothing
else is said. Ratios are paired by prompt: geometric mean with a 95% bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ..config import SamplingParams
from ..draft.base import NoDrafter
from ..draft.load import load_drafter
from ..draft.methods import DEFAULT_METHOD, DEFAULT_NODES, find_policy
from ..engine import Engine
from ..models.load import DEFAULT_MODEL, load, load_stock
from ..models.numerics import DEFAULT_NUMERICS, NUMERICS
from ..text import encode, user
from .suites import spec_bench
from .timing import Contestant, Run, ours, ratio, take_turns


def _transformers(model: PreTrainedModel, max_tokens: int, **options: int) -> Contestant:
    def decode(prompt: list[int]) -> Run:
        ids = torch.tensor([prompt])
        generate: Callable[..., torch.Tensor] = cast(Any, model).generate
        began = time.perf_counter()
        out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, **options)
        seconds = time.perf_counter() - began
        return Run(out.shape[1] - len(prompt), seconds)

    return decode


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.speed", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--numerics", choices=NUMERICS, default=DEFAULT_NUMERICS)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--method", default=DEFAULT_METHOD)
    parser.add_argument("--nodes", type=int, default=DEFAULT_NODES)
    parser.add_argument("--categories", default="summarization,rag")
    parser.add_argument("--per-category", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    target, (reference, _) = load(args.target, numerics=args.numerics), load_stock(args.target)
    items = spec_bench(args.per_category, set(args.categories.split(",")))
    trees = Engine(target, load_drafter(args.drafter, target, find_policy(args.method)), nodes=args.nodes)
    greedy = SamplingParams(max_tokens=args.max_tokens)
    contestants: dict[str, Contestant] = {
        "plain": ours(Engine(target, NoDrafter()), greedy),
        f"{args.drafter}, {args.method}, {args.nodes} nodes": ours(trees, greedy),
        "transformers generate": _transformers(reference, args.max_tokens),
        "transformers prompt lookup": _transformers(reference, args.max_tokens, prompt_lookup_num_tokens=10),
    }
    prompts = [encode(target.tokenizer, user(item.prompt)) for item in items]
    runs = take_turns(contestants, prompts, warm=encode(target.tokenizer, user("Hello")))
    can = target.capabilities
    print(f"{len(items)} prompts of {args.categories}, up to {args.max_tokens} tokens, {can.name} in {can.numerics}")
    print(f"{'':40} tokens/s    MAL   over plain          over plain, no prefill   over transformers generate")
    for name, own in runs.items():
        columns = [
            ratio(own, runs["plain"], lambda r: r.tokens / r.seconds),
            ratio(own, runs["plain"], lambda r: r.tokens / r.decode),
            ratio(own, runs["transformers generate"], lambda r: r.tokens / r.seconds),
        ]
        rate = sum(r.tokens for r in own) / sum(r.seconds for r in own)
        print(f"{name:40} {rate:8.1f} {sum(r.mal for r in own) / len(own):6.2f}   {'   '.join(columns)}")


if __name__ == "__main__":
    main()
