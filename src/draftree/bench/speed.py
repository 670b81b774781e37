"""Is plain decoding as fast as transformers' generate, and how much faster are draft trees?

    python -m draftree.bench.speed [--categories summarization,rag] [--per-category 2] [--max-tokens 128]
        [--numerics fp32,auto] [--drafter ...] [--method ...] [--temperature 0]

All contestants decode each prompt in turn on the same threads, transformers in float32 with its own layers (greedily,
whatever the temperature), in an order that rotates from prompt to prompt, so that a drifting machine hits all alike.
Times include the prefill where nothing else is said. Ratios are paired by prompt: geometric mean with a 95% bootstrap
interval over prompts; "plain" is plain decoding in the same numerics. The last columns are the worst category over
plain, the prefill left out, and how many lie below 0.98.
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
from ..draft.load import DEFAULT_DRAFTER, load_drafter
from ..draft.methods import DEFAULT_METHOD, DEFAULT_NODES, find_policy
from ..engine import Engine
from ..models.load import DEFAULT_MODEL, load, load_stock
from ..models.numerics import DEFAULT_NUMERICS
from ..text import encode, user
from .suites import spec_bench
from .timing import Contestant, Run, by_category, losses, ours, ratio, take_turns

_REFERENCE = "transformers generate"


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
    parser.add_argument("--numerics", default=DEFAULT_NUMERICS, help="one or more, with commas")
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER)
    parser.add_argument("--method", default=DEFAULT_METHOD)
    parser.add_argument("--nodes", type=int, default=DEFAULT_NODES)
    parser.add_argument("--categories", default="", help="with commas; all by default")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    reference, _ = load_stock(args.target)
    items = spec_bench(args.per_category, set(filter(None, args.categories.split(","))))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=11)
    contestants: dict[str, Contestant] = {
        _REFERENCE: _transformers(reference, args.max_tokens),
        "transformers prompt lookup": _transformers(reference, args.max_tokens, prompt_lookup_num_tokens=10),
    }
    bases: dict[str, str] = {}
    for numerics in args.numerics.split(","):
        target = load(args.target, numerics=numerics)
        used = target.capabilities.numerics
        drafter = load_drafter(args.drafter, target, find_policy(args.method))
        name, plain = f"{drafter.name}, {args.method}, {used}", f"plain, {used}"
        trees = Engine(target, drafter, nodes=args.nodes)
        contestants |= {plain: ours(Engine(target, NoDrafter()), params), name: ours(trees, params)}
        bases |= {plain: plain, name: plain}
    prompts = [encode(target.tokenizer, user(item.prompt)) for item in items]
    runs = take_turns(contestants, prompts, warm=encode(target.tokenizer, user("Hello")))
    categories = [item.category for item in items]
    what = args.categories or "all categories"
    print(f"{len(items)} prompts of {what}, up to {args.max_tokens} tokens, temperature {args.temperature:g}")
    print(
        f"{'':40} tokens/s    MAL   over transformers   over plain          no prefill          worst category"
        "          below 0.98"
    )
    for name, own in runs.items():
        columns = [ratio(own, runs[_REFERENCE], lambda r: r.rate)]
        if base := bases.get(name):
            columns.append(ratio(own, runs[base], lambda r: r.rate))
            columns.append(ratio(own, runs[base], lambda r: r.decode_rate))
            columns.append(losses(by_category(own, runs[base], categories)))
        rate = sum(r.tokens for r in own) / sum(r.seconds for r in own)
        print(f"{name:40} {rate:8.1f} {sum(r.mal for r in own) / len(own):6.2f}   {'   '.join(columns)}")


if __name__ == "__main__":
    main()
