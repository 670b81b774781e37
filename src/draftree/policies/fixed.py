"""Trees of a fixed shape: full, by rank, by Sequoia from measured acceptance, and the files that hold them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ..artifacts import JsonFormat, user_path
from ..config import MAX_NODES, Checked, Count, check_fields
from ..errors import ConfigError, UnknownNameError
from .base import MAX_WIDTH, Child, Frontier, GrowthPolicy, Numbers, Provenance, Width

Acceptance = NDArray[np.float64]
"""[D, R] how often the target's next token at depth d is the drafter's candidate of rank r, the root's depth 0."""
Ranks = tuple[int, ...]
"""A node of a fixed tree: the ranks on its path from the root, 0 for the most probable child."""


EAGLE: tuple[Ranks, ...] = tuple(
    tuple(map(int, digits))
    for digits in (
        "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"
    ).split()
)
"""The 25 nodes of EAGLE's fixed tree, one digit a rank (``mc_sim_7b_63`` in eagle/model/choices.py of its code)."""


@dataclass(frozen=True, slots=True)
class StaticTree(Checked, GrowthPolicy):
    """Every node gets its ``width`` most probable children, down to ``depth``; width 1 is a chain.

    The paper's baseline is the chain of 4, its static tree has width 2 and depth 4 (Section 4).
    """

    width: Width = 2
    depth: Count = 4

    def width_for(self, nodes: int) -> int:
        return min(self.width, nodes)

    def grow(self, frontier: Frontier) -> list[Child]:
        count = len(frontier.requests)
        return frontier.likeliest([self.width] * count, [frontier.depth + 1 < self.depth] * count)


CHAIN = StaticTree(1, MAX_NODES)
"""A chain as long as its budget."""
BINARY = StaticTree(2, MAX_NODES)
"""A full tree of 2 children each, as deep as its budget (OPT-Tree's baseline)."""


def chain(depth: int = 4) -> GrowthPolicy:
    """The method ``chain``."""
    return StaticTree(1, depth)


@dataclass(frozen=True, slots=True)
class RankTree(GrowthPolicy):
    """A fixed tree of ranks.

    A budget smaller than the tree keeps the first nodes of ``paths``; where the drafter has no candidate of a wanted
    rank, that node and all below it are missing.

    Attributes:
        paths: the nodes, each after its parent and after its siblings of lower rank.
        made_for: the models that it was calibrated for; None: any.

    Raises:
        ConfigError: the paths are not such a tree.
    """

    paths: tuple[Ranks, ...]
    made_for: Provenance | None = None
    _children: Sequence[Sequence[int]] = field(init=False, repr=False, compare=False)
    """[nodes + 1] numbers of each node's children; 0 is the root, node i of ``paths`` is i + 1."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_paths(self.paths)
        children: dict[Ranks, list[int]] = {(): []}
        for number, path in enumerate(self.paths, start=1):
            children[path] = []
            children[path[:-1]].append(number)
        object.__setattr__(self, "_children", [*children.values()])

    def width_for(self, nodes: int) -> int:
        return min(max(map(len, self._children)), nodes)

    def grow(self, frontier: Frontier) -> list[Child]:
        """The tree's children of each node; its tag is its number."""
        grown = []
        for parent, (request, tag, candidates) in enumerate(
            zip(frontier.requests, frontier.tags, frontier.candidates, strict=True)
        ):
            budget = frontier.budgets[request]
            for rank, number in enumerate(self._children[tag][: len(candidates.tokens)]):
                if number <= budget:
                    extend = any(below <= budget for below in self._children[number][:1])
                    grown.append(Child(parent, rank, extend, number))
        return grown


def check_paths(paths: Sequence[Ranks]) -> None:
    """Check that paths are the nodes of a tree, each after its parent and its siblings of lower rank.

    Raises:
        ConfigError: they are not; the message names the first path at fault.
    """
    if not 1 <= len(paths) <= MAX_NODES:
        raise ConfigError(f"the tree has {len(paths)} nodes: use 1 to {MAX_NODES}")
    seen: set[Ranks] = {()}
    for path in paths:
        if not path or not all(isinstance(rank, int) and 0 <= rank < MAX_WIDTH for rank in path):
            raise ConfigError(f"the tree has a node {path!r}: give a path of ranks from 0 to {MAX_WIDTH - 1}")
        if path in seen:
            raise ConfigError(f"the tree has node {list(path)} twice: give each node once")
        before = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
        if before not in seen:
            raise ConfigError(f"the tree has node {list(path)} but not {list(before)} before it: add that one")
        seen.add(path)


def best_tree(acceptance: Acceptance, nodes: int) -> tuple[Ranks, ...]:
    """The tree of at most ``nodes`` nodes with the largest expected acceptance length, by [D, R] acceptance.

    Nodes that would gain nothing are left out. The most probable nodes come first, as far as parents and lower ranks
    allow: where larger ranks are less often right, the first n nodes are the best tree of n nodes.
    """
    return _best_first(_unfold(_solve(acceptance, nodes), nodes), acceptance)


def expected_acceptance_length(acceptance: Acceptance, paths: Sequence[Ranks]) -> float:
    """1 + the sum over nodes of the product of ``acceptance`` along their paths."""
    return 1 + math.fsum(_path_acceptance(acceptance.tolist(), path) for path in paths)


def _solve(acceptance: Acceptance, nodes: int) -> Numbers:
    """The recursion for all sizes at once.

    c(d, n, r) is what n nodes below an accepted node of depth d gain at most in children of rank r and more:
    c(d, n, r) = max over 1 <= m <= n of a[d, r] (1 + c(d + 1, m - 1, 0)) + c(d, n - m, r + 1); 0: no more children.

    Returns:
        [D, R, nodes + 1] the m of each maximum, 0 for no more children.
    """
    depths, ranks = acceptance.shape
    choices = np.zeros((depths, ranks, nodes + 1), np.int64)
    below = np.zeros(nodes + 1)
    too_many = np.full(nodes, -np.inf)
    for d in reversed(range(depths)):
        siblings = np.zeros_like(below)
        for r in reversed(range(ranks)):
            child = acceptance[d, r] * (1 + below[-2::-1])  # of m = nodes, ..., 1
            left = sliding_window_view(np.concatenate([too_many, siblings]), nodes)  # [n, m] of the siblings' n - m
            every = child + left[: nodes + 1]
            gains = every.max(1)
            siblings = gains.clip(min=0)
            choices[d, r] = np.where(gains > 0, nodes - every.argmax(1), 0)
        below = siblings
    return choices


def _unfold(choices: Numbers, nodes: int) -> list[Ranks]:
    paths: list[Ranks] = []
    open_nodes: list[tuple[Ranks, int]] = [((), nodes)]
    while open_nodes:
        parent, left = open_nodes.pop()
        if len(parent) == choices.shape[0]:
            continue
        for rank, sizes in enumerate(choices[len(parent)]):
            size = int(sizes[left])
            if not size:
                break
            paths.append((*parent, rank))
            open_nodes.append((paths[-1], size - 1))
            left -= size
    return paths


def _best_first(paths: Sequence[Ranks], acceptance: Acceptance) -> tuple[Ranks, ...]:
    """By path acceptance, then depth, then ranks; each node after its parent and its sibling of the rank before."""
    table, members = acceptance.tolist(), set(paths)
    ready: list[tuple[float, int, Ranks]] = [(-_path_acceptance(table, (0,)), 1, (0,))] if members else []
    ordered: list[Ranks] = []
    while ready:
        path = heapq.heappop(ready)[2]
        ordered.append(path)
        for after in ((*path, 0), (*path[:-1], path[-1] + 1)):
            if after in members:
                heapq.heappush(ready, (-_path_acceptance(table, after), len(after), after))
    return tuple(ordered)


def _path_acceptance(table: Sequence[Sequence[float]], path: Ranks) -> float:
    return math.prod(row[rank] for row, rank in zip(table, path, strict=False))


@dataclass(frozen=True, slots=True)
class Counts:
    """How often the target's next token was the drafter's candidate of each rank.

    Attributes:
        trials: [D] nodes at depth d, the root's depth 0 first, whose next token was looked for.
        accepted: [D][R] how many of them had it at that rank.
    """

    trials: tuple[int, ...]
    accepted: tuple[tuple[int, ...], ...]

    @property
    def acceptance(self) -> Acceptance:
        """Share of the trials; 0 where there were none."""
        return np.array(self.accepted) / np.maximum(self.trials, 1)[:, None]


@dataclass(frozen=True, slots=True)
class TreeFile:
    """The contents of a tree file.

    Attributes:
        made_for: the models that were measured.
        temperature, prompts: that the target decoded at, and how many.
        counts: that the tree was made of, for people.
        expected_acceptance_length: E(A) of the tree, root counted as 1.
        tree: its nodes in the order in which smaller budgets take them.

    Raises:
        ConfigError: the nodes make no tree.
    """

    made_for: Provenance
    temperature: float
    prompts: int
    counts: Counts
    expected_acceptance_length: float
    tree: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        check_paths(self.tree)


TREE_FILE = JsonFormat("draftree static tree", 1, "tree file", "give a file that 'draftree calibrate' wrote", TreeFile)


def read_tree(name: str) -> TreeFile:
    """Read a tree file.

    Raises:
        UnknownNameError: there is no such file.
        ConfigError: it cannot be read, or is no tree file of this version.
    """
    try:
        return TREE_FILE.read(user_path(name))
    except FileNotFoundError:
        raise UnknownNameError(f"no tree file {name!r}: make one with 'draftree calibrate'") from None


def eagle() -> GrowthPolicy:
    """The method ``eagle``."""
    return RankTree(EAGLE)


def sequoia(tree: str = "") -> GrowthPolicy:
    """The method ``sequoia``."""
    if not tree:
        raise ConfigError(
            "method sequoia needs a tree: make one with 'draftree calibrate' and give it with --set tree=FILE"
        )
    file = read_tree(tree)
    return RankTree(file.tree, file.made_for)
