"""Trees that a drafter cannot afford are tried on the text that follows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from draftree.config import Budget
from draftree.drafters.grow import grow
from draftree.policies.auto.benefit import Price, Trial
from draftree.policies.auto.cost_model import ARPass
from draftree.policies.auto.policy import AutoTree
from draftree.policies.auto.settings import DEFAULTS, AutoSettings
from draftree.request import Outcome, StepCost
from draftree.tree import DraftTree

from ...toy import ScriptedScorer
from .test_policy import NODES, Fake, costs

SAYS = 0.97


def dear(tokens: int) -> float:
    """A second token costs nearly a pass, further ones little: one drafted token hardly gains."""
    return 1.0 if tokens == 1 else 1.85 + 0.1 * tokens


def padded(tokens: int) -> float:
    """As llama.cpp's kernels for Q4_K: two and three tokens cost as many passes, four and more are padded to fours."""
    return [1.0, 2.08, 3.09][tokens - 1] if tokens < 4 else 2.0 + 0.24 * tokens


def decode(
    steps: int,
    right: bool | int,
    settings: AutoSettings = DEFAULTS,
    verify: Callable[[int], float] = dear,
    layer: float = 0.0,
) -> list[int]:
    """How many nodes each step verifies, of a text that the drafter knows, or not at all, whatever it says.

    Args:
        right: whether it knows the text; a number: from that step on.
        verify: passes of the target over so many tokens.
        layer: passes that a drafted layer takes.
    """
    policy, request, at, chosen = AutoTree(depth=NODES, target=costs(verify), settings=settings), Fake(), 0, list[int]()
    for step in range(steps):
        knows = right if isinstance(right, bool) else step >= right
        plan = policy.plan([request], [Budget(NODES)])
        first = at if knows else -(10**6)
        script = lambda row, path, first=first: ([first + len(path)], [math.log(SAYS)], 1.0)  # noqa: E731
        tree = grow(ScriptedScorer(script), policy, plan)[0].tree
        path = list(range(len(tree))) if knows else []
        cost = StepCost(1, 1e-6 + layer * len(plan.proposed), verify(1 + len(tree)), 0.0, 0)
        tokens = list(range(at, at + len(path) + 1))
        policy.observe(plan, [Outcome(request, tree, path, tokens, len(tokens), cost)])
        at += len(tokens)
        chosen.append(len(tree))
    return chosen


def first_deep(chosen: list[int]) -> int:
    return next((step for step, nodes in enumerate(chosen) if nodes >= 4), len(chosen))


def test_a_text_that_the_drafter_knows_is_drafted_deeply_sooner() -> None:
    with_trials = decode(80, True)
    without = decode(80, True, AutoSettings(trial_gain=math.inf))
    assert first_deep(with_trials) < 0.7 * first_deep(without)
    assert with_trials[-1] >= 4


def test_nothing_is_drafted_while_a_trial_goes_on() -> None:
    policy, request = AutoTree(depth=NODES, target=costs(dear)), Fake()
    plan = policy.plan([request], [Budget(NODES)])
    policy._trials[request] = Trial(DraftTree.chain([1, 2, 3]), plan.price, 2.0)
    assert [b.nodes for b in policy.plan([request], [Budget(NODES)]).budgets] == [0]
    assert all(b.nodes for b in policy.plan([request, Fake()], [Budget(NODES)] * 2).budgets)


def test_trials_that_fail_pay_for_nothing() -> None:
    assert sum(decode(200, False)) <= sum(decode(200, False, AutoSettings(trial_gain=math.inf)))


def test_trials_of_several_requests_cost_what_their_trees_would_add_to_the_pass() -> None:
    policy, both = AutoTree(depth=NODES, target=costs(dear), settings=AutoSettings(fast_decay=1.0)), [Fake(), Fake()]
    plan = policy.plan(both, [Budget(NODES)] * 2)
    plan.wished = [DraftTree.chain([1, 2]), DraftTree.chain([1])], 3
    step = StepCost(2, 1e-6, 2.0, 0.0, 0)
    policy.observe(plan, [Outcome(request, DraftTree.empty(), [], [9], 1, step) for request in both])
    (drafter,) = policy.selection.drafters
    assert drafter._tried == pytest.approx(1 - dear(2 + 3) / dear(2))


def test_layers_are_drafted_only_as_many_as_can_pay() -> None:
    """One or two at a time would use up what may be lost, and one or two drafted tokens never pay."""
    assert first_deep(decode(200, 20, verify=padded, layer=0.02)) < 200


@pytest.mark.parametrize(
    ("steps", "path", "ended"), [([[1, 2], [3]], [0, 1, 2], True), ([[1], [9]], [0], True), ([[1, 2]], [0, 1], False)]
)
def test_a_trial_follows_the_text_until_it_leaves_the_tree(
    steps: list[list[int]], path: list[int], ended: bool
) -> None:
    price = Price(ARPass(64, 1), np.ones(4), 1.0, (True,), (0.0,), 1.0, False)
    trial = Trial(DraftTree.chain([1, 2, 3]), price, 2.0)
    assert [trial.goes_on(tokens) for tokens in steps][-1] != ended
    assert trial.path == path


def test_no_tree_is_grown_below_a_first_candidate_that_cannot_pay() -> None:
    plan = AutoTree(depth=NODES, target=costs(dear)).plan([Fake()], [Budget(NODES)])
    firsts = [np.array([p]) for p in (0.3, 0.6, 0.97)]
    assert [plan.may_gain(np.array([0]), first) for first in firsts] == [False, False, True]
    both = AutoTree(depth=NODES, target=costs(dear)).plan([Fake(), Fake()], [Budget(NODES)] * 2)
    assert both.may_gain(np.arange(2), np.array([0.3, 0.97]))
