"""Policies, drafters and schemes of a user that break the rules of their seam: a line with their name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter, DraftSource, Scorer
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import DraftreeError
from draftree.papers.entropy_trees import EntropyTree
from draftree.policies.base import Candidates, Child, GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.verify.base import NodeByNode, Scheme, UniformDraws, Visit
from draftree.verify.schemes import Match

from .toy import ToyModel

VOCAB = 5
Returns = Callable[..., Any]


def _raises(*_: object, **__: object) -> None:
    raise KeyError("lost")


def _const(value: object) -> Returns:
    return lambda *_, **__: value


class Ranks(Scorer):
    def __init__(self, score: Returns) -> None:
        self._score = score

    def score(self, nodes: Sequence[Any], width: int) -> list[Candidates]:
        return self._score(nodes, width)  # type: ignore[no-any-return]


def _usual(nodes: Sequence[Any], width: int) -> list[Candidates]:
    return [Candidates((0, 1), (-0.5, -1.5), 0.7) for _ in nodes]


class MySource(DraftSource):
    name = "mine"

    def __init__(self, score: Returns = _usual, scorer: Returns | None = None) -> None:
        self._score, self._scorer = score, scorer

    def scorer(self, requests: Sequence[Any], coupled: bool) -> Scorer:
        return Ranks(self._score) if self._scorer is None else self._scorer(requests, coupled)


class MyPolicy(GrowthPolicy):
    def grow(self, frontier: Any) -> list[Child]:
        return frontier.likeliest([1] * len(frontier.requests), [False] * len(frontier.requests))  # type: ignore[no-any-return]


def decoded(policy: GrowthPolicy | None = None, drafter: Drafter | None = None, scheme: Scheme | None = None) -> None:
    drafter = drafter or TreeDrafter(policy or MyPolicy(), MySource())
    engine = Engine(ToyModel(VOCAB), Speculation(drafter, 4, scheme or Match()))
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))


def refused(named: str, rule: str, **parts: Any) -> None:
    with pytest.raises(DraftreeError) as refusal:
        decoded(**parts)
    message = str(refusal.value)
    assert "\n" not in message
    assert named in message and rule in message, message


GROW: dict[str, tuple[Returns, str]] = {
    "raises": (_raises, "raised KeyError: 'lost'"),
    "None": (_const(None), "return a list of Child"),
    "a number": (_const(3), "return a list of Child"),
    "pairs": (_const([(0, 0)]), "return a list of Child"),
    "another node's": (_const([Child(7, 0)]), "parent"),
    "a negative parent": (_const([Child(-1, 0)]), "parent"),
    "no candidate": (_const([Child(0, 9)]), "rank"),
    "a negative rank": (_const([Child(0, -1)]), "rank"),
    "a fraction": (_const([Child(0, cast(int, 0.5))]), "rank"),
    "nothing": (_const([Child(cast(int, None), 0)]), "parent"),
    "twice": (_const([Child(0, 0), Child(0, 0)]), "order"),
    "out of order": (_const([Child(0, 1), Child(0, 0)]), "order"),
}


@pytest.mark.parametrize("case", GROW)
def test_a_policy_that_grows_wrongly_is_named_with_the_rule(case: str) -> None:
    policy, (returns, rule) = MyPolicy(), GROW[case]
    policy.grow = returns  # type: ignore[method-assign]
    refused("policy MyPolicy: grow", rule, policy=policy)


METHODS = {
    "prepare raises": ("prepare", _raises, "raised KeyError"),
    "plan raises": ("plan", _raises, "raised KeyError"),
    "plan None": ("plan", _const(None), "return a Plan"),
    "width_for None": ("width_for", _const(None), "return a whole number from 1"),
    "width_for 0": ("width_for", _const(0), "return a whole number from 1"),
    "width_for 1.5": ("width_for", _const(1.5), "return a whole number from 1"),
    "pool None": ("pool", _const(None), "return a whole number from 1"),
    "pool raises": ("pool", _raises, "raised KeyError"),
    "prune None": ("prune", _const(None), "for each pool"),
    "prune too few": ("prune", _const([]), "for each pool"),
    "prune short": ("prune", _const([[]]), "for each pool"),
    "prune raises": ("prune", _raises, "raised KeyError"),
    "observe raises": ("observe", _raises, "raised KeyError"),
}


@pytest.mark.parametrize("case", METHODS)
def test_every_method_of_a_policy_is_named_with_its_rule(case: str) -> None:
    method, returns, rule = METHODS[case]
    policy = MyPolicy()
    setattr(policy, method, returns)
    refused(f"policy MyPolicy: {method}", rule, policy=policy)


@pytest.mark.parametrize("method", ["prepare", "open", "observe", "close"])
def test_every_method_of_a_source_that_raises_is_named(method: str) -> None:
    """Their exceptions came out bare."""
    source = MySource()
    setattr(source, method, _raises)
    refused(f"drafter mine: {method}", "raised KeyError: 'lost'", drafter=TreeDrafter(StaticTree(1, 2), source))


@pytest.mark.parametrize(("nodes", "rule"), [(None, "default_nodes is None"), ("12", "is '12'"), (0, "at least 1")])
def test_a_policys_node_budget_is_named_with_its_rule(nodes: object, rule: str) -> None:
    policy = type("MyOwn", (MyPolicy,), {"default_nodes": nodes})()
    with pytest.raises(DraftreeError, match="policy MyOwn: default_nodes") as refusal:
        SpeculationParams(drafter="lookup", method=policy)
    assert rule in str(refusal.value)


def test_a_class_in_place_of_a_policy_or_a_source_is_refused() -> None:
    for parts in ((MyPolicy, MySource()), (MyPolicy(), MySource)):
        with pytest.raises(DraftreeError, match="instance of"):
            TreeDrafter(*cast(Any, parts))


def _each(value: object) -> Returns:
    return lambda nodes, width: [value for _ in nodes]


SCORES: dict[str, tuple[Returns, str]] = {
    "raises": (_raises, "raised KeyError: 'lost'"),
    "None": (_const(None), "Candidates for each node"),
    "too few": (_const([]), "Candidates for each node"),
    "None each": (_each(None), "Candidates for each node"),
    "fewer log-probabilities": (_each(Candidates((0, 1), (-0.5,), 0.7)), "as many log-probabilities as tokens"),
    "no lists": (_each(Candidates(3, None, 0.7)), "as many log-probabilities as tokens"),  # type: ignore[arg-type]
    "nan": (_each(Candidates((0,), (math.nan,), 0.7)), "finite"),
    "a bare tuple": (_each(((0,), (-0.5,), 0.7)), "Candidates for each node"),
    "no entropy": (_each(Candidates((0,), (-0.5,), None)), "finite"),  # type: ignore[arg-type]
    "beyond the vocabulary": (_each(Candidates((VOCAB,), (-0.5,), 0.7)), f"token {VOCAB}: the target has 0 to 4"),
    "a negative token": (_each(Candidates((-1,), (-0.5,), 0.7)), "token -1: the target has 0 to 4"),
    "a huge token": (_each(Candidates((2**40,), (-0.5,), 0.7)), "drafter mine"),
}


@pytest.mark.parametrize("case", SCORES)
def test_a_source_that_scores_wrongly_is_named_with_the_rule(case: str) -> None:
    returns, rule = SCORES[case]
    refused("drafter mine", rule, drafter=TreeDrafter(StaticTree(1, 2), MySource(returns)))


@pytest.mark.parametrize(("scorer", "rule"), [(_raises, "raised KeyError"), (_const(None), "scorer returned None")])
def test_a_source_that_begins_wrongly_is_named_with_the_rule(scorer: Returns, rule: str) -> None:
    refused("drafter mine", rule, drafter=TreeDrafter(StaticTree(1, 2), MySource(scorer=scorer)))


DECISIONS: dict[str, tuple[Returns, str]] = {
    "raises": (_raises, "raised KeyError: 'lost'"),
    "None": (_const(None), "raised TypeError: 'NoneType' object cannot be interpreted as an integer"),
    "a fraction": (_const(2.0), "raised TypeError: 'float' object cannot be interpreted as an integer"),
    "beyond the vocabulary": (_const(VOCAB), f"token {VOCAB}: the target has 0 to 4"),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_a_scheme_that_decides_wrongly_is_named_with_the_rule(case: str) -> None:
    """A scheme without a name is called by its class."""
    returns, rule = DECISIONS[case]

    class Mine(NodeByNode):
        lossy = True

        def decide(self, visit: Visit, draws: UniformDraws) -> int:
            return returns()  # type: ignore[no-any-return]

    refused("verification Mine", rule, scheme=Mine())


WIDTHS: dict[str, tuple[Returns, str]] = {
    "raises": (_raises, "raised KeyError"),
    "None": (_const(None), "gave None"),
    "text": (_const("2"), "gave '2'"),
    "nan": (_const(math.nan), "gave nan"),
    "infinite": (_const(math.inf), "gave inf"),
    "negative": (_const(-1), "gave -1"),
    "a list": (_const([1]), "gave [1]"),
}


@pytest.mark.parametrize("what", ["width", "depth"])
@pytest.mark.parametrize("case", WIDTHS)
def test_a_function_of_entropy_is_refused_with_its_range_and_what_it_gave(case: str, what: str) -> None:
    returns, gave = WIDTHS[case]
    policy = EntropyTree(returns) if what == "width" else EntropyTree(depth_of=returns)
    rule = "use a number from 0 on" if "gave" in gave else f"the {what} function"
    refused(gave, rule, policy=policy)


@pytest.mark.parametrize(
    "function", [lambda e: 1 if e < 0.5 else 4, lambda e: 2.0, lambda e: max(1, 4 - e), lambda e: 10**9]
)
def test_a_function_of_entropy_takes_a_number_and_may_return_any_from_0_on(function: Returns) -> None:
    decoded(EntropyTree(function))
