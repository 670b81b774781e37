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

MOST_NODES = 64
"""Of a row: the bits of a node's ancestors are one number."""
NOTHING_NEW = Nodes.of([], [])
_PAUSE = 4
"""Proposals for which no layer is drafted ahead where nodes were missing lately."""


@dataclass(slots=True)
class Demand:
    """What proposals ask of a head below the roots.

    Attributes:
        layers, width: how often the proposal under way has asked for nodes, and how many of a row at most.
        there: how many of these layers, from the first on, were drafted ahead.
        drawn: it has asked for what passes do not find: a warped or masked distribution, or more tokens.
    """

    layers: int = 0
    width: int = 0
    there: int = 0
    drawn: bool = False
    _ahead: int = 0  # layers that were drafted ahead of it
    _most: int = 0  # of the next ones, while the pause lasts
    _pause: int = 0

    def add(self, nodes: Sequence[Nodes], there: bool) -> None:
        """It asks for nodes."""
        self.there += there and self.there == self.layers
        self.layers, self.width = self.layers + 1, max(self.width, *[new.scored for new in nodes])

    def begin(self, most: int, room: int = MOST_NODES) -> tuple[int, int]:
        """A proposal begins.

        Args:
            most: nodes of a row that a pass can choose.
            room: nodes of a row in all, at most ``MOST_NODES``.

        Returns:
            layers to draft ahead of it, and nodes of a row in each, a power of two.
        """
        if self.there < min(self._ahead, self.layers):
            self._most, self._pause = self.there, _PAUSE
        elif self._pause:
            self._pause -= 1
        width = 1 << max(0, self.width - 1).bit_length()
        layers = min(self.layers, room // width, self._most if self._pause else MOST_NODES)
        if self.drawn or not 0 < self.width <= most:
            layers = 0
        self.layers, self.width, self.there, self.drawn, self._ahead = 0, 0, 0, False, layers
        return layers, width


class Drafted:
    """What passes have found at nodes of R rows: at the roots, then layer by layer at ``width`` nodes of each row.

    Attributes:
        states: [nodes, H] predicted at all these, as of ``Made``.
        best: [nodes, 2k + 1] what may follow them (``HeadScores``), on the host.
        tokens, parents: [R, layers x width] of the nodes below a row's root, in the order of their numbers.

    Args:
        states: of the roots, and of each layer.
        best: [.., 2k + 3] of the same, with the token of each node and its ``BEFORE``.
    """

    def __init__(self, states: Sequence[Tensor], best: Sequence[Tensor], width: int) -> None:
        self._rows, self._width, layers = len(states[0]), width, len(states) - 1
        self.states, found = torch.cat([*states]), torch.cat([*best]).cpu()
        self.best = found[:, :-2]
        nodes = found[self._rows :, -2:].numpy().astype(np.int64).reshape(layers, self._rows, width, 2)
        above = nodes[..., 1] % width + width * (np.arange(layers) - 1)[:, None, None]
        above[0] = ROOT
        self.tokens, self.parents = (own.swapaxes(0, 1).reshape(self._rows, -1) for own in (nodes[..., 0], above))

    def places(self, row: int, numbers: Longs) -> Longs:
        """Where nodes of a row are among all, by their numbers; ROOT is its root."""
        layer, node = np.divmod(numbers, self._width)
        return np.where(numbers < 0, row, self._rows * (1 + layer * self._width) + row * self._width + node)


class Ahead:
    """What is drafted ahead for one row.

    Attributes:
        drafted: the nodes of all rows.
        row: number of this one among them.
        asked: the numbers of those that have been asked for, in that order.
    """

    def __init__(self, drafted: Drafted, row: int) -> None:
        self.drafted, self.row, self.asked = drafted, row, list[int]()
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

    def above(self, parents: Ints) -> Longs:
        """Where parents of nodes are among all (``Drafted.places``); they are counted as they were asked for."""
        return self.drafted.places(self.row, np.array([*self.asked, ROOT])[parents])

    def asked_and(self, new: Nodes, parents: Ints) -> Nodes:
        """The nodes that have been asked for, of which these are the parents, and new ones, which are scored."""
        tokens = self.drafted.tokens[self.row, self.asked]
        return Nodes.of(np.append(tokens, new.tokens), np.append(parents, new.parents), new.scored)


def ask(rows: Sequence[Ahead | None], nodes: Sequence[Nodes]) -> Longs | None:
    """Ask for nodes of some rows.

    Returns:
        the places of those that are scored (``Drafted.places``); None: not all are there, and none has been asked for.
    """
    there = [own for own in rows if own is not None]
    if len(there) < len(rows) or any(own.drafted is not there[0].drafted for own in there):
        return None
    found = [numbers for own, new in zip(there, nodes, strict=True) if (numbers := own.find(new)) is not None]
    if len(found) < len(rows):
        return None
    places = list[Longs]()
    for own, numbers, new in zip(there, found, nodes, strict=True):
        own.asked += numbers.tolist()
        places.append(own.drafted.places(own.row, numbers[len(numbers) - new.scored :]))
    return np.concatenate(places)
