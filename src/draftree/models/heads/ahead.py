"""Nodes of a head that are drafted before they are asked for: layers of a proposal without a round trip to the host.

The next proposal is expected to ask for what the last one did. Behind the pass over the roots come the passes of as
many layers at once. Each pass chooses the nodes of the next one, those of the most probable paths, on the device
(``DeviceInputs.best_below``), and the candidates of all come to the host in one transfer. The growth loop asks for
nodes as ever: a node that is there takes no pass. Where one is not, a pass over all that were asked for replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...tree import ROOT, Ints
from ..base import Nodes
from ..huggingface.pass_inputs import Longs
from ..huggingface.runner import Made
from ..huggingface.torch_scores import HeadScores

MOST_NODES = 64
"""Of a row: the bits of a node's ancestors are one number."""
NOTHING_NEW = Nodes.of([], [])


@dataclass(slots=True)
class Demand:
    """What a proposal has asked of a head below the roots.

    Attributes:
        layers: passes.
        width: most nodes of a row in one of them.
        drawn: more than the most probable tokens, which are found in the passes.
    """

    layers: int = 0
    width: int = 0
    drawn: bool = False

    def add(self, nodes: Sequence[Nodes]) -> None:
        """One more layer."""
        self.layers, self.width = self.layers + 1, max(self.width, *[new.scored for new in nodes])

    def expected(self, most: int) -> tuple[int, int]:
        """Layers to draft ahead, and nodes of a row in each: a power of two, at most ``most``."""
        width = min(most, 1 << max(0, self.width - 1).bit_length())
        return min(self.layers, MOST_NODES // width) if width and not self.drawn else 0, width


class Drafted:
    """What passes have found at nodes of R rows: at the roots, then layer by layer at ``width`` nodes of each row.

    Attributes:
        logits, ids, states: [nodes, ...] of all these, as of ``Made``.
        best: [nodes, 2k + 1] the same, on the host.
        tokens, parents: [R, layers x width] of the nodes below a row's root, in the order of their numbers.

    Args:
        states: [R, H] of the roots.
        made: by the passes, copies.
    """

    def __init__(self, states: Tensor, made: Sequence[Made], width: int) -> None:
        self._rows, self._width, below = len(states), width, made[1:]
        self.logits = torch.cat([each.logits for each in made])
        self.ids = torch.cat([each.ids for each in made if each.ids is not None])
        self.states = torch.cat([states, *(each.states for each in below if each.states is not None)])
        found = torch.cat([each.best for each in made if each.best is not None]).cpu()
        self.best, chosen = found[:, :-2], found[self._rows :, -2:].numpy().astype(np.int64)
        layers = chosen.reshape(len(below), self._rows, width, 2)
        self.tokens = layers[..., 0].swapaxes(0, 1).reshape(self._rows, -1)
        above = layers[..., 1] % width + width * (np.arange(len(below)) - 1)[:, None, None]
        above[0] = ROOT
        self.parents = above.swapaxes(0, 1).reshape(self._rows, -1)

    def places(self, row: int, numbers: Longs) -> Longs:
        """Where nodes of a row are in the tensors, by their numbers; ROOT is its root."""
        layer, node = np.divmod(numbers, self._width)
        return np.where(numbers < 0, row, self._rows * (1 + layer * self._width) + row * self._width + node)

    def scores(self, places: Longs, counts: Sequence[int]) -> HeadScores:
        """Scores of nodes by their places, ``counts`` of each row."""
        return HeadScores(self.logits, counts, self.ids, self.best[torch.from_numpy(places)], places)


class Ahead:
    """What is drafted ahead for one row.

    Attributes:
        drafted: the nodes of all rows.
        asked: the numbers of those that have been asked for, in that order.
    """

    def __init__(self, drafted: Drafted, row: int) -> None:
        self.drafted, self.asked, self._row = drafted, list[int](), row
        self._numbers: dict[tuple[int, int], int] = {}
        nodes = zip(drafted.parents[row].tolist(), drafted.tokens[row].tolist(), strict=True)
        for number, node in enumerate(nodes):
            self._numbers.setdefault(node, number)  # where a row has few candidates, impossible ones fill a layer up

    def find(self, new: Nodes) -> Longs | None:
        """The numbers of nodes; None: not all of them are there."""
        found = list[int]()
        for token, parent in zip(new.tokens.tolist(), new.parents.tolist(), strict=True):
            if parent >= len(self.asked):
                return None
            number = self._numbers.get((parent if parent == ROOT else self.asked[parent], token))
            if number is None:
                return None
            found.append(number)
        return np.array(found, np.int64)

    def places(self, numbers: Longs) -> Longs:
        """Where nodes are in the tensors (``Drafted.places``)."""
        return self.drafted.places(self._row, numbers)

    def above(self, parents: Ints) -> Longs:
        """Where parents of nodes are in the tensors; they are counted as they were asked for."""
        return self.places(np.array([*self.asked, ROOT])[parents])

    def asked_and(self, new: Nodes, parents: Ints) -> Nodes:
        """The nodes that have been asked for, of which these are the parents, and new ones, which are scored."""
        tokens = self.drafted.tokens[self._row, self.asked]
        return Nodes.of(np.append(tokens, new.tokens), np.append(parents, new.parents), new.scored)


def scores_ahead(rows: Sequence[Ahead | None], nodes: Sequence[Nodes]) -> HeadScores | None:
    """Ask for nodes of some rows; None: not all of them are there, and nothing has been asked for."""
    there = [own for own in rows if own is not None]
    if len(there) < len(rows) or len({id(own.drafted) for own in there}) > 1:
        return None
    found = [own.find(new) for own, new in zip(there, nodes, strict=True)]
    numbers = [each for each in found if each is not None]
    if len(numbers) < len(rows):
        return None
    places, counts = list[Longs](), [new.scored for new in nodes]
    for own, each, count in zip(there, numbers, counts, strict=True):
        own.asked += each.tolist()
        places.append(own.places(each[len(each) - count :]))
    return there[0].drafted.scores(np.concatenate(places), counts)
