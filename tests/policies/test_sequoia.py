"""The best fixed tree by dynamic programming against all trees there are ("Sequoia", Section 3.1)."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import numpy as np
import pytest

from draftree.policies.fixed import Acceptance, Ranks, best_tree, check_paths, expected_acceptance_length

Tree = frozenset[Ranks]


@cache
def forests(nodes: int, depth: int, width: int) -> tuple[Tree, ...]:
    """All trees of ``nodes`` nodes, at most ``depth`` levels and ``width`` children of a node."""
    if nodes == 0:
        return (frozenset(),)
    if depth == 0 or width == 0:
        return ()
    found = []
    for size in range(1, nodes + 1):
        for own, others in product(forests(size - 1, depth - 1, _WIDTH), forests(nodes - size, depth, width - 1)):
            first = {(0,)} | {(0, *path) for path in own}
            found.append(frozenset(first | {(path[0] + 1, *path[1:]) for path in others}))
    return tuple(found)


_WIDTH = 4


def gain(table: Acceptance, tree: Tree) -> float:
    return 1 + sum(math.prod(float(table[d, r]) for d, r in enumerate(path)) for path in tree)


def random_table(seed: int, depths: int, falling: bool = False) -> Acceptance:
    """A third of these tables have zeros, so that some trees want fewer nodes than they may have."""
    rng = np.random.default_rng(seed)
    table = rng.random((depths, _WIDTH)) / 2
    if seed % 3 == 0:
        table[rng.random(table.shape) < 0.3] = 0
    return np.sort(table)[:, ::-1] if falling else table


def test_the_oracle_counts_trees_right() -> None:
    """Ordered trees of n nodes below a root: Catalan numbers, where nothing is cut off."""
    assert [len(set(forests(n, 9, _WIDTH))) for n in range(5)] == [1, 1, 2, 5, 14]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("nodes", range(1, 8))
def test_no_tree_of_that_size_and_depth_is_better(nodes: int, depth: int) -> None:
    for seed in range(6):
        table = random_table(seed, depth)
        tree = best_tree(table, nodes)
        if tree:
            check_paths(tree)
        assert len(tree) <= nodes
        assert max(map(len, tree), default=0) <= depth
        best = max(gain(table, other) for n in range(nodes + 1) for other in forests(n, depth, _WIDTH))
        assert expected_acceptance_length(table, tree) == pytest.approx(best, abs=1e-12)
        assert gain(table, frozenset(tree)) == pytest.approx(best, abs=1e-12)


def test_a_rank_that_is_never_right_is_taken_for_the_sake_of_the_next() -> None:
    """The rank before must be in the tree: the greedy choice would stop at the zero."""
    table = np.array([[0.3, 0.0, 0.6]])
    assert best_tree(table, 3) == ((0,), (1,), (2,))
    assert best_tree(table, 2) == ((0,),)


def test_nodes_that_gain_nothing_are_left_out() -> None:
    assert best_tree(np.array([[1.0, 0.0], [1.0, 0.0]]), 9) == ((0,), (0, 0))
    assert best_tree(np.zeros((2, 2)), 9) == ()


@pytest.mark.parametrize("seed", range(4))
def test_the_first_nodes_are_the_best_smaller_tree_where_acceptance_falls_with_rank(seed: int) -> None:
    table = random_table(seed, 4, falling=True)
    whole = best_tree(table, 12)
    for n in range(1, 12):
        smaller = expected_acceptance_length(table, best_tree(table, n))
        assert expected_acceptance_length(table, whole[:n]) == pytest.approx(smaller, abs=1e-12)


def test_512_nodes_take_seconds() -> None:
    table = 0.7 * np.power(0.6, np.tile(np.arange(32.0), (12, 1)))
    assert len(best_tree(table, 512)) == 512
