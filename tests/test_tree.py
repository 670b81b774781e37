"""Draft trees as data: order, ancestors, expected acceptance length."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.tree import ROOT, DraftTree, ancestors


def tree(parents: list[int], tokens: list[int] | None = None) -> DraftTree:
    """A tree of this shape; tokens count from 0 unless given."""
    n = len(parents)
    depths: list[int] = []
    for p in parents:
        depths.append(1 if p == ROOT else depths[p] + 1)
    paths = [-float(depth) for depth in depths]
    return DraftTree([*range(n)] if tokens is None else tokens, parents, depths, paths, [0.0] * n)


@pytest.mark.parametrize("parents", [[0], [1, ROOT], [ROOT, 2, 0], [ROOT, 0, 2]])
def test_a_parent_that_does_not_come_before_its_child_is_refused(parents: list[int]) -> None:
    ones = [1] * len(parents)
    with pytest.raises(ValueError, match="level order"):
        DraftTree(ones, parents, ones, [0.0] * len(ones), [0.0] * len(ones))


def test_the_empty_tree_has_no_nodes_no_depth_and_gains_the_bonus_token() -> None:
    empty = DraftTree.empty()
    assert (len(empty), empty.depth, empty.expected_acceptance_length) == (0, 0, 1.0)
    assert empty.children(ROOT) == []


def test_depth_is_that_of_the_deepest_node() -> None:
    assert tree([ROOT, ROOT, 0, 1, 3]).depth == 3


def test_children_come_in_the_order_of_their_numbers() -> None:
    shape = tree([ROOT, ROOT, 0, 1, 0])
    assert [shape.children(node) for node in (ROOT, 0, 1, 2)] == [[0, 1], [2, 4], [3], []]


def test_expected_acceptance_length_of_the_opt_tree_example() -> None:
    """OPT-Tree, Figure 4 and Appendix B: each node's draft probability given its parent; E(A) = 3.07."""
    parents = [ROOT, ROOT, 0, 0, 1, 1, 2, 2, 4]
    draft = [0.5, 0.4, 0.8, 0.1, 0.6, 0.2, 0.5, 0.2, 0.5]
    paths: list[float] = []
    for parent, p in zip(parents, draft, strict=True):
        paths.append(p * (1 if parent == ROOT else paths[parent]))
    shape = tree(parents)
    example = replace(shape, path_logprobs=[*map(math.log, paths)])
    assert example.expected_acceptance_length == pytest.approx(3.07, abs=1e-6)


def walk(parents: list[int], node: int) -> list[int]:
    """A node and its ancestors, by walking up."""
    return [] if node == ROOT else [node, *walk(parents, parents[node])]


@given(data=st.data(), size=st.integers(0, 14))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_ancestors_are_what_walking_up_meets(data: st.DataObject, size: int) -> None:
    parents = [data.draw(st.integers(ROOT, i - 1)) for i in range(size)]
    start = data.draw(st.integers(0, size))
    mask, depths = ancestors(parents, start)
    met = [walk(parents, node) for node in range(start, size)]
    assert mask.shape == (size - start, size)
    assert [sorted(m) for m in met] == [np.flatnonzero(row).tolist() for row in mask]
    assert depths == [len(m) for m in met]


@pytest.mark.parametrize(
    ("parents", "depths"),
    [([-1, 0, -1], [1, 2, 1]), ([-1, -1], [1, 2]), ([-7], [1]), ([-1, 0], [1, 1]), ([-1, 0], [1])],
    ids=["depth falls", "depth of another level", "no such parent", "depth of the parent", "too short"],
)
def test_columns_that_are_no_tree_in_level_order_are_refused(parents: list[int], depths: list[int]) -> None:
    n = len(parents)
    with pytest.raises(ValueError, match="level order|lengths"):
        DraftTree([*range(n)], parents, depths, [0.0] * n, [0.0] * n)


@pytest.mark.parametrize("column", range(5))
def test_a_column_that_is_an_array_is_refused(column: int) -> None:
    columns: list[Any] = [[3], [ROOT], [1], [-0.5], [0.0]]
    columns[column] = np.array(columns[column])
    with pytest.raises(ValueError, match=r"tolist\(\)"):
        DraftTree(*columns)
