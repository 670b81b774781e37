"""``auto`` over several requests that share a pass: one node budget, spent where it gains most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from draftree.config import Budget, SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter, grow
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.cost_profile import Point, Profile
from draftree.policies.auto import MOST_NODES, AutoPlan, AutoTree
from draftree.policies.base import Plan
from draftree.policies.live_costs import ARPass, CostModel
from draftree.request import Outcome, Request, StepCost
from draftree.text.detokenizer import NoText
from draftree.tree import DraftTree

from ...toy import Path, ScriptedScorer, ToyModel
from .test_policy import CURVES, ME, Fake, costs, decode


def affine(fixed: float, token: float) -> Profile:
    """A machine on which a pass takes ``fixed`` seconds, and ``token`` for each of its tokens."""
    sizes = (1, 1025)
    return Profile(ME, (Point(1, 64, sizes, tuple(fixed + token * n for n in sizes)),))


def chains(*probabilities: float) -> Callable[[int, Path], tuple[Sequence[int], Sequence[float], float]]:
    """One candidate after every node, of a probability by request."""
    return lambda row, path: ([len(path) + 1], [math.log(probabilities[row])], 1.0)


def drafted(policy: AutoTree, *probabilities: float, budget: Budget, other_tokens: int = 0) -> list[DraftTree]:
    """The trees of one proposal for as many requests."""
    plan = policy.plan([Fake() for _ in probabilities], [budget] * len(probabilities), other_tokens)
    return [grown.tree for grown in grow(ScriptedScorer(chains(*probabilities)), policy, plan)]


def decoded(policy: AutoTree, batch: int, steps: int, says: float, other_tokens: int = 0) -> list[int]:
    """How many nodes in all each step verifies where all that is drafted is right."""
    chosen, requests = [], [Fake() for _ in range(batch)]
    for _ in range(steps):
        plan = policy.plan(requests, [Budget(8)] * batch, other_tokens)
        trees = [grown.tree for grown in grow(ScriptedScorer(chains(*[says] * batch)), policy, plan)]
        chosen.append(sum(map(len, trees)))
        assert policy.target is not None
        cost = StepCost(batch, 1e-6, policy.target.seconds(batch + other_tokens + chosen[-1], 64), 0.0, 0)
        policy.observe(
            plan,
            [
                Outcome(r, tree, list(range(len(tree))), [*tree.tokens, len(tree) + 1], len(tree) + 1, cost)
                for r, tree in zip(requests, trees, strict=True)
            ],
        )
    return chosen


@pytest.mark.parametrize("sure", [0, 1])
def test_nodes_go_to_the_request_that_is_predictable(sure: int) -> None:
    probabilities = [0.15, 0.15]
    probabilities[sure] = 0.95
    trees = drafted(AutoTree(target=affine(1.0, 0.2)), *probabilities, budget=Budget(8))
    assert len(trees[sure]) >= 3
    assert len(trees[1 - sure]) == 0


def test_requests_that_are_alike_get_alike_trees() -> None:
    one, other = drafted(AutoTree(target=affine(1.0, 0.05)), 0.8, 0.8, budget=Budget(8))
    assert len(one) >= len(other) >= len(one) - 1 > 0


def test_each_request_stays_within_its_own_budget() -> None:
    policy, script = AutoTree(target=affine(1.0, 0.0)), chains(0.99, 0.9, 0.8)
    budgets = [Budget(2), Budget(9, 3), Budget(5)]
    plan = policy.plan([Fake() for _ in budgets], budgets)
    assert [len(grown.tree) for grown in grow(ScriptedScorer(script), policy, plan)] == [2, 3, 5]


def test_a_large_batch_on_a_steep_curve_is_decoded_without_drafts() -> None:
    steep = affine(1.0, 0.05)
    assert decode(AutoTree(target=steep), 60, 0.7, 0.7)[-1] > 0
    assert set(decode(AutoTree(target=steep), 30, 0.7, 0.7, batch=128)[5:]) == {0}


def test_tokens_beside_the_trees_leave_less_for_drafts_and_at_last_nothing() -> None:
    policy = AutoTree(target=affine(1.0, 0.1))
    sizes = [len(drafted(policy, 0.8, budget=Budget(16), other_tokens=beside)[0]) for beside in (0, 4, 16, 64, 256)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] > sizes[-1] == 0


def test_tokens_beside_cost_nothing_where_passes_cost_the_same() -> None:
    alone, beside = (decoded(AutoTree(target=affine(1.0, 0.0)), 2, 30, says=0.8, other_tokens=b) for b in (0, 40))
    assert alone[-1] == beside[-1] == 16


def test_load_that_has_passed_leaves_no_mark() -> None:
    policy = AutoTree(target=affine(1.0, 0.1))
    before = decoded(policy, 1, 30, says=0.8)[-1]
    loaded = decoded(policy, 1, 100, says=0.8, other_tokens=400)
    assert max(loaded) <= 1  # a node costs what 0.98 tokens do, and a draft that was always right is as sure as that
    assert decoded(policy, 1, 30, says=0.8)[-1] == before > 0


def resting() -> tuple[AutoTree, Callable[[int], Plan]]:
    """A policy that rests, and what gives the plan of a step beside so many tokens of a prompt."""
    policy, request = AutoTree(target=affine(0.0, 1.0), drafter=affine(1.1, 0.0)), Fake()
    assert not policy.plan([request], [Budget(8)]).budgets[0].nodes
    return policy, lambda beside: policy.plan([request], [Budget(8)], beside)


def knowing_nothing() -> tuple[AutoTree, Callable[[int], Plan]]:
    """A policy whose drafter finds nothing in its text, after a step that was planned."""
    policy, source = AutoTree(target=affine(0.0, 1.0)), NgramSource()
    drafter, request = TreeDrafter(policy, source), Request([1, 2, 3], SamplingParams(), 99, frozenset(), NoText())
    drafter.open(request)
    policy.plan([request], [Budget(8)])

    def plan(beside: int) -> Plan:
        drafter.propose([request], [Budget(8)], other_tokens=beside)
        assert drafter._plan is not None
        return drafter._plan

    return policy, plan


@pytest.mark.parametrize("unplanned", [resting, knowing_nothing])
def test_steps_without_a_plan_learn_from_passes_of_their_requests_alone(
    unplanned: Callable[[], tuple[AutoTree, Callable[[int], Plan]]],
) -> None:
    """While a prompt was read in its steps, an AR pass was believed to take as long as they did."""
    policy, plan = unplanned()
    ar = ARPass(0, 1, 1)
    for _ in range(9):
        policy._costs.learn(0, ar, 1.0)
        policy._costs.learn(3, ar, 4.0)

    def step(beside: int, seconds: float) -> list[float]:
        """Seconds of passes over 1, 2, ... tokens after the step."""
        cost = StepCost(1 + (beside > 0), 0.0, seconds, 0.0, 0)
        made = plan(beside)
        assert not isinstance(made, AutoPlan)
        policy.observe(made, [Outcome(Fake(), DraftTree.empty(), [], [1], 1, cost)])
        return policy._costs.curve(3, ar).seconds

    known = [1.0, 2.0, 3.0, 4.0]
    assert step(0, 1.0) == known
    for beside in (1, 9, 400):
        assert step(beside, 10.0) == known
    assert step(0, 10.0) != known


def test_a_step_without_a_plan_has_no_tokens_of_the_one_before() -> None:
    policy, plan = AutoTree(target=affine(0.0, 1.0), drafter=affine(1.1, 0.0)), Plan([Budget(0)])
    ar = ARPass(0, 1, 1)
    for _ in range(9):
        policy._costs.learn(0, ar, 1.0)
        policy._costs.learn(3, ar, 4.0)
    policy.plan([Fake()], [Budget(8)], other_tokens=1)
    for _ in range(9):
        policy.observe(plan, [Outcome(Fake(), DraftTree.empty(), [], [1], 1, StepCost(1, 0.0, 1.0, 0.0, 0))])
    assert policy._costs.curve(3, ar).seconds == [1.0, 2.0, 3.0, 4.0]


def test_a_pass_is_priced_by_its_tokens() -> None:
    costs = CostModel(affine(1.0, 0.5))
    for ar in (ARPass(64, 1, 1), ARPass(64, 3, 3), ARPass(64, 3, 10), ARPass(64, 1, 1)):
        assert costs.curve(4, ar).seconds == pytest.approx([1.0 + 0.5 * (ar.tokens + n) for n in range(5)])


def test_what_ragged_passes_take_is_no_drift() -> None:
    model, ar = CostModel(affine(1.0, 0.5)), ARPass(64, 3, 10)
    for nodes in (0, 5) * 20:
        model.learn(nodes, ar, 1.0 + 0.5 * (ar.tokens + nodes))
    assert model.curve(5, ar).seconds == pytest.approx([1.0 + 0.5 * (ar.tokens + n) for n in range(6)])


def test_no_more_nodes_are_weighed_in_all_than_are_of_use_unless_one_request_may_have_them() -> None:
    policy, most = AutoTree(target=affine(1.0, 0.0)), MOST_NODES
    for batch, nodes, weighed in ((1, 31, 31), (3, 31, 93), (64, 31, most), (2, most + 100, most + 100)):
        plan = policy.plan([Fake() for _ in range(batch)], [Budget(nodes)] * batch)
        assert isinstance(plan, AutoPlan) and len(plan.price.curve.seconds) == weighed + 1


def test_ties_between_requests_never_break_a_tree() -> None:
    """A child that is certain is as likely as its parent: the earlier one stays, whichever request both are of."""
    policy = AutoTree(target=costs(CURVES["affine"]))
    trees = drafted(policy, 1.0, 1.0, 1.0, budget=Budget(7))
    assert sum(map(len, trees)) > 0
    for tree in trees:
        assert tree.parents == list(range(-1, len(tree) - 1))


def test_a_plan_is_priced_beside_what_its_engine_computes() -> None:
    policy = AutoTree(target=affine(1.0, 0.1))
    drafter = TreeDrafter(policy, ModelSource(ToyModel(), 5))
    drafter.propose([Fake()], [Budget(1, 0)], other_tokens=9)
    assert isinstance(drafter._plan, AutoPlan)
    assert drafter._plan.price.ar == ARPass(0, 1, 10)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_is_the_targets_own(temperature: float) -> None:
    prompts = [[1, 2, 3], [4], [2, 2, 0, 1]]
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    free = AutoTree(target=affine(1.0, 0.05), drafter=affine(0.01, 0.0))
    want = [g.token_ids for g in Engine(ToyModel()).generate(prompts, params)]
    drafting = Engine(ToyModel(), Speculation(TreeDrafter(free, ModelSource(ToyModel(seed=0, spread=1.2), 5))))
    got = drafting.generate(prompts, params)
    assert [g.token_ids for g in got] == want
    assert sum(map(sum, (g.stats.drafted for g in got))) > 0


def test_priorities_change_no_text() -> None:
    def texts(urgent: int | None) -> list[list[int]]:
        policy = AutoTree(target=affine(1.0, 0.2), drafter=affine(0.01, 0.0))
        drafter = TreeDrafter(policy, ModelSource(ToyModel(6, seed=1, spread=1.2), 6))
        engine = Engine(ToyModel(6, seed=1, spread=2.0), Speculation(drafter, 8))
        handles = [
            engine.submit(
                [1, 2, i],
                SamplingParams(max_tokens=40, temperature=float(i % 2), seed=i),
                priority=-3 if i == urgent else i,
                timeout=1e9,
            )
            for i in range(3)
        ]
        return [handle.result().token_ids for handle in handles]

    alone = [
        Engine(ToyModel(6, seed=1, spread=2.0))
        .generate([[1, 2, i]], SamplingParams(max_tokens=40, temperature=float(i % 2), seed=i))[0]
        .token_ids
        for i in range(3)
    ]
    assert all(texts(urgent) == alone for urgent in (None, 0, 1, 2))
