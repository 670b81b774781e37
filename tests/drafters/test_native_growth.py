"""Trees that C grows are those of the loop in Python: random sources, texts, ensembles, budgets and constraints."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import DraftSource, Grown, NodeStates, Scorer, UnscoredNode
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter, grows_by_rule
from draftree.drafters.native_growth import NativeGrowth
from draftree.drafters.ngram import NgramSource
from draftree.errors import ConfigError
from draftree.models.cost_profile import Point, Profile
from draftree.papers.opt_tree import OptTree
from draftree.policies import auto
from draftree.policies.auto import AutoTree
from draftree.policies.base import Candidates, Child, Frontier, GrowthPolicy, GrowthRule, Plan
from draftree.policies.fixed import StaticTree
from draftree.request import Outcome, Request, StepCost
from draftree.sampling.constraint import ConstraintState
from draftree.sampling.warping import GOLDEN, mix
from draftree.text.detokenizer import NoText
from draftree.tree import ROOT, DraftTree

from ..pairs import costs, target

VOCAB = 40
Path = tuple[int, ...]


class Toy(DraftSource):
    """Predicts at random, but the same after the same path of the same request.

    Attributes:
        settled: numbers of the nodes of its trees while they grew.
    """

    def __init__(self, name: str, seed: int, depth: int | None) -> None:
        self.name, self._seed, self._depth = name, seed, depth
        self.settled: list[list[int]] = []

    def fit(self, request: Request, budget: Budget) -> Budget:
        depths = [depth for depth in (budget.depth, self._depth) if depth is not None]
        return Budget(budget.nodes, min(depths, default=None))

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        return _ToyScorer(requests, self._seed)

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        self.settled += [list(g.numbers) for g in grown]


class _ToyScorer(Scorer):
    def __init__(self, requests: Sequence[Request], seed: int) -> None:
        self._requests, self._seed = requests, seed
        self._paths: dict[tuple[int, int], Path] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        return [self._scored(node, width) for node in nodes]

    def _scored(self, node: UnscoredNode, width: int) -> Candidates:
        ids = tuple(self._requests[node.request].ids)
        above = self._paths.get((node.request, node.parent), ids)
        path = self._paths[node.request, node.node] = ids if node.node == ROOT else (*above, node.token)
        draw = random.Random(hash((self._seed, path)))  # noqa: S311
        if draw.random() < 0.2:
            return Candidates((), (), 0.0)
        logits = np.array([draw.gauss(0, draw.choice([1, 3])) for _ in range(VOCAB)])
        logprobs = logits - math.log(np.exp(logits).sum())
        best = np.argsort(-logprobs, kind="stable")[:width]
        return Candidates(best.tolist(), logprobs[best].tolist(), float(-(np.exp(logprobs) * logprobs).sum()))


class Rules(ConstraintState):
    """Allows random tokens, and forces one at times."""

    def __init__(self, seed: int, depth: int = 0) -> None:
        draw = random.Random(seed)  # noqa: S311
        self._seed, self._depth = seed, depth
        bits = np.array([draw.random() < 0.7 for _ in range(64)])
        self._mask = None if draw.random() < 0.2 else np.packbits(bits, bitorder="little").view(np.uint32)
        self._forced = draw.randrange(VOCAB) if draw.random() < 0.3 else None

    @property
    def mask(self) -> NDArray[np.uint32] | None:
        return self._mask

    @property
    def forced(self) -> int | None:
        return self._forced

    def after(self, token: int) -> ConstraintState | None:
        return Rules(hash((self._seed, token)), self._depth + 1) if self.allows(token) else None


def requests_of(draw: random.Random) -> list[Request]:
    made = []
    for _ in range(draw.choice([1, 1, 2, 4, 20])):
        alphabet = draw.choice([2, 4, VOCAB])
        ids = [draw.randrange(alphabet) for _ in range(draw.randrange(1, 60))]
        prediction = [draw.randrange(alphabet) for _ in range(draw.choice([0, 0, 20]))]
        request = Request(ids, SamplingParams(), 10**6, frozenset(), NoText(), prediction)
        request.draws.state = Rules(draw.randrange(2**30)) if draw.random() < 0.3 else None
        made.append(request)
    return made


def policy_of(draw: random.Random) -> GrowthPolicy:
    if draw.random() < 0.4:
        return OptTree(draw.choice([None, 1e-9, 0.05, 0.3]), draw.choice([2, 5, 4096]))
    return AutoTree(width=draw.choice([1, 3, 8]), depth=draw.choice([1, 4, 16]), target=profile_of(draw))


def profile_of(draw: random.Random) -> Profile:
    """Costs with dents and steps."""
    sizes, price = (1, 2, 3, 5, 8, 13, 64), draw.choice([0.0, 0.02, 0.2])
    seconds = tuple(draw.choice([0.01, 1.0]) * (1 + price * size * draw.uniform(0.5, 1)) for size in sizes)
    return replace(costs(1.0), points=(Point(1, 64, sizes, seconds),))


def sources_of(draw: random.Random) -> DraftSource:
    parts: list[DraftSource] = []
    for at in range(draw.choice([1, 1, 2, 3])):
        if draw.random() < 0.5:
            parts.append(NgramSource(draw.choice([1, 2, 3])))
        else:
            parts.append(Toy(f"toy{at}", draw.randrange(99), draw.choice([None, None, 1, 3])))
    return parts[0] if len(parts) == 1 else EnsembleSource(tuple(parts))


def walk(tree: DraftTree, draw: random.Random) -> tuple[list[int], list[int]]:
    """A random path and the tokens of a target along it."""
    path, tokens, node = list[int](), list[int](), ROOT
    while (children := tree.children(node)) and draw.random() < 0.8:
        node = draw.choice(children)
        path.append(node)
        tokens.append(int(tree.tokens[node]))
    return path, [*tokens, draw.randrange(4)]


class Pair:
    """A drafter whose trees C grows, and one of the same source and policy with Python's loop."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)  # noqa: S311
        self.drafters = []
        for native in (True, False):
            draw = random.Random(seed)  # noqa: S311
            source, policy = sources_of(draw), policy_of(draw)
            drafter = TreeDrafter(policy, source)
            drafter.prepare(target())
            if not native:
                drafter._native = None
            elif drafter._native:
                drafter._native._by_texts = False  # steps that are not planned teach nothing about time
            self.drafters.append(drafter)
        self.requests = requests_of(self.draw)
        self.nodes = 0
        for request in self.requests:
            for drafter in self.drafters:
                drafter.open(request)

    def differs(self) -> bool:
        """Make a step of some requests: whether the two come to different trees, or learn something else of them."""
        draw = self.draw
        requests = self.requests[: draw.randrange(len(self.requests)) + 1]
        budgets = [Budget(draw.choice([0, 1, 4, 12, 12]), draw.choice([None, None, 0, 1, 3])) for _ in requests]
        own, expected = (drafter.propose(requests, budgets) for drafter in self.drafters)
        if any(differ(one, other) for one, other in zip(own, expected, strict=True)):
            return True
        self.nodes += sum(map(len, own))
        outcomes = []
        for request, tree in zip(requests, expected, strict=True):
            path, tokens = walk(tree, draw)
            outcomes.append(Outcome(request, tree, path, tokens, len(tokens), StepCost(1, 0.01, 1.0, 0.0, 0)))
            request.ids += tokens
            request.stats.steps += 1
            for token in tokens:
                request.draws.state = request.state and request.state.after(token)
        for drafter in self.drafters:
            drafter.observe(outcomes)
        return learned(self.drafters[0]) != pytest.approx(learned(self.drafters[1]))


def differ(one: DraftTree, other: DraftTree) -> bool:
    whole = [(tree.part, tree.tokens, tree.parents, tree.depths) for tree in (one, other)]
    floats = [[*tree.path_logprobs, *tree.entropies] for tree in (one, other)]
    return whole[0] != whole[1] or floats[0] != pytest.approx(floats[1], rel=1e-6, abs=1e-6)


def learned(drafter: TreeDrafter) -> list[float]:
    """What the policy has learned, and the numbers that nodes of toys had while they grew."""
    policy, found = drafter.policy, list[float]()
    if isinstance(policy, AutoTree):
        found += [number for trust in policy._trust for number in (trust.scale, trust.onward)]
        found.append(policy._selection.pace)
    for part in drafter.source.parts or (drafter.source,):
        if isinstance(part, Toy):
            found += [number for numbers in part.settled for number in numbers]
    return found


def differing(seeds: Sequence[int], steps: int = 6) -> tuple[int, int]:
    """Of how many seeds some step differs; the nodes that were drafted."""
    count = nodes = 0
    for seed in seeds:
        pair = Pair(seed)
        count += any([pair.differs() for _ in range(steps)])
        nodes += pair.nodes
    return count, nodes


def test_trees_are_those_of_the_loop() -> None:
    count, nodes = differing(range(150))
    assert not count
    assert nodes > 1000


@pytest.mark.parametrize(("constant", "value"), [("_LEAST", 0.05), ("_SPARE", 0.95)])
def test_another_constant_would_be_noticed(constant: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, constant, value)
    assert differing(range(60))[0]


class TestPolicies:
    def test_one_that_grows_in_its_own_way_is_not_grown_by_c(self) -> None:
        class Narrow(AutoTree):
            def grow(self, frontier: Frontier) -> list[Child]:
                return super().grow(frontier)[:1]

        class Told(Narrow):
            def rule(self, plan: Plan) -> None:
                return None

        assert grows_by_rule(AutoTree) and grows_by_rule(OptTree)
        assert not grows_by_rule(Narrow) and not grows_by_rule(StaticTree)
        assert grows_by_rule(Told)


class Raises(Toy):
    """Raises, or returns nonsense, at a layer."""

    def __init__(self, error: bool) -> None:
        super().__init__("raises", 3, None)
        self._error, self.calls = error, 0

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        return _Raising(requests, self)


class _Raising(_ToyScorer):
    def __init__(self, requests: Sequence[Request], source: Raises) -> None:
        super().__init__(requests, 3)
        self._source = source

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        self._source.calls += 1
        if self._source.calls == 2:
            if self._source._error:
                raise ValueError("no scores")
            return []
        return super().score(nodes, width)


@pytest.mark.parametrize("error", [True, False])
def test_what_a_scorer_raises_comes_out_and_the_next_step_is_as_ever(error: bool) -> None:
    source = Raises(error)
    drafter, request = TreeDrafter(OptTree(1e-9), source), Request([1, 2], SamplingParams(), 99, frozenset(), NoText())
    with pytest.raises(ValueError if error else ConfigError, match="score"):
        drafter.propose([request], [Budget(12)])
    expected = TreeDrafter(OptTree(1e-9), Toy("toy", 3, None)).propose([request], [Budget(12)])
    assert not differ(drafter.propose([request], [Budget(12)])[0], expected[0])


def test_requests_keep_their_warping_and_noise_where_more_come() -> None:
    """The ninth request beside eight took both from all of them."""
    drafter = TreeDrafter(OptTree(1e-9), NgramSource())
    params = [SamplingParams(temperature=0.5 + number, seed=number) for number in range(20)]
    requests = [Request([1, 2, 3] * 9, each, 99, frozenset(), NoText()) for each in params]
    for count in (1, 8, 9, 20, 3, 20):
        drafter.propose(requests[:count], [Budget(4)] * count)
        assert drafter._native is not None
        found = [(own.warping.temperature, own.noise) for own in drafter._native._drafting.requests[:count]]
        assert found == [(0.5 + number, mix(number + GOLDEN)) for number in range(count)]


def python_calls(drafter: TreeDrafter, request: Request) -> int:
    """That a step's proposal and outcome make."""
    count = 0

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(watch)
    (tree,) = drafter.propose([request], [Budget(12)])
    sys.setprofile(None)
    path, tokens = walk(tree, random.Random(1))  # noqa: S311
    request.ids += tokens
    request.stats.steps += 1
    outcome = Outcome(request, tree, path, tokens, len(tokens), StepCost(1, 0.001, 1.0, 0.0, 0))
    sys.setprofile(watch)
    drafter.observe([outcome])
    sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("policy", "most"), [(OptTree(0.1), 50), (AutoTree(target=costs(1.0)), 150)], ids=["opt", "auto"]
)
def test_a_step_of_lookup_makes_few_calls_of_python(policy: GrowthPolicy, most: int) -> None:
    drafter, request = (
        TreeDrafter(policy, NgramSource()),
        Request([1, 2, 3] * 9, SamplingParams(), 10**6, frozenset(), NoText()),
    )
    drafter.prepare(target())
    drafter.open(request)
    found = [python_calls(drafter, request) for _ in range(30)]
    assert sorted(found)[15] <= most


class Planned(AutoTree):
    """Counts its plans."""

    plans = 0

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> Plan:
        self.plans += 1
        return super().plan(requests, budgets, other_tokens)

    def rule(self, plan: Plan) -> GrowthRule | None:
        return super().rule(plan)


@pytest.mark.parametrize(
    ("ids", "constrained", "parts", "planned"),
    [
        ([1, 2, 3, 1, 2], False, 0, True),
        ([1, 2, 3, 4, 5], False, 0, False),
        ([1, 2, 3, 4, 5], True, 0, True),
        ([1, 2, 3, 4, 5], False, 1, True),
    ],
)
def test_a_step_whose_texts_say_nothing_is_not_planned(
    ids: list[int], constrained: bool, parts: int, planned: bool
) -> None:
    """A constraint may say what must come, and another part may know what follows."""
    source: DraftSource = NgramSource(2)
    if parts:
        source = EnsembleSource((source, Toy("toy", 3, None)))
    policy = Planned(target=costs(1.0))
    request = Request(ids, SamplingParams(), 10**6, frozenset(), NoText())
    if constrained:
        request.draws.state = Rules(1)
    drafter = TreeDrafter(policy, source)
    drafter.prepare(target())
    drafter.open(request)
    tree = drafter.propose([request], [Budget(4)])[0]
    assert policy.plans == planned
    drafter.observe([Outcome(request, tree, [], [7], 1, StepCost(1, 0.0, 1.0, 0.0, 0))])
    assert policy.report.steps == 1, "it counts"


@pytest.mark.parametrize(
    "policy", [AutoTree(2**40, 2**40, target=costs(1.0)), AutoTree(depth=2**62, target=costs(1.0)), OptTree(0.1, 2**62)]
)
def test_bounds_that_are_larger_than_numbers_of_c_bound_nothing(policy: GrowthPolicy) -> None:
    request = Request([1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(), 10**6, frozenset(), NoText())
    drafter = TreeDrafter(policy, NgramSource(2))
    drafter.prepare(target())
    drafter.open(request)
    assert len(drafter.propose([request], [Budget(4)])[0])
    assert drafter._grown_natively


def test_what_a_state_forces_is_asked_once() -> None:
    """A grammar looks for it in its parser."""
    asked = list[str]()

    class Asked(Rules):
        @property
        def forced(self) -> int | None:
            asked.append("forced")
            return 7

    request = Request([1, 2, 3], SamplingParams(), 10**6, frozenset(), NoText())
    request.draws.state = Asked(1)
    growth = NativeGrowth(NgramSource(2), "lookup")
    growth._states = NodeStates([request])
    _, forced = growth._states_of([(0, ROOT, ROOT, 3)])
    assert forced == [7] and asked == ["forced"]
