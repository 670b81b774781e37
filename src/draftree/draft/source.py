"""The seam between trees under construction and whatever says what may follow their nodes: n-grams, a table, a model.

A source shapes nothing: the growth loop and its policy choose among what it says (``grow.py``, ``drafter.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from ..config import Budget
from ..models.base import LanguageModel
from ..sequence import Sequence
from ..tree import DraftTree
from .base import Outcome
from .drawing import Drawing, Drawn
from .policy import Candidates


class Scorer(Protocol):
    """Says what may follow the nodes of the trees under construction."""

    def score_roots(self, rows: Many[int], width: int) -> Candidates:
        """Candidates after the last token of these sequences (positions in the batch that is being drafted)."""

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """Candidates after new nodes, flat over sequences: their row, number, parent's number and token, [F] each."""

    def draw(self, counts: Tensor) -> Drawn:
        """Draw ``counts`` ([F]) children for the nodes that were asked about last, in that order."""


class Grown(NamedTuple):
    """A finished tree.

    Attributes:
        tree: what is verified.
        numbers: [N] int64, the number that each node had while it grew: what the scorer knows it by.
    """

    tree: DraftTree
    numbers: Tensor


class Source(ABC):
    """Says what may follow, and keeps whatever state that takes for each sequence.

    Attributes:
        learns: what it says depends on other sequences, so that drawn children would not repeat under the same seed.
        resting: it does not pay just now: a union leaves it out. Set by the policy.
        spent: seconds that a union has waited for what it said.
    """

    learns: ClassVar[bool] = False
    resting: bool = False
    spent: float = 0.0

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    @property
    def parts(self) -> tuple[Source, ...]:
        """The sources that it joins: itself, unless it is a union."""
        return (self,)

    @property
    def model(self) -> LanguageModel | None:
        """The language model whose passes it makes, one for each layer of the trees; None: there is none."""
        return None

    @property
    def passes(self) -> int:
        """Model passes so far, prefills not counted.

        Each brings its candidates to the host in one transfer, and its drawn children in another.
        """
        return 0

    @property
    def successors(self) -> int:
        """How many of the target's most probable tokens after each verified node it wants to be told; 0: none."""
        return 0

    def prepare(self, target: LanguageModel) -> None:  # noqa: B027
        """It will draft for ``target``: called once, before anything else."""

    def open(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence begins: its prompt is in ``sequence.ids``."""

    def fit(self, sequence: Sequence, budget: Budget) -> Budget:
        """The part of a budget that it can draft within; no nodes or no depth: it is not asked about this sequence."""
        return budget

    @abstractmethod
    def begin(self, sequences: Many[Sequence], drawing: Drawing) -> Scorer:
        """What scores the nodes of one proposal's trees, whose roots are the last tokens of ``sequence.ids``."""

    def settle(self, sequences: Many[Sequence], grown: Many[Grown]) -> None:  # noqa: B027
        """The proposal's trees are finished: these are verified."""

    def observe(self, outcomes: Many[Outcome]) -> None:  # noqa: B027
        """What became of them; ``sequence.ids`` already ends with the tokens gained."""

    @abstractmethod
    def close(self, sequence: Sequence) -> None:
        """A sequence has ended."""
