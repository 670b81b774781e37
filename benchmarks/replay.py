"""How fast is each growth policy along recorded drafts, by the measured costs of this machine's passes?

    python -m benchmarks.replay [--methods auto,chain:depth=1,...] [--drafter head] [--limit 13] [--max-tokens 64]
                                [--suites spec-bench,gsm8k,humaneval] [--categories] [--beam 16] [--layers 10]

Every method decodes along the target's greedy answers, whose draft distributions were recorded once (``recorded.py``):
its trees and what is accepted of them are exactly those of decoding. A step takes the seconds of this machine's cost
profiles, so that other load on the machine is in no figure; our own Python between passes, and the AR steps by which
``auto`` follows the drift of a machine, are left out. ``draftree bench`` measures both by the clock. Prints tokens a
second over AR decoding, and ``auto``'s over each method's (geometric means of ratios by prompt, 95% bootstrap
intervals); ``--categories`` adds a table of speed-ups by category.

``foresight`` is no method: it knows the target's answer, drafts nothing else, and stops where that is fastest. No
policy that drafts layer by layer can be faster. ``hindsight`` is none either: for each prompt the fastest of the fixed
methods. Choosing among them prompt by prompt can gain no more.

A sweep over draft windows (Syu & Lee, *HSDDW*) records chains:

    python -m benchmarks.replay --suites spec-bench --limit 26 --beam 1 --layers 20 --categories \\
        --methods chain:depth=2,chain:depth=4,chain:depth=8,chain:depth=16,hsddw:cap=20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.progress import track

from draftree.bench.contestants import AR, entries, split_names
from draftree.bench.summary import markdown, ratio
from draftree.config import DEFAULT_NODES, SamplingParams
from draftree.drafters.base import DraftSource, Scorer
from draftree.drafters.grow import TreeDrafter
from draftree.engine.replay import Replay
from draftree.errors import InputError
from draftree.models.base import LanguageModel
from draftree.models.cost_profile import Profile, kept_or_measured
from draftree.policies.auto.policy import AutoTree
from draftree.policies.base import GrowthPolicy
from draftree.request import Request, StepCost
from draftree.tree import ROOT, Drawing

from .recorded import BEAM, KnownText, RecordedSource, add_options, recorded

AUTO, FORESIGHT, HINDSIGHT = "auto", "foresight", "hindsight"
GRID = (
    AUTO,
    *(f"chain:depth={depth}" for depth in range(1, 9)),
    "static",
    *(f"opt-tree:nodes={nodes}" for nodes in (4, 8, 16, 32, 64)),
    *(f"opt-tree:delta={delta}" for delta in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)),
)
"""The chains, the static tree, the budgets and the thresholds that users choose from."""

_NODES = 1.5
"""Mean nodes of a drafter's pass: trees are narrow in most layers. Chains have 1."""


class Costs(NamedTuple):
    """Cost profiles.

    Attributes:
        target: of the target.
        drafter: of what drafts; None: it has no model, and drafting is free.
        width: most nodes of a layer.
    """

    target: Profile
    drafter: Profile | None
    width: int = BEAM

    def layer(self, context: int) -> float:
        """Seconds of drafting one layer."""
        return 0.0 if self.drafter is None else self.drafter.seconds(min(_NODES, self.width), context)


class Speed(NamedTuple):
    """One text: tokens gained, steps, seconds by the profiles, and seconds of AR decoding."""

    tokens: int
    steps: int
    seconds: float
    ar: float


@dataclass(slots=True)
class ReadSource(DraftSource):
    """The recorded source as a policy sees it while drafts are replayed: its model has no text left to read."""

    source: DraftSource

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def model(self) -> LanguageModel | None:
        return self.source.model

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        return []

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        return self.source.begin(requests, drawing)

    def close(self, request: Request) -> None:
        pass


def along(texts: Sequence[KnownText], costs: Costs, policy: GrowthPolicy, nodes: int = DEFAULT_NODES) -> list[Speed]:
    """One policy through all texts in turn: what it learns from one it takes to the next."""
    found = []
    for known in texts:
        source, steps, seconds, ar = RecordedSource(known), 0, 0.0, 0.0
        with Replay(TreeDrafter(policy, source), known.prompt, known.text, SamplingParams()) as replay:
            while replay.left:
                context, before = len(known.prompt) + len(known.text) - len(replay.left), source.layers
                tree = replay.propose(nodes, len(replay.left) - 1)
                path, layers = replay.accepted(tree), source.layers - before
                draft = layers * costs.layer(context)
                verify = costs.target.seconds(len(tree) + 1, context)
                replay.advance(tree, path, len(path) + 1, StepCost(1, draft, verify, 0.0, layers))
                steps, seconds = steps + 1, seconds + draft + verify
                ar += (len(path) + 1) * costs.target.seconds(1, context)
        found.append(Speed(len(known.text) - 1, steps, seconds, ar))
    return found


def foresight(texts: Sequence[KnownText], costs: Costs, width: int, nodes: int = DEFAULT_NODES) -> list[Speed]:
    """The least seconds that each text can take, if each step drafts the target's own tokens.

    A pass over more tokens may cost less: it is then taken to verify as many.

    Args:
        texts, costs, nodes: as ``along``.
        width: most probable candidates of a node that count as drafted.
    """
    found = []
    for known in texts:
        last, ar = len(known.text) - 1, 0.0
        rest = [(0.0, 0)] * (last + 1)  # from each position on: seconds, steps
        for at in reversed(range(last)):
            context = len(known.prompt) + at + 1
            verify, ways = [costs.target.seconds(n, context) for n in range(1, nodes + 2)], []
            for depth in range(min(nodes, _right(known, at, width)) + 1):
                seconds, steps = rest[at + depth + 1]
                ways.append((seconds + depth * costs.layer(context) + min(verify[depth:]), steps + 1))
            rest[at] = min(ways)
            ar += costs.target.seconds(1, context)
        seconds, steps = rest[0]
        found.append(Speed(last, steps, seconds, ar))
    return found


def hindsight(speeds: Sequence[Sequence[Speed]]) -> list[Speed]:
    """For each text the fastest of several methods.

    Args:
        speeds: of each method, those of all texts.
    """
    return [min(each, key=lambda speed: speed.seconds) for each in zip(*speeds, strict=True)]


def _right(known: KnownText, at: int, width: int) -> int:
    """How many tokens the drafter has right in a row behind a position, the step's last token left to the target."""
    if at >= len(known.drafts):
        return 0
    drafts, path = known.drafts[at], list[int]()
    for token in known.text[at + 1 : -1]:
        number = drafts.numbers.get(tuple(path), ROOT)
        if (
            number == ROOT
            or token not in drafts.tokens[number, :width][drafts.logprobs[number, :width].isfinite()].tolist()
        ):
            break
        path.append(token)
    return len(path)


def print_speeds(speeds: dict[str, list[Speed]]) -> None:
    """The fastest first: MAL, tokens a second over AR decoding, and ``auto``'s over the method's."""
    for label, found in sorted(speeds.items(), key=lambda pair: sum(s.seconds for s in pair[1])):
        over = ratio([s.ar for s in found], [s.seconds for s in found])
        mal = sum(s.tokens for s in found) / sum(s.steps for s in found)
        line = f"{label:22} MAL {mal:.3f}  {over.text('.3f')} x AR decoding"
        if AUTO in speeds and label != AUTO:
            beside = ratio([s.seconds for s in found], [s.seconds for s in speeds[AUTO]])
            line += f"  auto {beside.text('.3f')} x this"
        print(line)


def print_categories(speeds: dict[str, list[Speed]], texts: Sequence[KnownText]) -> None:
    """Speed-ups over AR decoding by category."""
    categories = list(dict.fromkeys(known.category for known in texts))
    rows = []
    for label, found in speeds.items():
        row = [label]
        for category in categories:
            own = [s for s, known in zip(found, texts, strict=True) if known.category == category]
            row.append(f"{ratio([s.ar for s in own], [s.seconds for s in own]).mean:.3f}")
        rows.append(row)
    print(markdown(["method", *categories], rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(GRID), help="as draftree bench takes them")
    parser.add_argument("--categories", action="store_true", help="print speed-ups by category too")
    add_options(parser)
    args = parser.parse_args(argv)
    try:
        contestants = [e for e in entries(split_names(args.methods), [args.drafter], [0.0]) if e.method != AR]
        found = recorded(args)
    except InputError as error:
        parser.error(str(error))
    texts, target, source = found.texts, found.target, ReadSource(found.source)
    model = source.model
    costs = Costs(kept_or_measured(target), None if model is None else kept_or_measured(model), args.beam)
    speeds: dict[str, list[Speed]] = {}
    for entry in track(contestants, "replaying", transient=True):
        policy = AutoTree(target=costs.target, drafter=costs.drafter) if entry.label == AUTO else entry.policy()
        policy.prepare(target, [source])
        speeds[entry.label] = along(texts, costs, policy, entry.nodes)
    if fixed := [own for label, own in speeds.items() if label != AUTO]:
        speeds[HINDSIGHT] = hindsight(fixed)
    speeds[FORESIGHT] = foresight(texts, costs, min(args.beam, AutoTree().width))
    print_speeds(speeds)
    if args.categories:
        print_categories(speeds, texts)


if __name__ == "__main__":
    main()
