"""Chains, static trees and trees shaped by entropy on scripted entropies ("Dynamic Tree Speculative Decoding")."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.config import MAX_NODES, Budget
from draftree.errors import ConfigError
from draftree.papers.entropy_trees import BranchingSteps, EntropyStop, EntropyTree, fit
from draftree.policies.base import MAX_WIDTH, GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.policies.methods import METHODS, find_policy
from draftree.tree import ROOT, DraftTree

from ..toy import Path, ScriptedScorer, trees_of

PAPER = [
    (0, 1),
    (0.0199, 1),
    (0.02, 2),
    (0.99, 2),
    (1.0, 4),
    (1.01, 5),
    (1.25, 5),
    (1.26, 6),
    (1.5, 6),
    (1.51, 7),
    (1.75, 7),
]
"""Entropies and the paper's B(H) there: 1 below 0.02; 2 below 1; else min(ceil(4H), 7)."""


def drafted(policy: GrowthPolicy | str, entropies: Callable[[Path], float], nodes: int = 200) -> DraftTree:
    """The tree of a policy, or of a method with its defaults, where the distribution after a path has this entropy.

    The children of every node are tokens 0, 1, ... in order of probability.
    """
    if isinstance(policy, str):
        policy = METHODS[policy].policy()
    logprobs = [math.log(0.5**rank) for rank in range(1, MAX_WIDTH + 1)]
    scorer = ScriptedScorer(lambda row, path: (range(MAX_WIDTH), logprobs, entropies(path)))
    return trees_of(scorer, policy, [Budget(nodes)])[0]


def scattered(seed: int, most: float = 2.5) -> Callable[[Path], float]:
    """Entropies between 0 and ``most`` that hang on the whole path; a third of them close to 0."""

    def entropy(path: Path) -> float:
        rng = Random(f"{seed} {path}")
        return 0.01 if rng.random() < 1 / 3 else rng.random() * most

    return entropy


def levels(tree: DraftTree) -> list[int]:
    """Nodes on each level."""
    counts: list[int] = np.bincount(tree.depths, minlength=1)[1:].tolist()
    return counts


def by_depth(*entropies: float) -> Callable[[Path], float]:
    """The entropy of the distribution after a path of 0, 1, ... tokens."""
    return lambda path: entropies[len(path)]


def always(entropy: float) -> Callable[[Path], float]:
    return lambda path: entropy


def children(tree: DraftTree) -> list[int]:
    """How many children the root and each node have."""
    return [len(tree.children(node)) for node in range(ROOT, len(tree))]


@pytest.mark.parametrize("entropy", [0.0, 5.0])
def test_the_baseline_is_a_chain_of_four(entropy: float) -> None:
    tree = drafted("chain", always(entropy))
    assert (tree.parents, tree.tokens) == ([-1, 0, 1, 2], [0, 0, 0, 0])


def test_early_stopping_keeps_the_token_whose_entropy_crossed_and_ends_there() -> None:
    tree = drafted("early-stop", by_depth(0.1, 0.9, 1.2, 0.1, 0.1))
    assert tree.parents == [-1, 0, 1]
    assert tree.entropies == pytest.approx([0.1, 0.9, 1.2])


def test_early_stopping_goes_on_at_an_entropy_of_exactly_one() -> None:
    assert drafted("early-stop", by_depth(1.0, 1.001, 0.0)).depth == 2


def test_early_stopping_drafts_one_token_where_the_first_distribution_is_unsure() -> None:
    assert len(drafted("early-stop", always(3.0))) == 1


def test_early_stopping_is_bounded_by_the_node_budget_alone() -> None:
    assert drafted("early-stop", always(0.5), nodes=37).depth == 37


def test_naive_width_gives_the_last_position_four_alternatives() -> None:
    tree = drafted("naive-width", by_depth(0.1, 0.9, 1.2, 0.1))
    assert (tree.parents, tree.tokens) == ([-1, 0, 1, 1, 1, 1], [0, 0, 0, 1, 2, 3])


@pytest.mark.parametrize(("entropies", "nodes"), [((0.1, 0.1, 0.1, 0.1, 0.1), 4), ((0.1, 0.1, 0.1, 1.2, 0.1), 7)])
def test_naive_width_within_four_levels_has_three_tokens_and_four_leaves_at_most(
    entropies: tuple[float, ...], nodes: int
) -> None:
    tree = drafted(EntropyStop(1.0, width=4, depth=4), by_depth(*entropies))
    assert (len(tree), tree.depth) == (nodes, 4)


def test_the_static_tree_has_thirty_nodes() -> None:
    tree = drafted("static", always(0.5))
    assert len(tree) == 2 + 4 + 8 + 16
    assert children(tree) == [2] * 15 + [0] * 16


@pytest.mark.parametrize(("entropy", "branching"), [*PAPER, (5.0, 7)])
def test_dynamic_width_branches_as_in_the_paper(entropy: float, branching: int) -> None:
    tree = drafted("dynamic-width", lambda path: 0.0 if path else entropy)
    assert children(tree)[: branching + 1] == [branching, *[1] * branching]


def test_the_children_of_dynamic_width_are_the_likeliest() -> None:
    assert drafted("dynamic-width", lambda path: 0.0 if path else 1.0).tokens[:4] == [0, 1, 2, 3]


def test_dynamic_width_asks_the_entropy_of_each_node_anew() -> None:
    tree = drafted("dynamic-width", by_depth(0.5, 0.01, 1.2, 0.5))
    assert np.bincount(tree.depths).tolist() == [0, 2, 2, 10, 20]


@pytest.mark.parametrize("entropy", [0.0, 0.5])
def test_dynamic_width_is_four_levels_deep(entropy: float) -> None:
    assert drafted("dynamic-width", always(entropy)).depth == 4


@pytest.mark.parametrize(("entropy", "branching"), [*PAPER, (1.7501, 0), (5.0, 0)])
def test_dynamic_width_and_depth_gives_no_children_above_the_stop(entropy: float, branching: int) -> None:
    assert children(drafted("dynamic-width-depth", lambda path: 0.0 if path else entropy))[0] == branching


def test_dynamic_width_and_depth_ends_one_branch_and_goes_on_with_another() -> None:
    entropies: Mapping[Path, float] = {(): 0.5, (0,): 2.0}
    tree = drafted("dynamic-width-depth", lambda path: entropies.get(path, 0.01))
    assert children(tree) == [2, 0, *[1] * 7, 0]
    assert tree.depth == 8


def test_users_give_functions_of_entropy_for_width_and_depth() -> None:
    policy = EntropyTree(lambda h: 3 if h > 1 else 1, lambda h: 1 if h > 1 else 3, depth=9)
    assert children(drafted(policy, by_depth(2.0, 0.5, 0.5, 0.5)))[0] == 3
    assert [drafted(policy, by_depth(*h)).depth for h in ([2.0] * 9, [0.5] * 9, [0.5, 2.0, 0.5])] == [1, 3, 1]


def test_fractions_of_a_width_are_cut_off() -> None:
    assert children(drafted(EntropyTree(lambda h: h + 1.9, depth=1), always(1.0)))[0] == 2


@pytest.mark.parametrize(("deepest", "depth"), [(0.0, 0), (0.9, 0), (1.0, 1), (2.5, 2)])
def test_a_depth_function_says_the_deepest_level_that_may_get_nodes(deepest: float, depth: int) -> None:
    policy = EntropyTree(lambda h: 1, lambda h: deepest)
    assert drafted(policy, always(1.0)).depth == depth


def test_a_width_of_nothing_makes_leaves() -> None:
    assert len(drafted(EntropyTree(lambda h: 0), always(1.0))) == 0


def test_a_users_functions_are_bounded_by_width_and_depth() -> None:
    policy = EntropyTree(lambda h: 60, lambda h: 60, width=3, depth=2)
    assert len(drafted(policy, always(1.0))) == 3 + 9


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: StaticTree(width=0), "width is 0"),
        (lambda: StaticTree(width=65), "width is 65"),
        (lambda: StaticTree(depth=0), "depth is 0"),
        (lambda: EntropyStop(stop=-0.5), "stop is -0.5"),
        (lambda: EntropyStop(stop=math.nan), "stop is nan"),
        (lambda: EntropyStop(width=0), "width is 0"),
        (lambda: BranchingSteps(sure=-1), "sure is -1"),
        (lambda: BranchingSteps(unsure=math.nan), "unsure is nan"),
        (lambda: BranchingSteps(slope=-2), "slope is -2"),
        (lambda: BranchingSteps(width=65), "width is 65"),
        (lambda: BranchingSteps(stop=-3), "stop is -3"),
        (lambda: EntropyTree(width=0), "width is 0"),
        (lambda: EntropyTree(width=65), "width is 65"),
        (lambda: EntropyTree(depth=-1), "depth is -1"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_and_value(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_a_function_that_gives_no_numbers_is_refused() -> None:
    policy = EntropyTree(lambda entropies: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="nats gave None"):
        trees_of(ScriptedScorer(lambda b, path: ([1], [-0.5], 0.5)), policy, [Budget(3)])


def published(entropies: Callable[[Path], float], depth: int = 4) -> set[Path]:
    """The paper's tree, node by node from its text: B(H) children each, four levels, as many nodes as that takes."""
    found, level = set[Path](), [()]
    for _ in range(depth):
        below = list[Path]()
        for path in level:
            h = entropies(path)
            branching = 1 if h < 0.02 else 2 if h < 1 else min(math.ceil(4 * h), 7)
            below += [(*path, token) for token in range(branching)]
        found |= set(below)
        level = below  # type: ignore[assignment]
    return found


def paths(tree: DraftTree) -> set[Path]:
    """Its nodes by their tokens from the root."""
    found: list[Path] = []
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.mark.parametrize("seed", range(4))
def test_dynamic_width_is_the_published_tree_without_a_node_budget(seed: int) -> None:
    """Within the default budget of 31 it is not: two levels may take it all."""
    tree = drafted("dynamic-width", scattered(seed), nodes=MAX_NODES)
    assert paths(tree) == published(scattered(seed))
    assert (tree.depth, levels(drafted("dynamic-width", always(5.0), nodes=31))) == (4, [7, 24])


def test_the_largest_published_tree_has_2800_nodes_and_is_not_cut() -> None:
    assert levels(drafted("dynamic-width", always(5.0), nodes=MAX_NODES)) == [7, 49, 343, 2401]


@pytest.mark.parametrize(
    ("wanted", "share", "given"),
    [
        ([7], 28, [7]),
        ([2, 2, 2, 2], 8, [2, 2, 2, 2]),
        ([7, 7, 7, 7], 22, [7, 7, 7, 0]),
        ([7, 7, 1, 2], 9, [7, 0, 1, 0]),
        ([7, 2], 3, [0, 2]),
        ([7, 7], 2, [2, 0]),
        ([0, 7, 7], 2, [0, 2, 0]),
        ([0, 0], 5, [0, 0]),
    ],
)
def test_a_node_gets_all_its_children_or_none_but_for_the_last_resort(
    wanted: list[int], share: int, given: list[int]
) -> None:
    assert fit(wanted, share) == given


@pytest.mark.parametrize(
    ("entropy", "nodes", "level"),
    [
        (5.0, 31, [7, 21, 2, 1]),
        (5.0, 60, [7, 49, 3, 1]),
        (5.0, 8, [5, 1, 1, 1]),
        (5.0, 3, [1, 1, 1]),
        (0.5, 31, [2, 4, 8, 16]),
        (0.5, 29, [2, 4, 8, 14]),
        (0.0, 31, [1, 1, 1, 1]),
    ],
)
def test_the_width_shrinks_so_that_the_budget_lasts_to_the_last_level(
    entropy: float, nodes: int, level: list[int]
) -> None:
    assert levels(drafted("dynamic-width-budget", always(entropy), nodes)) == level


def test_the_likeliest_nodes_get_their_children_first() -> None:
    tree = drafted("dynamic-width-budget", always(5.0), 31)
    assert children(tree)[:8] == [7, 7, 7, 7, 0, 0, 0, 0]  # nodes 0, 1, ... in order of probability
    third = [parent for parent, depth in zip(tree.parents, tree.depths, strict=True) if depth == 3]
    assert third == [7, 7]  # the first child of the first node


@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 120), depth=st.integers(1, 6))
def test_a_budget_is_kept_and_the_depth_reached_and_a_tree_that_fits_is_the_published_one(
    seed: int, nodes: int, depth: int
) -> None:
    policy = find_policy("dynamic-width-budget", {"depth": depth})
    tree, whole = drafted(policy, scattered(seed), nodes), published(scattered(seed), depth)
    assert len(tree) <= nodes
    assert tree.depth == min(depth, nodes)
    assert paths(tree) <= whole
    assert (paths(tree) == whole) == (len(whole) <= nodes)


def test_no_node_is_kept_for_levels_that_the_sequence_has_no_tokens_left_for() -> None:
    policy = METHODS["dynamic-width-budget"].policy()
    scorer = ScriptedScorer(lambda row, path: (range(8), [-1.0 - r for r in range(8)], 5.0))
    tree = trees_of(scorer, policy, [Budget(28, depth=2)])[0]
    assert levels(tree) == [7, 21]


def test_a_node_without_candidates_leaves_its_share_to_the_next() -> None:
    def script(row: int, path: Path) -> tuple[list[int], list[float], float]:
        none = [-math.inf, -math.inf] if path == (0,) else [-0.5, -1.0]
        return [0, 1], none, 5.0

    tree = trees_of(ScriptedScorer(script), find_policy("dynamic-width-budget", {"depth": 3}), [Budget(4)])[0]
    assert paths(tree) == {(0,), (1,), (1, 0), (1, 0, 0)}


def test_each_sequence_of_a_batch_has_its_own_budget() -> None:
    policy = METHODS["dynamic-width-budget"].policy()
    budgets = [Budget(31), Budget(5), Budget(9, depth=2)]

    def script(row: int, path: Path) -> tuple[range, list[float], float]:
        return range(8), [-1.0 - rank for rank in range(8)], scattered(row)(path)

    together = trees_of(ScriptedScorer(script), policy, budgets)
    for b, budget in enumerate(budgets):
        alone = trees_of(ScriptedScorer(lambda _, path, b=b: script(b, path)), policy, [budget])[0]  # type: ignore[misc]
        assert paths(together[b]) == paths(alone)


FUNCTIONS = ("dynamic-width", "dynamic-width-depth", "dynamic-width-budget")
