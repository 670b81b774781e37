"""One proposal of ``auto``: what it is for, what it costs, and what has become of it so far."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..sequence import Sequence
from ..tree import DraftTree
from .calibration import Floats, Ints
from .costs import Curve
from .policy import Frontier


class Price(NamedTuple):
    """Seconds of asking sources.

    Attributes:
        each: of each source, about a layer.
        layer: of all that are asked, about a layer.
        node: of each node that a layer has beyond the first, in all sequences.
    """

    each: Many[float]
    layer: float
    node: float


@dataclass(slots=True)
class Proposal:
    """From the budgets to the outcome.

    Attributes:
        sequences: whom it is for.
        curve: what verifying costs.
        price: of asking the sources.
        rate: tokens a second that a step must be worth, of all sequences together.
        odds: [B] each sequence's record.
        frontiers: what was proposed, layer by layer.
        rows, paths: [P] of all that has been drafted: which sequence, and the probability of being accepted.
        above: how many of them are of the layers before the last one.
        mass: expected tokens of them all.
        totals: [N] expected tokens of the best 1, 2, ... nodes of each sequence, summed over sequences.
        gained: expected tokens that the last layer has brought.
        pools, chosen: what was drafted, and how many nodes are verified.
        gain: [B] expected tokens of what is verified, the root's bonus included.
        fresh: models read much of a text first.
        asked: layers that the sources were asked about: not those that were known already.
    """

    sequences: Many[Sequence]
    curve: Curve
    price: Price
    rate: float
    odds: Floats
    fresh: bool
    frontiers: list[Frontier] = field(default_factory=list)
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    paths: Floats = field(default_factory=lambda: np.zeros(0))
    above: int = 0
    mass: float = 0.0
    totals: Floats = field(default_factory=lambda: np.zeros(1))
    gained: float = 0.0
    pools: Many[DraftTree] = ()
    chosen: int = 0
    gain: Many[float] = ()
    asked: int = 1

    @property
    def layers(self) -> int:
        """How deep it was drafted."""
        return len(self.frontiers)

    def add(self, rows: Ints, paths: Floats) -> float:
        """A layer has been drafted, of these sequences and probabilities; its expected tokens."""
        self.above, mass = len(self.paths), float(paths.sum())
        self.rows, self.paths = np.concatenate([self.rows, rows]), np.concatenate([self.paths, paths])
        self.mass += mass
        return mass
