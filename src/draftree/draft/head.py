"""A draft head: reads the target's hidden states and drafts with its own guesses of them (Li et al., *EAGLE*).

Nothing that it drafted is kept. Accepted tokens are fed once more, with the target's hidden states, when the next tree
is begun: so its cache holds what the target has seen, and no guess.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import CacheError
from ..models.base import Row
from ..models.head_model import HeadModel, HeadRow
from ..sequence import Sequence
from ..tree import ROOT
from .base import Outcome
from .drawing import Drawing
from .model import ModelScorer, ModelSource, State
from .policy import Candidates
from .source import Grown, Scorer


@dataclass(slots=True)
class HeadSource(ModelSource):
    """Asks a draft head. Its rows hold a sequence's tokens but the first, which has no hidden state before it.

    Attributes:
        model: the head; its target tracks hidden states.
    """

    at_once = False  # a node's input is what was predicted for its parent

    model: HeadModel = field()

    def begin(self, sequences: Many[Sequence], drawing: Drawing) -> Scorer:
        """A sequence's new tokens are fed when its root is asked for."""
        return _HeadScorer(self, sequences, drawing)

    def tokens(self, rows: Many[Row]) -> Many[Tensor]:
        """The rows' draft vocabularies."""
        return [self.model.own(row).tokens for row in rows]

    def settle(self, sequences: Many[Sequence], grown: Many[Grown]) -> None:
        """Nothing: what was drafted is not kept."""

    def observe(self, outcomes: Many[Outcome]) -> None:
        """Nothing: what was accepted comes with the target's hidden states."""


class _HeadScorer(ModelScorer):
    """Scores nodes by passes over them; roots by a pass over the tokens that the target has committed since."""

    _source: HeadSource

    def score_roots(self, rows: Many[int], width: int) -> Candidates:
        """Feed each sequence's new tokens with the target's hidden states; the last of them is the root."""
        source = self._source
        fed: list[HeadRow] = []
        tokens, features = [], []
        for b in rows:
            sequence = self._sequences[b]
            if sequence.row is None:
                raise CacheError("a draft head reads the target's hidden states: give it a sequence with an open row")
            if sequence not in source._states:
                source.model.reserve(1, sequence.prompt_length + (sequence.params.max_tokens or 0))
                source._states[sequence] = State(source.model.start())
            state = source._states[sequence]
            state.numbers = {ROOT: ROOT}
            fed.append(source.model.own(state.row))
            tokens.append(torch.tensor(sequence.ids[state.row.length + 1 :]))
            features.append(sequence.row.waiting_features() if len(tokens[-1]) else source.model.nothing)
        self._asked = [(self._sequences[b], ROOT) for b in rows]
        self._depths |= {(b, ROOT): 0 for b in rows}
        logits = source.model.advance(fed, tokens, features)[:, None]
        source._passes += 1
        for sequence, _ in self._asked:
            if sequence.row is not None:
                sequence.row.drop_features()
        batch = torch.arange(len(rows))
        column, none = torch.zeros_like(batch), [0] * len(rows)
        return self._laws.candidates(self._asked, logits, batch, column, width, source.tokens(fed), depths=none)
