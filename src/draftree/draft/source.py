"""The seam between trees under construction and whatever says what may follow their nodes: n-grams, a table, a model.

A source shapes nothing: the growth loop and its policy choose among what it says (``grow.py``, ``drafter.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

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
        model: the language model whose passes it makes, one for each layer of the trees; None: there is none.
        passes: model passes so far, prefills not counted; each brings its candidates to the host in one transfer, and
            its drawn children in another.
    """

    model: LanguageModel | None = None
    passes: int = 0

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
