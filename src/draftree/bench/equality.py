"""Is the output what the target alone would have said? Every method and drafter on Spec-Bench prompts.

    python -m draftree.bench.equality [--limit 26] [--max-tokens 64] [--drafters lookup,self] [--temperatures 0,1]

Greedy ids are compared with transformers' ``generate(do_sample=False)``, alone and in batches of three prompts of
different lengths; sampled ids (temperatures 0.4 and 1.0) with our plain decoding under the same seed. Float32.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from rich.progress import track
from transformers import PreTrainedModel

from ..config import SamplingParams
from ..drafters.base import Drafter, NoDrafter
from ..drafters.registry import load_drafter
from ..engine import Engine
from ..models.load import DEFAULT_MODEL, load, load_stock
from ..policies.methods import METHODS
from ..text import encode, user
from .compare import first_difference
from .peers import bare
from .suites import spec_bench

SEED = 7


def generate_greedily(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy decoding."""
    ids = torch.tensor([prompt], device=model.device)
    generate: Callable[..., torch.Tensor] = cast(Any, model).generate
    out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


def main() -> None:
    """Compare and print a table."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.equality", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafters", default="lookup,self")
    parser.add_argument("--limit", type=int, default=26, help="prompts, from the categories in turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--temperatures", default="0,0.4,1.0")
    args = parser.parse_args()
    target, (reference, _) = load(args.target, dtype="float32"), load_stock(args.target, dtype="float32")
    bare(reference)
    prompts = [encode(target.tokenizer, user(item.prompt)) for item in spec_bench(args.limit)]
    temperatures = [float(t) for t in args.temperatures.split(",")]
    laws = {t: SamplingParams(max_tokens=args.max_tokens, temperature=t, seed=SEED) for t in temperatures}
    plain = Engine(target, NoDrafter())
    expected = {
        (t, i): generate_greedily(reference, p, args.max_tokens) if t == 0 else plain.generate([p], law)[0].token_ids
        for t, law in laws.items()
        for i, p in enumerate(track(prompts, f"reference at temperature {t}"))
    }
    runs: list[tuple[str, str, Drafter]] = [("none", "plain", NoDrafter())]
    for drafter in args.drafters.split(","):
        runs += [(drafter, m.name, load_drafter(drafter, target, m.policy())) for m in METHODS.values() if m.complete]
    print(f"{'drafter':8} {'method':20} {'T':>4} {'batch':>5}  equal  near-tie  different")
    for drafter, method, made in runs:
        engine = Engine(target, made, nodes=args.nodes)
        for t, law in laws.items():
            for batch in (1, 3):
                counts = Counter[str]()
                for at in track(range(0, len(prompts), batch), f"{drafter} {method} T={t}", transient=True):
                    some = prompts[at : at + batch]
                    for i, got in enumerate(engine.generate(some, law), start=at):
                        want = expected[t, i]
                        found = first_difference(target, prompts[i], want, got.token_ids, law, SEED)
                        counts["equal" if found is None else "near-tie" if found.near_tie else "different"] += 1
                figures = f"{counts['equal']:6} {counts['near-tie']:9} {counts['different']:10}"
                print(f"{drafter:8} {method:20} {t:4} {batch:5} {figures}", flush=True)


if __name__ == "__main__":
    main()
