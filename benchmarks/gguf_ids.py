"""Are texts over llama.cpp those of llama.cpp alone? python -m benchmarks.gguf_ids [--target FILE] [--prompts 50]

For each prompt the greedy ids of each method, eight requests at a time, against those of ``llama_decode`` with one
sequence: the prompt in one pass, then a token a pass. Prints how many are equal; where a format is not bit-exact, how
many of the others differ by a near-tie first.
"""

from __future__ import annotations

import argparse

from draftree import Engine, SamplingParams, SpeculationParams
from draftree.bench.compare import first_difference
from draftree.bench.suites import choose, load_suite
from draftree.engines import make_engine
from draftree.models.llama.context import Context, Tokens
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.loading import DEFAULT_MODEL, load_llama
from draftree.text import encode, user

METHODS = ("none", "chain", "static", "binary", "opt-tree", "dynamic-width-budget", "auto")


def alone(model: LlamaModel, prompt: list[int], count: int) -> list[int]:
    """Greedy ids by llama.cpp."""
    context, ids, fresh = Context(model.weights, 4096, model.threads, hidden=False), list(prompt), prompt
    while len(ids) < len(prompt) + count and (fresh is prompt or ids[-1] not in model.capabilities.eos_ids):
        positions = list(range(len(ids) - len(fresh), len(ids)))
        wanted = [at == len(ids) - 1 for at in positions]
        found = context.decode(Tokens(list(fresh), positions, [[0]] * len(fresh), wanted))
        if found is None:
            break
        fresh = [int(found[0][-1].argmax())]
        ids += fresh
    return ids[len(prompt) :]


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--suite", default="spec-bench")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--methods", default=",".join(METHODS))
    args = parser.parse_args()
    model = load_llama(args.target)
    print(model.capabilities.trees)
    items = choose(load_suite(args.suite), limit=args.prompts)
    prompts = [encode(model.tokenizer, user(item.turns[0])) for item in items]
    params = SamplingParams(max_tokens=args.tokens)
    wanted = [alone(model, prompt, args.tokens) for prompt in prompts]
    for method in args.methods.split(","):
        engine = Engine(model)
        if method != "none":
            engine = make_engine(model, SpeculationParams(drafter=args.drafter, method=method, nodes=8))
        results = engine.generate(prompts, params)
        pairs = [(p, w, r.token_ids) for p, w, r in zip(prompts, wanted, results, strict=True)]
        equal = sum(w == ids for _, w, ids in pairs)
        found = [first_difference(model, p, w, ids, params) for p, w, ids in pairs if w != ids]
        ties = sum(each is not None and each.near_tie for each in found)
        accepted = sum(sum(result.stats.accepted) for result in results)
        print(f"{method:22} {equal} of {len(pairs)} equal, {ties} near-ties, {accepted} drafted tokens accepted")
        engine.prefixes.clear()


if __name__ == "__main__":
    main()
