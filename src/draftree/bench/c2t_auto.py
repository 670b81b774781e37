"""Would a classifier's score make ``auto`` faster than counting how often the draft's probabilities come true?

    python -m draftree.bench.c2t_auto --classifier FILE [--suites spec-bench,gsm8k,humaneval] [--limit 13]
                                      [--max-tokens 64] [--cache DIR]

``auto`` decodes along texts whose draft laws were recorded (``recorded.py``), once as it is and once with
``classifier=FILE``: by the draft's own probabilities and by the classifier's scores, which it counts and corrects both.
Steps take what this machine's profile says, so that the load of the machine is in no figure. FILE is one that 'draftree
train classifier --given-parent --features step,entropy,depth,rank' wrote. Prints tokens a second over plain decoding
and over one another (geometric means of ratios by prompt, 95% bootstrap intervals), and how far each was off.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Many
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from ..config import SamplingParams
from ..draft.auto import AutoTree
from ..draft.base import StepCost
from ..draft.classifier import Classifier
from ..draft.classifier_file import read_classifier
from ..draft.drafter import TreeDrafter
from ..draft.learned import ScoredAuto
from ..draft.load import load_drafter
from ..draft.methods import DEFAULT_NODES
from ..models.load import DEFAULT_MODEL, load
from ..models.profile import Profile, kept_or_measured
from ..text import encode, user
from ..train.replay import Replay
from .recorded import KnownText, RecordedSource, record
from .stats import ratio
from .suites import choose, load_suite


class Costs(NamedTuple):
    """Profiles of the target and of what drafts."""

    target: Profile
    drafter: Profile


class Speed(NamedTuple):
    """One text: tokens gained, steps, seconds by the profiles, and seconds of plain decoding."""

    tokens: int
    steps: int
    seconds: float
    plain: float


def decode(texts: Many[KnownText], costs: Costs, classifier: Classifier | None = None) -> tuple[list[Speed], float]:
    """One ``auto`` through all texts in turn, and its trust at the end: accepted over expected nodes."""
    machine, found = costs._asdict(), list[Speed]()
    policy = AutoTree(**machine) if classifier is None else ScoredAuto(**machine, classifier=classifier)
    for known in texts:
        source, steps, seconds, plain = RecordedSource(known), 0, 0.0, 0.0
        with Replay(TreeDrafter(policy, source), known.prompt, known.text, SamplingParams()) as replay:
            while replay.left:
                context, asked = len(known.prompt) + len(known.text) - len(replay.left), source.layers
                tree = replay.propose(DEFAULT_NODES, len(replay.left) - 1)
                path, layers = replay.accepted(tree), source.layers - asked
                draft = layers * costs.drafter.seconds(1.5, context)
                verify = costs.target.seconds(len(tree) + 1, context)
                replay.advance(tree, path, len(path) + 1, StepCost(1, draft, verify, 0.0, layers))
                steps, seconds = steps + 1, seconds + draft + verify
                plain += (len(path) + 1) * costs.target.seconds(1, context)
        found.append(Speed(len(known.text) - 1, steps, seconds, plain))
    return found, policy.trust


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.c2t_auto", description=__doc__)
    parser.add_argument("--classifier", required=True, help="of nodes given their parents")
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="head", help="a head or a model")
    parser.add_argument("--suites", default="spec-bench,gsm8k,humaneval")
    parser.add_argument("--limit", type=int, default=13, help="prompts of each suite, from its categories in turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--cache", type=Path, help="folder for recorded laws, for several runs")
    args = parser.parse_args()
    classifier = read_classifier(args.classifier).classifier
    if not classifier.given_parent:
        parser.error(f"--classifier {args.classifier}: train it with --given-parent --features step,entropy,depth,rank")
    target = load(args.target)
    drafter = load_drafter(args.drafter, target, AutoTree())
    model = drafter.source.model if isinstance(drafter, TreeDrafter) else None
    if not isinstance(drafter, TreeDrafter) or model is None or drafter.learns:
        parser.error(f"--drafter {args.drafter} is no head and no model: use one of those")
    costs = Costs(kept_or_measured(target), kept_or_measured(model))
    texts: list[KnownText] = []
    for suite in args.suites.split(","):
        items = choose(load_suite(suite), limit=args.limit)
        prompts = [encode(target.tokenizer, user(item.prompt)) for item in items]
        file = args.cache and args.cache / f"{args.drafter}-{suite}-{args.limit}-{args.max_tokens}.safetensors"
        laws = record(target, drafter.source, prompts, args.max_tokens, file)
        texts += track(laws, f"recording {suite}", len(prompts), transient=True)
    print(f"{len(texts)} prompts, up to {args.max_tokens} tokens, drafter {args.drafter}")
    speeds = {}
    for name, net in (("counts", None), ("classifier", classifier)):
        speeds[name], trust = decode(texts, costs, net)
        over = ratio([s.plain for s in speeds[name]], [s.seconds for s in speeds[name]])
        mal = sum(s.tokens for s in speeds[name]) / sum(s.steps for s in speeds[name])
        print(
            f"{name:12} MAL {mal:.3f}, {over.text('.3f')} x plain decoding, accepted / expected at the end {trust:.3f}"
        )
    counts, scored = ([s.seconds for s in speeds[name]] for name in ("counts", "classifier"))
    print(f"classifier over counts: {ratio(counts, scored).text('.3f')}")


if __name__ == "__main__":
    main()
