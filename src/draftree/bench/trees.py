"""At equal nodes, whose trees are accepted furthest, and does E(A) foretell it?

    python -m draftree.bench.trees [--drafter lookup] [--methods opt-tree,eagle2,...] [--budgets 8,16,32,64]
                                   [--limit 26] [--max-tokens 64]

Greedy *match* gives the target's own text whatever was drafted. So the text is decoded once, plainly, and each method's
trees are then held against it step by step, which gives exactly the acceptance that decoding with it would have given.
Every tree is verified only where the drafter learns from the target's laws or reads its hidden states. One drafter
drafts for all prompts in turn.
MAL counts the bonus token; differences are paired by prompt, with a 95% bootstrap interval. ``r`` is the correlation of
E(A) with the acceptance length over steps (OPT-Tree, Figure 5) and ``E(A)`` its mean: what MAL was foretold to be.
"""

from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

from rich.progress import track

from ..config import SamplingParams
from ..drafters.base import Drafter, NoDrafter
from ..drafters.registry import load_drafter
from ..engine import Engine
from ..models.huggingface import HFModel
from ..models.load import DEFAULT_MODEL, load
from ..policies.methods import find_policy
from ..text import encode, user
from ..train.replay import Replay
from .suites import spec_bench
from .summary import interval

METHODS: dict[str, dict[str, float | str]] = {
    "opt-tree": {"delta": 0.001},
    "eagle2": {},
    "eagle": {},
    "binary": {},
    "chain": {"depth": 64},
    "dynamic-width-depth": {},
}
"""In the order in which each should be accepted at least as far as the next, up to ``binary``."""
_RANKED = list(METHODS)[1 : list(METHODS).index("binary") + 1]


class Step(NamedTuple):
    """One tree held against the text: its E(A), and the tokens that a step with it gains."""

    expected: float
    gained: int


def replay(target: HFModel, drafter: Drafter, prompt: list[int], text: list[int], nodes: int) -> list[Step]:
    """Draft along a text that is known."""
    verifier = target if drafter.successors or target.tracks_features else None
    steps = []
    with Replay(drafter, prompt, text, SamplingParams(), target=verifier) as known:
        while known.left:
            tree, gained = known.step(nodes)
            steps.append(Step(tree.expected_acceptance_length, gained))
    return steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.trees", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--budgets", default="8,16,32,64")
    parser.add_argument("--limit", type=int, default=26, help="prompts, from the categories in turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    order = args.methods.split(",")
    if unknown := set(order) - set(METHODS):
        parser.error(f"--methods {','.join(sorted(unknown))}: choose from {', '.join(METHODS)}")
    target = load(args.target)
    plain = Engine(target, NoDrafter())
    prompts = [encode(target.tokenizer, user(item.prompt)) for item in spec_bench(args.limit)]
    params = SamplingParams(max_tokens=args.max_tokens)
    texts = [plain.generate([p], params)[0].token_ids for p in track(prompts, "decoding plainly")]
    pairs = [(p, t) for p, t in zip(prompts, texts, strict=True) if len(t) > 1]
    print(f"{len(pairs)} prompts, up to {args.max_tokens} tokens, drafter {args.drafter}")
    print(f"{'nodes':>5} {'method':20} {'MAL':>6}  less the next              {'E(A)':>6} {'drift':>7} {'r':>6}")
    for nodes in map(int, args.budgets.split(",")):
        runs = {}
        for method in order:
            drafter = load_drafter(args.drafter, target, find_policy(method, METHODS[method]))
            drafter.prepare(target)
            runs[method] = [
                replay(target, drafter, p, t, nodes)
                for p, t in track(pairs, f"{method}, {nodes} nodes", transient=True)
            ]
        for method, after in zip(order, [*order[1:], ""], strict=True):
            steps = [step for run in runs[method] for step in run]
            mal = statistics.mean(s.gained for s in steps)
            foretold = statistics.mean(s.expected for s in steps)
            ranked = after in _RANKED
            difference = _difference(runs[method], runs[after]) if ranked else " " * 24
            print(
                f"{nodes:5} {method:20} {mal:6.3f}  {difference:26} {foretold:6.3f} {foretold / mal - 1:+7.1%} "
                f"{_correlation(steps):6.2f}",
                flush=True,
            )


def _mal(run: list[Step]) -> float:
    return sum(s.gained for s in run) / len(run)


def _difference(own: list[list[Step]], other: list[list[Step]]) -> str:
    """Mean difference of MAL over prompts, and its interval."""
    return interval([_mal(a) - _mal(b) for a, b in zip(own, other, strict=True)]).text("+.3f")


def _correlation(steps: list[Step]) -> float:
    try:
        return statistics.correlation([s.expected for s in steps], [float(s.gained) for s in steps])
    except statistics.StatisticsError:  # all the same
        return float("nan")


if __name__ == "__main__":
    main()
