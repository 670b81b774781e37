"""One proposal of ``auto``: what it is for, what it costs, and what has become of it so far."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import neg
from typing import NamedTuple

from ...request import Request
from ...tree import DraftTree
from ..base import Frontier
from .cost_model import Curve


class Price(NamedTuple):
    """Seconds of asking sources.

    Attributes:
        each: of each source, about a layer.
        layer: of all that are asked, about a layer.
        node: of each node that a layer has beyond the first, in all requests.
    """

    each: Sequence[float]
    layer: float
    node: float


@dataclass(slots=True)
class Proposal:
    """From the budgets to the outcome.

    Attributes:
        requests: whom it is for.
        curve: what verifying costs.
        price: of asking the sources.
        rate: tokens a second that a step must be worth, of all requests together.
        odds: [B] each request's record.
        frontiers: what was proposed, layer by layer.
        laws: of each of them, [F, K] probabilities of its candidates.
        best: of each request, the probabilities that drafted nodes are accepted, in descending order.
        seconds: [N + 1] of verifying 0, 1, ... nodes.
        mass: expected tokens of all drafted nodes.
        totals: [N] expected tokens of the best 1, 2, ... nodes of each request, summed over requests.
        gained: expected tokens that the last layer has brought.
        pools, chosen: what was drafted, and how many nodes are verified.
        gain: [B] expected tokens of what is verified, the root's bonus included.
        fresh: models read much of a text first.
        asked: layers that the sources were asked about: not those that were known already.
    """

    requests: Sequence[Request]
    curve: Curve
    price: Price
    rate: float
    odds: Sequence[float]
    fresh: bool
    frontiers: list[Frontier] = field(default_factory=list)
    laws: list[list[list[float]]] = field(default_factory=list)
    best: list[list[float]] = field(init=False)
    seconds: list[float] = field(init=False)
    mass: float = 0.0
    totals: Sequence[float] = (0.0,)
    gained: float = 0.0
    pools: Sequence[DraftTree] = ()
    chosen: int = 0
    gain: Sequence[float] = ()
    asked: int = 1

    def __post_init__(self) -> None:
        self.best = [[] for _ in self.requests]
        self.seconds = self.curve.now.tolist()

    @property
    def layers(self) -> int:
        """How deep it was drafted."""
        return len(self.frontiers)

    def add(self, layer: Sequence[tuple[int, float]]) -> float:
        """Nodes have been drafted, of these requests and probabilities; the tokens that are expected of them."""
        mass = 0.0
        for row, path in layer:
            insort(self.best[row], path, key=neg)
            mass += path
        self.mass += mass
        return mass

    def best_totals(self) -> list[float]:
        """[N] expected tokens of the best 1, 2, ... nodes of each request, summed over requests."""
        most = len(self.seconds) - 1
        columns = zip_longest(*(best[:most] for best in self.best), fillvalue=0.0)
        found = list(accumulate(map(sum, columns)))
        return found + [found[-1] if found else 0.0] * (most - len(found))
