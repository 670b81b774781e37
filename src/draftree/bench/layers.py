"""How often is the target right about its own next token when some of its layers are left out?

    python -m draftree.bench.layers --prompts questions.jsonl [--drop 12] [--limit 4] [--max-tokens 48] [--among 10]

The target answers some prompts greedily. Then each set of layers is asked about every token of these answers, in one
pass, behind the same prompt: the share of positions where it agrees with the target, which is what a greedy draft of
one token would be accepted with. First early exits after N layers. Then layers are left out one by one: of the
``among`` layers that mattered least when they alone were missing, the one whose loss costs least now. Seconds of a pass
are proportional to the layers, but for the output layer (``draftree profile``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from ..config import SamplingParams
from ..engine import Engine
from ..models.base import Nodes
from ..models.cpu.quantization import DEFAULT_NUMERICS
from ..models.huggingface import HFModel
from ..models.load import DEFAULT_MODEL, load
from ..text import encode, user
from ..train.prompts import read_prompts

Answers = Sequence[tuple[list[int], list[int]]]
"""Prompts and what the target said."""


def agreement(target: HFModel, kept: Sequence[int], answers: Answers) -> float:
    """Share of tokens of the answers that the target without its other layers would have said there."""
    model = target.with_layers(kept, "fewer")
    right = total = 0
    for prompt, answer in answers:
        row = model.open(prompt)
        said = [int(row.logits.argmax())]
        said += model.extend([row], [Nodes.chain(answer[:-1])])[0].argmax(-1).tolist()
        model.close(row)
        right += sum(a == b for a, b in zip(said, answer, strict=True))
        total += len(answer)
    return right / total


def leave_out(target: HFModel, answers: Answers, drop: int, among: int) -> Iterable[tuple[int, list[int], float]]:
    """Layers to leave out, one by one: which one, what is left, and how often that agrees."""
    kept = list(range(target.layers))
    alone = {layer: agreement(target, [k for k in kept if k != layer], answers) for layer in kept}
    for _ in range(drop):
        some = sorted((layer for layer in kept if layer in alone), key=lambda layer: -alone[layer])[:among]
        found = {layer: agreement(target, [k for k in kept if k != layer], answers) for layer in some}
        worst = max(some, key=lambda layer: found[layer])
        kept.remove(worst)
        yield worst, kept, found[worst]


def name_of(kept: Sequence[int]) -> str:
    """The drafter that has these layers, ascending."""
    runs: list[list[int]] = []
    for layer in kept:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "layers=" + ".".join(_run(run, alone=len(runs) == 1) for run in runs)


def _run(run: Sequence[int], *, alone: bool) -> str:
    """Layers in a row; one alone in a name would be read as how many."""
    return str(run[0]) if len(run) == 1 and not alone else f"{run[0]}-{run[-1]}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.layers", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--numerics", default=DEFAULT_NUMERICS)
    parser.add_argument("--prompts", required=True, help="a file, as for 'draftree calibrate'")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--drop", type=int, default=12, help="most layers to leave out")
    parser.add_argument("--among", type=int, default=10, help="layers that are tried at each step")
    args = parser.parse_args()
    target = load(args.target, numerics=args.numerics)
    prompts = [encode(target.tokenizer, user(p)) for p in read_prompts(args.prompts)[: args.limit]]
    told = Engine(target).generate(prompts, SamplingParams(max_tokens=args.max_tokens))
    answers = [(p, g.token_ids) for p, g in zip(prompts, told, strict=True) if len(g.token_ids) > 1]
    tokens = sum(len(answer) for _, answer in answers)
    print(f"{len(answers)} prompts, {tokens} tokens: agreement of the target's next token")
    count = target.layers
    for left in sorted({max(1, count * part // 6) for part in range(2, 6)} | {count - 2, count - 1}):
        print(f"layers={left:<14} {agreement(target, range(left), answers):6.3f}", flush=True)
    for layer, kept, right in leave_out(target, answers, args.drop, args.among):
        print(f"{right:6.3f} without layer {layer:2}: {name_of(kept)}", flush=True)


if __name__ == "__main__":
    main()
