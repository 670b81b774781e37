"""Passes whose second token costs nearly as much as the first."""

from __future__ import annotations

import math

from draftree.config import Budget
from draftree.drafters.grow import grow
from draftree.policies.auto import AutoTree
from draftree.request import Outcome, StepCost

from ...toy import ScriptedScorer
from .test_policy import NODES, Fake, costs

SAYS = 0.97


def dear(tokens: int) -> float:
    """A second token costs nearly a pass, further ones little: one drafted token hardly gains."""
    return 1.0 if tokens == 1 else 1.85 + 0.1 * tokens


def test_a_text_that_the_drafter_knows_comes_to_be_drafted_deeply() -> None:
    policy, request, at, chosen = AutoTree(depth=NODES, target=costs(dear)), Fake(), 0, list[int]()
    for _ in range(200):
        plan = policy.plan([request], [Budget(NODES)])
        script = lambda row, path, first=at: ([first + len(path)], [math.log(SAYS)], 1.0)  # noqa: E731
        tree = grow(ScriptedScorer(script), policy, plan)[0].tree
        tokens = list(range(at, at + len(tree) + 1))
        cost = StepCost(1, 1e-6, dear(1 + len(tree)), 0.0, 0)
        policy.observe(plan, [Outcome(request, tree, list(range(len(tree))), tokens, len(tokens), cost)])
        at += len(tokens)
        chosen.append(len(tree))
    assert set(chosen[20:]) == {NODES, 0} and chosen[20:].count(0) <= 5, "nothing but some AR passes, to compare with"
