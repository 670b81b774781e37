"""Is ``auto`` faster than the best method whose shape is fixed, and by how much, on this machine?

    python -m draftree.bench.grid [--methods auto,chain:depth=1,...] [--drafter head] [--limit 13] [--max-tokens 64]
                                  [--suites spec-bench,gsm8k,humaneval] [--beam 16] [--layers 10] [--cache DIR]

Every method decodes along the target's greedy answers, whose draft laws were recorded once (``recorded.py``): its trees
and what is accepted of them are exactly those of decoding. Steps take what this machine's profiles say of their passes,
so that the load of the machine is in no figure; our own Python between passes, and the plain passes by which ``auto``
follows the drift of a machine, are not charged. ``draftree bench`` measures both by the clock. Prints tokens a second
over plain decoding, and ``auto``'s over each method's (geometric means of ratios by prompt, 95% bootstrap intervals).
``foresight`` is no method: it knows what the target will say, drafts nothing else, and stops where that is fastest. No
policy can be faster that asks this drafter layer by layer. ``hindsight`` is none either: for each prompt the fastest
of the fixed methods. Choosing among them prompt by prompt can gain no more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from ..config import DEFAULT_NODES, SamplingParams
from ..drafters.base import TreeDrafter
from ..drafters.distributions import Drawing
from ..drafters.registry import load_drafter
from ..drafters.source import Scorer, TokenSource
from ..errors import ConfigError, InputError
from ..models.base import LanguageModel
from ..models.cost_profile import Profile, kept_or_measured
from ..models.huggingface import HFModel
from ..models.load import DEFAULT_MODEL, load
from ..outcome import StepCost
from ..policies.auto.policy import AutoTree
from ..policies.base import GrowthPolicy
from ..request import Request
from ..text import encode, user
from ..train.replay import Replay
from ..tree import ROOT
from .contestants import PLAIN, entries, split_names
from .recorded import BEAM, DEPTH, KnownText, RecordedSource, record
from .suites import choose, load_suite
from .summary import ratio

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
"""Of a layer, as a model is asked about it."""


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


@dataclass(slots=True)
class ReadSource(TokenSource):
    """What drafts, as a policy judges it while laws are replayed: its model has no text left to read.

    Attributes:
        source: that was recorded.
    """

    source: TokenSource

    def __post_init__(self) -> None:
        self.near = self.source.near

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name

    @property
    def model(self) -> LanguageModel | None:
        """The source's."""
        return self.source.model

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """Nothing."""
        return []

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """See ``TokenSource``."""
        return self.source.begin(requests, drawing)

    def close(self, request: Request) -> None:
        """See ``TokenSource``."""


class Recorded(NamedTuple):
    """A pair of models, what their passes cost, and texts with the draft laws along them."""

    target: HFModel
    source: ReadSource
    costs: Costs
    texts: list[KnownText]


def along(texts: Sequence[KnownText], costs: Costs, policy: GrowthPolicy, nodes: int = DEFAULT_NODES) -> list[Speed]:
    """One policy through all texts in turn: what it learns from one it takes to the next."""
    found = []
    for known in texts:
        source, steps, seconds, plain = RecordedSource(known), 0, 0.0, 0.0
        with Replay(TreeDrafter(policy, source), known.prompt, known.text, SamplingParams()) as replay:
            while replay.left:
                context, asked = len(known.prompt) + len(known.text) - len(replay.left), source.layers
                tree = replay.propose(nodes, len(replay.left) - 1)
                path, layers = replay.accepted(tree), source.layers - asked
                draft = layers * costs.drafter.seconds(_NODES, context)
                verify = costs.target.seconds(len(tree) + 1, context)
                replay.advance(tree, path, len(path) + 1, StepCost(1, draft, verify, 0.0, layers))
                steps, seconds = steps + 1, seconds + draft + verify
                plain += (len(path) + 1) * costs.target.seconds(1, context)
        found.append(Speed(len(known.text) - 1, steps, seconds, plain))
    return found


def foresight(texts: Sequence[KnownText], costs: Costs, width: int, nodes: int = DEFAULT_NODES) -> list[Speed]:
    """The least seconds that each text can take, if each step's draft is what the target will say.

    A pass over more tokens may cost less: it is then taken to verify as many.

    Args:
        texts, costs, nodes: as ``along``.
        width: most probable candidates of a node that count as drafted.
    """
    found = []
    for known in texts:
        last, plain = len(known.text) - 1, 0.0
        rest = [(0.0, 0)] * (last + 1)  # from each position on: seconds, steps
        for at in reversed(range(last)):
            context = len(known.prompt) + at + 1
            layer = costs.drafter.seconds(_NODES, context)
            verify, ways = costs.target.curve(nodes, context), []
            for depth in range(min(nodes, _right(known, at, width)) + 1):
                seconds, steps = rest[at + depth + 1]
                ways.append((seconds + depth * layer + min(verify[depth:]), steps + 1))
            rest[at] = min(ways)
            plain += costs.target.seconds(1, context)
        seconds, steps = rest[0]
        found.append(Speed(last, steps, seconds, plain))
    return found


def hindsight(speeds: Sequence[Sequence[Speed]]) -> list[Speed]:
    """For each text the fastest of several methods.

    Args:
        speeds: of each method, those of all texts.
    """
    return [min(each, key=lambda speed: speed.seconds) for each in zip(*speeds, strict=True)]


def _right(known: KnownText, at: int, width: int) -> int:
    """How many tokens the drafter has right in a row behind a position, the step's last token left to the target."""
    if at >= len(known.laws):
        return 0
    laws, path = known.laws[at], list[int]()
    for token in known.text[at + 1 : -1]:
        place = laws.places.get(tuple(path), ROOT)
        if place == ROOT or token not in laws.tokens[place, :width][laws.logprobs[place, :width].isfinite()].tolist():
            break
        path.append(token)
    return len(path)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which pair, and which texts."""
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="head", help="a head or a model")
    parser.add_argument("--suites", default="spec-bench,gsm8k,humaneval")
    parser.add_argument("--limit", type=int, default=13, help="prompts of each suite, from its categories in turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--beam", type=int, default=BEAM, help="nodes of each layer whose laws are recorded")
    parser.add_argument("--layers", type=int, default=DEPTH, help="layers of them: more than any method drafts")
    parser.add_argument("--cache", type=Path, help="folder for recorded laws, for several runs")


def recorded(args: argparse.Namespace) -> Recorded:
    """What ``add_options`` asks for.

    Raises:
        InputError: there is no such model or suite, the drafter is no head and no model, or a size is below 1.
    """
    for name in ("beam", "layers"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}: use at least 1")
    target = load(args.target)
    drafter = load_drafter(args.drafter, target, AutoTree())
    model = drafter.source.model if isinstance(drafter, TreeDrafter) else None
    if not isinstance(drafter, TreeDrafter) or model is None or drafter.learns:
        raise ConfigError(f"--drafter {args.drafter} is no head and no model: use one of those")
    texts: list[KnownText] = []
    for suite in args.suites.split(","):
        items = choose(load_suite(suite), limit=args.limit)
        prompts = [encode(target.tokenizer, user(item.prompt)) for item in items]
        size = f"{args.limit}-{args.max_tokens}-{args.beam}x{args.layers}"
        file = args.cache and args.cache / f"{args.drafter}-{suite}-{size}.safetensors"
        laws = record(target, drafter.source, prompts, args.max_tokens, file, (args.beam, args.layers))
        texts += track(laws, f"recording {suite}", len(prompts), transient=True)
    print(f"{len(texts)} prompts, up to {args.max_tokens} tokens, drafter {args.drafter}")
    return Recorded(target, ReadSource(drafter.source), Costs(kept_or_measured(target), kept_or_measured(model)), texts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.grid", description=__doc__)
    parser.add_argument("--methods", default=",".join(GRID), help="as draftree bench takes them")
    add_options(parser)
    args = parser.parse_args()
    try:
        contestants = [e for e in entries(split_names(args.methods), [args.drafter], [0.0]) if e.method != PLAIN]
        target, source, costs, texts = recorded(args)
    except InputError as error:
        parser.error(str(error))
    speeds: dict[str, list[Speed]] = {}
    for entry in track(contestants, "replaying", transient=True):
        policy = AutoTree(**costs._asdict()) if entry.label == AUTO else entry.policy()
        policy.prepare(target, [source])
        speeds[entry.label] = along(texts, costs, policy, entry.nodes)
    if fixed := [found for label, found in speeds.items() if label != AUTO]:
        speeds[HINDSIGHT] = hindsight(fixed)
    speeds[FORESIGHT] = foresight(texts, costs, AutoTree().width)
    for label, found in sorted(speeds.items(), key=lambda pair: sum(s.seconds for s in pair[1])):
        over = ratio([s.plain for s in found], [s.seconds for s in found])
        mal = sum(s.tokens for s in found) / sum(s.steps for s in found)
        line = f"{label:22} MAL {mal:.3f}  {over.text('.3f')} x plain decoding"
        if AUTO in speeds and label != AUTO:
            beside = ratio([s.seconds for s in found], [s.seconds for s in speeds[AUTO]])
            line += f"  auto {beside.text('.3f')} x this"
        print(line)


if __name__ == "__main__":
    main()
