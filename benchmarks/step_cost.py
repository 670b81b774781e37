"""What do a step and a forward pass cost?

    python -m benchmarks.step_cost steps [--context 512] [--nodes 16] [--repeats 10]
    python -m benchmarks.step_cost passes [--context 512] [--repeats 9] [--threads N]
    python -m benchmarks.step_cost features [--context 512] [--repeats 50] [--threads N]

``steps`` prints, per drafter and method, a step's median wall-clock time and the share of it outside model passes (CPU
only: on an accelerator a pass returns before it is done), and the transfers to the host per step: one with the verdict,
and one for each draft pass. Then what building trees of 64 nodes costs a layer, without any model; what scoring takes
of a step with c2t and the head; and what reading shared key heads in place saves in a target pass.

``passes`` prints, for transformers' own layers and for each weight format, the median milliseconds of a pass over n
tokens, passes of all taking turns; their ratios; Python's share, which is what a pass behind 8 tokens takes (mean of
n = 1 and 8) with as many layers that are so narrow that arithmetic takes no time; passes of the head that ships for the
target; and how far next-token distributions on a fixed text are from float32's.

``features`` prints what passes cost that keep hidden states, of none, of the final one and of three layers, by
transformers' own layers and by fused ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import NoDrafter, Scorer, UnscoredNode
from draftree.drafters.grow import TreeDrafter, grow
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.models.base import FeatureSpec, LanguageModel, Nodes, prefill
from draftree.models.cpu.quantization import AUTO, DEFAULT_WEIGHT_FORMAT, DRAFTING, STOCK, WEIGHT_FORMATS, summary
from draftree.models.heads.eagle_file import shipped_for, shipped_head
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.huggingface import attention
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.torch_scores import tensor_of
from draftree.models.loading import DEFAULT_MODEL, load_huggingface, load_stock
from draftree.policies.base import Candidates, Frontier, Plan
from draftree.policies.c2t import ClassifierTree, Score
from draftree.policies.methods import METHODS, find_policy
from draftree.request import Stats
from draftree.text import encode
from draftree.tree import ROOT

_MOST = 128
"""Most nodes that are scored at once."""
SIZES = (1, 2, 4, 8, 16, 24, 32, 64)
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
    parser.add_argument("what", choices=("steps", "passes", "features"))
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--nodes", type=int, default=16, help="of steps")
    parser.add_argument("--repeats", type=int, default=10, help="steps, or passes, that are measured")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.what == "steps":
        _measure_steps(load_huggingface(args.target), args.context, args.nodes, args.repeats)
        return
    if args.what == "features":
        _compare_features(args.target, args.context, args.repeats)
        return
    models = {STOCK: HFModel(*load_stock(args.target), name=args.target)}
    models |= {
        weight_format: load_huggingface(args.target, weight_format=weight_format)
        for weight_format in WEIGHT_FORMATS
        if weight_format != AUTO
    }
    models[DRAFTING] = models[DEFAULT_WEIGHT_FORMAT].in_weight_format(DRAFTING)
    _print_times(models, args.context, args.repeats)
    _print_agreement(models)


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
                engine = Engine(target, made, nodes=nodes)
                params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True)
                drafting = made.source.model if isinstance(made, TreeDrafter) else None
                models: list[LanguageModel] = [target, drafting] if drafting else [target]
                steps, outside, stats = _steps(engine, prompt, params, models, count)
                share = statistics.median(outside) / statistics.median(steps)
                name = "AR" if isinstance(made, NoDrafter) else method
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
        rng = torch.Generator().manual_seed(1)
        logits = torch.randn((_MOST, 1000), generator=rng) * 3
        top = logits.log_softmax(-1).topk(width)
        self._found = Candidates(top.indices, top.values, torch.distributions.Categorical(logits=logits).entropy())

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> Candidates:
        found, count = self._found, len(nodes)
        return Candidates(found.tokens[:count], found.logprobs[:count], found.entropies[:count])


def _build_trees(repeats: int = 200) -> None:
    print("\nbuilding a tree of 64 nodes          layers  nodes drafted  ms a layer")
    settings: dict[str, dict[str, float | str]] = {"opt-tree": {"delta": 0.001}, "c2t": {"beta": 0.0}}
    for method in ("binary", "dynamic-width", "opt-tree", "eagle2", "c2t"):
        policy = find_policy(method, settings.get(method))
        scorer, seconds = _RandomScorer(policy.width_for(64)), []
        for _ in range(repeats):
            began = time.perf_counter()
            tree, numbers = grow(scorer, policy, Plan([Budget(64)]))[0]
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


def _print_times(models: dict[str, HFModel], context: int, repeats: int) -> None:
    narrow = {weight_format: _narrow(model, weight_format) for weight_format, model in models.items()}
    every: dict[str, LanguageModel] = {**models, **_heads(models)}
    own, python = pass_seconds(every, context, SIZES, repeats), pass_seconds(narrow, 8, (1, 8), 3 * repeats)
    some = models[STOCK].capabilities
    print(
        f"{some.name}, context {context}, {torch.get_num_threads()} threads, median of {repeats}: milliseconds a pass"
    )
    print(f"{'tokens':11}{''.join(f'{n:7}' for n in SIZES)}   8 / 1  16 / 1  python  layers")
    for name, times in own.items():
        ratios = "".join(f"{times[n] / times[1]:8.2f}" for n in (8, 16))
        shown = "".join(f"{1e3 * times[n]:7.1f}" for n in SIZES)
        line = f"{name:11}{shown}{ratios}"
        if name in models:
            line += f"{1e3 * statistics.mean(python[name].values()):8.1f}  {summary(models[name].model)}"
        print(line, flush=True)


def _heads(models: dict[str, HFModel]) -> dict[str, HeadModel]:
    """The head that ships for the target, if there is one, in each of the weight formats that it can have."""
    if shipped_for(models[STOCK]) is None:
        return {}
    heads = [shipped_head(models[weight_format]) for weight_format in (STOCK, DEFAULT_WEIGHT_FORMAT, "int8")]
    return {f"head {head.capabilities.weight_format}": head for head in heads}


def pass_seconds(
    models: Mapping[str, LanguageModel], context: int, sizes: tuple[int, ...], repeats: int
) -> dict[str, dict[int, float]]:
    """Median seconds of passes behind a context, by model and tokens; all take turns, and the first round warms up."""
    rows = {name: prefill(m, [i % m.capabilities.vocab_size for i in range(context)]) for name, m in models.items()}
    seen: dict[tuple[str, int], list[float]] = {(name, n): [] for name in models for n in sizes}
    for _ in range(repeats + 1):
        for n in sizes:
            for name, model in models.items():
                tokens = [(5 * i + 3) % model.capabilities.vocab_size for i in range(n)]
                nodes = Nodes.of(torch.tensor(tokens), torch.full((n,), ROOT))  # a head scores no chain in one pass
                began = time.perf_counter()
                model.extend([rows[name]], [nodes])
                seen[name, n].append(time.perf_counter() - began)
                model.commit(rows[name], [])
    for name, model in models.items():
        model.close(rows[name])
    return {name: {n: statistics.median(seen[name, n][1:]) for n in sizes} for name in models}


def _compare_features(target: str, context: int, repeats: int) -> None:
    """Stock models have weights of their own, for a hook on a layer reads for all on the same ones."""
    sizes = (1, 4, 16)
    for weight_format in (STOCK, DEFAULT_WEIGHT_FORMAT):
        if weight_format == STOCK:
            made = {name: HFModel(*load_stock(target), name=target) for name in ("none", "final", "three")}
        else:
            fused = load_huggingface(target, weight_format=weight_format)
            made = {name: fused.twin() for name in ("none", "final", "three")}
        made["final"].track_features()
        made["three"].track_features(FeatureSpec((0, made["three"].layers // 2, made["three"].layers)))
        found = pass_seconds(made, context, sizes, repeats)
        print(f"{weight_format}, context {context}, {torch.get_num_threads()} threads, median of {repeats}: ms a pass")
        for name, times in found.items():
            more = "".join(f"{times[n] / found['none'][n] - 1:9.1%}" for n in sizes)
            print(f"{name:8}{''.join(f'{1e3 * times[n]:9.2f}' for n in sizes)}{more}", flush=True)


def _narrow(model: HFModel, weight_format: str) -> HFModel:
    """As many layers of the same kind, so narrow that their arithmetic takes no time."""
    config = deepcopy(model.model.config)
    heads = config.num_attention_heads
    config.update({"head_dim": 2, "hidden_size": 2 * heads, "intermediate_size": 16, "vocab_size": 64})
    config._attn_implementation = "sdpa"
    narrow: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return HFModel(
        narrow, name="narrow", weight_format=None if weight_format == STOCK else weight_format, self_test=False
    )


@torch.inference_mode()
def _print_agreement(models: dict[str, HFModel]) -> None:
    print(f"\n{'':8}same next token  KL from {STOCK}, nats  perplexity of the text")
    found = {weight_format: _logprobs(model) for weight_format, model in models.items()}
    reference, _ = found[STOCK]
    for weight_format, (logprobs, ids) in found.items():
        same = float((logprobs.argmax(-1) == reference.argmax(-1)).double().mean())
        divergence = float((reference.exp() * (reference - logprobs)).sum(-1).mean())
        perplexity = float((-logprobs[:-1].gather(1, ids[1:, None])).mean().exp())
        print(f"{weight_format:8}{same:15.1%}{divergence:21.5f}{perplexity:24.2f}")


def _logprobs(model: HFModel) -> tuple[Tensor, Tensor]:
    """[n, V] log-probs of the token after each of a fixed text, and its [n] ids."""
    ids = torch.tensor(encode(model.tokenizer, TEXT)[: model.capabilities.max_length])
    row = model.open()
    scores = model.extend([row], [Nodes.chain(ids.tolist())])
    logprobs = tensor_of(scores).double().log_softmax(-1)
    model.close(row)
    return logprobs, ids


if __name__ == "__main__":
    main()
