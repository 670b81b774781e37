"""Is ``auto`` faster than the best fixed method, and never slower than plain decoding?

    python -m draftree.bench.auto [--numerics fp32] [--drafter lookup] [--temperature 0] [--per-category 2]
        [--max-tokens 64] [--grid small]

Plain decoding, ``auto`` and a grid of fixed methods decode each Spec-Bench prompt in turn, on the same weights and
threads, in an order that rotates. The prefill is left out: it is the same for all. Ratios are paired by prompt:
geometric mean with a 95% bootstrap interval; the last columns are the worst category and how many lie below 0.98.
"""

from __future__ import annotations

import argparse

from ..config import SamplingParams
from ..draft.auto import AutoTree
from ..draft.base import NoDrafter
from ..draft.load import load_drafter
from ..draft.methods import find_policy
from ..engine import Engine
from ..models.load import DEFAULT_MODEL, load
from ..models.numerics import DEFAULT_NUMERICS, NUMERICS
from ..text import encode, user
from .suites import spec_bench
from .timing import Contestant, by_category, losses, mean_ratio, ours, ratio, take_turns

Fixed = tuple[str, dict[str, float | str], int]
"""Method, settings, node budget."""

_LENGTHS: list[Fixed] = [("chain", {"depth": d}, d) for d in range(1, 9)]
_SIZES: list[Fixed] = [("opt-tree", {}, n) for n in (4, 8, 16, 32, 64)]
_DELTAS: list[Fixed] = [("opt-tree", {"delta": delta}, 16) for delta in (0.1, 0.2, 0.4, 0.8)]
GRIDS: dict[str, list[Fixed]] = {
    "small": [
        ("chain", {"depth": 3}, 3),
        ("chain", {"depth": 7}, 7),
        ("dynamic-width-depth", {}, 7),
        ("opt-tree", {}, 7),
        ("opt-tree", {"depth": 16}, 15),
    ],
    "full": [*_LENGTHS, ("static", {}, 30), ("dynamic-width-depth", {}, 7), *_SIZES, *_DELTAS],
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.auto", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--numerics", choices=NUMERICS, default=DEFAULT_NUMERICS)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--nodes", type=int, default=31)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--grid", choices=sorted(GRIDS), default="full")
    args = parser.parse_args()
    target = load(args.target, numerics=args.numerics)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=11)
    chosen = AutoTree()
    engines = {
        "plain": Engine(target, NoDrafter()),
        "auto": Engine(target, load_drafter(args.drafter, target, chosen), nodes=args.nodes),
    }
    for method, settings, nodes in GRIDS[args.grid]:
        name = " ".join([method, *(f"{k}={v}" for k, v in settings.items()), f"nodes={nodes}"])
        policy = find_policy(method, settings)
        engines[name] = Engine(target, load_drafter(args.drafter, target, policy), nodes=nodes)
    contestants: dict[str, Contestant] = {name: ours(engine, params) for name, engine in engines.items()}
    items = spec_bench(args.per_category)
    prompts = [encode(target.tokenizer, user(item.prompt)) for item in items]
    runs = take_turns(contestants, prompts, warm=encode(target.tokenizer, user("Hello")))
    categories = [item.category for item in items]
    print(f"{len(items)} prompts of up to {args.max_tokens} tokens at temperature {args.temperature:g}, {args.drafter}")
    print(f"{'':40} {'MAL':>5}   over plain          worst category          below 0.98")
    for name, own in sorted(runs.items(), key=lambda run: -mean_ratio(run[1], runs["plain"])):
        print(
            f"{name:40} {sum(r.mal for r in own) / len(own):5.2f}   "
            f"{ratio(own, runs['plain'], lambda r: r.decode_rate)}   "
            f"{losses(by_category(own, runs['plain'], categories))}"
        )
    best = max((n for n in runs if n not in ("plain", "auto")), key=lambda n: mean_ratio(runs[n], runs["plain"]))
    print(f"auto over the best fixed method ({best}): {ratio(runs['auto'], runs[best], lambda r: r.decode_rate)}")
    print(chosen.report.text())


if __name__ == "__main__":
    main()
