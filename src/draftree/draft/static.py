"""Fixed trees given by ranks: a node is "the r-th most probable child of that node", whatever the probabilities are.

EAGLE's published tree is here; ``sequoia.py`` finds the best such tree for a pair of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import MAX_NODES
from ..errors import ConfigError
from ..typed import check_fields
from .entropy import MAX_WIDTH
from .policy import Frontier, Growth, GrowthPolicy

Ranks = tuple[int, ...]
"""A node of a fixed tree: the ranks on its path from the root, 0 for the most probable child."""

_NONE = MAX_NODES + 1
"""In place of a node's number: more than any budget."""


EAGLE: tuple[Ranks, ...] = tuple(
    tuple(map(int, digits))
    for digits in (
        "0 1 2 3  00 01 02 10 11 20 21 30  000 001 002 010 011 020 021 100  0000 0001 0002  00000 00001"
    ).split()
)
"""The 25 nodes of EAGLE's fixed tree, one digit a rank (``mc_sim_7b_63`` in eagle/model/choices.py of its code)."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Names of a target and a drafter."""

    target: str
    drafter: str


@dataclass(frozen=True, slots=True)
class RankTree(GrowthPolicy):
    """A fixed tree of ranks.

    A budget smaller than the tree keeps the first nodes of ``paths``; where the drafter has no candidate of a wanted
    rank, that node and all below it are missing.

    Attributes:
        paths: the nodes, each after its parent and after its siblings of lower rank.
        made_for: the only models that it may draft for; None: any.

    Raises:
        ConfigError: the paths are not such a tree.
    """

    paths: tuple[Ranks, ...]
    made_for: Pair | None = None
    _children: Tensor = field(init=False, repr=False, compare=False)
    """[nodes + 1, width] int64: number of the child of each rank; 0 is the root, node i of ``paths`` is i + 1."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_paths(self.paths)
        numbers: dict[Ranks, int] = {(): 0} | {path: i for i, path in enumerate(self.paths, start=1)}
        children = torch.full((len(numbers), 1 + max(path[-1] for path in self.paths)), _NONE)
        for path in self.paths:
            children[numbers[path[:-1]], path[-1]] = numbers[path]
        object.__setattr__(self, "_children", children)

    @property
    def partner(self) -> str | None:
        """The drafter of ``made_for``."""
        return None if self.made_for is None else self.made_for.drafter

    def width_for(self, nodes: int) -> int:
        """Most children of a node."""
        return min(self._children.shape[1], nodes)

    def grow(self, frontier: Frontier) -> Growth:
        """The tree's children of each node, which is known by its tag."""
        wanted = self._children[frontier.tags, : frontier.candidates.tokens.shape[1]]
        budget = frontier.budgets[frontier.rows, None]
        keep = wanted <= budget
        tags = torch.where(keep, wanted, 0)
        return Growth(keep, self._children[tags, 0] <= budget, tags)

    def check(self, target: str, drafter: str) -> None:
        """Only the models that it was made for; folders and hub ids count by their last part."""
        if self.made_for is None:
            return
        for role, made_for, used in (
            ("target", self.made_for.target, target),
            ("drafter", self.made_for.drafter, drafter),
        ):
            if short_name(made_for) != short_name(used):
                raise ConfigError(
                    f"the tree was made for {role} {made_for!r}, not {used!r}: "
                    "make one for these models with 'draftree calibrate'"
                )


def short_name(model: str) -> str:
    """The last part of a folder or hub id: what stays the same on another machine."""
    return model.replace("\\", "/").rstrip("/").rpartition("/")[2] or model


def check_paths(paths: Sequence[Ranks]) -> None:
    """Make sure that paths of ranks are the nodes of a tree, each after its parent and its siblings of lower rank.

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
