"""Which of llama.cpp's sequence ids a row's nodes carry, so that each node attends to its own path and to nothing else.

llama.cpp marks a cell of its cache with the ids of the sequences that it belongs to, and a token attends to the cells
that share its id. So a node carries the ids of the leaves below it, one id a leaf; committed tokens carry the row's own
id and that of every leaf. There are few ids: where they run out, leaves that nothing was added to lately give theirs
up, and are read once more if they are needed after all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...errors import CacheError
from ...tree import ROOT

LOST = -1
"""The id of a node whose cell was given up."""


@dataclass(slots=True, eq=False)
class Branches:
    """The uncommitted nodes of a row.

    Attributes:
        main: the row's own id.
        parents, tokens, depths: of each node; depth 0 is below the last committed token.
        ids: of each node one that passes through it, or ``LOST``.
        tips: id -> the last node of its path; ROOT where it has none.
    """

    main: int
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tips: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.tips = {self.main: ROOT}

    def id_of(self, node: int) -> int:
        """An id that passes through a node or, for ROOT, through the last committed token."""
        return self.main if node == ROOT else self.ids[node]

    def depth_of(self, node: int) -> int:
        """Of a node; ROOT is at -1."""
        return -1 if node == ROOT else self.depths[node]

    def path(self, node: int) -> list[int]:
        """The nodes from the last committed token down to ``node``."""
        nodes = list[int]()
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def add(self, token: int, parent: int) -> None:
        """Add a node that has no cell yet.

        Raises:
            CacheError: its parent does not come before it.
        """
        if not ROOT <= parent < len(self.parents):
            raise CacheError(f"parent {parent} does not come before its child, node {len(self.parents)}")
        self.parents.append(parent)
        self.tokens.append(token)
        self.depths.append(self.depth_of(parent) + 1)
        self.ids.append(LOST)

    def carry(self, nodes: Sequence[int], free: list[int]) -> tuple[dict[int, list[int]], list[tuple[int, int, int]]]:
        """Give ids to nodes without cells, in ascending order; the parents of all others have cells.

        A first child goes on with an id of its parent; further ones take theirs from ``free``.

        Returns:
            the ids of each of ``nodes``; (from, to, depth) of each id that was taken: cells down to this depth that
            carry ``from`` have to carry ``to``.
        """
        taken, ends = set[int](), {tip: id_ for id_, tip in self.tips.items()}
        for node in nodes:
            id_ = ends.pop(self.parents[node], LOST)
            if id_ == LOST:
                id_ = free.pop()
                taken.add(id_)
            self.ids[node] = ends[node] = id_
        self.tips = {id_: tip for tip, id_ in ends.items()}
        carried: dict[int, list[int]] = {node: [] for node in nodes}
        copies = list[tuple[int, int, int]]()
        for id_, node in self.tips.items():
            while node in carried:
                carried[node].append(id_)
                node = self.parents[node]
            if id_ in taken:
                copies.append((self.id_of(node), id_, self.depth_of(node)))
        return carried, copies

    def missing(self, nodes: Iterable[int]) -> list[int]:
        """Of some nodes and those above them the ones without cells, in ascending order."""
        return sorted(node for node in self._above(nodes) if self.ids[node] == LOST)

    def _above(self, nodes: Iterable[int]) -> set[int]:
        """Some nodes and all above them."""
        above = set[int]()
        for node in nodes:
            while node != ROOT and node not in above:
                above.add(node)
                node = self.parents[node]
        return above

    def give_up(self, used: Iterable[int]) -> list[tuple[int, int]]:
        """Let all nodes lose their cells but those at or above the nodes ``used``, one id for each leaf of them.

        Returns:
            (id, depth) of those that belong to no cell below this depth any more.
        """
        nodes = [node for node in self._above(used) if self.ids[node] != LOST]
        leaves = set(nodes).difference(self.parents[node] for node in nodes)
        before, self.tips = self.tips, {self.main: ROOT} | {self.ids[leaf]: leaf for leaf in leaves}
        carried = {node: id_ for id_, tip in self.tips.items() for node in self.path(tip)}
        self.ids = [carried.get(node, LOST) for node in range(len(self.ids))]
        ends = {id_: self.tips.get(id_, ROOT) for id_ in before}
        return [(id_, self.depth_of(end)) for id_, end in ends.items() if end != before[id_]]

    def renumber(self, keep: Sequence[int], trunk: int) -> list[tuple[int, int]]:
        """Keep some nodes, closed under parents, of which the first ``trunk`` are committed now.

        Returns:
            as ``give_up``, the ids whose paths end among these.
        """
        numbers = {old: new - trunk if new >= trunk else ROOT for new, old in enumerate(keep)} | {ROOT: ROOT}
        rest = keep[trunk:]
        self.parents = [numbers[self.parents[node]] for node in rest]
        self.tokens = [self.tokens[node] for node in rest]
        self.depths = [self.depths[node] - trunk for node in rest]
        self.ids = [self.ids[node] for node in rest]
        tips = {id_: numbers[tip] for id_, tip in self.tips.items()}
        self.tips = {id_: tip for id_, tip in tips.items() if tip != ROOT or id_ == self.main}
        return [(id_, ROOT) for id_ in tips.keys() - self.tips.keys()]

    def cut(self, count: int) -> None:
        """Forget all but the first nodes; none of the others has a cell."""
        for values in (self.parents, self.tokens, self.depths, self.ids):
            del values[count:]
