"""What does ``auto`` lose where no draft is ever right?

    python -m benchmarks.strangers [--repeats 7] [--answers 2] [--tokens 32] [--shapes vocabulary,deep,wide]
                                   [--drafters lookup,recycle,model,lookup+recycle] [--real]

Models of random weights decode greedily beside an AR engine of the same weights, one step of each in turn, so that the
load of the machine falls on both. Every drafter offers its own candidates plus 1, as sure as before: hardly anything
that it drafts is accepted. Each repeat has a new engine that has learned nothing. Prints, for the first answer and for
those after it, AR seconds over ``auto``'s without the prefill (median and smallest), how many steps drafted, and the
accepted tokens. ``--real`` decodes short answers of the default model instead, with drafters as they are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.config import SamplingParams
from draftree.drafters.base import DraftSource, Scorer, UnscoredNode
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.cost_profile import Grid, load_profile, measure_and_keep
from draftree.models.huggingface.hf_loading import load_huggingface
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.auto.policy import AutoTree
from draftree.policies.base import Candidates
from draftree.request import Request
from draftree.text.encoding import encode, user
from draftree.tree import Drawing

SHAPES: dict[str, dict[str, Any]] = {
    "vocabulary": {"vocab_size": 131072, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    "deep": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 24},
    "wide": {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4},
}
DRAFTERS = ("lookup", "recycle", "model", "lookup+recycle")
COSTS = Grid(sizes=(1, 2, 4, 8, 16), contexts=(64,), batches=(1,), repeats=3)
QUESTIONS = ("Name three rivers.", "What is a prime number?", "Write a line about rain.")


class Answer(NamedTuple):
    """AR seconds over ``auto``'s; accepted tokens; steps, and those of them that drafted."""

    ratio: float
    accepted: int
    steps: int
    drafted: int


def stranger(shape: str, seed: int = 0, layers: int | None = None) -> HFModel:
    """A model of random weights whose distributions are peaked: it is sure of what nobody can foresee."""
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return HFModel(model.eval(), name=f"stranger-{shape}-{config.num_hidden_layers}", self_test=False)


class WrongScorer(Scorer):
    """Another scorer's candidates, each token replaced by the next one of the vocabulary."""

    def __init__(self, scorer: Scorer, vocab: int) -> None:
        self._scorer, self._vocab = scorer, vocab

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        scored = self._scorer.score(nodes, width)
        return [found._replace(tokens=[(token + 1) % self._vocab for token in found.tokens]) for found in scored]


def spoil(source: DraftSource, vocab: int) -> None:
    """Make all that a source drafts wrong."""
    if isinstance(source, EnsembleSource):
        for part in source.parts:
            spoil(part, vocab)
        return
    kind: Any = type(source)

    def begin(self: DraftSource, requests: Sequence[Request], drawing: Drawing) -> WrongScorer:
        return WrongScorer(kind.begin(self, requests, drawing), vocab)

    source.__class__ = type(f"Wrong{kind.__name__}", (kind,), {"begin": begin, "__slots__": ()})


def drafter_for(name: str, target: HFModel, shape: str | None) -> TreeDrafter:
    """A drafter as it is for a real target, one that is always wrong for a stranger of this shape."""
    vocab = target.capabilities.vocab_size
    if shape is not None and name == "model":
        made = TreeDrafter(AutoTree(), ModelSource(stranger(shape, seed=1, layers=1), vocab))
    else:
        loaded = load_drafter(name, target, AutoTree())
        if not isinstance(loaded, TreeDrafter):
            raise SystemExit(f"drafter {name} drafts nothing")
        made = loaded
    if shape is not None:
        for model in (target, *made.source.models):
            if load_profile(model) is None:
                measure_and_keep(model, COSTS)
        spoil(made.source, vocab)
    return made


def answer(alone: Engine, auto: Engine, prompt: list[int], tokens: int) -> Answer:
    """One answer of each engine, one step of each in turn."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    one, other = alone.stepper.open(alone.request(prompt, params)), auto.stepper.open(auto.request(prompt, params))
    drafted = 0
    while one.finish_reason is None or other.finish_reason is None:
        if one.finish_reason is None:
            alone.stepper.step([one])
        if other.finish_reason is None:
            passes = auto.speculation.drafter.passes
            (outcome,) = auto.stepper.step([other])
            drafted += bool(len(outcome.tree) or auto.speculation.drafter.passes > passes)
    if one.output_ids != other.output_ids:
        print("the ids differ (a near-tie, or a bug)")
    took = [r.stats.seconds.draft + r.stats.seconds.verify + r.stats.seconds.other for r in (one, other)]
    alone.stepper.close(one)
    auto.stepper.close(other)
    return Answer(took[0] / took[1], tokens - 1 - other.stats.steps, other.stats.steps, drafted)


def report(name: str, found: Sequence[Sequence[Answer]]) -> None:
    """Print the first answers and those after them."""
    for label, some in (("first", [each[0] for each in found]), ("later", [a for each in found for a in each[1:]])):
        if some:
            ratios = [one.ratio for one in some]
            print(
                f"{name:22} {label}: {statistics.median(ratios):.3f} of AR, smallest {min(ratios):.3f}; "
                f"{sum(one.drafted for one in some) / len(some):.1f} of {some[0].steps} steps drafted, "
                f"{sum(one.accepted for one in some) / len(some):.1f} tokens accepted",
                flush=True,
            )


def prompts(target: HFModel, answers: int, real: bool) -> Iterator[list[int]]:
    """Short ones; those of strangers repeat themselves, so that n-grams are found."""
    for i in range(answers):
        if real:
            yield encode(target.tokenizer, user(QUESTIONS[i % len(QUESTIONS)]))
        else:
            yield [(97 * i + 31 * j * j) % 4096 for j in range(24)] * 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--answers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--drafters", default=",".join(DRAFTERS))
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--cache", help="folder for measured costs, for several runs; by default they are not kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not args.real:  # a stranger's costs are of no use to anybody else
            os.environ["XDG_CACHE_HOME"] = args.cache or folder
        for shape in [None] if args.real else args.shapes.split(","):
            target = load_huggingface() if shape is None else stranger(shape)
            for name in args.drafters.split(","):
                found = []
                for _ in range(args.repeats):
                    auto = Engine(target, Speculation(drafter_for(name, target, shape)))
                    alone = Engine(target.twin())
                    questions = prompts(target, args.answers, real=args.real)
                    found.append([answer(alone, auto, prompt, args.tokens) for prompt in questions])
                report(f"{shape or 'default'} {name}", found)


if __name__ == "__main__":
    main()
