"""Several proposals under way at once in one policy: what belongs to a proposal travels with its plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from draftree.config import Budget
from draftree.drafters.grow import grow
from draftree.papers.hsddw import DynamicWindow
from draftree.policies.auto import AutoTree
from draftree.policies.base import Child, Frontier, GrowthPolicy, Plan
from draftree.request import Outcome, Request, StepCost
from draftree.tree import ROOT, DraftTree

from ..pairs import costs
from ..toy import Path, ScriptedScorer
from .auto.test_policy import Fake

STEP = StepCost(1, 0.1, 1.0, 0.0, 0)


class Group(NamedTuple):
    """Requests that are drafted for together, with the entropies of their distributions by depth."""

    requests: Sequence[Request]
    entropies: Sequence[float]
    accepted: int

    def plan(self, policy: GrowthPolicy) -> Plan:
        return policy.plan(self.requests, [Budget(8)] * len(self.requests))

    def grow(self, policy: GrowthPolicy, plan: Plan) -> list[DraftTree]:
        def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
            return [row, row + 1], [math.log(0.7), math.log(0.2)], self.entropies[min(len(path), 3)] + 0.1 * row

        return [grown.tree for grown in grow(ScriptedScorer(script), policy, plan)]

    def observe(self, policy: GrowthPolicy, plan: Plan, trees: Sequence[DraftTree]) -> None:
        outcomes = []
        for request, tree in zip(self.requests, trees, strict=True):
            path = list[int]()
            while len(path) < self.accepted and (children := tree.children(path[-1] if path else ROOT)):
                path.append(children[0])
            tokens = [*map(tree.tokens.__getitem__, path), 9]
            outcomes.append(Outcome(request, tree, path, tokens, len(tokens), STEP))
        policy.observe(plan, outcomes)


def groups() -> tuple[Group, Group]:
    few = Group([Fake()], (0.1, 0.4, 0.9, 1.6), 2)
    return few, Group([Fake(), Fake(), Fake()], (1.0, 0.2, 0.6, 0.3), 1)


def interleaved(policy: GrowthPolicy, steps: int) -> list[list[list[int]]]:
    """The tokens of each group's trees, where each part of a step is made for one group and then the other."""
    both, found = groups(), list[list[list[int]]]([[], []])
    for _ in range(steps):
        plans = [group.plan(policy) for group in both]
        trees = [group.grow(policy, plan) for group, plan in zip(both, plans, strict=True)]
        for group, plan, grown, own in reversed(list(zip(both, plans, trees, found, strict=True))):
            group.observe(policy, plan, grown)
            own += [tree.tokens for tree in grown]
    return found


def alone(policy: GrowthPolicy, which: int, steps: int) -> list[list[int]]:
    group, found = groups()[which], list[list[int]]()
    for _ in range(steps):
        plan = group.plan(policy)
        trees = group.grow(policy, plan)
        group.observe(policy, plan, trees)
        found += [tree.tokens for tree in trees]
    return found


def test_a_window_of_two_groups_at_once_is_that_of_each_alone() -> None:
    both = interleaved(DynamicWindow(cap=6), 12)
    for which, found in enumerate(both):
        assert found == alone(DynamicWindow(cap=6), which, 12)
        assert len(set(map(len, found))) > 1  # the threshold moves, and is each request's own


def test_auto_learns_of_two_groups_at_once() -> None:
    policy = AutoTree(target=costs(1.0))
    both = interleaved(policy, 12)
    assert [len(found) for found in both] == [12, 36]
    assert policy.report.steps == 24


def test_a_policy_of_one_method_may_read_its_plan() -> None:
    seen = []

    class First(GrowthPolicy):
        def grow(self, frontier: Frontier) -> list[Child]:
            seen.append(frontier.plan)
            return [Child(at, 0) for at, found in enumerate(frontier.candidates) if found.logprobs[0] > math.log(0.5)]

    first, _ = groups()
    plan = first.plan(First())
    assert len(first.grow(First(), plan)[0]) == 8
    assert all(one is plan for one in seen)
