"""Passes whose second token costs nearly as much as the first."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from draftree.config import Budget
from draftree.drafters.grow import grow
from draftree.policies.auto.policy import AutoTree
from draftree.request import Outcome, StepCost

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
    right: bool,
    verify: Callable[[int], float] = dear,
) -> list[int]:
    """How many nodes each step verifies, of a text that the drafter knows, or not at all, whatever it says.

    Args:
        right: whether it knows the text.
        verify: passes of the target over so many tokens.
    """
    policy, request, at, chosen = AutoTree(depth=NODES, target=costs(verify)), Fake(), 0, list[int]()
    for _ in range(steps):
        plan = policy.plan([request], [Budget(NODES)])
        first = at if right else -(10**6)
        script = lambda row, path, first=first: ([first + len(path)], [math.log(SAYS)], 1.0)  # noqa: E731
        tree = grow(ScriptedScorer(script), policy, plan)[0].tree
        path = list(range(len(tree))) if right else []
        cost = StepCost(1, 1e-6, verify(1 + len(tree)), 0.0, 0)
        tokens = list(range(at, at + len(path) + 1))
        policy.observe(plan, [Outcome(request, tree, path, tokens, len(tokens), cost)])
        at += len(tokens)
        chosen.append(len(tree))
    return chosen


def test_a_text_that_the_drafter_knows_comes_to_be_drafted_deeply() -> None:
    assert decode(200, True)[-1] >= 4


def test_a_balance_is_not_spent_on_fewer_layers_than_can_pay() -> None:
    """One or two at a time would use up what may be lost, and one or two drafted tokens never pay here."""
    policy = AutoTree(depth=NODES, target=costs(padded))
    (drafter,) = policy.selection.drafters
    drafter.measure(0.02, 1, 0.0)
    drafter.learn(0.0, 0.01, 1.0)
    drafter.balance = 0.05  # of two layers, where four are the fewest that pay
    assert policy.plan([Fake()], [Budget(NODES)]).price.enabled == (False,)
    drafter.balance = 0.09
    assert policy.plan([Fake()], [Budget(NODES)]).price.enabled == (True,)


def test_no_tree_is_grown_below_a_first_candidate_that_cannot_pay() -> None:
    plan = AutoTree(depth=NODES, target=costs(dear)).plan([Fake()], [Budget(NODES)])
    firsts = [np.array([p]) for p in (0.3, 0.6, 0.97)]
    assert [plan.may_gain(np.array([0]), first) for first in firsts] == [False, False, True]
    both = AutoTree(depth=NODES, target=costs(dear)).plan([Fake(), Fake()], [Budget(NODES)] * 2)
    assert both.may_gain(np.arange(2), np.array([0.3, 0.97]))
