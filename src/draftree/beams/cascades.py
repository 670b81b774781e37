"""Sources made of others: a hierarchy, in which one reads ahead what another finds likely, and a union.

A hierarchy says what its upper source says, with fewer passes of it (after Syu & Lee, HSDDW): when the upper source is
asked about nodes that it has not read, the lower one names likely nodes below them (where beams are drawn, what the
same noise draws from its own law), which the upper one reads in the same pass.
Beams are drawn from the upper source's law alone, and independently of the lower one, so drafts and output are those of
the upper source by itself. A union chooses among what several sources find likely; it has no law of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .drafting import likely
from .forest import BeamRequest, Node
from .sources import BeamSource, Frontier, PassBeams


class HierarchyBeams(BeamSource):
    """Says what its upper source says, sooner.

    Args:
        lower: names nodes that are likely to be asked about.
        upper: is asked.
        name: what people call it.
    """

    def __init__(self, lower: BeamSource, upper: PassBeams, name: str) -> None:
        super().__init__(name)
        self.lower, self.upper = lower, upper
        self.hope = upper.hope
        self._named: dict[BeamRequest, dict[tuple[Node, int], Node]] = {}

    @property
    def passes(self) -> int:
        """Of both."""
        return self.lower.passes + self.upper.passes

    def width(self, beams: int) -> int:
        """The upper source's."""
        return self.upper.width(beams)

    def prepare(self) -> None:
        """See ``BeamSource``."""
        self.upper.prepare()

    def seconds(self, nodes: float, context: int) -> float:
        """The upper source's, as if the lower one were of no use."""
        return self.upper.seconds(nodes, context)

    def reading(self, tokens: int) -> float:
        """Of both."""
        return self.lower.reading(tokens) + self.upper.reading(tokens)

    def open(self, request: BeamRequest) -> None:
        """Tell both."""
        self.upper.open(request)
        self.lower.open(request)
        self._named[request] = {}

    def room(self, request: BeamRequest) -> int:
        """What both have."""
        return min(self.lower.room(request), self.upper.room(request))

    def logits(self, asked: Sequence[Frontier]) -> list[Tensor]:
        """See ``BeamSource``; nothing is asked of the lower source where the upper one has read all nodes."""
        lacking = [at for at in asked if at.left > 0 and self.upper.lacks(at.request, at.nodes)]
        if lacking:
            ahead = dict(zip((at.request for at in lacking), likely(self.lower, lacking), strict=True))
            for request, named in ahead.items():
                self._named[request] |= {(node.parent, node.token): node for node in named if node.parent}
            requests = [at.request for at in asked]
            self.upper.read(requests, [[*at.nodes, *ahead.get(at.request, ())] for at in asked])
        return self.upper.logits(asked)

    def node(self, request: BeamRequest, parent: Node, token: int) -> Node:
        """What the lower source has named, or knows."""
        return self._named[request].get((parent, token)) or self.lower.node(request, parent, token)

    def leave(self, requests: Sequence[BeamRequest]) -> None:
        """Tell both."""
        self.upper.leave(requests)
        self.lower.leave(requests)

    def settle(self, request: BeamRequest) -> None:
        """Tell both; what was named is forgotten."""
        self._named[request].clear()
        self.upper.settle(request)
        self.lower.settle(request)

    def close(self, request: BeamRequest) -> None:
        """Tell both."""
        self._named.pop(request, None)
        self.lower.close(request)
        self.upper.close(request)


class UnionBeams(BeamSource):
    """What any of several sources finds likely: each token by its greatest probability.

    Args:
        parts: at least two sources.
        name: what people call it.
    """

    gives_laws: ClassVar[bool] = False

    def __init__(self, parts: Sequence[BeamSource], name: str) -> None:
        super().__init__(name)
        self.parts = tuple(parts)
        self.hope = max(part.hope for part in parts)

    @property
    def passes(self) -> int:
        """Of all."""
        return sum(part.passes for part in self.parts)

    def prepare(self) -> None:
        """See ``BeamSource``."""
        for part in self.parts:
            part.prepare()

    def seconds(self, nodes: float, context: int) -> float:
        """Of all."""
        return sum(part.seconds(nodes, context) for part in self.parts)

    def reading(self, tokens: int) -> float:
        """Of all."""
        return sum(part.reading(tokens) for part in self.parts)

    def open(self, request: BeamRequest) -> None:
        """Tell all."""
        for part in self.parts:
            part.open(request)

    def room(self, request: BeamRequest) -> int:
        """What all have."""
        return min(part.room(request) for part in self.parts)

    def logits(self, asked: Sequence[Frontier]) -> list[Tensor]:
        """See ``BeamSource``: the greatest log-probabilities."""
        said = [part.logits(asked) for part in self.parts]
        return [_greatest(own) for own in zip(*said, strict=True)]

    def leave(self, requests: Sequence[BeamRequest]) -> None:
        """Tell all."""
        for part in self.parts:
            part.leave(requests)

    def settle(self, request: BeamRequest) -> None:
        """Tell all."""
        for part in self.parts:
            part.settle(request)

    def close(self, request: BeamRequest) -> None:
        """Tell all."""
        for part in self.parts:
            part.close(request)


def _greatest(logits: Sequence[Tensor]) -> Tensor:
    """[n, V]; parts that know nothing of a node say nothing."""
    laws = torch.stack([rows.float().log_softmax(-1) for rows in logits])
    return laws.nan_to_num(nan=-math.inf, neginf=-math.inf).amax(0)
