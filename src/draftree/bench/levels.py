"""Three levels against two with the same models: target passes a token and speed, with and without looping back.

    python -m draftree.bench.levels [--lower head] [--upper int8] [--rules entropy,gain,always,never] [--limit 13]
                                    [--max-tokens 48] [--temperature 0] [--numerics fp32]

Every contestant answers every prompt, taking turns; speeds are ratios paired by prompt (geometric mean, 95% bootstrap
interval), prefill left out. "two" are the lower and the upper drafter alone, with ``dynamic-window``; "three" is the
hierarchy of both under each rule of looping back, its pending run a chain; "hsddw" and "auto" are the methods of these
names over the hierarchy: the published one, and one that may leave it out. Target passes are those after the prefill,
tokens those after the first.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rich.progress import track

from ..config import DEFAULT_NODES, SamplingParams
from ..drafters.base import NoDrafter
from ..drafters.registry import load_drafter
from ..engine import Engine
from ..models.cpu.quantization import DEFAULT_NUMERICS
from ..models.load import DEFAULT_MODEL, load
from ..policies.auto.policy import AutoTree
from ..policies.methods import find_policy
from ..request import Stats
from ..text import encode, user
from .suites import spec_bench
from .summary import ratio

PLAIN = "plain"


class Answer(NamedTuple):
    """One contestant's answer to one prompt."""

    category: str
    ids: list[int]
    stats: Stats

    @property
    def seconds(self) -> float:
        """Without the prefill."""
        return self.stats.seconds.total - self.stats.seconds.prefill


def passes_a_token(answers: Sequence[Answer]) -> float:
    """Target passes for each token after the first."""
    return sum(a.stats.steps for a in answers) / max(1, sum(a.stats.tokens - 1 for a in answers))


def upper_passes_a_token(answers: Sequence[Answer]) -> float:
    """The upper drafter's passes for each token after the first; of a drafter alone, all of its passes."""
    passes = sum(a.stats.levels[-1].passes if a.stats.levels else a.stats.draft_passes for a in answers)
    return passes / max(1, sum(a.stats.tokens - 1 for a in answers))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.levels", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--numerics", default=DEFAULT_NUMERICS)
    parser.add_argument("--lower", default="head")
    parser.add_argument("--upper", default="int8")
    parser.add_argument("--rules", default="entropy,gain,always,never")
    parser.add_argument("--nodes", type=int, default=DEFAULT_NODES)
    parser.add_argument("--limit", type=int, default=13, help="prompts, from the categories in turn")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    target = load(args.target, numerics=args.numerics)
    whole = f"{args.lower}>{args.upper}"
    chosen: dict[str, tuple[str, str, dict[str, str]]] = {
        f"two: {args.lower}": (args.lower, "dynamic-window", {}),
        f"two: {args.upper}": (args.upper, "dynamic-window", {}),
    }
    rules = args.rules.split(",")
    chosen |= {f"three: {rule}": (f"{whole}:loop={rule}", "chain", {"depth": str(args.nodes)}) for rule in rules}
    chosen["hsddw over three"] = (whole, "hsddw", {})
    chosen["auto over three"] = (f"{whole}:loop=always", "auto", {})
    engines = {PLAIN: Engine(target, NoDrafter())}
    for label, (drafter, method, settings) in chosen.items():
        made = load_drafter(drafter, target, find_policy(method, settings))
        engines[label] = Engine(target, made, nodes=args.nodes)
    found: dict[str, list[Answer]] = defaultdict(list)
    labels = list(engines)
    for turn, item in enumerate(track(spec_bench(args.limit), "decoding in turns")):
        prompt = encode(target.tokenizer, user(item.prompt))
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=turn)
        for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
            g = engines[label].generate([prompt], params)[0]
            found[label].append(Answer(item.category, g.token_ids, g.stats))
    _show(found, labels)
    policy = engines["auto over three"].drafter.policy
    if isinstance(policy, AutoTree):
        print(policy.report.text())


def _show(found: dict[str, list[Answer]], labels: Sequence[str]) -> None:
    plain = found[PLAIN]
    tokens = sum(a.stats.tokens for a in plain)
    print(
        f"{len(plain)} prompts, {tokens} tokens; passes of target and of the upper drafter for each token; over plain"
    )
    for label in labels:
        rows = found[label]
        same = sum(a.ids == b.ids for a, b in zip(rows, plain, strict=True))
        speed = ratio([b.seconds for b in plain], [a.seconds for a in rows])
        print(
            f"{label:18} {passes_a_token(rows):6.3f} {upper_passes_a_token(rows):6.3f}  {speed.text()}  "
            f"same text {same} of {len(rows)}"
        )
        for at, level in enumerate(rows[0].stats.levels):
            mine = [a.stats.levels[at] for a in rows]
            proposed, accepted = (sum(getattr(x, key) for x in mine) for key in ("proposed", "accepted"))
            emitted = sum(x.emitted for x in mine) / sum(a.stats.tokens for a in rows)
            print(f"{'':4}level {level.name}: {accepted} of {proposed} accepted above, {emitted:.0%} of the text")
    print(f"\n{'target passes a token':20} " + " ".join(f"{label[-9:]:>9}" for label in labels))
    for category in sorted({a.category for a in plain}):
        answers = [[a for a in found[label] if a.category == category] for label in labels]
        print(f"{category:21} " + " ".join(f"{passes_a_token(own):9.3f}" for own in answers))
    print(f"\n{'speed over plain':21} " + " ".join(f"{label[-9:]:>9}" for label in labels))
    for category in sorted({a.category for a in plain}):
        times = [[a.seconds for a in found[label] if a.category == category] for label in labels]
        print(f"{category:21} " + " ".join(f"{ratio(times[0], own).mean:9.2f}" for own in times))
    print(f"\n{'tokens a second':21} " + " ".join(f"{label[-9:]:>9}" for label in labels))
    for category in sorted({a.category for a in plain}):
        answers = [[a for a in found[label] if a.category == category] for label in labels]
        rates = [sum(a.stats.tokens for a in own) / sum(a.seconds for a in own) for own in answers]
        print(f"{category:21} " + " ".join(f"{rate:9.1f}" for rate in rates))


if __name__ == "__main__":
    main()
