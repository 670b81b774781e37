"""A chain that ends where another token no longer pays: what it counts, and what costs make of it."""

from __future__ import annotations

import math
from random import Random

import pytest

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import TreeDrafter
from draftree.drafters.eagle import EagleSource
from draftree.engine import Engine
from draftree.errors import ConfigError
from draftree.models.cost_profile import Point, Profile
from draftree.outcome import Outcome, StepCost
from draftree.policies.base import GrowthPolicy
from draftree.policies.methods import find_policy
from draftree.policies.stopping import PayingChain
from draftree.request import Request

from ..drafters.test_ensemble import request_of
from ..heads import trained
from ..pairs import costs, target
from ..tiny import VOCAB
from .test_chains import Unsure

STEP = StepCost(batch=1, draft=1.0, verify=1.0, other=0.0, draft_passes=0)
SIZES = tuple(range(1, 33))


def curve(*seconds: float) -> Profile:
    """Passes over 1, 2, ... tokens; the last price goes on."""
    each = [seconds[min(n, len(seconds)) - 1] for n in SIZES]
    return Profile(costs(1.0).identity, (Point(1, 64, SIZES, tuple(each)),))


class Texts:
    """Drafts whose tokens are right with a probability that their entropy tells."""

    def __init__(self, policy: GrowthPolicy, right: dict[float, float], seed: int = 0) -> None:
        self.random, self.right, self.policy = Random(seed), right, policy
        self.entropies: list[float] = []
        self.source = Unsure(lambda path: self.entropies[len(path)])
        self.drafter = TreeDrafter(policy, self.source)
        self.tokens = self.seconds = 0.0

    def step(self, request: Request, verify: Profile, each: float) -> int:
        """One draft; how long it was."""
        self.entropies = [self.random.choice(list(self.right)) for _ in range(32)]
        tree = self.drafter.propose([request], [Budget(24)])[0]
        count = 0
        while count < len(tree) and self.random.random() < self.right[self.entropies[count]]:
            count += 1
        request.stats.steps += 1
        self.drafter.observe([Outcome(request, tree, list(range(count)), [0] * count + [7], count + 1, STEP)])
        self.tokens += count + 1
        self.seconds += len(tree) * each + verify.seconds(len(tree) + 1, len(request.ids))
        return len(tree)


def rate(policy: GrowthPolicy, right: dict[float, float], verify: Profile, each: float, steps: int = 120) -> float:
    """Tokens a second by these costs."""
    texts, request = Texts(policy, right), request_of(1, 2, 3)
    for _ in range(steps):
        texts.step(request, verify, each)
    return texts.tokens / texts.seconds


LAWS = (
    {0.1: 0.95, 1.5: 0.3, 2.5: 0.1},
    {0.1: 0.99, 0.5: 0.97},
    {1.5: 0.1, 2.5: 0.05},
)
PRICES = (
    (curve(1.0), 0.001),
    (curve(1.0), 0.08),
    (curve(*[1 + 0.15 * n for n in range(24)]), 0.06),
    (curve(1.0, 1.9, 1.9, 1.9, 2.0, 2.4), 0.02),
)


@pytest.mark.parametrize("prices", PRICES, ids=["free", "flat", "steep", "stairs"])
@pytest.mark.parametrize("right", LAWS, ids=["tells", "sure", "wrong"])
def test_it_is_as_fast_as_the_best_fixed_length_without_being_told(
    right: dict[float, float], prices: tuple[Profile, float]
) -> None:
    verify, each = prices
    mean = sum(right.values()) / len(right)
    best = max(sum(mean**i for i in range(n + 1)) / (n * each + verify.seconds(n + 1, 3)) for n in range(1, 21))
    assert rate(PayingChain(1, 20, verify, each), right, verify, each) >= 0.95 * best


def test_dear_tokens_make_short_drafts_and_free_ones_long_drafts() -> None:
    right, lengths = {0.1: 0.9}, []
    for verify, each in ((curve(1.0), 0.0), (curve(*range(1, 25)), 1.0)):
        texts, request = Texts(PayingChain(1, 20, verify, each), right), request_of(1, 2)
        lengths.append([texts.step(request, verify, each) for _ in range(60)][-1])
    assert lengths == [20, 1]


def test_counts_are_of_judged_tokens_alone() -> None:
    """Two right, one wrong, the rest unseen; and nothing of what lies behind a request's end."""
    policy = PayingChain(4, 4, costs(1.0), 0.0)
    texts, request = Texts(policy, {0.1: 1.0}), request_of(1, 2)
    before = policy.acceptance(0.1)
    assert before == pytest.approx(math.exp(-0.1))
    texts.entropies = [0.1, 0.1, 0.1, 0.1]
    tree = texts.drafter.propose([request], [Budget(9)])[0]
    texts.drafter.observe([Outcome(request, tree, [0, 1], [0, 0, 7], 3, STEP)])
    assert policy.acceptance(0.1) == pytest.approx((2 + 4 * before) / (3 + 4), rel=1e-3)
    assert policy.acceptance(1.5) == pytest.approx(math.exp(-1.5))
    record = policy.record(request)
    assert (record.hits, 2 < record.expected < 3) == (2, True)
    tree = texts.drafter.propose([request], [Budget(9)])[0]
    texts.drafter.observe([Outcome(request, tree, [0, 1], [0, 0, 7], 1, STEP)])
    assert policy.record(request).hits == pytest.approx(2 * 0.95 + 1)


def test_a_sequence_of_which_all_was_right_drafts_further_than_another() -> None:
    verify, each = curve(1.0), 0.12
    texts = Texts(PayingChain(1, 20, verify, each), {1.2: 0.5})
    lucky, other = request_of(1, 2), request_of(3)
    for _ in range(80):
        texts.step(other, verify, each)
    texts.right = {1.2: 1.0}
    for _ in range(12):
        texts.step(lucky, verify, each)
    texts.right = {1.2: 0.5}
    assert texts.step(lucky, verify, each) > texts.step(other, verify, each)


@pytest.mark.parametrize(("floor", "cap"), [(1, 1), (3, 3), (2, 5)])
def test_it_keeps_to_floor_and_cap(floor: int, cap: int) -> None:
    for each, want in ((0.0, cap), (9.0, floor)):
        texts = Texts(PayingChain(floor, cap, costs(1.0), each), {0.1: 0.9})
        assert texts.step(request_of(1, 2), costs(1.0), each) == want


def test_costs_that_nobody_measured_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="no measured costs: give its drafter to an Engine"):
        Texts(PayingChain(), {0.1: 0.9}).step(request_of(1), costs(1.0), 0.0)


def test_an_engine_finds_the_costs_of_target_and_head() -> None:
    model = target()
    policy = find_policy("dynamic-window", {"cap": 5})
    assert policy == PayingChain(1, 5)
    made = Engine(model, TreeDrafter(policy, EagleSource(trained(model), VOCAB)), nodes=6)
    assert isinstance(policy, PayingChain)
    assert policy.target is not None
    assert policy.drafter
    params = [SamplingParams(max_tokens=12, temperature=t, seed=1) for t in (0.0, 1.0)]
    prompts = [[3, 4, 5], [6, 7]]
    want = [g.token_ids for g in Engine(model).generate(prompts, params)]
    assert [g.token_ids for g in made.generate(prompts, params)] == want


def test_a_sequence_in_a_batch_drafts_as_far_as_alone() -> None:
    """A pass's seconds are all requests'; one request's tokens were held against all requests' speed."""

    def lengths(batch: int) -> int:
        sizes = Profile(
            costs(1.0).identity, tuple(Point(b, 64, SIZES, tuple(4.2 + 0.9 * n for n in SIZES)) for b in (1, batch))
        )
        policy = PayingChain(cap=6, target=sizes, drafter=0.01)
        drafter = TreeDrafter(policy, Unsure(lambda path: 0.1))
        requests = [request_of(*range(64)) for _ in range(batch)]
        for _ in range(30):
            trees = drafter.propose(requests, [Budget(24)] * batch)
            drafter.observe(
                [
                    Outcome(s, tree, list(range(len(tree))), [0] * (len(tree) + 1), len(tree) + 1, STEP)
                    for s, tree in zip(requests, trees, strict=True)
                ]
            )
        return min(map(len, trees))

    assert lengths(4) == lengths(1) == 6
