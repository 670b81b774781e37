"""What says which tokens may follow a node of a request's tree: the seam, and what all kinds with passes share.

A source keeps a tree of its own beside the target's, of what it has been fed; after each step it follows the running
beams. It shapes nothing (``drafting.py``). The kinds are in ``drafters.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..models.base import ForestModel, Nodes, Row
from ..models.cost_profile import Profile, kept_or_measured
from .chance import Chance
from .nodes import Node, TreeRow, feed
from .request import BeamRequest


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes of one request that a source is asked about.

    Attributes:
        request: theirs.
        nodes: at least one.
        counts: how often each was drawn.
        depth: drafted layers above what follows them in this step.
        left: layers that will be drafted below what follows them in this step.
        chance: draws what follows them; None: the most probable is chosen.
    """

    request: BeamRequest
    nodes: Sequence[Node]
    counts: Sequence[int]
    depth: int
    left: int
    chance: Chance | None = None


class BeamSource(ABC):
    """Says what may follow.

    Attributes:
        name: what people call it.
        gives_laws: it gives every token of the vocabulary a probability, so that beams can be drawn from it.
        hope: how often it may have drafted a beam of a layer, as long as nothing is known.
    """

    gives_laws: ClassVar[bool] = True
    hope: float = 0.7

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def passes(self) -> int:
        """Model passes so far, prefills not counted."""
        return 0

    def width(self, beams: int) -> int:
        """Drafted beams W_S that so many beams are best drafted with, at least as many and at most twice."""
        return 2 * beams

    def prepare(self) -> None:  # noqa: B027
        """Find out what its passes cost."""

    def seconds(self, nodes: float, context: int) -> float:
        """Of drafting a layer below so many nodes behind so many tokens."""
        return 0.0

    def reading(self, tokens: int) -> float:
        """Seconds of reading a prompt of so many tokens."""
        return 0.0

    @abstractmethod
    def open(self, request: BeamRequest) -> None:
        """A request begins; the target has read its prompt."""

    def room(self, request: BeamRequest) -> int:
        """Most layers that it can draft below the running beams."""
        return request.limit

    @abstractmethod
    def logits(self, asked: Sequence[Frontier]) -> list[Tensor]:
        """For each request [n, V] logits of the tokens after its n nodes."""

    def node(self, request: BeamRequest, parent: Node, token: int) -> Node:
        """The node below ``parent``; one that it knows already, if it does."""
        return Node(token, parent, parent.length + 1)

    def leave(self, requests: Sequence[BeamRequest]) -> None:  # noqa: B027
        """The step's drafts are made, or could not be: the target goes on."""

    def settle(self, request: BeamRequest) -> None:  # noqa: B027
        """A step is over: ``request.running`` go on."""

    @abstractmethod
    def close(self, request: BeamRequest) -> None:
        """A request has ended; twice is harmless."""


class PassBeams(BeamSource):
    """What makes passes of a model that keeps the beams in a cache of its own, as the target does.

    Attributes:
        model: the model.
    """

    model: ForestModel

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._trees: dict[BeamRequest, TreeRow] = {}
        self._passes = 0
        self._profile: Profile | None = None

    @property
    def passes(self) -> int:
        """See ``BeamSource``."""
        return self._passes

    def prepare(self) -> None:
        """See ``BeamSource``; kept from an earlier start, or measured now (seconds, once)."""
        self._profile = self._profile or kept_or_measured(self.model)

    def seconds(self, nodes: float, context: int) -> float:
        """See ``BeamSource``."""
        return 0.0 if self._profile is None else self._profile.seconds(nodes, context)

    def reading(self, tokens: int) -> float:
        """See ``BeamSource``."""
        return self.seconds(tokens, tokens)

    def tree(self, request: BeamRequest) -> TreeRow:
        """What its model has read of a request."""
        return self._trees[request]

    def lacks(self, request: BeamRequest, nodes: Sequence[Node]) -> bool:
        """It has not read all of these nodes."""
        return bool(self.tree(request).unfed(nodes))

    def read(self, requests: Sequence[BeamRequest], nodes: Sequence[Sequence[Node]]) -> None:
        """One pass over what it has not read of these nodes and those above them, if there is anything."""
        trees = [self.tree(request) for request in requests]
        fresh = [tree.unfed(own) for tree, own in zip(trees, nodes, strict=True)]
        self._passes += feed(trees, fresh, self._extend)

    @abstractmethod
    def _extend(self, rows: Sequence[Row], new: Sequence[Nodes], nodes: Sequence[Sequence[Node]]) -> Tensor:
        """[B, n, V] logits after new nodes of rows."""

    def close(self, request: BeamRequest) -> None:
        """Forget its row."""
        if request in self._trees:
            self.model.close(self._trees.pop(request).row)
