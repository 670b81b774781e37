"""The growth loop with a scripted scorer: budgets, cuts, order, and what is scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftree.config import Budget, SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import ConfigError
from draftree.papers.cascade import CascadeSource
from draftree.policies.base import Child, Frontier, GrowthPolicy, Plan, Pool, best_per_request
from draftree.policies.fixed import StaticTree
from draftree.request import Outcome
from draftree.tree import ROOT, DraftTree

from ..pairs import begun
from ..toy import Path, Script, ScriptedScorer, ToyModel, trees_of

WIDTH = 4


def random_script(seed: int) -> Script:
    """Each (row, path) has its own candidates; log-probs are few multiples of 1/4, so that ties and -inf abound."""

    def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
        rng = Random(f"{seed} {row} {path}")
        logprobs = sorted((rng.choice([-0.25, -0.5, -0.75, -1.0, -math.inf]) for _ in range(WIDTH)), reverse=True)
        return rng.sample(range(20), WIDTH), logprobs, rng.randrange(8) / 4

    return script


def even(logprobs: Sequence[float]) -> Script:
    """Every node has children 0, 1, ... with these log-probs."""
    return lambda row, path: (range(len(logprobs)), logprobs, 1.0)


@dataclass(frozen=True)
class Picky(GrowthPolicy):
    """A policy without pattern: what is kept and extended hangs on token and depth."""

    width: int = WIDTH

    def width_for(self, nodes: int) -> int:
        return self.width

    @staticmethod
    def keeps(token: int, depth: int) -> bool:
        return (token + depth) % 4 != 0

    @staticmethod
    def extends(token: int, depth: int) -> bool:
        return (token + depth) % 5 != 1

    def grow(self, frontier: Frontier) -> list[Child]:
        depth = frontier.depth + 1
        return [
            Child(parent, rank, self.extends(token, depth))
            for parent, found in enumerate(frontier.candidates)
            for rank, token in enumerate(found.tokens)
            if self.keeps(token, depth)
        ]


Node = tuple[int, int, int, float, float]
"""Token, parent, depth, path log-prob, entropy."""


def slowly(script: Script, row: int, budget: Budget) -> tuple[list[Node], list[Path]]:
    """What ``Picky`` grows for one request, node by node, and the paths that are scored."""
    nodes: list[Node] = []
    frontier: list[tuple[int, Path, float]] = [(ROOT, (), 0.0)]
    scored: list[Path] = []
    depth = 0
    while frontier and len(nodes) < budget.nodes and depth != budget.depth:
        depth += 1
        scored += [path for _, path, _ in frontier]
        wanted: list[tuple[float, int, Path, float]] = []
        for number, path, score in frontier:
            tokens, logprobs, entropy = script(row, path)
            for token, logprob in zip(tokens, logprobs, strict=True):
                if Picky.keeps(token, depth) and logprob > -math.inf:
                    wanted.append((score + logprob, number, (*path, token), entropy))
        best = sorted(range(len(wanted)), key=lambda i: (-wanted[i][0], i))[: budget.nodes - len(nodes)]
        frontier = []
        for score, parent, path, entropy in (wanted[i] for i in sorted(best)):
            if Picky.extends(path[-1], depth):
                frontier.append((len(nodes), path, score))
            nodes.append((path[-1], parent, depth, score, entropy))
    return nodes, scored


def listed(tree: DraftTree) -> list[Node]:
    return list(zip(tree.tokens, tree.parents, tree.depths, tree.path_logprobs, tree.entropies, strict=True))


def shapes(trees: Sequence[DraftTree]) -> list[list[Node]]:
    return [listed(tree) for tree in trees]


budgets = st.builds(Budget, st.integers(0, 12), st.one_of(st.none(), st.integers(0, 5)))
batches = given(seed=st.integers(0, 10**6), asked=st.lists(budgets, min_size=1, max_size=4))
examples = settings(max_examples=100, deadline=None, derandomize=True)


@batches
@examples
def test_trees_are_those_that_grow_node_by_node(seed: int, asked: list[Budget]) -> None:
    trees = trees_of(ScriptedScorer(random_script(seed)), Picky(), asked)
    assert shapes(trees) == [slowly(random_script(seed), b, budget)[0] for b, budget in enumerate(asked)]


@batches
@examples
def test_exactly_the_nodes_that_may_get_children_are_scored(seed: int, asked: list[Budget]) -> None:
    scorer = ScriptedScorer(random_script(seed))
    trees_of(scorer, Picky(), asked)
    scored = [(b, path) for b, budget in enumerate(asked) for path in slowly(random_script(seed), b, budget)[1]]
    assert sorted(a for call in scorer.calls for a in call) == sorted(scored)


@batches
@examples
def test_no_tree_exceeds_its_budget(seed: int, asked: list[Budget]) -> None:
    for tree, budget in zip(trees_of(ScriptedScorer(random_script(seed)), StaticTree(3, 9), asked), asked, strict=True):
        assert len(tree) <= budget.nodes
        assert budget.depth is None or tree.depth <= budget.depth


@batches
@examples
def test_nodes_are_in_level_order_and_no_likelier_than_their_parents(seed: int, asked: list[Budget]) -> None:
    for tree in trees_of(ScriptedScorer(random_script(seed)), StaticTree(3, 9), asked):
        levels = [0, *tree.depths]
        paths = [0.0, *tree.path_logprobs]
        assert levels == sorted(levels)
        for node, parent in enumerate(tree.parents):
            assert levels[node + 1] == levels[parent + 1] + 1
            assert paths[node + 1] <= paths[parent + 1]


@batches
@examples
def test_a_batch_gives_what_each_sequence_gives_alone(seed: int, asked: list[Budget]) -> None:
    script = random_script(seed)

    def alone(b: int) -> DraftTree:
        return trees_of(ScriptedScorer(lambda _, path: script(b, path)), StaticTree(3, 4), [asked[b]])[0]

    together = trees_of(ScriptedScorer(script), StaticTree(3, 4), asked)
    assert shapes(together) == [listed(alone(b)) for b in range(len(asked))]


def test_the_likeliest_paths_stay_where_a_layer_is_cut() -> None:
    """Brute force: all 9 + 27 paths of the last layers against the 5 that there is room for."""
    script = random_script(3)
    full = trees_of(ScriptedScorer(script), StaticTree(3, 3), [Budget(100)])[0]
    above = full.depths.index(3)
    layer = full.path_logprobs[above:]
    cut = trees_of(ScriptedScorer(script), StaticTree(3, 3), [Budget(above + 5)])[0]
    assert len(layer) > 10
    assert sorted(cut.path_logprobs[above:]) == sorted(layer)[-5:]
    assert listed(cut)[:above] == listed(full)[:above], "earlier layers are left as they are"


def test_of_equal_paths_the_earlier_stay() -> None:
    tree = trees_of(ScriptedScorer(even([-0.5, -0.5, -0.5])), StaticTree(3, 2), [Budget(7)])[0]
    assert tree.parents == [-1, -1, -1, 0, 0, 0, 1]


def test_a_likelier_path_of_a_later_parent_displaces_an_earlier_one() -> None:
    def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
        return [0, 1], [-0.5, -0.75] if path != (0,) else [-2.0, -3.0], 1.0

    tree = trees_of(ScriptedScorer(script), StaticTree(2, 2), [Budget(4)])[0]
    assert list(zip(tree.parents, tree.tokens, strict=True))[2:] == [(1, 0), (1, 1)]


@pytest.mark.parametrize("budget", [Budget(0), Budget(0, 3), Budget(3, 0)])
def test_nothing_is_scored_for_a_sequence_without_a_budget(budget: Budget) -> None:
    scorer = ScriptedScorer(even([-0.5]))
    assert len(trees_of(scorer, StaticTree(1, 4), [budget])[0]) == 0
    assert scorer.calls == []


def test_a_sequence_without_a_budget_may_sit_between_others() -> None:
    scorer = ScriptedScorer(even([-0.5]))
    trees = trees_of(scorer, StaticTree(1, 4), [Budget(2), Budget(0), Budget(9, 3)])
    assert [len(tree) for tree in trees] == [2, 0, 3]
    assert {row for call in scorer.calls for row, _ in call} == {0, 2}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_leaves_are_never_scored(depth: int) -> None:
    scorer = ScriptedScorer(even([-0.5, -1.0]))
    tree = trees_of(scorer, StaticTree(2, depth), [Budget(100)])[0]
    assert len(scorer.calls) == depth, "one call a layer, the root's included"
    assert len(scorer.scored) == sum(level < depth for level in tree.depths)


def test_the_layer_that_spends_the_budget_is_never_scored() -> None:
    scorer = ScriptedScorer(even([-0.5, -1.0]))
    trees_of(scorer, StaticTree(2, 4), [Budget(5)])
    assert [len(call) for call in scorer.calls] == [1, 2]


def test_the_depth_that_a_budget_leaves_open_is_bounded_by_its_nodes() -> None:
    assert trees_of(ScriptedScorer(even([-0.5])), StaticTree(1, 99), [Budget(6)])[0].depth == 6


def test_a_candidate_without_probability_is_never_kept() -> None:
    tree = trees_of(ScriptedScorer(even([-0.5, -math.inf, -math.inf])), StaticTree(3, 2), [Budget(9)])[0]
    assert tree.tokens == [0, 0]


def test_no_candidates_at_all_make_an_empty_tree() -> None:
    scorer = ScriptedScorer(even([-math.inf, -math.inf]))
    assert [len(tree) for tree in trees_of(scorer, StaticTree(2, 3), [Budget(9), Budget(9)])] == [0, 0]
    assert len(scorer.calls) == 1


def test_a_scorer_may_offer_fewer_candidates_than_the_policy_is_wide() -> None:
    """A vocabulary can be smaller than a policy's width."""
    assert len(trees_of(ScriptedScorer(even([-0.5, -1.0])), StaticTree(7, 2), [Budget(99)])[0]) == 2 + 4


def test_siblings_share_the_entropy_of_the_distribution_that_they_were_taken_from() -> None:
    def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
        return [4, 5], [-0.5, -1.0], 0.25 + sum(path)

    tree = trees_of(ScriptedScorer(script), StaticTree(2, 2), [Budget(9)])[0]
    assert tree.entropies == [0.25, 0.25, 4.25, 4.25, 5.25, 5.25]


rows_of_scores = st.lists(st.lists(st.sampled_from([-2.0, -1.0, 0.0]), max_size=6), min_size=1, max_size=4)


@given(scores=rows_of_scores, limits=st.lists(st.integers(0, 5), min_size=4, max_size=4))
@examples
def test_best_per_request_equals_sorting_each_row(scores: list[list[float]], limits: list[int]) -> None:
    limits = limits[: len(scores)]
    best = [
        i in sorted(range(len(row)), key=lambda j: (-row[j], j))[:limit]
        for row, limit in zip(scores, limits, strict=True)
        for i in range(len(row))
    ]
    flat, rows = [s for row in scores for s in row], [b for b, row in enumerate(scores) for _ in row]
    assert best_per_request(flat, rows, limits) == best


@pytest.mark.parametrize("keep", [[False, True, False], [True, False, True]])
def test_a_policy_that_keeps_a_node_without_its_parent_is_refused(keep: list[bool]) -> None:
    class Orphans(StaticTree):
        def prune(self, plan: Plan, pools: Sequence[Pool]) -> Sequence[Sequence[bool] | None]:
            return [keep]

    with pytest.raises(ConfigError, match="parents"):
        trees_of(ScriptedScorer(even([-0.5])), Orphans(1, 3), [Budget(3)])


def test_a_policy_that_keeps_more_than_the_budget_is_refused() -> None:
    class Greedy(StaticTree):
        def pool(self, nodes: int) -> int:
            return 9

    with pytest.raises(ConfigError, match="6 nodes of 3"):
        trees_of(ScriptedScorer(even([-0.5, -0.6])), Greedy(2, 2), [Budget(3, 9)])


class _Planned(StaticTree):
    """Observes that outcomes are those of its plan."""

    def observe(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        assert len(plan.budgets) == len(outcomes)
        assert all(budget.nodes or not len(o.tree) for budget, o in zip(plan.budgets, outcomes, strict=True))


@pytest.mark.parametrize("way", ["model", "cascade"])
def test_what_a_failed_step_proposed_is_never_observed(way: str) -> None:
    """The next step, where it drafted nothing, taught the policy from other texts; a cascade failed it."""

    def fails(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(ids) > 3:
            raise ZeroDivisionError
        return logits

    source = ModelSource(ToyModel(6), 6)
    made = CascadeSource(NgramSource(), source, StaticTree(1, 2)) if way == "cascade" else source
    engine = Engine(ToyModel(6), Speculation(TreeDrafter(_Planned(1, 3), made), 6))
    params = SamplingParams(max_tokens=9)
    bad = begun(engine.stepper, engine.request([1, 2, 3], SamplingParams(max_tokens=9, processors=(fails,))))
    good = begun(engine.stepper, engine.request([4, 5], params))
    with pytest.raises(ZeroDivisionError):
        engine.stepper.step([bad, good])
    engine.stepper.close(bad)
    engine.stepper.step([good], nodes=0)
    while good.finish_reason is None:
        engine.stepper.step([good])
    engine.stepper.close(good)
    assert good.output_ids == Engine(ToyModel(6)).generate([[4, 5]], params)[0].token_ids
