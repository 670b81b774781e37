"""Texts, drafters and clocks in which ``auto`` decodes without a model, and is judged by what passes truly cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import cast

from draftree.config import Budget
from draftree.drafters.grow import grow
from draftree.models.cost_profile import Point, Profile
from draftree.policies.accounts import AutoSettings
from draftree.policies.auto import AutoTree
from draftree.policies.base import GrowthPolicy, SourceInfo
from draftree.policies.gain import Record
from draftree.request import Outcome, StepCost
from draftree.tree import ROOT, DraftTree

from ...toy import Path, ScriptedScorer
from .test_policy import ME, Fake

NODES = 16
PASS = 4e-3
"""Seconds of an AR pass."""
SAYS = (0.6, 0.2, 0.1)
"""Probabilities that a drafter gives its candidates, whatever becomes of them."""
_RANKS = len(SAYS)

Shape = Callable[[int], float]
"""A pass over so many tokens takes so many AR passes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A text and its drafter.

    Attributes:
        rate: position -> how often the first candidate is right.
        layer: AR passes that drafting one layer takes.
    """

    rate: Callable[[int], float]
    layer: float

    def text(self, tokens: int, seed: int) -> list[int]:
        """Tokens that follow one another: position p has 3p + r where candidate r is right, and -1 where none is."""
        draw, found = Random(seed), list[int]()
        for position in range(tokens):
            rate, luck = self.rate(position), draw.random()
            second = luck < rate + 0.3 * (1 - rate) and rate > 0
            found.append(_RANKS * position if luck < rate else _RANKS * position + 1 if second else -1)
        return found


@dataclass(frozen=True, slots=True)
class Answers:
    """How long the prompts and answers of one request after the other are.

    Attributes:
        each: prompt tokens and answer tokens of an answer; they are repeated.
        limit: tokens that a request allows, at least as many as its answer has.
        token: AR passes in which a draft model reads a prompt token.
    """

    each: Sequence[tuple[int, int]]
    limit: int
    token: float


class Reader:
    """A drafter whose model reads the prompts of ``Answers``."""

    name = "reader"

    def __init__(self, answers: Answers, layer: float) -> None:
        self.model, self.models, self.left, self.most_read = self, (self,), {0: 0}, None
        sizes, seconds = (1, 2, 10_002), (layer, layer, layer + 10_000 * answers.token)
        self.costs = Profile(ME, (Point(1, 64, sizes, tuple(PASS * each for each in seconds)),))

    def unread(self, request: object) -> list[tuple[object, int]]:
        return [(self, self.left[id(request)])]

    def record(self) -> Record:
        return Record(AutoSettings(), cast(SourceInfo, self), {id(self): self.costs}, self.costs)


@dataclass(frozen=True, slots=True)
class Noise:
    """Of measured seconds: the standard deviation of their logarithm, and how often they are ten times as many."""

    deviation: float
    stalls: float

    def factor(self, draw: Random) -> float:
        return math.exp(draw.gauss(0, self.deviation)) * (10.0 if draw.random() < self.stalls else 1.0)


NOISE = Noise(0.1, 0.01)


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came of a text.

    Attributes:
        steps: target passes.
        tokens: a request.
        passes: AR passes that decoding took, by what passes and layers truly cost.
    """

    steps: int
    tokens: float
    passes: float

    @property
    def ratio(self) -> float:
        """Tokens a second over those of AR decoding."""
        return self.tokens / self.passes

    @property
    def lost(self) -> float:
        """AR passes that AR decoding would not have taken."""
        return self.passes - self.tokens


def profile(shape: Shape, wrong: Shape = lambda n: 1.0) -> Profile:
    """Passes of this shape over the tokens of 1, 2, 4 or 8 rows, if ``wrong`` by this factor of the tokens of one."""
    sizes = tuple(range(1, NODES + 2))
    points = [(b, tuple(PASS * shape(b * n) * wrong(n) for n in sizes)) for b in (1, 2, 4, 8)]
    return Profile(ME, tuple(Point(batch, 64, sizes, seconds) for batch, seconds in points))


def decode(
    policy: GrowthPolicy, kind: Kind, shape: Shape, tokens: int, batch: int = 1, seed: int = 0, noise: Noise = NOISE
) -> Decoded:
    """Decode texts of ``tokens`` tokens a request, the same whatever the seed: that is the noise's."""
    requests, at, draw = [Fake() for _ in range(batch)], [0] * batch, Random(seed)
    texts = [kind.text(2 * tokens, number) for number in range(batch)]  # none gets twice as far as they do on average

    def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
        first = _RANKS * (at[row] + len(path))
        return [*range(first, first + _RANKS)], [math.log(p) for p in SAYS], 1.0

    steps, passes, ar = 0, 0.0, shape(batch)
    while sum(at) < tokens * batch:
        plan = policy.plan(requests, [Budget(NODES)] * batch)
        layers, trees = 0, [DraftTree.empty()] * batch
        if any(budget.nodes for budget in plan.budgets):
            scorer = ScriptedScorer(script)
            trees = [grown.tree for grown in grow(scorer, policy, plan)]
            layers = len(scorer.calls)
        verify, draft = shape(batch + sum(map(len, trees))), layers * kind.layer * ar
        passes += (verify + draft) / ar
        cost = StepCost(batch, PASS * draft * noise.factor(draw), PASS * verify * noise.factor(draw), 0.0, layers)
        outcomes = []
        for number, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            path = accepted(tree, texts[number][at[number] : at[number] + NODES])
            end = at[number] + len(path)
            gained = [*texts[number][at[number] : end], texts[number][end]]
            outcomes.append(Outcome(request, tree, path, gained, len(gained), cost))
        policy.observe(plan, outcomes)
        at = [before + outcome.taken for before, outcome in zip(at, outcomes, strict=True)]
        steps += 1
    return Decoded(steps, sum(at) / batch, passes)


def decode_answers(
    policy: AutoTree, kind: Kind, shape: Shape, answers: Answers, count: int, seed: int = 0
) -> tuple[Decoded, int]:
    """Decode so many answers, one after the other, by a draft model; and how many prompts it has read."""
    draw, reader, read = Random(seed), Reader(answers, kind.layer), 0
    policy._learn_anew([reader.record()])
    steps, tokens, passes = 0, 0, 0.0
    for number in range(count):
        prompt, length = answers.each[number % len(answers.each)]
        request, at, text = Fake(), 0, kind.text(length + NODES, number)
        request.stats.steps, request.limit = 0, answers.limit
        reader.left = {id(request): prompt}

        def script(row: int, path: Path, at: int = 0) -> tuple[list[int], list[float], float]:
            first = _RANKS * (at + len(path))
            return [*range(first, first + _RANKS)], [math.log(p) for p in SAYS], 1.0

        while at < length:
            plan, layers, tree, reading = policy.plan([request], [Budget(NODES)]), 0, DraftTree.empty(), 0.0
            if plan.budgets[0].nodes:
                scorer = ScriptedScorer(partial(script, at=at))
                tree, layers = grow(scorer, policy, plan)[0].tree, len(scorer.calls)
                reading, read = answers.token * reader.left[id(request)], read + (reader.left[id(request)] > 0)
                reader.left[id(request)] = 0
            verify, draft = shape(1 + len(tree)), layers * kind.layer + reading
            passes += verify + draft
            cost = StepCost(1, PASS * draft * NOISE.factor(draw), PASS * verify * NOISE.factor(draw), 0.0, layers)
            path = accepted(tree, text[at : at + NODES])
            gained = text[at : at + len(path) + 1]
            policy.observe(plan, [Outcome(request, tree, path, gained, len(gained), cost)])
            request.ids += gained
            at, steps, request.stats.steps = at + len(gained), steps + 1, request.stats.steps + 1
        tokens += at
    return Decoded(steps, tokens, passes), read


def accepted(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """The nodes of a tree that a text begins with."""
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    path, node = list[int](), ROOT
    for token in text:
        if (node, token) not in children:
            break
        node = children[node, token]
        path.append(node)
    return path
