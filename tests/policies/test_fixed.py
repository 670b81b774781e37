"""Fixed trees given by ranks on scripted candidates: EAGLE's tree, binary trees, budgets, missing candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from draftree.config import MAX_NODES, Budget
from draftree.errors import ConfigError
from draftree.policies.base import GrowthPolicy
from draftree.policies.fixed import EAGLE, Ranks, RankTree
from draftree.policies.methods import find_policy
from draftree.tree import ROOT, DraftTree

from ..toy import Path, Script, ScriptedScorer, trees_of

WIDTH = 8


def by_rank(found: int = WIDTH) -> Script:
    """The token of a candidate is its rank; ``found`` of them exist after an odd token, all after an even one."""

    def script(row: int, path: Path) -> tuple[Sequence[int], list[float], float]:
        there = found if path and path[-1] % 2 else WIDTH
        return range(WIDTH), [-0.1 * (r + 1) if r < there else -math.inf for r in range(WIDTH)], 1.0

    return script


def paths(tree: DraftTree) -> list[Ranks]:
    """Each node's tokens from the root, which are its ranks."""
    known: dict[int, Ranks] = {ROOT: ()}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        known[node] = (*known[parent], token)
    return [known[node] for node in range(len(tree))]


def drafted(policy: GrowthPolicy, *budgets: Budget, found: int = WIDTH) -> list[list[Ranks]]:
    return [paths(tree) for tree in trees_of(ScriptedScorer(by_rank(found)), policy, budgets)]


def test_the_tree_of_eagle_has_25_nodes_on_five_levels() -> None:
    assert len(EAGLE) == len(set(EAGLE)) == 25
    assert [sum(len(path) == depth for path in EAGLE) for depth in range(1, 7)] == [4, 8, 8, 3, 2, 0]


def test_the_tree_of_eagle_is_closed_under_parents_and_lower_ranks() -> None:
    for *parent, rank in EAGLE:
        assert tuple(parent) in {(), *EAGLE}
        assert all((*parent, r) in EAGLE for r in range(rank))


def test_eagle_drafts_its_tree() -> None:
    assert drafted(find_policy("eagle"), Budget(25)) == [list(EAGLE)]


def test_a_larger_budget_changes_nothing() -> None:
    assert drafted(find_policy("eagle"), Budget(MAX_NODES)) == [list(EAGLE)]


@pytest.mark.parametrize("nodes", [1, 3, 4, 7, 12, 24])
def test_a_smaller_budget_keeps_the_first_nodes(nodes: int) -> None:
    assert drafted(find_policy("eagle"), Budget(nodes)) == [list(EAGLE[:nodes])]


def test_the_first_nodes_are_those_of_the_given_order_not_the_likeliest() -> None:
    order = ((0,), (0, 0), (0, 0, 0), (1,))
    assert drafted(RankTree(order), Budget(3)) == [[(0,), (0, 0), (0, 0, 0)]]


def test_each_sequence_of_a_batch_keeps_to_its_own_budget() -> None:
    asked = [Budget(6), Budget(25), Budget(0), Budget(25, depth=2)]
    assert drafted(find_policy("eagle"), *asked) == [list(EAGLE[:6]), list(EAGLE), [], list(EAGLE[:12])]


def test_nodes_without_a_candidate_are_missing_with_all_below_them() -> None:
    """A tree that took the n-th frontier node for the n-th node of its structure would go astray here."""
    want = [p for p in EAGLE if all(rank < 1 for before, rank in zip(p, p[1:], strict=False) if before % 2)]
    assert 0 < len(want) < 25
    assert drafted(find_policy("eagle"), Budget(25), found=1) == [want]


def test_a_narrow_vocabulary_leaves_the_higher_ranks_out() -> None:
    scorer = ScriptedScorer(lambda row, path: (range(2), [-0.5, -0.6], 1.0))
    assert paths(trees_of(scorer, find_policy("eagle"), [Budget(25)])[0]) == [p for p in EAGLE if max(p) < 2]


def test_only_inner_nodes_are_scored() -> None:
    scorer = ScriptedScorer(by_rank())
    trees_of(scorer, find_policy("eagle"), [Budget(25)])
    assert {path for _, path in scorer.scored} == {path[:-1] for path in EAGLE if len(path) > 1}


@pytest.mark.parametrize("nodes", [2, 6, 14, 62])
def test_binary_gives_every_node_two_children_until_the_budget_is_used(nodes: int) -> None:
    tree = drafted(find_policy("binary"), Budget(nodes))[0]
    full = {d: 2**d for d in range(1, 1 + (nodes + 2).bit_length() - 2)}
    assert {d: sum(len(p) == d for p in tree) for d in full} == full
    assert len(tree) == nodes


def test_the_last_level_of_binary_takes_the_most_probable_paths() -> None:
    assert drafted(find_policy("binary"), Budget(4))[0][2:] == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), "0 nodes: .*4096"),
        (tuple((r,) for r in range(MAX_NODES + 1)), "4097 nodes"),
        (((0,), ()), r"node \(\): .*63"),
        (((0,), (-1,)), r"node \(-1,\)"),
        (((64,),), r"node \(64,\)"),
        (((0,), ("a",)), r"paths is \(\(0,\), \('a',\)\)"),
        (((0,), (0,)), r"\[0\] twice"),
        (((0,), (2,)), r"node \[2\] .*\[1\]"),
        (((0,), (1, 0)), r"node \[1, 0\] .*\[1\]"),
        (((0, 0), (0,)), r"node \[0, 0\] .*\[0\]"),
    ],
)
def test_what_is_no_tree_is_refused_by_its_first_node_at_fault(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RankTree(given)


def random_tree(dice: Random) -> tuple[Ranks, ...]:
    """A tree in a random order that its rules allow."""
    tree: list[Ranks] = []
    ready: list[Ranks] = [(0,)]
    for _ in range(dice.randrange(1, 30)):
        path = ready.pop(dice.randrange(len(ready)))
        tree.append(path)
        ready += [(*path, 0)] + ([(*path[:-1], path[-1] + 1)] if path[-1] < WIDTH - 1 else [])
    return tuple(tree)


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_is_drafted_as_far_as_budget_depth_and_candidates_go(seed: int) -> None:
    dice = Random(seed)
    tree, found = random_tree(dice), dice.randrange(WIDTH + 1)
    asked = [Budget(dice.randrange(30), dice.choice([None, 1, 3])) for _ in range(3)]
    for got, budget in zip(drafted(RankTree(tree), *asked, found=found), asked, strict=True):
        want = {
            path
            for path in tree[: budget.nodes]
            if len(path) <= (budget.depth or len(path))
            and all(rank < found for before, rank in zip(path, path[1:], strict=False) if before % 2)
        }
        assert len(got) == len(want)
        assert set(got) == want
