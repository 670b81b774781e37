"""Passes whose second token costs nearly as much as the first."""

from __future__ import annotations

import math
from collections.abc import Callable

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
