"""The seam between the engine and whatever proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import Budget
from ..sequence import Sequence as Request
from ..tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sequence's draft tree.

    Attributes:
        request: the sequence.
        tree: the tree that was verified.
        path: accepted nodes in order, by number.
    """

    request: Request
    tree: DraftTree
    path: list[int]

    @property
    def rejected_entropy(self) -> float | None:
        """Entropy (nats) of the draft law whose tokens were all rejected; None when nothing was rejected."""
        end = self.path[-1] if self.path else ROOT
        children = self.tree.children(end)
        return float(self.tree.entropies[children[0]]) if children else None


class Drafter(Protocol):
    """Proposes a draft tree for each sequence and keeps whatever state that takes.

    Attributes:
        passes: drafter model passes so far; each brings its candidates to the host in one transfer.
    """

    passes: int

    def open(self, request: Request) -> None:
        """A sequence begins: its prompt is in ``request.ids``."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        """One tree for each sequence, rooted at its last token and within its budget."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the proposed trees; ``request.ids`` already ends with the tokens gained."""

    def close(self, request: Request) -> None:
        """A sequence has ended."""


class NoDrafter:
    """Drafts nothing: the engine decodes plainly (AR)."""

    passes = 0

    def open(self, request: Request) -> None: ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        """Empty trees."""
        return [DraftTree.empty() for _ in requests]

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def close(self, request: Request) -> None: ...
