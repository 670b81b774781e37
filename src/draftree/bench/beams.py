"""Beam search with drafts: equal to transformers', timed beside our own plain beams, and the caches that it saves.

    python -m draftree.bench.beams [--limit 26] [--max-tokens 64] [--widths 2,3,4,5] [--drafters none,lookup,head]
        [--out FILE]

All W sequences and their scores are compared with those of transformers' ``generate(num_beams=W)``, in float32 unless
``--numerics`` says otherwise. A *near-tie*: the first sequence that differs scores within 1e-3 of theirs.
``--temperature`` above 0 times sampled beams, which have nothing to be compared with, beside our own plain ones. With
``--out`` each answer is kept, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from rich.progress import track
from transformers import PreTrainedModel

from ..beams.beam_engine import BeamEngine
from ..beams.params import BeamParams
from ..config import SamplingParams
from ..errors import InputError
from ..load import load_beam_source
from ..models.cpu.quantization import DEFAULT_NUMERICS
from ..models.load import DEFAULT_MODEL, load, load_stock
from ..text import encode, user
from .beam_lines import Found, Line, Lines
from .peers import bare
from .suites import spec_bench
from .summary import ratio

TRANSFORMERS = "transformers"
SEED, NEAR = 7, 1e-3


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
    parser.add_argument("--draft-beams", type=int, help="at most twice the beams by default")
    parser.add_argument("--depth", type=int, help="as deep as is likely to be fastest by default")
    parser.add_argument("--width-threshold", type=float)
    parser.add_argument("--limit", type=int, default=26, help="prompts, from the categories in turn")
    parser.add_argument("--max-prompt", type=int, default=1 << 20, help="leave out prompts of more tokens")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the seconds that processors worked, not the clock's"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--numerics", default=DEFAULT_NUMERICS)
    parser.add_argument("--out", help="keep each answer in this file, and go on there")
    args = parser.parse_args()
    widths, drafters = [int(w) for w in args.widths.split(",")], args.drafters.split(",")
    uncompared = ("out", "widths", "drafters")
    settings = {name: value for name, value in vars(args).items() if name not in uncompared}
    try:
        lines = Lines(args.out, settings)
        target = load(args.target, dtype="float32", numerics=args.numerics)
        stock = None if args.temperature else bare(load_stock(args.target, dtype="float32")[0])
        sources = {name: load_beam_source(name, target, sampled=bool(args.temperature)) for name in drafters}
    except InputError as error:
        sys.exit(f"error: {error}")
    encoded = [encode(target.tokenizer, user(item.prompt)) for item in spec_bench(args.limit)]
    prompts = [prompt for prompt in encoded if len(prompt) <= args.max_prompt]
    clock = time.process_time if args.cpu_time else time.perf_counter
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=SEED)
    engines = {name: BeamEngine(target, source) for name, source in sources.items()}
    decoders = ([] if stock is None else [TRANSFORMERS]) + drafters

    def decode(decoder: str, number: int, beams: BeamParams) -> Line:
        prompt, began = prompts[number], clock()
        if stock is not None and decoder == TRANSFORMERS:
            theirs = beam_search(stock, prompt, beams.width, args.max_tokens)
            return Line(beams.width, decoder, number, theirs, clock() - began)
        made = engines[decoder].generate([prompt], params, beams)[0]
        seconds, stats = clock() - began, made.stats
        found = [(h.token_ids, h.score) for h in made.hypotheses]
        slots = made.peak_slots / (beams.width * (len(prompt) + stats.tokens))
        return Line(beams.width, decoder, number, found, seconds, stats.tokens, stats.steps, slots)

    print(
        f"{'W':>2} {'decoder':16} {'layers/s':>8} {'over plain beams':>22} {'layers/pass':>11} {'cache':>6}  verdicts"
    )
    for width in widths:
        beams = BeamParams(
            width=width,
            returned=width,
            draft_width=args.draft_beams,
            depth=args.depth,
            threshold=args.width_threshold,
        )
        for number in track(range(len(prompts)), f"{width} beams", transient=True):
            turn = number % len(decoders)
            for decoder in decoders[turn:] + decoders[:turn]:
                if (width, decoder, number) not in lines:
                    lines.add(decode(decoder, number, beams))
        kept = {decoder: list(lines.of(width, decoder)) for decoder in decoders}
        for decoder, own in kept.items():
            print(_row(width, decoder, own, kept), flush=True)


def _row(width: int, decoder: str, own: Sequence[Line], kept: Mapping[str, Sequence[Line]]) -> str:
    """One line of the table."""
    told = {name: [n.layers for n in lines] for name, lines in kept.items() if name != TRANSFORMERS}
    layers = told.get(decoder) or next(iter(told.values()))  # transformers' search is the same one
    seconds = [n.seconds for n in own]
    over, verdicts, gained = "", "", 0.0
    if (base := kept.get("none")) and decoder != "none":
        rates = [n / s for n, s in zip(layers, seconds, strict=True)]
        over = ratio(rates, [n.layers / n.seconds for n in base]).text()
    if (theirs := kept.get(TRANSFORMERS)) and decoder != TRANSFORMERS:
        counts = Counter(verdict(n.found, other.found) for n, other in zip(own, theirs, strict=True))
        verdicts = ", ".join(f"{count} {what}" for what, count in counts.items())
    if passes := sum(n.passes for n in own):
        gained = (sum(layers) - len(own)) / passes
    slots = max(n.slots for n in own)
    rate = sum(layers) / sum(seconds)
    return f"{width:2} {decoder:16} {rate:8.2f} {over:>22} {gained:11.2f} {slots:6.0%}  {verdicts}"


if __name__ == "__main__":
    main()
