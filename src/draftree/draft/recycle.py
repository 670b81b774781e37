"""Recycling: the target's own most probable successors of every token, kept from the passes that verified it; no model.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (2024).
A verification pass computes the target's law after every node of the tree and uses one path of it. The k most probable
successors of all of them are kept in a table by token, and the next trees are read off it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError, DraftreeWarning, RunError
from ..models.base import LanguageModel
from ..sequence import Sequence
from .base import Outcome
from .drawing import Drawing, Drawn
from .policy import Candidates
from .recycle_file import Entries, read_entries, vocabulary_of, write_entries
from .source import Scorer, Source
from .successors import Successors

WIDTH = 8
"""Successors of a token that are kept, as in the paper: with 49152 tokens the table takes 3.1 MB."""


class SuccessorTable:
    """The last successors seen of every token.

    Args:
        vocab: tokens.
        width: successors of each.
    """

    def __init__(self, vocab: int, width: int) -> None:
        self._tokens = torch.zeros((vocab, width), dtype=torch.int32)
        self._logprobs = torch.full((vocab, width), float("-inf"))

    def put(self, tokens: Many[int], found: Successors) -> None:
        """Successors found after ``tokens`` ([R]); of a token that is there twice, the last ones stay."""
        last = {token: i for i, token in enumerate(tokens)}
        at, rows = torch.tensor(list(last)), torch.tensor(list(last.values()))
        width = found.tokens.shape[1]
        self._tokens[at, :width] = found.tokens[rows].int()
        self._logprobs[at, :width] = found.logprobs[rows]

    def after(self, tokens: Tensor, width: int) -> Candidates:
        """The successors of [F] tokens; what none of them is counts as one outcome of the entropy."""
        logprobs = self._logprobs[tokens, :width]
        known = self._logprobs[tokens].exp()
        rest = (1 - known.sum(1)).clamp(min=0) * (known[:, 0] > 0)
        entropies = torch.special.entr(known).sum(1) + torch.special.entr(rest)
        return Candidates(self._tokens[tokens, :width].long(), logprobs, entropies)

    @property
    def entries(self) -> Entries:
        """All that is known."""
        at = (self._logprobs[:, 0] > float("-inf")).nonzero()[:, 0]
        return Entries(at, self._tokens[at], self._logprobs[at])

    def fill(self, entries: Entries) -> None:
        """Take over what was known elsewhere, as many successors as there is room for."""
        width = min(self._tokens.shape[1], entries.successors.shape[1])
        self._tokens[entries.tokens, :width] = entries.successors[:, :width]
        self._logprobs[entries.tokens, :width] = entries.logprobs[:, :width]


@dataclass(slots=True)
class RecycleSource(Source):
    """Says what the target found probable when it last saw the same token; all sequences share the table.

    Attributes:
        width: successors that are kept of each token.
        file: read when it is there, and written whenever the last open sequence has ended; None: nothing is kept.

    Raises:
        ConfigError: a width below 1.
    """

    learns: ClassVar[bool] = True

    width: int = WIDTH
    file: Path | None = None
    _table: SuccessorTable = field(default_factory=lambda: SuccessorTable(0, 1), repr=False)
    _vocabulary: str = field(default="", repr=False)
    _open: set[Sequence] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"recycle keeps {self.width} successors of a token: use at least 1")

    @property
    def name(self) -> str:
        """See ``Source``."""
        return "recycle"

    @property
    def successors(self) -> int:
        """As many as are kept."""
        return self.width

    def prepare(self, target: LanguageModel) -> None:
        """Make the table, with what the file has.

        Raises:
            ConfigError: the file cannot be read, is none, or is of another vocabulary; or its folder is not there.
        """
        self._table = SuccessorTable(target.capabilities.vocab_size, self.width)
        if self.file is not None:
            self._vocabulary = vocabulary_of(target)
            if (entries := read_entries(self.file, target.capabilities.vocab_size, self._vocabulary)) is not None:
                self._table.fill(entries)

    def open(self, sequence: Sequence) -> None:
        """Count it."""
        self._open.add(sequence)

    def begin(self, sequences: Many[Sequence], drawing: Drawing) -> Scorer:
        """Read the table."""
        return _RecycleScorer(self._table, sequences)

    def observe(self, outcomes: Many[Outcome]) -> None:
        """Keep the successors of every verified token; where a token was there twice, those on the accepted path."""
        for outcome in outcomes:
            if outcome.successors is not None:
                tree = outcome.tree
                root = outcome.sequence.ids[-outcome.taken - 1]
                rows = list(range(1, len(tree) + 1)) + [0] + [n + 1 for n in outcome.path]
                tokens = [root, *tree.tokens.tolist()]
                found = Successors(outcome.successors.tokens[rows], outcome.successors.logprobs[rows])
                self._table.put([tokens[r] for r in rows], found)

    def close(self, sequence: Sequence) -> None:
        """Write the file when no sequence is left; where that fails, warn and go on."""
        if sequence not in self._open:
            return
        self._open.remove(sequence)
        if self.file is not None and not self._open:
            try:
                write_entries(self.file, self._table.entries, self._vocabulary)
            except RunError as error:
                warnings.warn(str(error), DraftreeWarning, stacklevel=2)


class _RecycleScorer:
    """Scores nodes by their tokens alone."""

    def __init__(self, table: SuccessorTable, sequences: Many[Sequence]) -> None:
        self._table = table
        self._sequences = sequences

    def score_roots(self, rows: Many[int], width: int) -> Candidates:
        """See ``Scorer``."""
        return self._table.after(torch.tensor([self._sequences[b].ids[-1] for b in rows]), width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        return self._table.after(tokens, width)

    def draw(self, counts: Tensor) -> Drawn:
        """Never asked for: schemes that need it refuse what ``learns``."""
        raise ConfigError("recycle does not draw children: use verification match")
