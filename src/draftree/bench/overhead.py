"""What does a step cost apart from model passes, and how many transfers to the host does it make?

    python -m draftree.bench.overhead [--context 512] [--nodes 16] [--steps 10]

Prints, per drafter and method, a step's median wall-clock time and what share of it the median time outside model
passes is (CPU only: on an accelerator a pass returns before it is done), and the transfers per step: one with the
verdict, and one for each drafter model pass.
Then what building trees of 64 nodes costs a layer, without any model; what scoring takes of a step with c2t and the
head; and what reading shared key heads in place saves in a target pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config import Budget, SamplingParams
from ..drafters.base import NoDrafter, TreeDrafter
from ..drafters.distributions import Drawn
from ..drafters.grow import grow
from ..drafters.registry import load_drafter
from ..engine import Engine
from ..errors import RunError
from ..models import attention
from ..models.base import LanguageModel, Nodes
from ..models.eagle_file import shipped_for
from ..models.huggingface import HFModel
from ..models.load import DEFAULT_MODEL, load
from ..policies.base import Candidates, Frontier
from ..policies.c2t import ClassifierTree, Score
from ..policies.methods import METHODS, find_policy
from ..request import Stats
from ..text import encode
from .suites import spec_bench

_MOST = 128
"""Most nodes that are scored at once."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.overhead", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    target = load(args.target)
    text = "\n".join(item.prompt for item in spec_bench(2, {"summarization"}))
    half = encode(target.tokenizer, text)[: args.context // 2]
    prompt = half + half  # said twice, so that lookup always finds something to draft

    print(
        f"context {len(prompt)}, node budget {args.nodes}, {target.capabilities.name} on {target.capabilities.device}"
    )
    print(f"{'drafter':8} {'method':20} {'T':>4}  nodes/step  ms/step  outside passes  transfers/step")
    for drafter in ("none", "lookup", "self"):
        for method in [m.name for m in METHODS.values() if m.complete] if drafter != "none" else ("chain",):
            for temperature in (0.0, 1.0):
                made = load_drafter(drafter, target, find_policy(method, {"depth": 16} if method == "chain" else None))
                engine = Engine(target, made, nodes=args.nodes)
                params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True)
                drafting = made.source.model if isinstance(made, TreeDrafter) else None
                models: list[LanguageModel] = [target, drafting] if drafting else [target]
                steps, outside, stats = _steps(engine, prompt, params, models, args.steps)
                share = statistics.median(outside) / statistics.median(steps)
                name = "plain" if isinstance(made, NoDrafter) else method
                print(
                    f"{drafter:8} {name:20} {temperature:4} {sum(stats.drafted) / stats.steps:11.1f} "
                    f"{1e3 * statistics.median(steps):8.1f} {share:14.1%} {1 + stats.draft_passes / stats.steps:15.2f}",
                    flush=True,
                )
    _build_trees()
    if shipped_for(target):
        _score(target, prompt, args.nodes, args.steps)
    _compare_attention(target, prompt)


class _RandomScorer:
    """Random laws, made beforehand: a model that takes no time."""

    def __init__(self, width: int) -> None:
        rng = torch.Generator().manual_seed(1)
        logits = torch.randn((_MOST, 1000), generator=rng) * 3
        top = logits.log_softmax(-1).topk(width)
        self._found = Candidates(top.indices, top.values, torch.distributions.Categorical(logits=logits).entropy())

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        return self._first(len(rows))

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        return self._first(len(rows))

    def _first(self, count: int) -> Candidates:
        found = self._found
        return Candidates(found.tokens[:count], found.logprobs[:count], found.entropies[:count])

    def draw(self, counts: Tensor) -> Drawn:
        raise RunError("nothing is drawn here: use drawing TOP")


def _build_trees(repeats: int = 200) -> None:
    print("\nbuilding a tree of 64 nodes          layers  nodes drafted  ms a layer")
    settings: dict[str, dict[str, float | str]] = {"opt-tree": {"delta": 0.001}, "c2t": {"beta": 0.0}}
    for method in ("binary", "dynamic-width", "opt-tree", "eagle2", "c2t"):
        policy = find_policy(method, settings.get(method))
        scorer, seconds = _RandomScorer(policy.width_for(64)), []
        for _ in range(repeats):
            began = time.perf_counter()
            tree, numbers = grow(scorer, policy, [Budget(64)])[0]
            seconds.append(time.perf_counter() - began)
        drafted = int(numbers.max()) + 1
        print(f"{method:36} {tree.depth:6} {drafted:14} {1e3 * statistics.median(seconds) / tree.depth:11.2f}")


class _Timed:
    """A score that adds up its seconds."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self.seconds = 0.0

    def __call__(self, frontier: Frontier) -> Tensor:
        began = time.perf_counter()
        found = self._score(frontier)
        self.seconds += time.perf_counter() - began
        return found


def _score(target: HFModel, prompt: list[int], nodes: int, count: int) -> None:
    """What the classifier of c2t takes of steps with the head."""
    policy = find_policy("c2t")
    assert isinstance(policy, ClassifierTree)  # noqa: S101 - it is what c2t makes
    timed = _Timed(policy.score)
    engine = Engine(target, load_drafter("head", target, replace(policy, score=timed)), nodes=nodes)
    request = engine.open(prompt, SamplingParams(ignore_eos=True))
    engine.step([request])
    timed.seconds, began = 0.0, time.perf_counter()
    for _ in range(count):
        engine.step([request])
    total = time.perf_counter() - began
    engine.close(request)
    print(f"\nscoring takes {timed.seconds / total:.2%} of a step with the head and c2t, {nodes} nodes")


def _steps(
    engine: Engine, prompt: list[int], params: SamplingParams, models: list[LanguageModel], count: int
) -> tuple[list[float], list[float], Stats]:
    """Seconds of ``count`` steps, and of them outside model passes; one more step warms up and is left out."""
    steps, outside = [], []
    request = engine.open(prompt, params)
    for _ in range(count + 1):
        began, before = time.perf_counter(), _inside(models)
        engine.step([request])
        steps.append(time.perf_counter() - began)
        outside.append(steps[-1] - (_inside(models) - before))
    engine.close(request)
    return steps[1:], outside[1:], request.stats


def _inside(models: list[LanguageModel]) -> float:
    return sum(m.pass_seconds for m in models if isinstance(m, HFModel))


def _compare_attention(target: HFModel, prompt: list[int]) -> None:
    """Passes with keys read in place and with keys repeated by transformers, in turn."""
    row = target.open(prompt)
    print("\nmilliseconds of a target pass   " + "tokens  repeated  in place")
    for n in (1, 2, 4, 8, 16, 17, 32):
        times: dict[str, list[float]] = {"sdpa": [], attention.NAME: []}
        for _ in range(9):
            for name, seen in times.items():
                target.model.set_attn_implementation(name)
                began = time.perf_counter()
                target.extend([row], [Nodes.chain(torch.randint(0, 1000, (n,)).tolist())])
                seen.append(time.perf_counter() - began)
                target.commit(row, [])
        repeated, shared = (1e3 * statistics.median(t) for t in times.values())
        print(f"{n:38} {repeated:9.1f} {shared:9.1f}", flush=True)
    target.close(row)


if __name__ == "__main__":
    main()
