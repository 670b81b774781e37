"""What does a step cost? python -m benchmarks.step_cost [--context 512] [--nodes 16] [--repeats 10] [--threads N]

Prints, per drafter and method, a step's median wall-clock time and the share of it outside model passes (CPU only: on
an accelerator a pass returns before it is done), and the transfers to the host per step: one with the verdict, and one
for each draft pass. Then what building trees of 64 nodes costs a layer, without any model; what scoring takes of a step
with c2t and the head; and what reading shared key heads in place saves in a target pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import Scorer, UnscoredNode
from draftree.drafters.draft_model import candidates_of_top
from draftree.drafters.grow import TreeDrafter, grow
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.base import LanguageModel, Nodes, prefill
from draftree.models.heads.head_folder import shipped_for
from draftree.models.huggingface import attention
from draftree.models.huggingface.hf_loading import load_huggingface
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.model_files import DEFAULT_MODEL
from draftree.policies.base import Candidates, Frontier
from draftree.policies.c2t import ClassifierTree, Score
from draftree.policies.methods import METHODS, find_policy
from draftree.request import Stats
from draftree.scores import NumpyScores
from draftree.text.encoding import encode

_MOST = 128
"""Most nodes that are scored at once."""
TEXT = """\
The lighthouse stands on a rock a mile from the coast. Every evening at six the keeper climbs the two hundred stairs,
cleans the glass of the lamp with a soft cloth, fills the tank with oil, and lights the wick. When the lamp is burning,
she writes the hour and the weather in the log book. If there is fog, she starts the horn and counts one minute between
the blasts. Once a week a boat brings bread, letters and the newspaper.

def fibonacci(n: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]

A train leaves at 9:15 and arrives at 11:45. It travels 200 kilometres. How fast is it? The journey takes two and a
half hours, so that its mean speed is 200 / 2.5 = 80 kilometres per hour. Light takes eight minutes and twenty seconds
from the sun to the earth, which is about 150 million kilometres. Water boils at 100 degrees Celsius at sea level, and
at less on a mountain, where the air is thinner. The capital of Australia is Canberra; its largest city is Sydney.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--nodes", type=int, default=16, help="most in one step's tree")
    parser.add_argument("--repeats", type=int, default=10, help="steps that are measured")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    _measure_steps(load_huggingface(args.target), args.context, args.nodes, args.repeats)


def _measure_steps(target: HFModel, context: int, nodes: int, count: int) -> None:
    half = encode(target.tokenizer, TEXT * 8)[: context // 2]
    prompt = half + half  # the text twice, so that prompt lookup always drafts
    some = target.capabilities
    print(f"context {len(prompt)}, node budget {nodes}, {some.name} on {some.device}")
    print(f"{'drafter':8} {'method':20} {'T':>4}  nodes/step  ms/step  outside passes  transfers/step")
    for drafter in ("none", "lookup", "self"):
        for method in [m.name for m in METHODS.values() if m.complete] if drafter != "none" else ("chain",):
            for temperature in (0.0, 1.0):
                made = load_drafter(drafter, target, find_policy(method, {"depth": 16} if method == "chain" else None))
                engine = Engine(target, Speculation(made, nodes))
                params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True)
                drafting = made.source.model if isinstance(made, TreeDrafter) else None
                models: list[LanguageModel] = [target, drafting] if drafting else [target]
                steps, outside, stats = _steps(engine, prompt, params, models, count)
                share = statistics.median(outside) / statistics.median(steps)
                name = "AR" if made.policy is None else method
                print(
                    f"{drafter:8} {name:20} {temperature:4} {sum(stats.drafted) / stats.steps:11.1f} "
                    f"{1e3 * statistics.median(steps):8.1f} {share:14.1%} {1 + stats.draft_passes / stats.steps:15.2f}",
                    flush=True,
                )
    _build_trees()
    if shipped_for(target):
        _score(target, prompt, nodes, count)
    _compare_attention(target, prompt)


class _RandomScorer(Scorer):
    """Random distributions, made beforehand: a model that takes no time."""

    def __init__(self, width: int) -> None:
        logits = 3 * np.random.default_rng(1).standard_normal((_MOST, 1000), np.float32)
        self._found = candidates_of_top(NumpyScores(logits, [_MOST]).top(range(_MOST), width), [])

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        return self._found[: len(nodes)]


def _build_trees(repeats: int = 200) -> None:
    print("\nbuilding a tree of 64 nodes          layers  nodes drafted  ms a layer")
    settings: dict[str, dict[str, float | str]] = {"opt-tree": {"delta": 0.001}, "c2t": {"beta": 0.0}}
    for method in ("binary", "dynamic-width", "opt-tree", "eagle2", "c2t"):
        policy = find_policy(method, settings.get(method))
        scorer, seconds = _RandomScorer(policy.width_for(64)), []
        for _ in range(repeats):
            began = time.perf_counter()
            tree, numbers = grow(scorer, policy, policy.plan([], [Budget(64)]))[0]
            seconds.append(time.perf_counter() - began)
        drafted = max(numbers) + 1
        print(f"{method:36} {tree.depth:6} {drafted:14} {1e3 * statistics.median(seconds) / tree.depth:11.2f}")


class _Timed:
    """A score that adds up its seconds."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self.seconds = 0.0

    def __call__(self, frontier: Frontier) -> Sequence[Sequence[float]]:
        began = time.perf_counter()
        found = self._score(frontier)
        self.seconds += time.perf_counter() - began
        return found


def _score(target: HFModel, prompt: list[int], nodes: int, count: int) -> None:
    """What the classifier of c2t takes of steps with the head."""
    policy = find_policy("c2t")
    assert isinstance(policy, ClassifierTree)  # noqa: S101 - it is what c2t makes
    timed = _Timed(policy.score)
    engine = Engine(target, Speculation(load_drafter("head", target, replace(policy, score=timed)), nodes))
    request = engine.stepper.open(engine.request(prompt, SamplingParams(ignore_eos=True)))
    engine.stepper.step([request])
    timed.seconds, began = 0.0, time.perf_counter()
    for _ in range(count):
        engine.stepper.step([request])
    total = time.perf_counter() - began
    engine.stepper.close(request)
    print(f"\nscoring takes {timed.seconds / total:.2%} of a step with the head and c2t, {nodes} nodes")


def _steps(
    engine: Engine, prompt: list[int], params: SamplingParams, models: list[LanguageModel], count: int
) -> tuple[list[float], list[float], Stats]:
    """Seconds of ``count`` steps, and of them outside model passes; one more step warms up and is left out."""
    steps, outside = [], []
    request = engine.stepper.open(engine.request(prompt, params))
    for _ in range(count + 1):
        began, before = time.perf_counter(), _inside(models)
        engine.stepper.step([request])
        steps.append(time.perf_counter() - began)
        outside.append(steps[-1] - (_inside(models) - before))
    engine.stepper.close(request)
    return steps[1:], outside[1:], request.stats


def _inside(models: list[LanguageModel]) -> float:
    return sum(m.pass_seconds for m in models if isinstance(m, HFModel))


def _compare_attention(target: HFModel, prompt: list[int]) -> None:
    """Passes with keys read in place and with keys repeated by transformers, in turn."""
    row = prefill(target, prompt)
    print("\nmilliseconds of a target pass   " + "tokens  repeated  in place")
    for n in (1, 2, 4, 8, 16, 17, 32):
        times: dict[str, list[float]] = {"sdpa": [], attention.NAME: []}
        for _ in range(9):
            for name, seen in times.items():
                target.model.set_attn_implementation(name)
                began = time.perf_counter()
                target.extend([row], [Nodes.chain(torch.randint(0, target.capabilities.vocab_size, (n,)).tolist())])
                seen.append(time.perf_counter() - began)
                target.commit(row, [])
        repeated, shared = (1e3 * statistics.median(t) for t in times.values())
        print(f"{n:38} {repeated:9.1f} {shared:9.1f}", flush=True)
    target.close(row)


if __name__ == "__main__":
    main()
