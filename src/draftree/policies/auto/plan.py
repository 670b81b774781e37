"""One proposal of ``auto``: what it is for, what it costs, and what has become of it so far."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import neg

from ...request import Request
from ...tree import DraftTree
from ..base import Frontier
from .benefit import Price
from .cost_model import Curve


@dataclass(slots=True)
class Proposal:
    """From the budgets to the outcome.

    Attributes:
        requests: B of them.
        curve: of verifying.
        price: of drafting.
        rate: tokens a second that a step must yield, of all requests together.
        odds: [B] factor of each request on the odds of its candidates.
        frontiers: what was proposed, layer by layer.
        probabilities: of each of them, [F, K] draft probabilities of its candidates.
        best: [B] acceptance probabilities of drafted nodes, in descending order.
        totals: [N] expected tokens of the best 1, 2, ... nodes of each request, summed over requests.
        gained: expected tokens that the last layer has added.
        passes: layers that the drafters made a pass for: not those that were known already.
        pools, chosen: what was drafted, and how many nodes of each request are verified.
        missed: ``Drafted.missed``.
        expected: [B] tokens of what is verified, the target's own included.
    """

    requests: Sequence[Request]
    curve: Curve
    price: Price
    rate: float
    odds: Sequence[float]
    gained: float
    frontiers: list[Frontier] = field(default_factory=list)
    probabilities: list[list[list[float]]] = field(default_factory=list)
    best: list[list[float]] = field(init=False)
    totals: Sequence[float] = (0.0,)
    passes: int = 1
    pools: Sequence[DraftTree] = ()
    chosen: int = 0
    missed: tuple[int, Sequence[set[int]]] | None = None
    expected: Sequence[float] = ()

    def __post_init__(self) -> None:
        self.best = [[] for _ in self.requests]
        self.expected = [1.0] * len(self.requests)

    def add(self, layer: Sequence[tuple[int, float]]) -> None:
        """Nodes have been drafted: request and acceptance probability of each."""
        for row, path in layer:
            insort(self.best[row], path, key=neg)

    def best_totals(self) -> list[float]:
        """[N] expected tokens of the best 1, 2, ... nodes of each request, summed over requests."""
        most = len(self.curve.now) - 1
        columns = zip_longest(*(best[:most] for best in self.best), fillvalue=0.0)
        found = list(accumulate(map(sum, columns)))
        return found + [found[-1] if found else 0.0] * (most - len(found))

    def affords(self, nodes: int) -> bool:
        """Verifying so many costs no more than the drafters may lose if none is accepted.

        One node is affordable while there is anything left.
        """
        beyond = float(self.curve.now[nodes]) - self.curve.ar + (self.passes - 1) * self.price.layer
        return not nodes or 0 < self.price.limit and (nodes == 1 or beyond <= self.price.limit)

    def affords_layer(self) -> bool:
        """The same of one more layer, and of the cheapest pass over a chain of all layers."""
        chain = float(self.curve.now[self.passes + 1 :].min(initial=self.curve.now[-1])) - self.curve.ar
        drafting = self.passes * self.price.layer
        return drafting < self.price.free or chain + drafting <= self.price.limit
