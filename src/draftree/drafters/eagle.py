"""An EAGLE head: reads the target's hidden states and drafts with its own predictions of them (Li et al., *EAGLE*).

Its cache keeps no prediction: accepted tokens are fed with the target's hidden states when the next tree begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import CacheError
from ..models.base import LanguageModel, Nodes, Row
from ..models.protocols import DraftHead
from ..policies.base import Candidates, Numbers
from ..request import Outcome, Request
from ..scores import Scores
from ..tree import ROOT, Drawing
from .base import Grown, Scorer, UnscoredNode
from .draft_model import ModelScorer, ModelSource, State


@dataclass(slots=True)
class EagleSource(ModelSource):
    """Predicts by an EAGLE head. Its rows hold a request's tokens but the first, which has no hidden state before it.

    Attributes:
        model: the head; the target tracks hidden states.
    """

    model: DraftHead = field()

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        """Keep no rows: what a head has read of a text, it reads again in one pass of one layer."""

    def read(self, request: Request, most: int) -> bool:
        """Read nothing ahead: one pass of one layer reads the whole prompt."""
        return True

    def unread(self, request: Request) -> list[tuple[LanguageModel, int]]:
        """Nothing that costs: of a prompt the head computes keys and values of one layer."""
        return []

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """A request's new tokens are fed when its root is scored."""
        return _EagleScorer(self, requests, drawing)

    def vocabulary_of(self, row: Row) -> Numbers | None:
        return self.model.vocabulary_of(row)

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """Do nothing: no drafted node is kept."""

    def has_read(self, request: Request, node: int) -> bool:
        """False: no drafted node is kept; each proposal begins with what the target has read."""
        return False

    def prune(self, request: Request, keep: Sequence[int], trunk: int) -> None:
        """Do nothing: no drafted node is kept."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Do nothing: accepted tokens are read again, with the target's hidden states."""


class _EagleScorer(ModelScorer):
    """Scores nodes by passes over them; roots by a pass over the tokens that the target has committed since."""

    _source: EagleSource

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """Feed nodes in as few passes as it takes: a node that follows a predicted hidden state comes after it."""
        waves: dict[tuple[int, int], int] = {}
        for b, node, parent, _ in nodes:
            before = waves.get((b, parent), 0)
            waves[b, node] = 0 if node == ROOT else before if before and self._is_read(b, parent) else before + 1
        found: dict[int, Candidates] = {}
        for wave in sorted(set(waves.values())):
            own = [i for i, n in enumerate(nodes) if waves[n.row, n.node] == wave]
            some = [nodes[i] for i in own]
            scored = super().score(some, width) if wave else self._score_roots(some, width)
            if len(own) == len(nodes):
                return scored
            found |= zip(own, scored, strict=True)
        return [found[i] for i in range(len(nodes))]

    def _score_roots(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """Feed each request's new tokens with the target's hidden states; the last of them is the root."""
        source, texts = self._source, []
        for b, *_ in nodes:
            request = self._requests[b]
            if request not in source._states:
                source.model.reserve(1, request.prompt_length + (request.params.max_tokens or 0))
                source._states[request] = State(source.model.open())
            state = source._states[request]
            state.slots = {ROOT: ROOT}
            texts.append(request.ids[state.row.length + 1 :])
            self._depths[b, ROOT] = 0
        rows = [self._state(b).row for b, *_ in nodes]
        scores = source.model.read(rows, texts, [self._target(b) for b, *_ in nodes])
        source._passes += 1
        return self._candidates(scores, nodes, width)

    def _target(self, b: int) -> Row:
        """The target's row of a request."""
        if (row := self._requests[b].row) is None:
            raise CacheError("a draft head reads the target's hidden states: give it a request with an open row")
        return row

    def _is_read(self, b: int, node: int) -> bool:
        """Whether the target has read a node, which it has for beams alone."""
        row = self._target(b)
        return row.length == len(self._requests[b].ids) and 0 <= node < len(row.parents)

    def _pass(self, rows: Sequence[Row], new: Sequence[Nodes], nodes: Sequence[UnscoredNode]) -> Scores:
        """A node's input is the target's hidden state at its parent, or else what was predicted there."""
        read: dict[int, list[int]] = {}
        for b, _, parent, _ in nodes:
            read.setdefault(b, []).append(parent if self._is_read(b, parent) else ROOT)
        if all(parent == ROOT for own in read.values() for parent in own):
            return self._source.model.extend(rows, new)
        return self._source.model.extend_below(rows, new, [(self._target(b), own) for b, own in read.items()])
