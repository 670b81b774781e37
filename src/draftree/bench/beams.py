"""Is beam search ours or transformers'? Both on Spec-Bench prompts, with every drafter that beams can have, and timed.

    python -m draftree.bench.beams [--limit 26] [--max-tokens 64] [--widths 2,3,4,5] [--drafters none,lookup,head]

All W sequences and their scores are compared with those of transformers' ``generate(num_beams=W)``, in float32 unless
``--numerics`` says otherwise. A *near-tie*: the first sequence that differs scores within 1e-3 of theirs.
``--temperature`` above 0 times sampled beams, which have nothing to be compared with, beside our own plain ones.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from rich.progress import track
from transformers import PreTrainedModel

from ..beams.engine import BeamEngine, BeamGeneration
from ..beams.load import load_beam_source
from ..beams.params import BeamParams
from ..config import SamplingParams
from ..models.load import DEFAULT_MODEL, load, load_stock
from ..models.numerics import DEFAULT_NUMERICS
from ..text import encode, user
from .stats import ratio
from .suites import spec_bench

SEED, NEAR = 7, 1e-3
Found = list[tuple[list[int], float]]
"""Sequences and scores, best first."""


@dataclass(slots=True)
class Kept:
    """What one decoder did with the prompts.

    Attributes:
        found: its sequences.
        seconds: for each prompt.
        layers: for each prompt, layers of beams: tokens of the longest.
        passes: target passes after the prefills.
        slots: the largest share of W caches that one prompt's beams took.
    """

    found: list[Found] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    passes: int = 0
    slots: float = 0.0

    @property
    def rates(self) -> list[float]:
        """Layers a second, prefill included."""
        return [n / s for n, s in zip(self.layers, self.seconds, strict=True)]


def beam_search(model: PreTrainedModel, prompt: Sequence[int], width: int, max_tokens: int) -> Found:
    """transformers' own."""
    ids = torch.tensor([list(prompt)], device=model.device)
    generate: Callable[..., Any] = cast(Any, model).generate
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows, scores = out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist()
    return list(zip(rows, scores, strict=True))


def verdict(ours: Found, theirs: Found) -> str:
    """How our sequences compare with theirs, which are filled up to one length."""
    for (mine, score), (other, want) in zip(ours, theirs, strict=True):
        if mine != other[: len(mine)] or abs(score - want) > NEAR:
            return "near-tie" if abs(score - want) <= NEAR else "different"
    return "equal"


def main() -> None:
    """Compare, time and print a table."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.beams", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafters", default="none,lookup,head")
    parser.add_argument("--widths", default="2,3,4,5")
    parser.add_argument("--draft-beams", type=int, help="twice the beams by default")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--width-threshold", type=float)
    parser.add_argument("--limit", type=int, default=26, help="prompts, from the categories in turn")
    parser.add_argument("--max-prompt", type=int, default=1 << 20, help="leave out prompts of more tokens")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the seconds that processors worked, not the clock's"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--numerics", default=DEFAULT_NUMERICS)
    args = parser.parse_args()
    target = load(args.target, dtype="float32", numerics=args.numerics)
    stock = None if args.temperature else load_stock(args.target, dtype="float32")[0]
    encoded = [encode(target.tokenizer, user(item.prompt)) for item in spec_bench(args.limit)]
    prompts = [prompt for prompt in encoded if len(prompt) <= args.max_prompt]
    clock = time.process_time if args.cpu_time else time.perf_counter
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=SEED)
    drafters = args.drafters.split(",")
    sources = {name: load_beam_source(name, target, sampled=bool(args.temperature)) for name in drafters}
    engines = {name: BeamEngine(target, source) for name, source in sources.items()}
    print(
        f"{'W':>2} {'decoder':16} {'layers/s':>8} {'over plain beams':>22} {'layers/pass':>11} {'cache':>6}  verdicts"
    )
    for width in (int(w) for w in args.widths.split(",")):
        beams = BeamParams(
            width=width,
            returned=width,
            draft_width=args.draft_beams,
            depth=args.depth,
            threshold=args.width_threshold,
        )
        made = {name: Kept() for name in ([] if stock is None else ["transformers"]) + drafters}
        for number, prompt in enumerate(track(prompts, f"{width} beams", transient=True)):
            order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
            for name in order:
                began = clock()
                if name == "transformers" and stock is not None:
                    theirs = beam_search(stock, prompt, width, args.max_tokens)
                    _keep(made[name], theirs, clock() - began)
                else:
                    ours = engines[name].generate([prompt], params, beams)[0]
                    found = [(h.token_ids, h.score) for h in ours.hypotheses]
                    _keep(made[name], found, clock() - began, ours, len(prompt), width)
        if stock is not None:
            made["transformers"].layers = made[drafters[0]].layers  # the same search
        base = made.get("none")
        for name, kept in made.items():
            over = "" if base is None or kept is base else ratio(kept.rates, base.rates).text()
            counts: Counter[str] = Counter()
            if stock is not None and name != "transformers":
                pairs = zip(kept.found, made["transformers"].found, strict=True)
                counts.update(verdict(ours, theirs) for ours, theirs in pairs)
            rate = sum(kept.layers) / sum(kept.seconds)
            gained = (sum(kept.layers) - len(prompts)) / kept.passes if kept.passes else 0.0
            said = ", ".join(f"{n} {what}" for what, n in counts.items())
            print(f"{width:2} {name:16} {rate:8.2f} {over:>22} {gained:11.2f} {kept.slots:6.0%}  {said}", flush=True)


def _keep(
    kept: Kept, found: Found, seconds: float, ours: BeamGeneration | None = None, prompt: int = 0, width: int = 1
) -> None:
    kept.found.append(found)
    kept.seconds.append(seconds)
    if ours:
        kept.layers.append(ours.stats.tokens)
        kept.passes += ours.stats.steps
        kept.slots = max(kept.slots, ours.peak_slots / (width * (prompt + ours.stats.tokens)))


if __name__ == "__main__":
    main()
