"""Looping back: decisions on scripted entropies, and what they learn."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from draftree.config import Budget
from draftree.drafters.base import TreeDrafter
from draftree.drafters.cascade.stages import CascadeSource
from draftree.drafters.cascade.stopping_rule import LoopBack, RunEnd, StoppingRule
from draftree.policies.fixed import StaticTree
from draftree.request import Outcome, Request, StepCost
from draftree.tree import DraftTree

from ...pairs import costs
from ..test_ensemble import Says, request_of


def outcome(of: Request, accepted: int, entropies: list[float], seconds: float = 1.0) -> Outcome:
    """A chain with these entropies, of which the first tokens were right."""
    chain = DraftTree.chain([1] * len(entropies), [math.log(0.8)] * len(entropies))
    tree = DraftTree(chain.tokens, chain.parents, chain.depths, chain.path_logprobs, torch.tensor(entropies))
    tokens = [*[1] * accepted, 2]
    return Outcome(of, tree, list(range(accepted)), tokens, len(tokens), StepCost(1, seconds, seconds, 0.0, 0))


def end(entropy: float, depth: int = 1, p: float = 0.8) -> RunEnd:
    return RunEnd(depth, entropy, [p] * depth)


def test_looping_back_ends_where_the_entropy_exceeds_tau_and_tau_learns_from_the_target() -> None:
    decider, one = StoppingRule(LoopBack("entropy", 1.0, memory=math.inf)), request_of()
    assert [decider.goes_on(one, end(h)) for h in (0.3, 1.0, 1.01, 9.0)] == [True, True, False, False]
    decider.observe(outcome(one, 1, [0.2, 0.5, 0.9]), math.inf, [])
    assert decider.threshold(one).value == pytest.approx(0.5)
    decider.observe(outcome(one, 2, [0.2, 0.5, 0.9]), math.inf, [])
    assert decider.threshold(one).value == pytest.approx(0.7)
    assert [decider.goes_on(one, end(h)) for h in (0.69, 0.71)] == [True, False]
    assert decider.goes_on(request_of(), end(1.0))


def test_a_tau_too_low_rises_where_all_that_it_let_through_was_right() -> None:
    decider, one = StoppingRule(LoopBack("entropy", 0.1, memory=20)), request_of()
    decider.observe(outcome(one, 2, [0.05, 0.08]), 0.4, [])
    assert decider.threshold(one).value == pytest.approx(0.4)


def test_a_pending_run_is_no_longer_than_its_cap() -> None:
    for rule in ("entropy", "gain"):
        decider = StoppingRule(LoopBack(rule, 9.0, pending=3), costs(1e-3))
        assert [decider.goes_on(request_of(), end(0.1, depth, 1.0)) for depth in (1, 2, 3, 4)] == [
            True,
            True,
            False,
            False,
        ]


def test_never_is_never() -> None:
    assert not StoppingRule(LoopBack("never", 9.0)).goes_on(request_of(), end(0.0))


def test_a_round_is_worth_its_seconds_or_is_not_made() -> None:
    decider, one = StoppingRule(LoopBack("gain"), costs(1.0)), request_of()  # plain decoding: a token a second
    assert decider.goes_on(one, end(9.0))  # rounds cost nothing yet, whatever the entropy
    decider.took(1.0)
    assert decider.goes_on(one, end(0.0, 1, 0.9))  # 0.9 x 2 tokens for one second
    assert not decider.goes_on(one, end(0.0, 4, 0.8))  # 0.8 ^ 4 x 2
    decider.took(100.0)
    assert not decider.goes_on(one, end(0.0, 1, 0.99))


def test_the_gain_of_a_round_is_what_rounds_have_given() -> None:
    decider, one = StoppingRule(LoopBack("gain"), costs(1.0)), request_of()
    decider.took(1.0)
    before = decider.gain(end(0.0, 1, 0.9), 5)
    for _ in range(60):
        decider.observe(outcome(one, 2, [0.1] * 3, 2.0), math.inf, [0])
    assert decider.gain(end(0.0, 1, 0.9), 5) < 0 < before


@pytest.mark.parametrize("rule", ["entropy", "gain"])
def test_decisions_are_made_where_something_new_would_be_asked(rule: str) -> None:
    """A lower level of two tokens and an upper one that agrees: it is asked again below its own next token alone."""
    asked: list[int] = []

    class Spy(StoppingRule):
        def goes_on(self, request: Request, at: RunEnd) -> bool:
            asked.append(at.depth)
            return True

    made = CascadeSource(Says("low", {1: 0.9}), Says("high", {1: 0.9}), StaticTree(1, 2), LoopBack(rule))
    made.verifiers, one = (replace(made.verifiers[0], rule=Spy(LoopBack(rule))),), request_of()
    drafter = TreeDrafter(StaticTree(1, 9), made)
    drafter.open(one)
    tree = drafter.propose([one], [Budget(9)])[0]
    assert tree.depth == 9
    assert asked == [3, 6]
