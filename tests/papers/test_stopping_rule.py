"""Looping back: decisions on scripted entropies, and what they learn."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from draftree.config import Budget
from draftree.drafters.grow import TreeDrafter
from draftree.papers.cascade import CascadeSource, LoopBack
from draftree.policies.fixed import StaticTree
from draftree.request import Outcome, Request, StepCost
from draftree.tree import DraftTree

from ..drafters.test_ensemble import Says, request_of
from ..toy import chain_tree


def deciding(settings: LoopBack) -> CascadeSource:
    return CascadeSource(Says("low", {}), Says("high", {}), StaticTree(1, 2), settings)


def outcome(of: Request, accepted: int, entropies: list[float]) -> Outcome:
    """A chain with these entropies, of which the first tokens were right."""
    chain = chain_tree([1] * len(entropies), math.log(0.8))
    tree = DraftTree(chain.tokens, chain.parents, chain.depths, chain.path_logprobs, entropies)
    tokens = [*[1] * accepted, 2]
    return Outcome(of, tree, list(range(accepted)), tokens, len(tokens), StepCost(1, 1.0, 1.0, 0.0, 0))


def test_looping_back_ends_where_the_entropy_exceeds_tau_and_tau_learns_from_the_target() -> None:
    decider, one = deciding(LoopBack(1.0)), request_of()
    assert [decider.goes_on(one, 1, h) for h in (0.3, 1.0, 1.01, 9.0)] == [True, True, False, False]
    decider.threshold(one).learn(outcome(one, 1, [0.2, 0.5, 0.9]))
    assert decider.threshold(one).value == pytest.approx(0.5)
    decider.threshold(one).learn(outcome(one, 2, [0.2, 0.5, 0.9]))
    assert decider.threshold(one).value == pytest.approx(0.7)
    assert [decider.goes_on(one, 1, h) for h in (0.69, 0.71)] == [True, False]
    assert decider.goes_on(request_of(), 1, 1.0)


def test_a_pending_run_is_no_longer_than_its_cap() -> None:
    decider = deciding(LoopBack(9.0, pending=3))
    assert [decider.goes_on(request_of(), depth, 0.1) for depth in (1, 2, 3, 4)] == [True, True, False, False]


def test_a_cap_of_one_token_is_one_round() -> None:
    assert not deciding(LoopBack(9.0, pending=1)).goes_on(request_of(), 1, 0.0)


def test_decisions_are_made_where_something_new_would_be_scored() -> None:
    """A lower stage of two tokens and an upper one that agrees: it scores again below its own next token alone."""
    depths: list[int] = []

    class Spy(CascadeSource):
        def goes_on(self, request: Request, depth: int, entropy: float) -> bool:
            depths.append(depth)
            return True

    made, one = Spy(Says("low", {1: 0.9}), Says("high", {1: 0.9}), StaticTree(1, 2)), request_of()
    drafter = TreeDrafter(StaticTree(1, 9), made)
    drafter.open(one)
    tree = drafter.propose([one], [Budget(9)])[0]
    assert tree.depth == 9
    assert depths == [3, 6]


@pytest.mark.parametrize(("lower", "rejected", "depth"), [(1, "end", 9), (2, "end", 1), (2, "on", 9)])
def test_a_rejection_by_the_upper_stage_ends_the_run_where_it_is_to(
    lower: int, rejected: Literal["on", "end"], depth: int
) -> None:
    made = CascadeSource(
        Says("low", {lower: 0.9}), Says("high", {1: 0.9}), StaticTree(1, 2), LoopBack(9.0, 50, rejected)
    )
    drafter, one = TreeDrafter(StaticTree(1, 9), made), request_of()
    drafter.open(one)
    assert drafter.propose([one], [Budget(9)])[0].depth == depth
