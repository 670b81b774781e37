"""How long should a drafted chain be, and do ``hsddw`` and ``dynamic-window`` find it out?

    python -m draftree.bench.windows [--drafter head] [--windows 2,...,20] [--dynamic hsddw dynamic-window:cap=20 ...]
                                     [--limit 26] [--max-tokens 64]

The target answers prompts greedily. Then the drafter drafts a chain of the largest window from every position of these
answers, once: what any chain would have drafted is part of it. So every window, and the dynamic ones with their own
code, is replayed along the answers exactly, with no further passes (Syu & Lee, *HSDDW*: the sweep over the window);
what it learns from one answer it takes to the next.

Tokens a second are by the measured costs of passes on this machine (``draftree profile``), of target and drafter: what
counts is one window against another, and these figures do not depend on what else the machine does. MAL counts the
bonus token. A dynamic window is beside the best fixed one of each category.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from ..config import SamplingParams
from ..drafters.base import NoDrafter, TreeDrafter
from ..drafters.distributions import Drawing, Drawn
from ..drafters.registry import load_drafter
from ..drafters.source import Scorer, TokenSource
from ..engine import Engine
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..models.cost_profile import Profile, kept_or_measured
from ..models.cpu.quantization import DEFAULT_NUMERICS
from ..models.load import DEFAULT_MODEL, load
from ..policies.base import Candidates, GrowthPolicy
from ..policies.entropy import StaticTree
from ..policies.methods import find_policy
from ..request import Request
from ..text import encode, user
from ..train.replay import Replay
from ..tree import DraftTree
from .suites import spec_bench

Link = tuple[int, float, float]
"""A token of a chain, its log-probability, and the entropy of its law."""


@dataclass(slots=True)
class Chains(TokenSource):
    """Repeats chains that were drafted before, by the length of the text that they follow.

    Attributes:
        chains: length of the text -> what was drafted behind it.
    """

    chains: dict[int, list[Link]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """See ``TokenSource``."""
        return "chains"

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """See ``TokenSource``; for one request."""
        return _ChainScorer(self.chains.get(len(requests[0].ids), []))

    def close(self, request: Request) -> None:
        """See ``TokenSource``."""


class _ChainScorer:
    """Goes down a chain; behind its end there is nothing."""

    def __init__(self, chain: list[Link]) -> None:
        self._chain = chain
        self._depth = 0

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """See ``Scorer``."""
        none = (0, -float("inf"), 0.0)
        token, logprob, entropy = self._chain[self._depth] if self._depth < len(self._chain) else none
        self._depth += 1
        return Candidates(torch.tensor([[token]]), torch.tensor([[logprob]]), torch.tensor([entropy]))

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        return self.score_roots([0], width)

    def draw(self, counts: Tensor) -> Drawn:
        """Never asked for: answers are greedy."""
        raise ConfigError("recorded chains draw no children: use verification match")


class Text(NamedTuple):
    """A prompt, its category and what the target said."""

    category: str
    prompt: list[int]
    answer: list[int]


class Outcome(NamedTuple):
    """A window on one text: tokens gained, target passes, and seconds by the profile."""

    tokens: int
    passes: int
    seconds: float


def links(tree: DraftTree) -> list[Link]:
    """A chain's tokens with their log-probabilities and entropies."""
    steps = torch.cat([tree.path_logprobs[:1], tree.path_logprobs.diff()])
    return list(zip(tree.tokens.tolist(), steps.tolist(), tree.entropies.tolist(), strict=True))


def record(target: LanguageModel, drafter: TreeDrafter, text: Text, longest: int) -> Chains:
    """What chains of the longest window hold at every position of a text, drafted by ``drafter`` itself."""
    reads = getattr(target, "tracks_features", False)
    features = None
    if reads:
        row = target.open([*text.prompt, *text.answer[:-1]])
        features = row.waiting_features()
        target.close(row)
    chains = Chains()
    with Replay(drafter, text.prompt, text.answer, SamplingParams(), features=features) as known:
        while known.left:
            tree = known.propose(longest, longest)
            chains.chains[len(text.prompt) + len(text.answer) - len(known.left)] = links(tree)
            known.advance(tree, [], 1)
    return chains


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of passes.

    Attributes:
        target: of the target.
        drafter: of the drafting model; None: it has none, and drafting is free.
    """

    target: Profile
    drafter: Profile | None

    def step(self, tree: DraftTree, context: int) -> float:
        """Seconds of drafting a chain, a pass for each token, and of verifying it."""
        drafting = len(tree) * self.drafter.seconds(1, context) if self.drafter else 0.0
        return drafting + self.target.seconds(len(tree) + 1, context)


def replay(text: Text, chains: Chains, policy: GrowthPolicy, longest: int, costs: Costs) -> Outcome:
    """A window, held against a text step by step."""
    tokens = passes = 0
    seconds = 0.0
    with Replay(TreeDrafter(policy, chains), text.prompt, text.answer, SamplingParams()) as known:
        while known.left:
            context = len(text.prompt) + len(text.answer) - len(known.left)
            tree, gained = known.step(longest)
            tokens, passes, seconds = tokens + gained, passes + 1, seconds + costs.step(tree, context)
    return Outcome(tokens, passes, seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.windows", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--numerics", default=DEFAULT_NUMERICS)
    parser.add_argument("--drafter", default="head", help="head, lookup, layers=N or a model")
    parser.add_argument("--windows", default=",".join(map(str, range(2, 21))))
    dynamic = ["hsddw:cap=20", "dynamic-window:cap=20"]
    parser.add_argument("--dynamic", nargs="*", default=dynamic, help="other methods: METHOD[:KEY=VALUE]...")
    parser.add_argument("--limit", type=int, default=26, help="prompts, from the categories in turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    windows = [int(w) for w in args.windows.split(",")]
    target = load(args.target, numerics=args.numerics)
    texts = _texts(args.limit, args.max_tokens, target)
    drafter = load_drafter(args.drafter, target, StaticTree(1, max(windows)))
    if not isinstance(drafter, TreeDrafter) or drafter.successors or drafter.learns:
        parser.error(f"--drafter {args.drafter}: what it drafts depends on more than the text: use head or a model")
    drafter.prepare(target)
    model = drafter.source.model
    costs = Costs(kept_or_measured(target), None if model is None else kept_or_measured(model))
    recorded = [record(target, drafter, t, max(windows)) for t in track(texts, "drafting from every position")]
    policies = {str(w): ("chain", {"depth": str(w)}) for w in windows}
    policies |= {text: _method(text) for text in args.dynamic}
    found: dict[str, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for label, (method, settings) in policies.items():
        policy = find_policy(method, settings)
        policy.prepare(target, drafter.source.parts)
        for text, chains in zip(texts, recorded, strict=True):
            found[text.category][label].append(replay(text, chains, policy, max(windows), costs))
    _show(found, [str(w) for w in windows], list(policies)[len(windows) :])


def _texts(limit: int, max_tokens: int, target: LanguageModel) -> list[Text]:
    """Prompts and the target's own greedy answers of more than one token."""
    plain, texts = Engine(target, NoDrafter()), []
    for item in track(spec_bench(limit), "decoding plainly"):
        prompt = encode(plain.tokenizer, user(item.prompt))
        answer = plain.generate([prompt], SamplingParams(max_tokens=max_tokens))[0].token_ids
        if len(answer) > 1:
            texts.append(Text(item.category, prompt, answer))
    return texts


def _method(text: str) -> tuple[str, dict[str, str]]:
    name, *pairs = text.split(":")
    return name, dict(pair.split("=", 1) for pair in pairs)


def _speed(outcomes: Sequence[Outcome]) -> float:
    return sum(o.tokens for o in outcomes) / sum(o.seconds for o in outcomes)


def _show(found: dict[str, dict[str, list[Outcome]]], windows: Sequence[str], dynamic: Sequence[str]) -> None:
    whole: dict[str, list[Outcome]] = defaultdict(list)
    for by_label in found.values():
        for label, outcomes in by_label.items():
            whole[label] += outcomes
    print(f"{'window':32}   MAL  tokens/s by the profile, all categories")
    for label in [*windows, *dynamic]:
        mal = sum(o.tokens for o in whole[label]) / sum(o.passes for o in whole[label])
        print(f"{label:32} {mal:5.2f}  {_speed(whole[label]):6.2f}")
    for name in dynamic:
        print(f"\n{name}: tokens/s beside the best fixed window of each category")
        shares = []
        for category, by_label in sorted([*found.items(), ("all", whole)]):
            best = max(windows, key=lambda w, rows=by_label: _speed(rows[w]))  # type: ignore[misc]
            share = _speed(by_label[name]) / _speed(by_label[best])
            shares.append(share)
            most = _speed(by_label[best])
            print(f"{category:20} {_speed(by_label[name]):6.2f}, best {most:6.2f} at {best:>2}: {share:.3f}")
        print(f"{'':20} lowest {min(shares):.3f}, mean {statistics.mean(shares):.3f}")


if __name__ == "__main__":
    main()
